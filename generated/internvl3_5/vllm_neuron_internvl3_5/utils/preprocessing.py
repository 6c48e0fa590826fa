"""Inputs of the vision tower, computed on the CPU:
patch order, bounds, row destinations.

A tile's patches stand in the order of its merge windows, after one window of places whose last is
the class token's:
`grid 4 x 4, merge 2 -> (row, col) = 00 01 10 11 | 02 03 12 13 | 20 21 30 31 | 22 23 32 33`.
Shapes: n vision blocks, S patches per block, m patches per merged row.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch

from ..config import InternVLVisionConfig
from .block_packing import VisionBatch


@lru_cache(maxsize=64)
def patch_order(height: int, width: int, merge_size: int) -> torch.Tensor:
    """Patch at each place of a tile, numbered row by row, int64 `[height * width]`."""
    grid = torch.arange(height * width).view(
        height // merge_size, merge_size, width // merge_size, merge_size
    )
    return grid.transpose(1, 2).flatten()


def tile_patches(tiles: torch.Tensor, patch_size: int, merge_size: int) -> torch.Tensor:
    """Square tiles `[k, C, side, side]` -> `[all patches, P]`, merge windows adjacent."""
    count, channels, side, _ = tiles.shape
    windows = side // (patch_size * merge_size)
    cut = tiles.reshape(
        count, channels, windows, merge_size, patch_size, windows, merge_size, patch_size
    )
    cut = cut.permute(0, 2, 5, 3, 6, 1, 4, 7)  # tile, window row and column, row and column in it
    return cut.reshape(-1, channels * patch_size**2)


def warmup_tower_inputs(
    num_blocks: int, block_size: int, config: InternVLVisionConfig, device: torch.device | str
) -> dict[str, torch.Tensor]:
    """Empty tower inputs: every row is padding. Also the canvas that `build_tower_inputs` fills.

    Padding patches see the first patch of their block (`[0, 1)`), never an empty range, over
    which a kernel's softmax is undefined. Padding rows have cache block -1, which sends them to
    scratch.
    """
    n, s, rows = num_blocks, block_size, block_size // config.merge_area
    return {
        "pixel_values": torch.zeros(n, s, config.patch_dim, dtype=config.dtype, device=device),
        "pos_emb_idx": torch.zeros(n, s, dtype=torch.int32, device=device),
        "bound_min": torch.zeros(n, s, 1, dtype=torch.int32, device=device),
        "bound_max": torch.ones(n, s, 1, dtype=torch.int32, device=device),
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
    config: InternVLVisionConfig,
) -> dict[str, torch.Tensor]:
    """Lay the tiles of a batch out as blocks.

    Args:
        batch: tiles and their places.
        pixels: `[tiles, C, side, side]`, any float dtype; cast to the model's.
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
    pixels = tile_patches(pixels, config.patch_size, merge)
    for frame, (block, offset) in zip(batch.frames, batch.places, strict=True):
        h, w = frame.height, frame.width
        start = offset + config.lead  # the class token stands at start - 1
        end = start + frame.patches
        own = pixels[frame.first_patch : frame.first_patch + frame.patches]
        inputs["pixel_values"][block, start:end] = own
        inputs["pos_emb_idx"][block, start:end] = patch_order(h, w, merge) + 1
        inputs["bound_min"][block, start - 1 : end] = start - 1
        inputs["bound_max"][block, start - 1 : end] = end
        rows = torch.arange(frame.first_row, frame.first_row + frame.patches // area)
        place = slice(start // area, end // area)
        inputs["row_block_ids"][block, place] = item_blocks[frame.item][rows // capacity]
        inputs["row_offsets"][block, place] = rows % capacity
    inputs["write_block_ids"] = torch.full((num_blocks,), scratch_block_id, dtype=torch.int64)
    return inputs
