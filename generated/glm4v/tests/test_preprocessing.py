"""Tower inputs against the functions that Hugging Face uses for the same grids."""

import pytest
import torch
from transformers.vision_utils import (
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
)
from vllm_neuron_glm4v.config import Glm4vConfig
from vllm_neuron_glm4v.utils.block_packing import plan_vision_batch
from vllm_neuron_glm4v.utils.preprocessing import (
    build_tower_inputs,
    position_taps,
    rotary_tables,
)

from .support import tiny_config, vision_pixels

VISION = Glm4vConfig.from_configs(tiny_config()).vision_config
GRIDS = [(2, 2), (2, 8), (8, 2), (4, 6), (6, 4), (14, 10), (32, 30), (64, 48)]
CAPACITY = 256 // VISION.merge_area


def build(items, block_size=256, num_blocks=None, config=VISION):
    pixels = vision_pixels(config, items)
    batch = plan_vision_batch(
        grid_thw=torch.tensor(items),
        keys=[f"item{i}" for i in range(len(items))],
        pixels_shape=tuple(pixels.shape),
        config=config,
        block_size=block_size,
    )
    ids = iter(range(10, 99))
    block_ids = {item.key: [next(ids) for _ in item.rows_per_cache_block] for item in batch.items}
    inputs = build_tower_inputs(
        batch,
        pixels,
        num_blocks=num_blocks or batch.num_packed_blocks,
        block_ids=block_ids,
        scratch_block_id=99,
        config=config,
    )
    return batch, pixels, block_ids, inputs


@pytest.mark.parametrize(("height", "width"), GRIDS)
def test_rotary_tables_equal_hugging_face(reference, height, width):
    position_ids = get_vision_position_ids(
        torch.tensor([[1, height, width]]), VISION.spatial_merge_size
    )
    modules = reference.model.visual.modules()
    rotary = next(m for m in modules if type(m).__name__.endswith("VisionRotaryEmbedding"))
    expected = rotary(torch.zeros(1), position_ids)
    actual = rotary_tables(
        height, width, VISION.head_dim, VISION.spatial_merge_size, VISION.rope_theta
    )
    for ours, theirs in zip(actual, expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(("height", "width"), GRIDS)
def test_interpolation_equals_hugging_face(height, width):
    side = VISION.position_grid_side
    index, weight = get_vision_interpolation_indices_and_weights(
        torch.tensor([[1, height, width]]),
        num_grid_per_side=side,
        mode="bicubic",
        align_corners=False,
        spatial_merge_size=VISION.spatial_merge_size,
    )
    ours_index, ours_weight = position_taps(height, width, side, VISION.spatial_merge_size)
    assert torch.equal(ours_index.long(), index.t())
    torch.testing.assert_close(ours_weight, weight.t(), rtol=0, atol=1e-6)
    assert ours_weight.dtype == torch.float32


def test_lines_beyond_the_table_repeat_the_outermost():
    index, weight = position_taps(2, 2, 8, 2)
    # patch 0 is row 0, column 0: its centre lies at 0.5 / 2 * 8 - 0.5 = 1.5 of either axis
    assert index[:, 0].tolist() == [8 * row + col for row in range(4) for col in range(4)]
    index, weight = position_taps(16, 16, 8, 2)
    assert index[:, 0].view(4, 4).tolist() == [[0, 0, 0, 1]] * 3 + [[8, 8, 8, 9]]
    torch.testing.assert_close(weight.sum(0), torch.ones(256))


def place_of(frame, offset):
    """Places of a frame's patches in its block."""
    start = offset
    return slice(start, start + frame.patches)


def test_every_patch_lies_where_its_frame_was_placed():
    batch, pixels, _, inputs = build([[1, 4, 6], [2, 8, 8], [1, 2, 2], [1, 10, 14]])
    for frame, (block, offset) in zip(batch.frames, batch.places, strict=True):
        here = inputs["pixel_values"][block, place_of(frame, offset)]
        expected = pixels[frame.first_patch : frame.first_patch + frame.patches]
        assert torch.equal(here, expected.to(here.dtype))


def test_bounds_are_per_frame():
    batch, _, _, inputs = build([[3, 4, 6], [1, 8, 8]])
    for frame, (block, offset) in zip(batch.frames, batch.places, strict=True):
        span = place_of(frame, offset)
        first = span.start
        for place in range(first, span.stop):
            assert inputs["bound_min"][block, place].item() == first
            assert inputs["bound_max"][block, place].item() == span.stop


def test_padding_patches_see_one_patch_and_no_empty_range():
    _, _, _, inputs = build([[1, 4, 6]], num_blocks=2)
    used = 24
    assert (inputs["bound_max"] > inputs["bound_min"]).all()
    assert inputs["bound_min"][0, used:].eq(0).all() and inputs["bound_max"][0, used:].eq(1).all()


def test_rows_go_to_their_items_cache_blocks():
    items = [[1, 2, 4], [5, 8, 16], [1, 4, 4]]
    batch, _, block_ids, inputs = build(items)
    rows = {}
    for frame, (block, offset) in zip(batch.frames, batch.places, strict=True):
        key = batch.items[frame.item].key
        for r in range(frame.patches // VISION.merge_area):
            row = frame.first_row + r
            place = (block, place_of(frame, offset).start // VISION.merge_area + r)
            assert int(inputs["row_block_ids"][place]) == block_ids[key][row // CAPACITY]
            assert int(inputs["row_offsets"][place]) == row % CAPACITY
            rows[frame.item, row] = place
    assert len(set(rows.values())) == len(rows) == 2 + 160 + 4
    assert int((inputs["row_block_ids"] >= 0).sum()) == len(rows)


def test_padding_rows_go_to_scratch():
    _, _, _, inputs = build([[1, 2, 4]], num_blocks=3)
    assert inputs["write_block_ids"].tolist() == [99, 99, 99]
    assert inputs["row_block_ids"][1:].eq(-1).all()


def test_tables_are_float32_for_a_bfloat16_tower():
    vision = Glm4vConfig.from_configs(tiny_config(dtype="bfloat16")).vision_config
    _, _, _, inputs = build([[1, 4, 4]], config=vision)
    assert inputs["pixel_values"].dtype == torch.bfloat16
    assert inputs["pos_emb_weight"].dtype == torch.float32
    assert inputs["cos"].dtype == torch.float32
    assert inputs["sin"].dtype == torch.float32
