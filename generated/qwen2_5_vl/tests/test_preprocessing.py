"""Tower inputs against the functions that Hugging Face uses for the same grids."""

import pytest
import torch
from transformers.vision_utils import (
    get_vision_position_ids,
    get_vision_window_index,
)
from vllm_neuron_qwen2_5_vl.config import Qwen2_5_VLConfig
from vllm_neuron_qwen2_5_vl.utils.block_packing import plan_vision_batch
from vllm_neuron_qwen2_5_vl.utils.preprocessing import (
    build_tower_inputs,
    rotary_tables,
    window_order,
)

from .support import tiny_config, vision_pixels

VISION = Qwen2_5_VLConfig.from_configs(tiny_config()).vision_config
GRIDS = [(2, 2), (2, 8), (8, 2), (4, 6), (6, 4), (14, 10), (32, 30), (64, 48)]
CAPACITY = 256 // VISION.merge_area
WINDOW = VISION.window_size // VISION.patch_size


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


def order_of(height, width):
    """Merge windows in Hugging Face's order, and the limits of its attention windows."""
    grid = torch.tensor([[1, height, width]])
    return get_vision_window_index(
        grid, VISION.spatial_merge_size, VISION.window_size, VISION.patch_size
    )


def windows_of(rows, height, width):
    """Rows `[height * width, ...]`, merge windows adjacent -> attention windows contiguous."""
    by_window = rows.reshape(-1, VISION.merge_area, *rows.shape[1:])
    return by_window[order_of(height, width)[0]].reshape(rows.shape)


@pytest.mark.parametrize(("height", "width"), [*GRIDS, (4, 4), (6, 10), (18, 22)])
def test_attention_windows_equal_hugging_face(height, width):
    """Also where windows at the right and bottom edge are smaller."""
    order, low, high = window_order(height, width, VISION.spatial_merge_size, WINDOW)
    expected, limits = order_of(height, width)
    assert torch.equal(order, expected)
    sizes = limits.diff().long()
    assert torch.equal(low[:, 0], limits[:-1].repeat_interleave(sizes))
    assert torch.equal(high[:, 0], limits[1:].repeat_interleave(sizes))


@pytest.mark.parametrize(("height", "width"), GRIDS)
def test_rotary_tables_equal_hugging_face(reference, height, width):
    position_ids = get_vision_position_ids(
        torch.tensor([[1, height, width]]), VISION.spatial_merge_size
    )
    modules = reference.model.visual.modules()
    rotary = next(m for m in modules if type(m).__name__.endswith("VisionRotaryEmbedding"))
    expected = rotary(torch.zeros(1), position_ids)
    actual = rotary_tables(
        height, width, VISION.head_dim, VISION.spatial_merge_size, VISION.rope_theta, WINDOW
    )
    for ours, theirs in zip(actual, expected, strict=True):
        assert torch.equal(ours, windows_of(theirs, height, width))


def place_of(frame, offset):
    """Places of a frame's patches in its block."""
    start = offset
    return slice(start, start + frame.patches)


def test_every_patch_lies_where_its_frame_was_placed():
    batch, pixels, _, inputs = build([[1, 4, 6], [2, 8, 8], [1, 2, 2], [1, 10, 14]])
    for frame, (block, offset) in zip(batch.frames, batch.places, strict=True):
        here = inputs["pixel_values"][block, place_of(frame, offset)]
        expected = pixels[frame.first_patch : frame.first_patch + frame.patches]
        expected = windows_of(expected, frame.height, frame.width)
        assert torch.equal(here, expected.to(here.dtype))


def test_bounds_are_per_frame():
    batch, _, _, inputs = build([[3, 4, 6], [1, 8, 8]])
    for frame, (block, offset) in zip(batch.frames, batch.places, strict=True):
        span = place_of(frame, offset)
        first = span.start
        for place in range(first, span.stop):
            assert inputs["bound_min"][block, place].item() == first
            assert inputs["bound_max"][block, place].item() == span.stop


def test_window_bounds_lie_where_the_frame_was_placed():
    batch, _, _, inputs = build([[2, 10, 6], [1, 8, 8]])
    for frame, (block, offset) in zip(batch.frames, batch.places, strict=True):
        span = place_of(frame, offset)
        _, low, high = window_order(frame.height, frame.width, VISION.spatial_merge_size, WINDOW)
        assert torch.equal(inputs["window_min"][block, span], low + offset)
        assert torch.equal(inputs["window_max"][block, span], high + offset)


def test_padding_patches_see_one_patch_and_no_empty_range():
    _, _, _, inputs = build([[1, 4, 6]], num_blocks=2)
    used = 24
    assert (inputs["bound_max"] > inputs["bound_min"]).all()
    assert inputs["bound_min"][0, used:].eq(0).all() and inputs["bound_max"][0, used:].eq(1).all()
    assert (inputs["window_max"] > inputs["window_min"]).all()
    assert inputs["window_min"][0, used:].eq(0).all() and inputs["window_max"][0, used:].eq(1).all()


def test_rows_go_to_their_items_cache_blocks():
    items = [[1, 2, 4], [5, 8, 16], [1, 4, 4]]
    batch, _, block_ids, inputs = build(items)
    rows = {}
    for frame, (block, offset) in zip(batch.frames, batch.places, strict=True):
        key = batch.items[frame.item].key
        order = order_of(frame.height, frame.width)[0].tolist()
        for r in range(frame.patches // VISION.merge_area):
            row = frame.first_row + order[r]
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
    vision = Qwen2_5_VLConfig.from_configs(tiny_config(dtype="bfloat16")).vision_config
    _, _, _, inputs = build([[1, 4, 4]], config=vision)
    assert inputs["pixel_values"].dtype == torch.bfloat16
    assert inputs["cos"].dtype == torch.float32
    assert inputs["sin"].dtype == torch.float32
