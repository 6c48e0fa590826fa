"""Each rule that ties values together, broken alone."""

from __future__ import annotations

import pytest

from vlmgen.spec import rules
from vlmgen.spec.extends import resolve_extends
from vlmgen.spec.source import parse_document

from . import test_pairings

# (rule, edits, path of the problem, part of the message, part of the legal values)
CASES = [
    (
        "sections sum to half the rotated head",
        [("sections: [24, 20, 20]", "sections: [24, 20, 24]")],
        "text.rope.sections",
        "24 + 20 + 24 = 68, half of the rotated head is 64",
        "sum to 64",
    ),
    (
        "interleaved sections end inside the half",
        [("sections: [24, 20, 20]", "sections: [21, 23, 20]")],
        "text.rope.sections",
        "interleaved section h of 23 ends at frequency 67",
        "h at most 21",
    ),
    (
        "deepstack index inside a checkpoint's depth",
        [("2048, deepstack: [5, 11, 17]", "2048, deepstack: [5, 11, 24]")],
        "checkpoints[0].vision.deepstack[2]",
        "deepstack index 24 is beyond the tower's depth 24",
        "0 to 23",
    ),
    (
        "deepstack indices ascend",
        [("2048, deepstack: [5, 11, 17]", "2048, deepstack: [5, 17, 11]")],
        "checkpoints[0].vision.deepstack",
        "[5, 17, 11] are not ascending",
        "[5, 11, 17]",
    ),
    (
        "deepstack indices are distinct",
        [("2048, deepstack: [5, 11, 17]", "2048, deepstack: [5, 11, 11]")],
        "checkpoints[0].vision.deepstack",
        "[5, 11, 11] are not ascending and distinct",
        "[5, 11]",
    ),
    (
        "no more levels than decoder layers",
        [("hidden_size: 2048, num_layers: 28", "hidden_size: 2048, num_layers: 2")],
        "checkpoints[0].vision.deepstack",
        "3 deepstack levels, but 2 decoder layers",
        "at most 2",
    ),
    (
        "KV heads divide heads",
        [("num_heads: 16, num_kv_heads: 8", "num_heads: 16, num_kv_heads: 6")],
        "checkpoints[0].text.num_kv_heads",
        "num_heads 16 is not divisible by num_kv_heads 6",
        "1, 2, 4, 8, 16",
    ),
    (
        "vision heads divide the width",
        [
            (
                "hidden_size: 1024, depth: 24, num_heads: 16",
                "hidden_size: 1024, depth: 24, num_heads: 12",
            )
        ],
        "checkpoints[0].vision.num_heads",
        "hidden_size 1024 is not divisible by num_heads 12",
        "1, 2, 4, 8",
    ),
    (
        "vision head size is a multiple of 4",
        [
            (
                "hidden_size: 1024, depth: 24, num_heads: 16",
                "hidden_size: 1024, depth: 24, num_heads: 512",
            )
        ],
        "checkpoints[0].vision.num_heads",
        "head size 1024 / 512 = 2 is not a multiple of 4",
        "256",
    ),
    (
        "position table is square",
        [("num_embeddings: 2304", "num_embeddings: 2300")],
        "vision.position.num_embeddings",
        "2300 is not a square number",
        "2304 (48 x 48)",
    ),
    (
        "tower ends at the text width",
        [("out_hidden_size: 2048", "out_hidden_size: 2560")],
        "checkpoints[0].vision.out_hidden_size",
        "out_hidden_size 2560 differs from the text hidden_size 2048",
        "2048",
    ),
    (
        "block size multiple of 128",
        [("block_size: 2048", "block_size: 2000"), ("buckets: [2048, 8192]", "buckets: [2000]")],
        "neuron.vision_attention_block_size",
        "block size 2000 is not a multiple of 128",
        "1920 or 2048",
    ),
    (
        "block size multiple of the merge area",
        [("merge_size: 2", "merge_size: 3"), ("buckets: [2048, 8192]", "buckets: [4096]")],
        "neuron.vision_attention_block_size",
        "block size 2048 is not a multiple of 1152",
        "1152 or 2304",
    ),
    (
        "buckets ascend",
        [("buckets: [2048, 8192]", "buckets: [8192, 2048]")],
        "neuron.num_vision_tokens_buckets",
        "[8192, 2048] are not ascending",
        "[2048, 8192]",
    ),
    (
        "buckets are whole blocks",
        [("buckets: [2048, 8192]", "buckets: [2048, 5000]")],
        "neuron.num_vision_tokens_buckets[1]",
        "bucket 5000 is not a multiple of the block size 2048",
        "4096 or 6144",
    ),
    (
        "quantization modes are listed once",
        [("quantization: [none, bf16]", "quantization: [none, none]")],
        "neuron.quantization[1]",
        "as is neuron.quantization[0]",
        "",
    ),
    (
        "token ids are distinct",
        [("id: 151656", "id: 151655")],
        "tokens.video.id",
        "tokens.video.id is 151655, as is tokens.image.id",
        "",
    ),
    (
        "token texts are distinct",
        [("<|video_pad|>", "<|image_pad|>")],
        "tokens.video.token",
        "as is tokens.image.token",
        "",
    ),
    (
        "token config keys are distinct",
        [("video_token_id}", "image_token_id}")],
        "tokens.video.config_key",
        "as is tokens.image.config_key",
        "",
    ),
    (
        "token ids are below the vocabulary",
        [("id: 151653", "id: 151936")],
        "tokens.vision_end.id",
        "token id 151936 of vision_end is not below vocab_size 151936",
        "0 to 151935",
    ),
    (
        "token ids are below a checkpoint's vocabulary",
        [("tie_word_embeddings: true}", "tie_word_embeddings: true, vocab_size: 151656}")],
        "checkpoints[0].text.vocab_size",
        "token id 151656 of video is not below vocab_size 151656",
        "at least 151657",
    ),
    (
        "layout names are distinct",
        [("name: flat", "name: nested")],
        "weights.layouts[1].name",
        "as is weights.layouts[0].name",
        "",
    ),
    (
        "layouts differ in a prefix",
        [
            (
                "name: flat, text: model., vision: visual.",
                "name: flat, text: model.language_model., vision: model.visual.",
            )
        ],
        "weights.layouts[1]",
        "layouts 'nested' and 'flat' have the same prefixes",
        "",
    ),
    (
        "a layout's parts have prefixes of their own",
        [("name: flat, text: model., vision: visual.", "name: flat, text: model., vision: model.")],
        "weights.layouts[1]",
        "uses one prefix for two parts",
        "",
    ),
    (
        "weight names are distinct",
        [("    k: self_attn.k_proj", "    k: self_attn.q_proj")],
        "weights.text.k",
        "as is weights.text.q",
        "",
    ),
    (
        "processor keywords are distinct",
        [("pixels: pixel_values_videos", "pixels: pixel_values")],
        "inputs.video.pixels",
        "as is inputs.image.pixels",
        "",
    ),
    (
        "config keys differ",
        [("config_key: vision_config", "config_key: text_config")],
        "vision.config_key",
        "text and vision both read the config key 'text_config'",
        "",
    ),
    (
        "checkpoint names are distinct",
        [("also: [Qwen3-VL-2B-Thinking]", "also: [Qwen3-VL-4B-Instruct]")],
        "checkpoints[1].name",
        "as is checkpoints[0].also[0]",
        "",
    ),
    (
        "defaults_from is listed",
        [("defaults_from: Qwen3-VL-8B-Instruct", "defaults_from: Qwen3-VL-8B")],
        "defaults_from",
        "'Qwen3-VL-8B' is not the name of a listed checkpoint",
        "Qwen3-VL-8B-Instruct",
    ),
    (
        "defaults equal their checkpoint",
        [("  num_layers: 36\n", "  num_layers: 37\n")],
        "text.num_layers",
        "text.num_layers is 37, but Qwen3-VL-8B-Instruct has 36",
        "36",
    ),
    (
        "tie flag equals the checkpoint's",
        [("  tie_word_embeddings: false\n", "  tie_word_embeddings: true\n")],
        "text.tie_word_embeddings",
        "text.tie_word_embeddings is true, but Qwen3-VL-8B-Instruct has false",
        "false",
    ),
    (
        "deepstack equals the default checkpoint's",
        [("indices: [8, 16, 24]", "indices: [7, 16, 24]")],
        "vision.deepstack.indices",
        "is [7, 16, 24], but Qwen3-VL-8B-Instruct has [8, 16, 24]",
        "[8, 16, 24]",
    ),
    (
        "architecture begins with class_prefix",
        [("class_prefix: Qwen3VL", "class_prefix: Qwen2VL")],
        "architecture",
        "does not begin with class_prefix 'Qwen2VL'",
        "",
    ),
    (
        "architecture and class_prefix agree in case",
        [("architecture: Qwen3VLFor", "architecture: Qwen3VlFor")],
        "architecture",
        "differ in case",
        "Qwen3VLForConditionalGeneration",
    ),
    (
        "architecture has a capitalised rest",
        [("class_prefix: Qwen3VL", "class_prefix: Qwen3VLForConditionalGeneration")],
        "architecture",
        "no capitalised rest",
        "",
    ),
    (
        "the rotated share is generated",
        [("partial: 1.0", "partial: 0.75"), ("sections: [24, 20, 20]", "sections: [16, 16, 16]")],
        "text.rope.partial",
        "text.rope.partial is 0.75",
        "1.0",
    ),
]


