"""Packing of tiles into attention blocks, and what is refused before anything is allocated."""

import random

import pytest
import torch
from vllm_neuron_internvl3_5.config import InternVLConfig
from vllm_neuron_internvl3_5.utils.block_packing import (
    VisionInputError,
    pack_first_fit_decreasing,
    plan_vision_batch,
    select_vision_blocks,
)

from .support import tiny_config, vision_pixels

VISION = InternVLConfig.from_configs(tiny_config()).vision_config


def plan(items, keys=None, block_size=1024, **changes):
    arguments = {
        "num_tiles": torch.tensor(items),
        "keys": keys or [f"item{i}" for i in range(len(items))],
        "pixels_shape": tuple(vision_pixels(VISION, items).shape),
        "config": VISION,
        "block_size": block_size,
    }
    return plan_vision_batch(**{**arguments, **changes})


def test_worked_example_fills_two_blocks():
    places, blocks = pack_first_fit_decreasing([256, 1024, 128, 512, 128], 1024)
    assert places == [(1, 512), (0, 0), (1, 768), (1, 0), (1, 896)]
    assert blocks == 2


@pytest.mark.parametrize("seed", range(50))
def test_tiles_never_overlap_or_leave_their_block(seed):
    rng = random.Random(seed)
    sizes = [rng.randrange(4, 1025, 4) for _ in range(rng.randrange(1, 40))]
    places, blocks = pack_first_fit_decreasing(sizes, 1024)
    used = [[False] * 1024 for _ in range(blocks)]
    for size, (block, offset) in zip(sizes, places, strict=True):
        assert offset + size <= 1024
        assert not any(used[block][offset : offset + size])
        used[block][offset : offset + size] = [True] * size
    assert -(-sum(sizes) // 1024) <= blocks <= len(sizes)
    half_empty = [sum(block) <= 512 for block in used]
    assert sum(half_empty) <= 1  # two such blocks would have been one


PATCHES = VISION.position_grid_side**2  # of a tile
ROWS = PATCHES // VISION.merge_area
THREE = 128 * -(-3 * (PATCHES + VISION.lead) // 128)  # a block for three tiles, not for four


def test_small_tiles_share_a_block_with_their_class_tokens():
    batch = plan([2, 3, 1], block_size=THREE)
    assert batch.num_packed_blocks == 2
    assert sorted(batch.places)[:3] == [(0, i * (PATCHES + VISION.lead)) for i in range(3)]


def test_tiles_of_an_item_are_placed_singly_and_stored_densely():
    batch = plan([3], block_size=THREE)
    assert [frame.first_row for frame in batch.frames] == [0, ROWS, 2 * ROWS]
    assert [frame.first_patch for frame in batch.frames] == [0, PATCHES, 2 * PATCHES]
    assert sum(batch.items[0].rows_per_cache_block) == 3 * ROWS


def test_a_repeated_key_is_encoded_once():
    batch = plan([1, 2, 1], keys=["a", "b", "a"])
    assert [item.key for item in batch.items] == ["a", "b"]
    assert [(frame.item, frame.first_patch) for frame in batch.frames] == [
        (0, 0),
        (1, PATCHES),
        (1, 2 * PATCHES),
    ]


def test_a_tile_above_the_block_size_names_both_numbers_and_the_legal_size():
    places = PATCHES + VISION.lead
    legal = -(-places // 128) * 128
    words = rf"{places} with its class token, does not fit .* of {places - 4}; .* is {legal}"
    with pytest.raises(VisionInputError, match=words):
        plan([1], block_size=places - 4)


@pytest.mark.parametrize(
    ("items", "changes", "words"),
    [
        ([], {}, "at least one tile"),
        ([1, 0], {}, "at least one tile"),
        ([1], {"keys": ["a", "b"]}, "1 numbers of tiles but 2 cache keys"),
        ([2], {"pixels_shape": (1, 3, 84, 84)}, "pixels have shape"),
        ([1], {"pixels_shape": (1, 3, 84, 70)}, "pixels have shape"),
    ],
)
def test_inputs_that_disagree_are_refused(items, changes, words):
    with pytest.raises(VisionInputError, match=words):
        plan(items, **changes)


def test_the_bucket_follows_the_packed_blocks_not_the_token_sum():
    size = PATCHES + VISION.lead + 4  # two tiles do not fit
    batch = plan([1] * 3, block_size=size)
    assert batch.num_packed_blocks == 3
    assert select_vision_blocks(batch, buckets=[4 * size, 2 * size], dp_size=1, free_blocks=9) == 4
    assert select_vision_blocks(batch, buckets=[4 * size], dp_size=3, free_blocks=9) == 6


def test_more_items_than_readable_cache_blocks_are_refused():
    batch = plan([1] * 5)
    with pytest.raises(VisionInputError, match=r"5 items need 5 .* can read 4 .* at least 5120"):
        select_vision_blocks(batch, buckets=[1024, 4096], dp_size=1, free_blocks=99)
    with pytest.raises(VisionInputError, match=r"cache has 4; .* at least 6"):
        select_vision_blocks(batch, buckets=[8192], dp_size=1, free_blocks=4)
