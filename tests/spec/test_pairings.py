"""Rules of the axes that the other families brought: each broken by a spec that extends one."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from vlmgen.errors import Problem, SpecError
from vlmgen.spec import rules
from vlmgen.spec.extends import resolve_extends
from vlmgen.spec.load import load_spec_text
from vlmgen.spec.rules.conditions import PAIRED
from vlmgen.spec.source import parse_document

from .conftest import ROOT

SPECS = ROOT / "specs"

# (rule, family that is extended, what the spec states, path, message, rule in words, legal values)
CASES = [
    (
        "contiguous sections of the wrong sum",
        "qwen2_vl",
        "text: {rope: {sections: [24, 24, 24]}}",
        "text.rope.sections",
        "M-RoPE sections 24 + 24 + 24 = 72, half of the rotated head is 64",
        "sections sum to head_dim * partial / 2",
        "three numbers that sum to 64",
    ),
    (
        "sections of a part of the head",
        "glm4v_moe",
        "text: {rope: {partial: 1.0}}",
        "text.rope.sections",
        "M-RoPE sections 8 + 12 + 12 = 32, half of the rotated head is 64",
        "sections sum to head_dim * partial / 2",
        "three numbers that sum to 64",
    ),
    (
        "deepstack of a tower with fewer blocks",
        "qwen3_vl_moe",
        "vision: {depth: 24}",
        "vision.deepstack.indices[2]",
        "deepstack index 24 is beyond the tower's depth 24",
        "a deepstack index is a tower block",
        "0 to 23",
    ),
    (
        "class token within frames",
        "qwen2_vl",
        "vision: {class_token: first}\nweights: {vision: {class_token: cls_token}}",
        "vision.class_token",
        "vision.class_token is stated, but vision.attention.bounds is frame",
        "a class token belongs to one tile; frames and windows of any size have none",
        "null, or vision.input tiles with bounds tile",
    ),
    (
        "tiles that attend within frames",
        "internvl",
        "vision: {attention: {bounds: frame}, class_token: null, position: {num_embeddings: 1024}}"
        "\nweights: {vision: {class_token: null}}",
        "vision.attention.bounds",
        "vision.attention.bounds is frame, but vision.input is tiles",
        "patches attend within a tile if and only if the input is tiles",
        "tile",
    ),
    (
        "a tile's bounds for frames",
        "qwen2_vl",
        "vision: {attention: {bounds: tile}}",
        "vision.attention.bounds",
        "vision.attention.bounds is tile, but vision.input is patches_merge_order",
        "patches attend within a tile if and only if the input is tiles",
        "frame, window",
    ),
    (
        "an interpolated table for tiles",
        "internvl",
        "vision: {position: {kind: learned_grid_sample_bicubic}}",
        "vision.position.kind",
        "vision.position.kind is learned_grid_sample_bicubic, but vision.input is tiles",
        "a table that is not interpolated (learned_fixed) is for tiles, which have one size",
        "learned_fixed",
    ),
    (
        "a fixed table for frames",
        "glm4v",
        "vision: {position: {kind: learned_fixed}}",
        "vision.position.kind",
        "vision.position.kind is learned_fixed, but vision.input is patches_merge_order",
        "a table that is not interpolated (learned_fixed) is for tiles, which have one size",
        "learned_bilinear, learned_grid_sample_bicubic",
    ),
    (
        "a table with a class token is one row more than a square",
        "internvl",
        "vision: {position: {num_embeddings: 1024}}",
        "vision.position.num_embeddings",
        "num_embeddings 1024 is not a square number and one for the class token",
        "the position table is a square grid and one for the class token",
        "such as 962 (31 x 31 + 1) or 1025 (32 x 32 + 1)",
    ),
    (
        "tiles of an odd side",
        "internvl",
        "vision: {position: {num_embeddings: 962}}",
        "vision.position.num_embeddings",
        "tiles of 31 x 31 patches are not cut whole by merge_size 2",
        "the side of a tile is a whole number of merge windows",
        "a table of such a side, as 32",
    ),
    (
        "a tile and its class token in a block",
        "internvl",
        "neuron: {vision_attention_block_size: 1024, num_vision_tokens_buckets: [1024]}",
        "neuron.vision_attention_block_size",
        "block size 1024 is below the 1028 places that a tile takes",
        "a tile and its class token, which takes a merge window, fit one vision block",
        "at least 1028",
    ),
    (
        "plain rope with three-axis positions",
        "internvl",
        "tokens: {positions: mrope_per_frame, video_prompt: none}\ninputs: {video: null}",
        "tokens.positions",
        "tokens.positions is mrope_per_frame, but text.rope.kind is plain",
        "mrope rotates by three-axis positions (mrope_per_frame, mrope_block), plain by places in "
        "the sequence",
        "sequence",
    ),
    (
        "M-RoPE with places in the sequence",
        "paddleocr_vl",
        "tokens: {positions: sequence}",
        "tokens.positions",
        "tokens.positions is sequence, but text.rope.kind is mrope",
        "mrope rotates by three-axis positions (mrope_per_frame, mrope_block), plain by places in "
        "the sequence",
        "mrope_per_frame, mrope_block",
    ),
    (
        "seconds without a temporal axis",
        "qwen3_vl",
        "tokens: {seconds: {input: second_per_grid_ts, config_key: tps, tokens_per_second: 2}}",
        "tokens.seconds",
        "tokens.seconds is stated, but tokens.positions is mrope_per_frame",
        "only a video that is one block (mrope_block) has a temporal axis to scale",
        "null",
    ),
    (
        "one run for frames that are blocks of their own",
        "qwen3_vl",
        "tokens: {video_prompt: one_run}",
        "tokens.video_prompt",
        "tokens.video_prompt is one_run, but tokens.positions is mrope_per_frame",
        "per-frame positions need the frames apart in the prompt, a block needs one run",
        "per_frame_timestamp, per_frame_image_token, none",
    ),
    (
        "windows that cut a merge window",
        "qwen2_5_vl",
        "vision: {attention: {window: {size: 100}}}",
        "vision.attention.window.size",
        "a window of 100 pixels is not a multiple of 28",
        "a window is a whole number of merge windows (patch_size x merge_size)",
        "such as 84 or 112",
    ),
    (
        "full blocks of a shallower tower",
        "qwen2_5_vl",
        "vision: {depth: 24}",
        "vision.attention.window.full_blocks",
        "full_blocks [7, 15, 23, 31] go beyond the tower's depth 24",
        "full_blocks are tower blocks",
        "0 to 23",
    ),
    (
        "full blocks ascend",
        "qwen2_5_vl",
        "vision: {attention: {window: {full_blocks: [15, 7]}}}",
        "vision.attention.window.full_blocks",
        "full_blocks [15, 7] are not ascending and distinct",
        "full_blocks are tower blocks, ascending and distinct",
        "[7, 15]",
    ),
    (
        "full blocks of a shallower checkpoint",
        "qwen2_5_vl",
        "checkpoints: [{name: Qwen2.5-VL-7B-Instruct, text: {}, vision: {}}, {name: Short, text: "
        "{}, vision: {depth: 16}}]",
        "checkpoints[1].vision.depth",
        "full_blocks [7, 15, 23, 31] go beyond the tower's depth 16 in Short",
        "full_blocks are tower blocks",
        "at least 32 blocks",
    ),
    (
        "more experts per token than there are",
        "qwen3_vl_moe",
        "text: {moe: {num_experts: 4}}",
        "text.moe.top_k",
        "top_k is 8, but num_experts is 4",
        "top_k is at most num_experts",
        "1 to 4",
    ),
    (
        "fewer experts in a checkpoint",
        "glm4v_moe",
        "checkpoints: [{name: GLM-4.5V, text: {}, vision: {}}, {name: Few, text: {num_experts: 4}, "
        "vision: {}}]",
        "checkpoints[1].text.num_experts",
        "top_k is 8, but num_experts is 4 in Few",
        "top_k is at most num_experts",
        "at least 8",
    ),
    (
        "no layer with experts",
        "glm4v_moe",
        "text: {moe: {first_dense: 46}}",
        "text.moe.first_dense",
        "first_dense 46 leaves none of 46 layers with experts",
        "some layer has experts",
        "0 to 45",
    ),
    (
        "a size of experts that the spec does not have",
        "qwen2_vl",
        "checkpoints: [{name: Qwen2-VL-7B-Instruct, text: {num_experts: 8}, vision: {}}]",
        "checkpoints[0].text.num_experts",
        "text.num_experts is stated in Qwen2-VL-7B-Instruct, but text.moe is null",
        "text.num_experts is a size of text.moe",
        "null",
    ),
    (
        "a flat convolution over two frames",
        "paddleocr_vl",
        "vision: {patch_embed: {temporal_patch_size: 2}}",
        "vision.patch_embed.temporal_patch_size",
        "temporal_patch_size is 2, but patch_embed.kind is conv2d",
        "a two-dimensional convolution sees one frame",
        "1, or patch_embed.kind conv3d",
    ),
    (
        "a convolution merger without the width of its MLP",
        "glm4v",
        "vision: {merger: {inner: joined}}",
        "vision.merger.inner",
        "merger.inner is joined, but merger.op is strided_conv",
        "inner is the width of the gated MLP of strided_conv, else joined or out",
        "a number",
    ),
    (
        "deepstack behind a convolution merger",
        "glm4v",
        "vision: {deepstack: {indices: [8], inject: after_layer, merger: {norm: layer, norm_eps: "
        "1.0e-6, norm_position: after_merge, activation: gelu, bias: true}}}\n"
        'weights: {vision: {deepstack: {prefix: "deep.{level}.", norm: norm, fc1: a, fc2: b}}}',
        "vision.deepstack",
        "vision.deepstack is stated, but merger.op is strided_conv",
        "a deepstack level is merged like a window",
        "null, or merger.op window",
    ),
    (
        "deepstack levels of another inner width",
        "qwen3_vl",
        "vision: {merger: {inner: out}}",
        "vision.merger.inner",
        "merger.inner is out, but vision.deepstack is stated",
        "a deepstack level is merged by the tower's merger, which may norm before the join",
        "joined, or vision.deepstack null",
    ),
    (
        "deepstack levels with another norm after the join",
        "qwen3_vl",
        "vision: {merger: {norm_position: after_merge, norm: rms}}",
        "vision.merger.norm",
        "merger.norm is rms, but vision.deepstack is stated",
        "a deepstack level is merged by the tower's merger, which may norm before the join",
        "layer, or vision.deepstack null",
    ),
    (
        "a merger without a prefix",
        "qwen2_vl",
        "weights: {vision: {merger: {prefix: null}}}",
        "weights.layouts[0].projector",
        "neither projector nor weights.vision.merger.prefix is stated",
        "the merger lies in the tower (merger.prefix) or beside it (projector)",
        "",
    ),
    (
        "a merger with two prefixes",
        "internvl",
        'weights: {vision: {merger: {prefix: "merger."}}}',
        "weights.layouts[0].projector",
        "projector and weights.vision.merger.prefix are both stated",
        "the merger lies in the tower (merger.prefix) or beside it (projector)",
        "",
    ),
]


def problems_of(family: str, text: str) -> list[Problem]:
    """Problems of a spec in `specs/` that extends a family and states this."""
    with pytest.raises(SpecError) as caught:
        load_spec_text(f"extends: {family}.yaml\n{text}\n", str(SPECS / "x.yaml"))
    return caught.value.problems


@pytest.mark.parametrize(
    ("family", "text", "path", "message", "rule", "legal"),
    [case[1:] for case in CASES],
    ids=[case[0] for case in CASES],
)
def test_wrong_pairing_is_refused_with_its_rule(family, text, path, message, rule, legal):
    problem = next(p for p in problems_of(family, text) if p.path == path)
    assert problem.message == message
    assert problem.rule == rule
    assert problem.legal == legal


# --- what stands in a spec if and only if another value asks for it -----------------------------

# A family in which every part stands, and one in which none does.
PAIRS = [
    ("text.rope.order", "qwen2_vl", "internvl"),
    ("text.rope.sections", "qwen2_vl", "internvl"),
    ("vision.attention.window", "qwen2_5_vl", "qwen2_vl"),
    ("vision.position.align_corners", "qwen3_vl", "glm4v"),
    ("vision.config_keys.merger_size", "glm4v", "internvl"),
    ("inputs.image.tiles", "internvl", "qwen2_vl"),
    ("inputs.image.grid", "qwen2_vl", "internvl"),
    ("inputs.video", "qwen2_vl", "paddleocr_vl"),
    ("tokens.video", "qwen2_vl", "internvl"),
    ("weights.text.q_norm", "qwen3_vl", "qwen2_vl"),
    ("weights.text.k_norm", "internvl3_5", "qwen2_vl"),
    ("weights.text.post_self_attn_layernorm", "glm4v", "glm4v_moe"),
    ("weights.text.post_mlp_layernorm", "glm4v", "glm4v_moe"),
    ("weights.text.gate", "glm4v_moe", "qwen3_vl_moe"),
    ("weights.text.up", "qwen2_vl", "glm4v"),
    ("weights.text.gate_up", "glm4v", "glm4v_moe"),
    ("weights.text.down", "glm4v_moe", "qwen3_vl_moe"),
    ("weights.text.moe", "qwen3_vl_moe", "qwen3_vl"),
    ("weights.text.moe.correction_bias", "glm4v_moe", "internvl3_5_moe"),
    ("weights.text.moe.gate_up", "qwen3_vl_moe", "internvl3_5_moe"),
    ("weights.text.moe.expert", "internvl3_5_moe", "qwen3_vl_moe"),
    ("weights.text.moe.gate", "internvl3_5_moe", "qwen3_vl_moe"),
    ("weights.text.moe.up", "glm4v_moe", "qwen3_vl_moe"),
    ("weights.text.moe.shared", "glm4v_moe", "internvl3_5_moe"),
    ("weights.vision.class_token", "internvl", "qwen2_vl"),
    ("weights.vision.embed_norm", "glm4v", "internvl"),
    ("weights.vision.pos_embed", "qwen3_vl", "qwen2_vl"),
    ("weights.vision.final_norm", "paddleocr_vl", "internvl"),
    ("weights.vision.scale1", "internvl", "qwen2_vl"),
    ("weights.vision.scale2", "internvl", "paddleocr_vl"),
    ("weights.vision.qkv", "qwen2_vl", "internvl"),
    ("weights.vision.q", "paddleocr_vl", "qwen3_vl"),
    ("weights.vision.k", "internvl", "qwen2_5_vl"),
    ("weights.vision.v", "internvl", "glm4v"),
    ("weights.vision.q_norm", "internvl_6b", "internvl"),
    ("weights.vision.k_norm", "internvl_6b", "paddleocr_vl"),
    ("weights.vision.fc1", "qwen2_vl", "qwen2_5_vl"),
    ("weights.vision.fc2", "internvl", "glm4v"),
    ("weights.vision.gate", "qwen2_5_vl", "qwen2_vl"),
    ("weights.vision.up", "glm4v", "qwen3_vl"),
    ("weights.vision.down", "glm4v_moe", "internvl"),
    ("weights.vision.merger.fc2", "qwen2_vl", "glm4v"),
    ("weights.vision.merger.conv", "glm4v", "qwen2_vl"),
    ("weights.vision.merger.gate", "glm4v", "internvl"),
    ("weights.vision.merger.up", "glm4v", "qwen3_vl"),
    ("weights.vision.merger.down", "glm4v_moe", "paddleocr_vl"),
    ("weights.vision.deepstack", "qwen3_vl", "qwen2_vl"),
]


def resolved(family: str) -> dict:
    """The data of a shipped spec with everything it inherits."""
    path = SPECS / f"{family}.yaml"
    document = parse_document(path.read_text(encoding="utf-8"), str(path))
    return resolve_extends(document, path).data


def value_at(data: dict, path: str):
    for key in path.split("."):
        data = data[key]
    return data


def overlay(path: str, value) -> str:
    for key in reversed(path.split(".")):
        value = {key: value}
    return yaml.safe_dump(value)


def test_every_pair_is_in_the_table():
    assert [name for names, _ in PAIRED for name in names] == [pair[0] for pair in PAIRS]


@pytest.mark.parametrize(("path", "with_it", "without"), PAIRS)
def test_part_is_missed_where_it_belongs_and_refused_where_not(path, with_it, without):
    part = value_at(resolved(with_it), path)
    missing = [p for p in problems_of(with_it, overlay(path, None)) if p.path == path]
    stated = [p for p in problems_of(without, overlay(path, part)) if p.path == path]
    assert [len(missing), len(stated)] == [1, 1]
    assert missing[0].message.startswith(f"{path} is missing, but ")
    assert stated[0].message.startswith(f"{path} is stated, but ")
    assert stated[0].legal == "null"
    assert missing[0].rule == stated[0].rule
    assert stated[0].rule.startswith(f"{path} is stated if and only if ")


def test_messages_say_what_is_so():
    def message(family: str, path: str, value) -> str:
        found = problems_of(family, overlay(path, value))
        return next(p.message for p in found if p.path == path)

    assert message("qwen2_vl", "weights.text.q_norm", "q_norm") == (
        "weights.text.q_norm is stated, but text.attention.qk_norm is none"
    )
    assert message("glm4v", "weights.text.gate_up", None) == (
        "weights.text.gate_up is missing, but a layer has a dense MLP and text.mlp.layout is "
        "fused_gate_up"
    )
    assert message("qwen3_vl_moe", "weights.text.down", "down") == (
        "weights.text.down is stated, but no layer has a dense MLP"
    )
    assert message("paddleocr_vl", "weights.vision.scale1", "scale") == (
        "weights.vision.scale1 is stated, but vision.layer_scale is false"
    )
    assert message("qwen2_vl", "weights.vision.class_token", "cls") == (
        "weights.vision.class_token is stated, but vision.class_token is null"
    )


@pytest.mark.parametrize("path", sorted(SPECS.glob("*.yaml")), ids=lambda path: path.stem)
def test_no_rule_is_broken_by_a_shipped_spec(path: Path):
    assert rules.broken_rules(resolved(path.stem)) == {}