@pytest.mark.parametrize(
    ("edits", "path", "message", "legal"),
    [case[1:] for case in CASES],
    ids=[case[0] for case in CASES],
)
def test_rule(problems_of, edits, path, message, legal):
    problems = problems_of(*edits)
    assert [problem.path for problem in problems] == [path]
    (problem,) = problems
    assert message in problem.message
    assert legal in problem.legal
    assert problem.rule
    assert problem.line > 1


def test_head_dim_of_a_checkpoint_is_checked_against_the_sections(problems_of):
    (problem,) = problems_of(
        ("tie_word_embeddings: true}", "tie_word_embeddings: true, head_dim: 64}")
    )
    assert problem.path == "checkpoints[0].text.head_dim"
    assert "half of the rotated head is 32 in Qwen3-VL-2B-Instruct" in problem.message


def test_deepstack_index_beyond_the_depth(problems_of):
    problems = problems_of(
        ("indices: [8, 16, 24]", "indices: [8, 16, 27]"),
        ("4096, deepstack: [8, 16, 24]", "4096, deepstack: [8, 16, 27]"),
    )
    assert [p.path for p in problems] == [
        "vision.deepstack.indices[2]",
        "checkpoints[2].vision.deepstack[2]",
    ]
    for problem in problems:
        assert problem.message == "deepstack index 27 is beyond the tower's depth 27"
        assert problem.legal == "0 to 26"
        assert problem.source[problem.column - 1 :].startswith("27")


