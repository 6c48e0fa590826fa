"""Packing of frames into attention blocks, and what is refused before anything is allocated."""

import random

import pytest
import torch
from vllm_neuron_qwen2_5_vl.config import Qwen2_5_VLConfig
from vllm_neuron_qwen2_5_vl.utils.block_packing import (
    VisionInputError,
    pack_first_fit_decreasing,
    plan_vision_batch,
    select_vision_blocks,
)

from .support import tiny_config, vision_pixels

VISION = Qwen2_5_VLConfig.from_configs(tiny_config()).vision_config


def plan(items, keys=None, block_size=1024, **changes):
    arguments = {
        "grid_thw": torch.tensor(items).reshape(-1, 3),
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
def test_frames_never_overlap_or_leave_their_block(seed):
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


def test_small_pictures_share_a_block():
    batch = plan([[1, 8, 16]] * 24, block_size=1024)
    assert batch.num_packed_blocks == 3
    assert [len(item.rows_per_cache_block) for item in batch.items] == [1] * 24


def test_frames_of_an_item_are_placed_singly_and_stored_densely():
    batch = plan([[3, 16, 32]], block_size=1024)
    assert [frame.first_row for frame in batch.frames] == [0, 128, 256]
    assert [frame.first_patch for frame in batch.frames] == [0, 512, 1024]
    assert batch.num_packed_blocks == 2
    assert batch.items[0].rows_per_cache_block == (256, 128)


def test_a_repeated_key_is_encoded_once():
    batch = plan([[1, 4, 4], [1, 8, 8], [1, 4, 4]], keys=["a", "b", "a"])
    assert [item.key for item in batch.items] == ["a", "b"]
    assert [(frame.item, frame.first_patch) for frame in batch.frames] == [(0, 0), (1, 16)]


def test_a_frame_above_the_block_size_names_both_numbers_and_the_legal_size():
    with pytest.raises(
        VisionInputError, match=r"40 x 40 = 1600 patches .* block of 1024; .* is 1664"
    ):
        plan([[1, 40, 40]])


@pytest.mark.parametrize(
    ("items", "changes", "words"),
    [
        ([], {}, "grid is empty"),
        ([[1, 4, 4]], {"keys": ["a", "b"]}, "1 grids but 2 cache keys"),
        ([[1, 4, 4]], {"pixels_shape": (15, VISION.patch_dim)}, "pixels have shape"),
        ([[1, 4, 3]], {}, "multiples of the merge size 2"),
        ([[1, 0, 4]], {}, "positive multiples"),
    ],
)
def test_inputs_that_disagree_are_refused(items, changes, words):
    with pytest.raises(VisionInputError, match=words):
        plan(items, **changes)


def test_the_bucket_follows_the_packed_blocks_not_the_token_sum():
    batch = plan(
        [[1, 24, 24]] * 3
    )  # 3 x 576 patches: 1728 in sum, but no two fit one block of 1024
    assert batch.num_packed_blocks == 3
    assert select_vision_blocks(batch, buckets=[4096, 2048], dp_size=1, free_blocks=9) == 4
    assert select_vision_blocks(batch, buckets=[4096], dp_size=3, free_blocks=9) == 6


def test_more_items_than_readable_cache_blocks_are_refused():
    batch = plan([[1, 4, 4]] * 5)
    with pytest.raises(VisionInputError, match=r"5 items need 5 .* can read 4 .* at least 5120"):
        select_vision_blocks(batch, buckets=[1024, 4096], dp_size=1, free_blocks=99)
    with pytest.raises(VisionInputError, match=r"cache has 4; .* at least 6"):
        select_vision_blocks(batch, buckets=[8192], dp_size=1, free_blocks=4)
