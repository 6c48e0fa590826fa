"""Inputs of the vision tower, computed on the CPU:
rotary tables, bounds, row destinations.

All tables are in the order of the places: windows of the attention, in each its merge windows, in
each its patches. The processor's order has the merge windows only:
`grid 4 x 4, merge 2 -> (row, col) = 00 01 10 11 | 02 03 12 13 | 20 21 30 31 | 22 23 32 33`.
Shapes: n vision blocks, S patches per block, D head width, m patches per merged row.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch

from ..config import Qwen2_5_VLVisionConfig
from .block_packing import VisionBatch


@lru_cache(maxsize=64)
def window_order(
    height: int, width: int, merge_size: int, window: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Merge windows of a frame in the order of the attention windows, and those windows' bounds.

    Windows of `window x window` patches are cut from the top left; at the right and bottom edge
    they are smaller.
    `grid 4 x 6, merge 2, window 4 -> merge windows 0 1 3 4 | 2 5, bounds 0..16 | 16..24`
    Source: `get_vision_window_index` in transformers.vision_utils.

    Returns:
        int64 `[height * width / m]`, and first and last-plus-one patch of the window at each
        place, int32 `[height * width, 1]` each.
    """
    side, area = window // merge_size, merge_size**2
    lines = torch.arange(height // merge_size)[:, None] // side
    columns = torch.arange(width // merge_size) // side
    own = (lines * (int(columns[-1]) + 1) + columns).flatten()  # window of each merge window
    order = torch.argsort(own, stable=True)
    sizes = torch.bincount(own) * area
    ends = sizes.cumsum(0)
    bounds = torch.stack((ends - sizes, ends)).to(torch.int32).repeat_interleave(sizes, dim=1)
    return order, bounds[0, :, None], bounds[1, :, None]


@lru_cache(maxsize=64)
def patch_order(height: int, width: int, merge_size: int, window: int) -> torch.Tensor:
    """Patch at each place of a frame, numbered row by row, int64 `[height * width]`."""
    grid = torch.arange(height * width).view(
        height // merge_size, merge_size, width // merge_size, merge_size
    )
    merge_windows = grid.transpose(1, 2).reshape(-1, merge_size**2)
    return merge_windows[window_order(height, width, merge_size, window)[0]].flatten()


@lru_cache(maxsize=64)
def rotary_tables(
    height: int, width: int, head_dim: int, merge_size: int, theta: float, window: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of one frame's patches, float32 `[height * width, D]` each.

    `D/4` frequencies turn with the row, as many with the column; the pair of lists stands twice,
    for rotation of halves: `[row | col | row | col]`.
    Source: the vision tower's rotary embedding in
    transformers.models.qwen2_5_vl.modeling_qwen2_5_vl.
    """
    order = patch_order(height, width, merge_size, window)
    rows, cols = order // width, order % width
    spatial = head_dim // 2
    inv_freq = 1.0 / (theta ** (torch.arange(0, spatial, 2, dtype=torch.float32) / spatial))
    angles = torch.cat([rows[:, None].float() * inv_freq, cols[:, None].float() * inv_freq], dim=-1)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def warmup_tower_inputs(
    num_blocks: int, block_size: int, config: Qwen2_5_VLVisionConfig, device: torch.device | str
) -> dict[str, torch.Tensor]:
    """Empty tower inputs: every row is padding. Also the canvas that `build_tower_inputs` fills.

    Padding patches see the first patch of their block (`[0, 1)`), never an empty range, over
    which a kernel's softmax is undefined. Padding rows have cache block -1, which sends them to
    scratch.
    """
    n, s, rows = num_blocks, block_size, block_size // config.merge_area
    return {
        "pixel_values": torch.zeros(n, s, config.patch_dim, dtype=config.dtype, device=device),
        "cos": torch.zeros(n, s, config.head_dim, dtype=torch.float32, device=device),
        "sin": torch.zeros(n, s, config.head_dim, dtype=torch.float32, device=device),
        "bound_min": torch.zeros(n, s, 1, dtype=torch.int32, device=device),
        "bound_max": torch.ones(n, s, 1, dtype=torch.int32, device=device),
        "window_min": torch.zeros(n, s, 1, dtype=torch.int32, device=device),
        "window_max": torch.ones(n, s, 1, dtype=torch.int32, device=device),
        "row_block_ids": torch.full((n, rows), -1, dtype=torch.int64, device=device),
        "row_offsets": torch.arange(rows, dtype=torch.int64, device=device).repeat(n, 1),
    }


def build_tower_inputs(
    batch: VisionBatch,
    pixels: torch.Tensor,
    *,
    num_blocks: int,
    block_ids: Mapping[str, Sequence[int]],
    scratch_block_id: int,
    config: Qwen2_5_VLVisionConfig,
) -> dict[str, torch.Tensor]:
    """Lay the frames of a batch out as blocks.

    Args:
        batch: frames and their places.
        pixels: `[patches, patch_dim]`, any float dtype; cast to the model's.
        num_blocks: n, at least `batch.num_packed_blocks`.
        block_ids: cache blocks of every item, by key.
        scratch_block_id: cache block for padding rows.
        config: the tower's configuration.

    Returns:
        Keyword arguments of the tower, without the cache buffer.
    """
    inputs = warmup_tower_inputs(num_blocks, batch.block_size, config, "cpu")
    merge, area = config.spatial_merge_size, batch.merge_area
    capacity = batch.block_size // area
    item_blocks = [torch.tensor(block_ids[item.key], dtype=torch.int64) for item in batch.items]
    window = config.window_size // config.patch_size
    for frame, (block, offset) in zip(batch.frames, batch.places, strict=True):
        h, w = frame.height, frame.width
        start, end = offset, offset + frame.patches
        own = pixels[frame.first_patch : frame.first_patch + frame.patches]
        order, low, high = window_order(h, w, merge, window)
        own = own.view(-1, area, config.patch_dim)[order]
        inputs["pixel_values"][block, start:end] = own.flatten(0, 1)
        cos, sin = rotary_tables(h, w, config.head_dim, merge, config.rope_theta, window)
        inputs["cos"][block, start:end] = cos
        inputs["sin"][block, start:end] = sin
        inputs["bound_min"][block, start:end] = start
        inputs["bound_max"][block, start:end] = end
        inputs["window_min"][block, start:end] = start + low
        inputs["window_max"][block, start:end] = start + high
        rows = frame.first_row + order
        place = slice(start // area, end // area)
        inputs["row_block_ids"][block, place] = item_blocks[frame.item][rows // capacity]
        inputs["row_offsets"][block, place] = rows % capacity
    inputs["write_block_ids"] = torch.full((num_blocks,), scratch_block_id, dtype=torch.int64)
    return inputs
