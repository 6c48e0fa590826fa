"""Golden vectors of the plugin's Qwen3-VL code against the generated package: all but the tower.

What becomes of each vector stands in `vector_table.py`. The tower's vectors are in
`test_vlm_tower_vectors.py`.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm_neuron_qwen3_vl import model as package_model
from vllm_neuron_qwen3_vl.config import (
    Qwen3VLConfig,
    Qwen3VLConfigError,
    Qwen3VLTextConfig,
    Qwen3VLVisionConfig,
)
from vllm_neuron_qwen3_vl.factory import Qwen3VLForConditionalGeneration
from vllm_neuron_qwen3_vl.model import (
    Qwen3VLNeuronModel,
    Qwen3VLTextAttention,
    Qwen3VLTextRMSNorm,
    Qwen3VLTextRotaryEmbedding,
    decode_cache_views,
)
from vllm_neuron_qwen3_vl.model import rotate as rotate_text
from vllm_neuron_qwen3_vl.utils.block_packing import (
    Item,
    VisionBatch,
    VisionInputError,
    pack_first_fit_decreasing,
    plan_vision_batch,
    select_vision_blocks,
)
from vllm_neuron_qwen3_vl.utils.merge_vision_embeds import (
    local_rows,
    merge_vision_embeddings,
    place_rows,
)
from vllm_neuron_qwen3_vl.utils.preprocessing import position_taps, rotary_tables
from vllm_neuron_qwen3_vl.weight_mapping import LAYOUTS, build_mappings

from tests.package import test_vlm_tower_vectors
from tests.package.layouts import SCRATCH, bins_of, lay_out, recorded_batch, small_vision_config
from tests.package.vector_table import RULES, TOPICS, cases
from tests.vectors.reader import Vector, compare, read_index, vectors

# ------------------------------------------------------------------------------------ the table


def test_every_vector_is_accounted_for() -> None:
    wanted = (
        "packing preprocessing merge text_mrope text_ops kv_write tower tower_load tower_errors "
        "embed_errors weight_names warmup_inputs select_vision_bucket max_pixels_token_count"
    )
    assert sorted(TOPICS) == sorted(wanted.split())
    entries = [vector for vector in read_index("vlm") if vector.topic in TOPICS]
    assert len(entries) == 236
    for vector in entries:
        named = [rule for rule in RULES if rule.matches(vector)]
        assert len(named) == 1, f"{vector.name} is in {len(named)} rules: {named}"


def test_every_rule_of_the_table_is_run() -> None:
    functions = {**globals(), **vars(test_vlm_tower_vectors)}
    for rule in RULES:
        assert any(rule.matches(vector) for vector in vectors(rule.topic)), f"no case for {rule}"
        assert rule.treatment in ("reproduced", "adapted", "different"), rule
        assert rule.why or rule.treatment != "different", f"a difference needs a reason: {rule}"
        function = functions[rule.test]
        marks = [mark for mark in function.pytestmark if mark.name == "parametrize"]
        run = {vector.name for mark in marks if mark.args[0] == "vector" for vector in mark.args[1]}
        assert {v.name for v in vectors(rule.topic) if rule.matches(v)} <= run, rule


# -------------------------------------------------------------------------------------- packing


@cases("test_first_fit_decreasing_fills_the_same_blocks")
def test_first_fit_decreasing_fills_the_same_blocks(vector: Vector) -> None:
    args, recorded = vector.args, vector.outputs["assignment"]
    sizes = args["tokens_per_image"]
    places, blocks = pack_first_fit_decreasing(sizes, args["block_size"])
    assert blocks == sum(bool(members) for members in recorded["bins"])
    assert bins_of(places, sizes, recorded["num_blocks"]) == recorded["bins"]


@cases("test_too_many_blocks_are_refused_when_the_bucket_is_chosen")
def test_too_many_blocks_are_refused_when_the_bucket_is_chosen(vector: Vector) -> None:
    args = vector.args
    assert vector.raises["type"] == "ValueError"
    _, blocks = pack_first_fit_decreasing(args["tokens_per_image"], args["block_size"])
    assert blocks == args["num_blocks"] + 1
    bucket = args["num_blocks"] * args["block_size"]
    batch = VisionBatch((Item("all", (1,)),), (), (), blocks, args["block_size"], 1)
    with pytest.raises(VisionInputError) as refused:
        select_vision_blocks(batch, buckets=[bucket], dp_size=1, free_blocks=100)
    assert f"{blocks} blocks of {args['block_size']}" in str(refused.value)
    assert str(bucket) in str(refused.value)
    assert f"at least {blocks * args['block_size']}" in str(refused.value)


@cases("test_a_frame_above_the_block_is_refused_before_packing")
def test_a_frame_above_the_block_is_refused_before_packing(vector: Vector) -> None:
    sizes, block_size = vector.args["tokens_per_image"], vector.args["block_size"]
    assert vector.raises["numbers"] == [1, 13, 12]
    with pytest.raises(VisionInputError, match="13 patches does not fit .* block of 12"):
        plan_vision_batch(
            grid_thw=torch.tensor([[1, 1, size] for size in sizes]),
            keys=[str(size) for size in sizes],
            pixels_shape=(sum(sizes), 1),
            config=small_vision_config(),
            block_size=block_size,
        )


# The plugin's mode, and what first-fit decreasing makes of the same sizes.
SHARED = {
    "one_item_basic": [[1, 2], [3, 0]],
    "one_item_exact_count": [[0], [1]],
    "one_item_too_few_blocks": [[0, 1, 2]],
    "one_item_tutorial_fault": [[0, 1]],
    "one_item_none": [],
    "one_item_zero_tokens": [[1, 0]],
    "groups_two_videos": [[0, 1], [2, 3], [4]],
    "groups_not_tiling": [[0, 1], [2]],
    "groups_frame_equals_block": [[0], [1], [2]],
    "groups_image_between": [[2], [0, 1], [3]],
    "groups_too_few_blocks": [[0, 1], [2]],
    "groups_id_comes_back": [[0, 1, 2]],
    "groups_mixed_sizes": [[0, 1], [2, 3]],
}


@cases("test_frames_share_blocks_where_the_plugin_opens_new_ones")
def test_frames_share_blocks_where_the_plugin_opens_new_ones(vector: Vector) -> None:
    sizes, block_size = vector.args["tokens_per_image"], vector.args["block_size"]
    places, blocks = pack_first_fit_decreasing(sizes, block_size)
    assert bins_of(places, sizes, blocks) == SHARED[vector.case]
    if vector.raises:
        assert vector.raises["type"] == "ValueError"
        fits = blocks <= vector.args["num_blocks"]
        assert fits == vector.case.startswith("one_item"), "the plugin refuses, sharing fits"
    else:
        theirs = [members for members in vector.outputs["assignment"]["bins"] if members]
        assert blocks <= len(theirs)


def test_the_tutorials_two_pictures_are_refused_with_the_legal_bucket() -> None:
    """They pack into one block, but one request may read only one cache block."""
    batch = plan_vision_batch(
        grid_thw=torch.tensor([[1, 28, 28], [1, 28, 28]]),
        keys=["a", "b"],
        pixels_shape=(1568, 1),
        config=small_vision_config(merge=2),
        block_size=2048,
    )
    assert batch.num_packed_blocks == 1
    with pytest.raises(VisionInputError, match="2 items need 2 .* read 1 .* least 4096"):
        select_vision_blocks(batch, buckets=[2048], dp_size=1, free_blocks=100)
    assert select_vision_blocks(batch, buckets=[2048, 4096], dp_size=1, free_blocks=100) == 1


def _rows(sizes: list[int]) -> list[tuple[int, int, int]]:
    return [(1, 1, size) for size in sizes]


@cases("test_pixels_are_laid_out_in_the_recorded_blocks")
def test_pixels_are_laid_out_in_the_recorded_blocks(vector: Vector) -> None:
    args, recorded = vector.args, vector.outputs["blocks"]
    flat = args["flat_tensor"].reshape(len(args["flat_tensor"]), -1)
    batch = recorded_batch(_rows(args["tokens_per_image"]), args["assignment"])
    blocks = lay_out(batch, flat, args["assignment"]["num_blocks"])["pixel_values"]
    vector.check({"blocks": blocks.reshape(recorded.shape).to(recorded.dtype)})


@cases("test_an_overfull_block_fails_and_the_packer_never_makes_one")
def test_an_overfull_block_fails_and_the_packer_never_makes_one(vector: Vector) -> None:
    args = vector.args
    sizes, block_size = args["tokens_per_image"], args["assignment"]["block_size"]
    batch = recorded_batch(_rows(sizes), args["assignment"])
    vector.expect_raises(lambda: lay_out(batch, args["flat_tensor"], 2))
    places, _ = pack_first_fit_decreasing(sizes, block_size)
    assert all(o + size <= block_size for (_, o), size in zip(places, sizes, strict=True))


@cases("test_bounds_of_real_patches_and_of_padding")
def test_bounds_of_real_patches_and_of_padding(vector: Vector) -> None:
    args, recorded = vector.args, vector.outputs
    grids = [tuple(row) for row in args["grid_thw"].tolist()]
    batch = recorded_batch(grids, args["assignment"])
    pixels = torch.zeros(sum(t * h * w for t, h, w in grids), 1)
    inputs = lay_out(batch, pixels, args["assignment"]["num_blocks"])
    real = recorded["bound_max"] > 0
    for name in ("bound_min", "bound_max"):
        compare(inputs[name][real], recorded[name][real], None, f"{vector.name} {name}")
    assert (recorded["bound_min"][~real] == 0).all() and (recorded["bound_max"][~real] == 0).all()
    assert (inputs["bound_min"][~real] == 0).all() and (inputs["bound_max"][~real] == 1).all()


GRID_OF_SIZE = {4: (1, 2, 2), 8: (1, 2, 4), 12: (1, 2, 6), 16: (1, 4, 4)}


@cases("test_row_destinations_are_the_inverse_of_the_unpack_indices")
def test_row_destinations_are_the_inverse_of_the_unpack_indices(vector: Vector) -> None:
    """Unpacking gathers row i of the items from a packed row; we send that packed row to i."""
    args, recorded = vector.args, vector.outputs
    merge = args["spatial_merge_size"]
    sizes = args["tokens_per_image"]
    grids = _rows(sizes) if merge == 1 else [GRID_OF_SIZE[size] for size in sizes]
    batch = recorded_batch(grids, args["assignment"], merge)
    pixels = torch.zeros(sum(sizes), 1)
    inputs = lay_out(batch, pixels, args["assignment"]["num_blocks"], merge)
    block, offset = inputs["row_block_ids"].flatten(), inputs["row_offsets"].flatten()
    gathered = []
    for item, size in enumerate(sizes):
        for row in range(size // merge**2):
            (place,) = torch.nonzero((block == item) & (offset == row)).flatten().tolist()
            gathered.append(place)
    assert len(gathered) == recorded["total_merged_tokens"]
    assert gathered == recorded["unpack_indices"][: len(gathered)].tolist()
    assert (block == -1).sum() == len(block) - len(gathered), "padding rows go to scratch"


@cases("test_picture_and_video_packed_together")
def test_picture_and_video_packed_together(vector: Vector) -> None:
    """A picture of 24 patches and a video of three frames of 16: planned, packed and laid out."""
    args, recorded = vector.args, vector.outputs
    rows = args["grid_thw"].tolist()
    video = [3, *rows[1][1:]]
    batch = plan_vision_batch(
        grid_thw=torch.tensor([rows[0], video]),
        keys=["0", "1"],
        pixels_shape=(72, 1),
        config=small_vision_config(merge=2),
        block_size=args["block_size"],
    )
    sizes = args["tokens_per_image"]
    blocks = args["num_blocks"]
    assert bins_of(batch.places, sizes, blocks) == recorded["assignment"]["bins"]
    inputs = lay_out(batch, args["flat_tensor"][:, None], blocks, merge=2)
    compare(inputs["pixel_values"][..., 0].int(), recorded["blocks"], None, "blocks")
    real = recorded["bound_max"] > 0
    for name in ("bound_min", "bound_max"):
        compare(inputs[name][real], recorded[name][real], None, name)
    assert inputs["write_block_ids"].tolist() == [SCRATCH] * blocks


# -------------------------------------------------------------------------------- preprocessing


def _over_frames(grid_thw: torch.Tensor, table: Any) -> list[tuple[torch.Tensor, ...]]:
    """`table(h, w)` of every frame of every grid."""
    return [table(h, w) for t, h, w in grid_thw.tolist() for _ in range(t)]


def _rotary(args: dict[str, Any]) -> dict[str, torch.Tensor]:
    head_dim, merge = args["head_dim"], args["spatial_merge_size"]
    theta = args.get("theta", 10000.0)
    frames = _over_frames(
        args["grid_thw"], lambda h, w: rotary_tables(h, w, head_dim, merge, theta)
    )
    cos, sin = (torch.cat(tables) for tables in zip(*frames, strict=True))
    return {"cos": cos, "sin": sin}


@cases("test_rotary_tables")
def test_rotary_tables(vector: Vector) -> None:
    vector.check(_rotary(vector.args))


def test_rotary_tables_with_row_and_column_swapped_are_noticed() -> None:
    (vector,) = [v for v in vectors("preprocessing") if v.case == "rope_g1x4x6_d8"]
    swapped = {
        name: table.view(-1, 2, 2, 2).flip(2).reshape(table.shape)
        for name, table in _rotary(vector.args).items()
    }
    with pytest.raises(AssertionError):
        vector.check(swapped)


@cases("test_a_head_width_that_is_no_multiple_of_4_is_refused")
def test_a_head_width_that_is_no_multiple_of_4_is_refused(vector: Vector) -> None:
    assert vector.args["head_dim"] == 6
    assert vector.outputs["cos"].shape == (24, 8), "the plugin: wider than the head"
    raw = tiny_config()
    raw["vision_config"] |= {"hidden_size": 24, "num_heads": 4}
    with pytest.raises(Qwen3VLConfigError, match="24 over 4 heads.*multiple of 4"):
        Qwen3VLConfig.from_configs(raw)


def _corners(args: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    side, merge = args["num_grid_per_side"], args["spatial_merge_size"]
    frames = _over_frames(args["grid_thw"], lambda h, w: position_taps(h, w, side, merge))
    index, weight = (torch.cat(tables, dim=1) for tables in zip(*frames, strict=True))
    return index, weight


@cases("test_position_weights_in_float32")
def test_position_weights_in_float32(vector: Vector) -> None:
    vector.check({"weight": _corners(vector.args)[1]})


@cases("test_position_weights_follow_hugging_face_to_the_last_bit")
def test_position_weights_follow_hugging_face_to_the_last_bit(vector: Vector) -> None:
    """One formula for the place between two table lines, another one for the same number."""
    from transformers.vision_utils import get_vision_interpolation_indices_and_weights

    args = vector.args
    _, ours = _corners(args)
    _, theirs = get_vision_interpolation_indices_and_weights(
        args["grid_thw"],
        args["num_grid_per_side"],
        mode="bilinear",
        align_corners=True,
        spatial_merge_size=args["spatial_merge_size"],
    )
    torch.testing.assert_close(ours, theirs.t(), rtol=0, atol=2**-22)
    with pytest.raises(AssertionError):
        vector.check({"weight": ours})
    # Places reach 47, where float32 steps by 2^-18; a weight joins one place per axis.
    compare(ours, vector.outputs["weight"], (0, 2 * 2**-18), vector.name)


@cases("test_position_corners_and_rounded_weights")
def test_position_corners_and_rounded_weights(vector: Vector) -> None:
    index, weight = _corners(vector.args)
    assert weight.dtype == torch.float32 and vector.outputs["weight"].dtype == torch.bfloat16
    vector.check(index, vector.outputs["idx"], "idx")
    vector.check(weight.to(torch.bfloat16), vector.outputs["weight"], "weight")


def test_transposed_position_corners_are_noticed() -> None:
    (vector,) = [v for v in vectors("preprocessing") if v.case == "pos_g1x4x6_n48"]
    index, _ = _corners(vector.args)
    with pytest.raises(AssertionError):
        vector.check(index[[0, 2, 1, 3]], vector.outputs["idx"], "idx")


@cases("test_bounds_of_frames_back_to_back")
def test_bounds_of_frames_back_to_back(vector: Vector) -> None:
    grids = [tuple(row) for row in vector.args["grid_thw"].tolist()]
    total = sum(t * h * w for t, h, w in grids)
    assignment = {"bins": [list(range(len(grids)))], "num_blocks": 1, "block_size": total}
    inputs = lay_out(recorded_batch(grids, assignment), torch.zeros(total, 1), 1)
    vector.check({name: inputs[name][0] for name in ("bound_min", "bound_max")})


# ---------------------------------------------------------------------------------------- merge


@cases("test_token_indices_become_rows_of_the_rank")
def test_token_indices_become_rows_of_the_rank(vector: Vector) -> None:
    args = vector.args
    rank = torch.tensor(args["rank"], dtype=torch.int32)
    vector.check({"local": local_rows(args["positions"], args["local_len"], rank)})


@cases("test_rows_without_a_place_are_dropped")
def test_rows_without_a_place_are_dropped(vector: Vector) -> None:
    args = vector.args
    vector.check({"result": place_rows(args["target"], args["positions"], args["values"])})
    for name, expected in vector.mutated.items():
        vector.check(args[name], expected)


@cases("test_only_one_sentinel_is_legal")
def test_only_one_sentinel_is_legal(vector: Vector) -> None:
    args = vector.args
    vector.expect_raises(lambda: place_rows(args["target"], args["positions"], args["values"]))


def _merge(args: dict[str, Any]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    return merge_vision_embeddings(
        args["hidden_states"],
        args["vision_embedding_blocks"],
        args["vision_positions"],
        torch.tensor(args["rank"], dtype=torch.int32),
    )


@cases("test_vision_rows_replace_placeholders")
def test_vision_rows_replace_placeholders(vector: Vector) -> None:
    args, recorded = vector.args, vector.outputs
    hidden, levels = _merge(args)
    vector.check(hidden, recorded["hidden"], "hidden")
    if recorded["deepstack"] is None:
        assert levels == []
    else:
        vector.check(torch.stack(levels), recorded["deepstack"], "deepstack")
    for name, expected in vector.mutated.items():
        vector.check(args[name], expected)


def test_swapped_deepstack_levels_are_noticed() -> None:
    (vector,) = [v for v in vectors("merge") if v.case == "merge_ds3_f32_rank1of4"]
    _, (first, second, third) = _merge(vector.args)
    with pytest.raises(AssertionError):
        vector.check(torch.stack([second, first, third]), vector.outputs["deepstack"], "deepstack")


@cases("test_blocks_that_do_not_fit_the_hidden_width_fail")
def test_blocks_that_do_not_fit_the_hidden_width_fail(vector: Vector) -> None:
    vector.expect_raises(lambda: _merge(vector.args))


# ----------------------------------------------------------------------------- text: rotation


def _text_config(args: dict[str, Any]) -> Qwen3VLTextConfig:
    rope = args["rope_parameters"]
    return Qwen3VLTextConfig(
        head_dim=args["head_dim"],
        rope_theta=rope["rope_theta"],
        mrope_section=tuple(rope["mrope_section"]),
        dtype=args["dtype"],
    )


@cases("test_text_rotary_tables")
def test_text_rotary_tables(vector: Vector) -> None:
    args = vector.args
    cos, sin = Qwen3VLTextRotaryEmbedding(_text_config(args))(args["position_ids"])
    vector.check({"cos": cos, "sin": sin})


@pytest.mark.parametrize("case", ["s24_20_20_image_f32", "s6_5_5_image_f32"])
def test_contiguous_sections_are_noticed(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (vector,) = [v for v in vectors("text_mrope") if v.case == case]
    args = vector.args
    rotary = Qwen3VLTextRotaryEmbedding(_text_config(args))

    def contiguous(device: torch.device) -> list[torch.Tensor]:
        axis = torch.repeat_interleave(torch.arange(3), torch.tensor(rotary.mrope_section))
        return [(axis == a).float() for a in range(3)]

    monkeypatch.setattr(rotary, "_axis_masks", contiguous)
    cos, sin = rotary(args["position_ids"])
    with pytest.raises(AssertionError):
        vector.check({"cos": cos, "sin": sin})


@cases("test_text_rotary_sections_have_a_default")
def test_text_rotary_sections_have_a_default(vector: Vector) -> None:
    args = vector.args
    assert "mrope_section" not in args["rope_parameters"]
    raw = tiny_config()
    raw["text_config"] |= {
        "head_dim": args["head_dim"],
        "rope_parameters": {"rope_type": "default", **args["rope_parameters"]},
    }
    config = Qwen3VLConfig.from_configs(raw).text_config
    config.dtype = args["dtype"]
    cos, sin = Qwen3VLTextRotaryEmbedding(config)(args["position_ids"])
    vector.check({"cos": cos, "sin": sin})


@cases("test_sections_that_leave_frequencies_over_are_refused")
def test_sections_that_leave_frequencies_over_are_refused(vector: Vector) -> None:
    args = vector.args
    cos, sin = Qwen3VLTextRotaryEmbedding(_text_config(args))(args["position_ids"])
    vector.check({"cos": cos, "sin": sin})  # the plugin's value, were it let through
    raw = tiny_config()
    raw["text_config"] |= {
        "head_dim": args["head_dim"],
        "rope_parameters": {"rope_type": "default", **args["rope_parameters"]},
    }
    with pytest.raises(Qwen3VLConfigError, match=r"\[8, 4, 4\], with sum 16; .* that is 32"):
        Qwen3VLConfig.from_configs(raw)


@cases("test_only_three_rows_of_positions_are_taken")
def test_only_three_rows_of_positions_are_taken(vector: Vector) -> None:
    args = vector.args
    assert vector.raises is None and vector.outputs["cos"].shape[-1] == args["head_dim"] // 2
    rotary = Qwen3VLTextRotaryEmbedding(_text_config(args))
    with pytest.raises((IndexError, RuntimeError, ValueError)):
        rotary(args["position_ids"])


@cases("test_each_frequency_has_one_axis")
def test_each_frequency_has_one_axis(vector: Vector) -> None:
    args = vector.args
    freqs = args["freqs"]  # [3, batch, T, D/2]
    rotary = Qwen3VLTextRotaryEmbedding(
        Qwen3VLTextConfig(head_dim=2 * freqs.shape[-1], mrope_section=tuple(args["mrope_section"]))
    )
    masks = rotary._axis_masks(freqs.device)
    assert torch.equal(sum(masks), torch.ones(freqs.shape[-1]))
    vector.check({"freqs": sum(freqs[axis] * mask for axis, mask in enumerate(masks))})


@cases("test_text_rotation")
def test_text_rotation(vector: Vector) -> None:
    args = vector.args
    vector.check({name: rotate_text(args[name], args["cos"], args["sin"]) for name in ("q", "k")})


# -------------------------------------------------------------------------------- text: norms


def _norm(args: dict[str, Any]) -> torch.Tensor:
    weight = args["weight"]
    norm = Qwen3VLTextRMSNorm(len(weight), args["eps"], weight.dtype)
    norm.weight.copy_(weight)
    return norm(args["hidden_states"])


@cases("test_text_norm_in_float32")
def test_text_norm_in_float32(vector: Vector) -> None:
    vector.check({"out": _norm(vector.args)})
    wrong = {**vector.args, "eps": 100 * vector.args["eps"]}
    with pytest.raises(AssertionError):
        vector.check({"out": _norm(wrong)})


@cases("test_text_norm_in_bf16_casts_before_the_weight")
def test_text_norm_in_bf16_casts_before_the_weight(vector: Vector) -> None:
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRMSNorm as Reference

    args, recorded = vector.args, vector.outputs["out"]
    reference = Reference(len(args["weight"]), eps=args["eps"])
    reference.weight = torch.nn.Parameter(args["weight"])
    ours = _norm(args)
    expected = reference(args["hidden_states"])
    assert ours.dtype == expected.dtype == args["weight"].dtype
    assert torch.equal(ours, expected)
    assert recorded.dtype == torch.bfloat16
    assert not torch.equal(ours.to(torch.bfloat16), recorded), "one rounding more than the plugin"
    # Two roundings of 2^-9 each, relative, against one.
    torch.testing.assert_close(ours.float(), recorded.float(), rtol=2**-7, atol=0)


# ------------------------------------------------------------------------------------ KV cache


@cases("test_one_kv_head_keeps_the_plain_table")
def test_one_kv_head_keeps_the_plain_table(vector: Vector) -> None:
    table = vector.args["block_table_2d"]
    assert torch.equal(vector.outputs["table"], table[:, None])
    cache = torch.zeros(8, 1, 4, 2, device="meta")
    k_cache, v_cache, ours = decode_cache_views(cache, cache, table)
    assert torch.equal(ours, table) and k_cache.shape == v_cache.shape == (8, 4, 2)


@cases("test_block_table_per_kv_head")
def test_block_table_per_kv_head(vector: Vector) -> None:
    args = vector.args
    cache = torch.zeros(8, args["kv_heads"], 4, 2, device="meta")  # any device but the CPU
    k_cache, _, table = decode_cache_views(cache, cache, args["block_table_2d"])
    vector.check({"table": table})
    assert k_cache is cache
    on_cpu = torch.zeros(8, args["kv_heads"], 4, 2)
    plain = decode_cache_views(on_cpu, on_cpu, args["block_table_2d"])[2]
    assert torch.equal(plain, args["block_table_2d"]), "the CPU path takes the plain table"


@cases("test_block_table_of_another_rank_is_not_checked_here")
def test_block_table_of_another_rank_is_not_checked_here(vector: Vector) -> None:
    assert vector.raises["deliberate"] and vector.raises["type"] == "AssertionError"
    cache = torch.zeros(8, 2, 4, 2, device="meta")
    table = decode_cache_views(cache, cache, vector.args["block_table_2d"])[2]
    assert table.dim() == 4  # which no decode call takes


def _attention(kv_heads: int, head_dim: int, dtype: torch.dtype) -> Qwen3VLTextAttention:
    config = Qwen3VLTextConfig(
        hidden_size=16,
        num_attention_heads=2 * kv_heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        dtype=dtype,
    )
    return Qwen3VLTextAttention(config)


def _decode_write(args: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run the package's decode step around a kernel that returns the recorded keys and values."""
    kv_heads = args.get("nkh", 1)
    attention = _attention(kv_heads, args["head_dim"], torch.float32)
    attention.k_cache, attention.v_cache = args["k_cache"], args["v_cache"]
    batch, steps = args["K_new"].shape[1], args["K_new"].shape[-1]
    seen: dict[str, Any] = {}

    def kernel(**kwargs: Any) -> tuple[torch.Tensor, ...]:
        seen.update(kwargs)
        return torch.zeros(batch * steps, 16), args["K_new"], args["V_new"]

    monkeypatch.setattr(package_model.NF, "attention_decode", kernel)
    table = torch.zeros(batch, 2, dtype=torch.int32)
    half = args["head_dim"] // 2
    attention._decode(
        torch.zeros(batch * steps, 16),
        args.get("cos", torch.zeros(batch * steps, half)),
        args.get("sin", torch.zeros(batch * steps, half)),
        torch.zeros(batch * steps, dtype=torch.int64),
        {"block_table_tensor": table, "slot_mapping": args["slot_mapping"]},
    )
    return seen


