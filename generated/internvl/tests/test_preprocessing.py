"""Tower inputs against tiles cut by torch."""

import torch
from vllm_neuron_internvl.config import InternVLConfig
from vllm_neuron_internvl.utils.block_packing import plan_vision_batch
from vllm_neuron_internvl.utils.preprocessing import (
    build_tower_inputs,
)

from .support import num_rows, tiny_config, vision_pixels

VISION = InternVLConfig.from_configs(tiny_config()).vision_config
CAPACITY = 256 // VISION.merge_area


def build(items, block_size=256, num_blocks=None, config=VISION):
    pixels = vision_pixels(config, items)
    batch = plan_vision_batch(
        num_tiles=torch.tensor(items),
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


def windows_first(raster, h, w):
    """`[h * w, ...]` row by row -> merge windows one after the other."""
    cut = raster.reshape(h // 2, 2, w // 2, 2, -1)
    return cut.transpose(1, 2).reshape(h * w, -1)


def place_of(frame, offset):
    """Places of a tile's patches in its block."""
    start = offset + VISION.lead
    return slice(start, start + frame.patches)


def test_every_patch_lies_where_its_tile_was_placed():
    batch, pixels, _, inputs = build([1, 3, 2])
    cut = torch.nn.functional.unfold(pixels, VISION.patch_size, stride=VISION.patch_size)
    pixels = cut.transpose(1, 2).flatten(0, 1)  # tiles' patches row by row
    for frame, (block, offset) in zip(batch.frames, batch.places, strict=True):
        here = inputs["pixel_values"][block, place_of(frame, offset)]
        expected = pixels[frame.first_patch : frame.first_patch + frame.patches]
        expected = windows_first(expected, frame.height, frame.width)
        assert torch.equal(here, expected.to(here.dtype))


def test_the_class_token_stands_before_its_tile_and_positions_follow():
    batch, _, _, inputs = build([2, 3])
    side = VISION.position_grid_side
    for frame, (block, offset) in zip(batch.frames, batch.places, strict=True):
        here = inputs["pos_emb_idx"][block, place_of(frame, offset)].long()
        assert torch.equal(here, windows_first(torch.arange(1, side**2 + 1), side, side)[:, 0])
        assert inputs["pos_emb_idx"][block, offset : offset + VISION.lead].eq(0).all()


def test_bounds_are_per_tile_with_its_class_token():
    batch, _, _, inputs = build([3, 1])
    for frame, (block, offset) in zip(batch.frames, batch.places, strict=True):
        span = place_of(frame, offset)
        first = span.start - 1  # the class token
        for place in range(first, span.stop):
            assert inputs["bound_min"][block, place].item() == first
            assert inputs["bound_max"][block, place].item() == span.stop


def test_padding_places_see_one_patch_and_no_empty_range():
    _, _, _, inputs = build([1], num_blocks=2)
    used = VISION.position_grid_side**2 + VISION.lead
    assert (inputs["bound_max"] > inputs["bound_min"]).all()
    assert inputs["bound_min"][0, used:].eq(0).all() and inputs["bound_max"][0, used:].eq(1).all()
    assert inputs["bound_max"][0, : VISION.lead - 1].eq(1).all()  # before the class token


def test_rows_go_to_their_items_cache_blocks():
    items = [2, 15, 1]
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
    assert len(set(rows.values())) == len(rows) == num_rows(VISION, sum(items))
    assert int((inputs["row_block_ids"] >= 0).sum()) == len(rows)


def test_padding_rows_go_to_scratch():
    _, _, _, inputs = build([1], num_blocks=3)
    assert inputs["write_block_ids"].tolist() == [99, 99, 99]
    assert inputs["row_block_ids"][1:].eq(-1).all()


def test_pixels_are_bfloat16_for_a_bfloat16_tower():
    vision = InternVLConfig.from_configs(tiny_config(dtype="bfloat16")).vision_config
    _, _, _, inputs = build([1], config=vision)
    assert inputs["pixel_values"].dtype == torch.bfloat16