def test_odd_rotated_part(problems_of):
    problems = problems_of(("head_dim: 128", "head_dim: 127"))
    assert "head_dim 127 x partial 1.0 = 127 is not an even number" in problems[0].message


def test_kv_heads_of_the_default_sizes(problems_of):
    problems = problems_of(
        ("    num_kv_heads: 8\n", "    num_kv_heads: 5\n"),
        ("4096, num_layers: 36, num_heads: 32, num_kv_heads: 8",
         "4096, num_layers: 36, num_heads: 32, num_kv_heads: 5"),
    )  # fmt: skip
    assert [p.path for p in problems] == [
        "text.attention.num_kv_heads",
        "checkpoints[2].text.num_kv_heads",
    ]


def test_a_rule_whose_values_were_refused_does_not_run(problems_of):
    (problem,) = problems_of(("head_dim: 128", "head_dim: many"))
    assert problem.path == "text.attention.head_dim"


def test_other_rules_run_beside_a_refused_value(problems_of):
    paths = [
        p.path
        for p in problems_of(("head_dim: 128", "head_dim: many"), ("id: 151656", "id: 151655"))
    ]
    assert paths == ["text.attention.head_dim", "tokens.video.id"]


def test_every_rule_is_broken_by_a_case(spec_text):
    """No rule is dead: each finds something in an edited spec, here or in test_pairings."""
    head_dim = ("tie_word_embeddings: true}", "tie_word_embeddings: true, head_dim: 64}")
    # A seventh KV head in the text section breaks its own rule, not only that of the defaults.
    sections = [
        head_dim,
        ("    num_kv_heads: 8\n", "    num_kv_heads: 7\n"),
        ("    num_heads: 16\n    qkv_layout: fused", "    num_heads: 7\n    qkv_layout: fused"),
        ("  out_hidden_size: 4096\n", "  out_hidden_size: 4095\n"),
        ("    indices: [8, 16, 24]", "    indices: [8, 16, 99]"),
    ]
    found: set[str] = set()
    for edits in [*(case[1] for case in CASES), *([edit] for edit in sections)]:
        text = spec_text
        for old, new in edits:
            assert old in text
            text = text.replace(old, new, 1)
        found |= set(rules.broken_rules(parse_document(text, "x.yaml").data))
    for _, family, text, *_ in test_pairings.CASES:
        path = test_pairings.SPECS / "x.yaml"
        document = parse_document(f"extends: {family}.yaml\n{text}", str(path))
        found |= set(rules.broken_rules(resolve_extends(document, path).data))
    found.add(rules.parts_are_paired.__name__)  # by PAIRS
    every = {rule.__name__ for rule in (*rules.SPEC_RULES, *rules.CHECKPOINT_RULES)}
    assert found == every