@cases("test_decode_writes_new_keys_and_values")
def test_decode_writes_new_keys_and_values(vector: Vector, monkeypatch: pytest.MonkeyPatch) -> None:
    args = vector.args
    _decode_write(args, monkeypatch)
    for name, expected in vector.mutated.items():
        vector.check(args[name], expected)
    shifted = {**vector.args, "slot_mapping": args["slot_mapping"].roll(1)}
    _decode_write(shifted, monkeypatch)
    with pytest.raises(AssertionError):
        vector.check(shifted["k_cache"], vector.mutated["k_cache"])


@cases("test_one_slot_per_new_token")
def test_one_slot_per_new_token(vector: Vector, monkeypatch: pytest.MonkeyPatch) -> None:
    args = vector.args
    assert vector.raises["type"] == "AssertionError"
    before = args["k_cache"].clone()
    with pytest.raises(RuntimeError, match="shape mismatch"):
        _decode_write(args, monkeypatch)
    assert torch.equal(args["k_cache"], before)


def _prefill_write(args: dict[str, Any]) -> None:
    attention = _attention(args["kv_heads"], args["head_dim"], args["k"].dtype)
    attention.k_cache, attention.v_cache = args["k_cache"], args["v_cache"]
    metadata = {"slot_mapping": args["slot_mapping"]}
    attention._write_cache(args["k"].transpose(0, 1), args["v"].transpose(0, 1), metadata)


