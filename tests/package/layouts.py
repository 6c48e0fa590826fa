"""Recorded block assignments as batches of the generated package."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm_neuron_qwen3_vl.config import Qwen3VLVisionConfig
from vllm_neuron_qwen3_vl.utils.block_packing import Frame, Item, VisionBatch
from vllm_neuron_qwen3_vl.utils.preprocessing import build_tower_inputs

SCRATCH = 99
Grid = tuple[int, int, int]


def bins_of(
    places: Sequence[tuple[int, int]], sizes: Sequence[int], blocks: int
) -> list[list[int]]:
    """Indexes in each block, in the order in which they were placed (largest first)."""
    order = sorted(range(len(places)), key=lambda i: (-sizes[i], i))
    return [[i for i in order if places[i][0] == block] for block in range(blocks)]


def recorded_batch(
    grids: Sequence[Grid], assignment: dict[str, Any], merge: int = 1
) -> VisionBatch:
    """A batch laid out as a record says: items of a block lie in the order of their index."""
    frames: list[Frame] = []
    places: dict[int, tuple[int, int]] = {}
    first_patch, first_frame = 0, []
    for item, (t, h, w) in enumerate(grids):
        first_frame.append(len(frames))
        for step in range(t):
            frames.append(Frame(item, h, w, first_patch, step * h * w // merge**2))
            first_patch += h * w
    for block, members in enumerate(assignment["bins"]):
        offset = 0
        for item in sorted(members):
            t, h, w = grids[item]
            for step in range(t):
                places[first_frame[item] + step] = (block, offset)
                offset += h * w
    items = tuple(Item(str(item), (t * h * w // merge**2,)) for item, (t, h, w) in enumerate(grids))
    return VisionBatch(
        items,
        tuple(frames),
        tuple(places[i] for i in range(len(frames))),
        sum(bool(members) for members in assignment["bins"]),
        assignment["block_size"],
        merge**2,
    )


def small_vision_config(patch_dim: int = 1, merge: int = 1) -> Qwen3VLVisionConfig:
    """Patches of `patch_dim` values, in float32, so that integers pass through unchanged."""
    return Qwen3VLVisionConfig(
        depth=1,
        hidden_size=8,
        intermediate_size=8,
        num_heads=1,
        in_channels=patch_dim,
        patch_size=1,
        temporal_patch_size=1,
        spatial_merge_size=merge,
        out_hidden_size=8,
        num_position_embeddings=16,
        deepstack_visual_indexes=(0,),
        dtype=torch.float32,
    )


def lay_out(
    batch: VisionBatch, pixels: torch.Tensor, num_blocks: int, merge: int = 1
) -> dict[str, torch.Tensor]:
    """Tower inputs of a batch; item i owns cache blocks i, i + 10, ... as far as its rows reach."""
    return build_tower_inputs(
        batch,
        pixels,
        num_blocks=num_blocks,
        block_ids={
            item.key: [int(item.key) + 10 * j for j in range(len(item.rows_per_cache_block))]
            for item in batch.items
        },
        scratch_block_id=SCRATCH,
        config=small_vision_config(pixels.shape[1], merge),
    )
