"""Config and tensors that say different things: both facts, exit code 7, nothing written."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from vlmgen.importer import ContradictionError, import_checkpoint

from .checkpoints import Headers

TEXT = "model.language_model.layers.0."
Change = Callable[[Headers], None]


def unstated_bias(h: Headers) -> None:
    for role in "qkv":
        h.add_bias(f"self_attn.{role}_proj")


def stated_bias(h: Headers) -> None:
    h.config["text_config"]["attention_bias"] = True


def more_layers(h: Headers) -> None:
    last = h.config["text_config"]["num_hidden_layers"]
    for key, shape in list(h.shapes.items()):
        if f".layers.{last - 1}." in key:
            h.shapes[key.replace(f".layers.{last - 1}.", f".layers.{last}.")] = shape


def fewer_layers(h: Headers) -> None:
    h.config["text_config"]["num_hidden_layers"] += 1


def more_blocks(h: Headers) -> None:
    h.config["vision_config"]["depth"] -= 1


def tied_with_a_head(h: Headers) -> None:
    h.config["tie_word_embeddings"] = True


def untied_without_a_head(h: Headers) -> None:
    h.drop("lm_head")


def hidden_size(h: Headers) -> None:
    h.config["text_config"]["hidden_size"] *= 2
    h.config["vision_config"]["out_hidden_size"] *= 2


def mlp_width(h: Headers) -> None:
    h.config["text_config"]["intermediate_size"] += 32


def head_dim(h: Headers) -> None:
    h.config["text_config"]["head_dim"] //= 2


def kv_heads(h: Headers) -> None:
    h.config["text_config"]["num_key_value_heads"] *= 2


def vocabulary(h: Headers) -> None:
    h.config["text_config"]["vocab_size"] += 1


def patch_size(h: Headers) -> None:
    h.config["vision_config"]["patch_size"] = 14


def tower_width(h: Headers) -> None:
    h.config["vision_config"]["hidden_size"] *= 2


def tower_mlp(h: Headers) -> None:
    h.config["vision_config"]["intermediate_size"] += 8


def merge_size(h: Headers) -> None:
    h.config["vision_config"]["spatial_merge_size"] = 3


def out_width(h: Headers) -> None:
    h.config["vision_config"]["out_hidden_size"] += 32


def table(h: Headers) -> None:
    h.config["vision_config"]["num_position_embeddings"] = 81


def levels(h: Headers) -> None:
    h.config["vision_config"]["deepstack_visual_indexes"] = [0, 1]


def one_layer_of_another_width(h: Headers) -> None:
    key = TEXT + "mlp.gate_proj.weight"
    h.shapes[key] = (h.shapes[key][0] * 2, h.shapes[key][1])


def norm_in_some_layers(h: Headers) -> None:
    h.drop(TEXT + "self_attn.q_norm")


def rope_twice(h: Headers) -> None:
    h.config["text_config"]["rope_theta"] = 10_000


CASES: list[tuple[Change, str, str, str]] = [
    (unstated_bias, "text.attention.qkv_bias", "attention_bias is false", "q_proj.bias"),
    (stated_bias, "text.attention.qkv_bias", "attention_bias is true", "q_proj.weight and no bias"),
    (more_layers, "text.num_layers", "num_hidden_layers is 4", "layers.4."),
    (fewer_layers, "text.num_layers", "num_hidden_layers is 5", "layers.3."),
    (more_blocks, "vision.depth", "depth is 3", "blocks.3."),
    (tied_with_a_head, "text.tie_word_embeddings", "embeddings is true", "lm_head.weight is there"),
    (untied_without_a_head, "text.tie_word_embeddings", "is false", "no lm_head.weight"),
    (hidden_size, "text.hidden_size", "hidden_size is 256", "embed_tokens.weight is [320, 128]"),
    (mlp_width, "text.mlp.intermediate_size", "intermediate_size is 224", "is [192, 128]"),
    (head_dim, "text.attention.num_heads", "head_dim is 32: 128 rows", "is [256, 128]"),
    (kv_heads, "text.attention.num_kv_heads", "num_key_value_heads is 4", "is [128, 128]"),
    (vocabulary, "text.vocab_size", "vocab_size is 321", "is [320, 128]"),
    (patch_size, "vision.patch_embed.patch_size", "patch_size is 14", "[64, 3, 2, 16, 16]"),
    (tower_width, "vision.hidden_size", "hidden_size is 128", "is [64, 3, 2, 16, 16]"),
    (tower_mlp, "vision.mlp.intermediate_size", "intermediate_size is 104", "is [96, 64]"),
    (merge_size, "vision.merger.merge_size", "spatial_merge_size is 3", "is [256, 256]"),
    (out_width, "vision.out_hidden_size", "out_hidden_size is 160", "is [128, 256]"),
    (table, "vision.position.num_embeddings", "is 81", "pos_embed.weight is [64, 64]"),
    (levels, "vision.deepstack.indices", "is [0, 1]", "deepstack_merger_list.2."),
    (one_layer_of_another_width, "weights.text", "layers.0.mlp", "layers.1.mlp"),
    (norm_in_some_layers, "weights.text.q_norm", "layers.1.self_attn", "layers.0.self_attn"),
    (rope_twice, "text.rope (rope_theta)", "rope_theta is 5000000.0", "rope_theta is 10000"),
]


@pytest.mark.parametrize(
    ("change", "path", "first", "second"), CASES, ids=[case[0].__name__ for case in CASES]
)
def test_contradiction_is_found_with_both_facts(
    tiny, folder, tmp_path, change, path, first, second
):
    headers = tiny("qwen3_vl")
    change(headers)
    out = tmp_path / "mine.yaml"
    with pytest.raises(ContradictionError) as caught:
        import_checkpoint(headers.write(folder), out=out, family="mine")
    found = [c for c in caught.value.conflicts if c.path == path]
    assert found, caught.value.conflicts
    assert any(first in c.first and second in c.second for c in found), found
    assert first in caught.value.message and second in caught.value.message
    assert caught.value.exit_code == 7
    assert not out.exists()


def test_crossed_widths_are_no_contradiction(tiny, folder):
    """GLM's tower has an MLP that is out_hidden_size wide; intermediate_size is the merger's."""
    headers = tiny("glm4v")
    vision = headers.config["vision_config"]
    assert vision["intermediate_size"] != vision["out_hidden_size"]
    assert import_checkpoint(headers.write(folder)).match.serves
    vision["intermediate_size"] += 8
    with pytest.raises(ContradictionError) as caught:
        import_checkpoint(headers.write(folder))
    assert [c.path for c in caught.value.conflicts] == ["vision.merger.inner"]


@pytest.mark.parametrize("missing", [0, 3, 7])
def test_number_of_experts(tiny, folder, missing):
    headers = tiny("glm4v_moe")
    headers.drop(f"layers.1.mlp.experts.{missing}.")
    with pytest.raises(ContradictionError) as caught:
        import_checkpoint(headers.write(folder))
    (conflict,) = caught.value.conflicts
    assert "7 experts in model.language_model.layers.1." in conflict.second


def test_router_of_another_size(tiny, folder):
    headers = tiny("qwen3_vl_moe")
    headers.config["text_config"]["num_experts" if "num_experts" in headers.config["text_config"]
                                  else "num_local_experts"] = 4  # fmt: skip
    with pytest.raises(ContradictionError) as caught:
        import_checkpoint(headers.write(folder))
    assert caught.value.conflicts[0].path == "text.moe.num_experts"


def test_experts_of_neither_direction(tiny, folder):
    headers = tiny("qwen3_vl_moe")
    for key, shape in headers.shapes.items():
        if "experts.down_proj" in key:
            headers.shapes[key] = (shape[0], shape[1] + 8, shape[2])
    with pytest.raises(ContradictionError) as caught:
        import_checkpoint(headers.write(folder))
    assert caught.value.conflicts[0].path == "text.moe.checkpoint"


def test_layer_that_the_family_ignores_is_no_contradiction(tiny, folder):
    headers = tiny("glm4v_moe")
    assert any(".layers.46." in key for key in headers.shapes)
    assert import_checkpoint(headers.write(folder)).match.serves


def test_sections_of_a_wrong_sum_are_refused_as_the_package_does(tiny, folder):
    from vlmgen.errors import CheckpointError

    headers = tiny("qwen3_vl")
    headers.config["text_config"]["rope_parameters"]["mrope_section"] = [12, 12, 12]
    with pytest.raises(CheckpointError, match="12 \\+ 12 \\+ 12 = 36, half of the rotated head"):
        import_checkpoint(headers.write(folder))