@cases("test_prefill_writes_keys_and_values")
def test_prefill_writes_keys_and_values(vector: Vector) -> None:
    args = vector.args
    _prefill_write(args)
    for name, expected in vector.mutated.items():
        vector.check(args[name], expected)


@cases("test_prefill_casts_to_the_cache_dtype")
def test_prefill_casts_to_the_cache_dtype(vector: Vector) -> None:
    args = vector.args
    assert vector.raises["type"] == "RuntimeError" and not vector.raises["deliberate"]
    _prefill_write(args)
    for token, slot in enumerate(args["slot_mapping"].tolist()):
        written = args["k_cache"][slot // 4, :, slot % 4]
        assert torch.equal(written, args["k"][:, token].to(torch.bfloat16))


def test_padding_slots_land_in_the_null_block() -> None:
    """Floor division would send slot -1 to the last place of the last block."""
    attention = _attention(1, 2, torch.float32)
    attention.k_cache, attention.v_cache = torch.zeros(2, 3, 1, 4, 2)
    ones = torch.ones(1, 1, 2)
    attention._write_cache(ones, ones, {"slot_mapping": torch.tensor([-1])})
    assert attention.k_cache[0, 0, 0].tolist() == [1, 1]
    assert attention.k_cache.sum() == 2


@cases("test_decode_tables_lie_as_the_kernel_reads")
def test_decode_tables_lie_as_the_kernel_reads(
    vector: Vector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package's rotary tables are in the model's dtype before they get here."""
    args = vector.args
    batch, steps, head_dim = args["B"], args["S_decode"], args["head_dim"]
    call = {
        "cos": args["cos"].to(args["dtype"]),
        "sin": args["sin"].to(args["dtype"]),
        "head_dim": head_dim,
        "K_new": torch.zeros(head_dim, batch, steps),
        "V_new": torch.zeros(batch, 1, steps, head_dim),
        "k_cache": torch.zeros(2, 1, 4, head_dim),
        "v_cache": torch.zeros(2, 1, 4, head_dim),
        "slot_mapping": torch.zeros(batch * steps, dtype=torch.int64),
    }
    seen = _decode_write(call, monkeypatch)
    vector.check({name: seen[name] for name in ("cos", "sin")})


# ------------------------------------------------------------------------- names of the weights


def _our_name(name: str) -> str:
    """The plugin's parameter name in this package."""
    renamed = {
        "pos_embed.pos_embed.weight": "pos_embed.pos_embed_weight",
        "patch_embed.proj.weight": "patch_embed.proj_weight",
        "patch_embed.proj.bias": "patch_embed.proj_bias",
    }
    return renamed.get(name, name)


@cases("test_every_parameter_is_filled_from_the_recorded_keys")
def test_every_parameter_is_filled_from_the_recorded_keys(vector: Vector) -> None:
    args, recorded = vector.args, vector.outputs
    config = Qwen3VLConfig()
    text, vision = config.text_config, config.vision_config
    if "depth" in args:
        vision.depth = args["depth"]
        vision.deepstack_visual_indexes = tuple(args["deepstack_visual_indexes"])
        ours = build_mappings(config, LAYOUTS["nested"])["vision"]
    else:
        text.num_hidden_layers = args["num_hidden_layers"]
        text.tie_word_embeddings = args["tie_word_embeddings"]
        mappings = build_mappings(config, LAYOUTS["nested"])
        ours = {f"language_model.{name}": keys for name, keys in mappings["text"].items()}
        ours |= {f"lm_head.{name}": keys for name, keys in mappings["head"].items()}
    expected = {
        _our_name(name): [keys] if isinstance(keys, str) else keys
        for name, keys in recorded.items()
    }
    assert ours == expected


# ------------------------------------------------------------------------------ sizes and limits


@cases("test_warmup_inputs")
def test_warmup_inputs(vector: Vector, monkeypatch: pytest.MonkeyPatch) -> None:
    args, recorded = vector.args, vector.outputs
    dp_size, block_size = args["dp_size"], args["vision_attention_block_size"]
    group = None if dp_size == 1 else SimpleNamespace(world_size=dp_size)
    monkeypatch.setattr(package_model, "get_neuron_vision_dp_group", lambda: group)
    model = Qwen3VLNeuronModel.__new__(Qwen3VLNeuronModel)
    torch.nn.Module.__init__(model)
    model.config = Qwen3VLConfig(vision_config=Qwen3VLVisionConfig(**args["vision_config"]))
    settings = SimpleNamespace(vision_attention_block_size=block_size)
    inputs = model.build_vision_synthetic_inputs(args["bucket"], settings, torch.device("meta"))
    described = {
        name: {"shape": list(t.shape), "dtype": str(t.dtype).removeprefix("torch.")}
        for name, t in inputs.items()
    }
    blocks = described["pixel_values"]["shape"][0]
    ours = {"shape": [blocks, block_size // 4], "dtype": "int64"}
    assert recorded["pos_emb_weight"]["dtype"] == "bfloat16"
    assert described == {
        **recorded,
        "pos_emb_weight": {**recorded["pos_emb_weight"], "dtype": "float32"},
        "row_block_ids": ours,
        "row_offsets": ours,
    }


def test_warmup_values_are_those_of_padding() -> None:
    model = Qwen3VLNeuronModel.__new__(Qwen3VLNeuronModel)
    torch.nn.Module.__init__(model)
    model.config = Qwen3VLConfig(vision_config=small_vision_config(merge=2))
    settings = SimpleNamespace(vision_attention_block_size=8)
    inputs = model.build_vision_synthetic_inputs(16, settings, torch.device("cpu"))
    assert inputs.pop("bound_max").flatten().tolist() == [1] * 16
    assert inputs.pop("row_block_ids").tolist() == [[-1, -1]] * 2
    assert inputs.pop("row_offsets").tolist() == [[0, 1]] * 2
    assert all((tensor == 0).all() for tensor in inputs.values())


def _select(args: dict[str, Any], packed: int, cache_blocks: int = 1) -> int:
    batch = VisionBatch((Item("all", (1,) * cache_blocks),), (), (), packed, args["block_size"], 1)
    return select_vision_blocks(
        batch, buckets=args["buckets"], dp_size=args["dp_size"], free_blocks=1000
    )


@cases("test_smallest_bucket_that_holds_the_packed_blocks")
def test_smallest_bucket_that_holds_the_packed_blocks(vector: Vector) -> None:
    """Of the recorded (bucket, number of blocks) the package needs the second only."""
    args = vector.args
    per_item = {"thirty_small_items": 784}.get(vector.case, args["block_size"])
    full, rest = divmod(args["total_tokens"], per_item)
    sizes = [per_item] * full + ([rest] if rest else [])
    _, packed = pack_first_fit_decreasing(sizes, args["block_size"])
    assert _select(args, packed) == vector.outputs[1]


@cases("test_no_bucket_is_large_enough")
def test_no_bucket_is_large_enough(vector: Vector) -> None:
    args = vector.args
    assert vector.raises["numbers"] == [4097, 4096]
    with pytest.raises(VisionInputError, match="into 3 blocks of 2048 .* 4096 .* least 6144"):
        _select(args, packed=-(-args["total_tokens"] // args["block_size"]))


@cases("test_no_buckets_means_one_block")
def test_no_buckets_means_one_block(vector: Vector) -> None:
    assert vector.raises["type"] == "ValueError"
    assert _select(vector.args, packed=1) == 1
    with pytest.raises(VisionInputError, match="4096"):
        _select(vector.args, packed=2)


@cases("test_the_bucket_follows_packed_blocks_and_not_tokens")
def test_the_bucket_follows_packed_blocks_and_not_tokens(vector: Vector) -> None:
    """Three pictures of 400: the plugin takes two blocks for three items and then cannot pack."""
    args = vector.args
    assert vector.outputs == [2048, 2]
    places, packed = pack_first_fit_decreasing([400] * 3, args["block_size"])
    assert packed == 2 and [block for block, _ in places] == [0, 0, 1]
    assert _select(args, packed, cache_blocks=3) == 2
    assert _select(args, packed=3, cache_blocks=3) == 8, "and three blocks get three, not two"


def _most_patches(args: dict[str, Any]) -> int:
    raw = tiny_config()
    raw["vision_config"] |= {"patch_size": args["patch_size"]}
    return Qwen3VLForConditionalGeneration.get_max_pixels_token_count(raw, args["max_pixels"])


@cases("test_most_patches_of_one_image")
def test_most_patches_of_one_image(vector: Vector) -> None:
    assert _most_patches(vector.args) == vector.outputs


# Recorded, and ours: strips of 32 x 416 and of 32 x 224 pixels, two patches wide.
BELOW = {"px1000_p16": (3, 52), "px255_p16": (0, 28)}


@cases("test_limits_below_the_smallest_picture")
def test_limits_below_the_smallest_picture(vector: Vector) -> None:
    recorded, ours = BELOW[vector.case]
    assert vector.outputs == recorded
    assert _most_patches(vector.args) == ours


def tiny_config() -> dict[str, Any]:
    """The tiny family's config.json as a dictionary."""
    from vlmgen.tiny.family import load_family

    return load_family("qwen3_vl")["config_kwargs"]


def test_the_signatures_take_what_the_vectors_name() -> None:
    """The tower takes the recorded inputs by the plugin's names, and two of its own."""
    from vllm_neuron_qwen3_vl.vision_encoder import Qwen3VLVisionModel

    (vector,) = [v for v in vectors("tower") if v.case == "two_images_ds3_f32"]
    recorded = set(vector.entry["args"]) - {"config", "model_dtype", "weights"}
    ours = set(inspect.signature(Qwen3VLVisionModel.forward).parameters) - {"self"}
    assert ours == recorded | {"row_block_ids", "row_offsets"}
