"""Inputs of the vision tower, computed on the CPU:
rotary tables, interpolated positions, bounds, row destinations.

All tables are in the processor's patch order, merge windows first:
`grid 4 x 4, merge 2 -> (row, col) = 00 01 10 11 | 02 03 12 13 | 20 21 30 31 | 22 23 32 33`.
Shapes: n vision blocks, S patches per block, D head width, m patches per merged row.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch

from ..config import Glm4vVisionConfig
from .block_packing import VisionBatch


@lru_cache(maxsize=64)
def patch_order(height: int, width: int, merge_size: int) -> torch.Tensor:
    """Patch at each place of a frame, numbered row by row, int64 `[height * width]`."""
    grid = torch.arange(height * width).view(
        height // merge_size, merge_size, width // merge_size, merge_size
    )
    return grid.transpose(1, 2).flatten()


@lru_cache(maxsize=64)
def rotary_tables(
    height: int, width: int, head_dim: int, merge_size: int, theta: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of one frame's patches, float32 `[height * width, D]` each.

    `D/4` frequencies turn with the row, as many with the column; the pair of lists stands twice,
    for rotation of halves: `[row | col | row | col]`.
    Source: the vision tower's rotary embedding in
    transformers.models.glm4v.modeling_glm4v.
    """
    order = patch_order(height, width, merge_size)
    rows, cols = order // width, order % width
    spatial = head_dim // 2
    inv_freq = 1.0 / (theta ** (torch.arange(0, spatial, 2, dtype=torch.float32) / spatial))
    angles = torch.cat([rows[:, None].float() * inv_freq, cols[:, None].float() * inv_freq], dim=-1)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


@lru_cache(maxsize=64)
def position_taps(
    height: int, width: int, side: int, merge_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of the learned `side x side` table around each patch, and their weights.

    The table is sampled at the patches' centres by bicubic interpolation, 4 x 4 rows each; the
    frame's outer edges meet those of the table, lines beyond them repeat the outermost.
    Source: `torch.nn.functional.grid_sample` with corners not aligned and border padding.

    Returns:
        int32 `[16, height * width]` and float32 `[16, height * width]`.
    """
    order = patch_order(height, width, merge_size)
    row_index, row_weight = _cubic(order // width, height, side)
    col_index, col_weight = _cubic(order % width, width, side)
    index = row_index[:, None] * side + col_index  # [4, 4, height * width]
    weight = row_weight[:, None] * col_weight
    return index.flatten(0, 1).to(torch.int32), weight.flatten(0, 1)


def _cubic(place: torch.Tensor, size: int, side: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Four table lines around each place on one axis and their weights, `[4, places]` each."""
    source = (place.float() + 0.5) * side / size - 0.5
    low = source.floor()
    near = source - low  # distance to the second of the four lines
    first, second, third, last = near + 1, near, 1 - near, 2 - near
    a = -0.75
    weight = torch.stack(
        [
            ((a * first - 5 * a) * first + 8 * a) * first - 4 * a,
            ((a + 2) * second - (a + 3)) * second * second + 1,
            ((a + 2) * third - (a + 3)) * third * third + 1,
            ((a * last - 5 * a) * last + 8 * a) * last - 4 * a,
        ]
    )
    lines = low.long() + torch.arange(-1, 3)[:, None]
    return lines.clamp(0, side - 1), weight


def warmup_tower_inputs(
    num_blocks: int, block_size: int, config: Glm4vVisionConfig, device: torch.device | str
) -> dict[str, torch.Tensor]:
    """Empty tower inputs: every row is padding. Also the canvas that `build_tower_inputs` fills.

    Padding patches see the first patch of their block (`[0, 1)`), never an empty range, over
    which a kernel's softmax is undefined. Padding rows have cache block -1, which sends them to
    scratch.
    """
    n, s, rows = num_blocks, block_size, block_size // config.merge_area
    return {
        "pixel_values": torch.zeros(n, s, config.patch_dim, dtype=config.dtype, device=device),
        "pos_emb_idx": torch.zeros(16, n, s, dtype=torch.int32, device=device),
        "pos_emb_weight": torch.zeros(16, n, s, dtype=torch.float32, device=device),
        "cos": torch.zeros(n, s, config.head_dim, dtype=torch.float32, device=device),
        "sin": torch.zeros(n, s, config.head_dim, dtype=torch.float32, device=device),
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
    config: Glm4vVisionConfig,
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
    for frame, (block, offset) in zip(batch.frames, batch.places, strict=True):
        h, w = frame.height, frame.width
        start, end = offset, offset + frame.patches
        own = pixels[frame.first_patch : frame.first_patch + frame.patches]
        inputs["pixel_values"][block, start:end] = own
        index, weight = position_taps(h, w, config.position_grid_side, merge)
        inputs["pos_emb_idx"][:, block, start:end] = index
        inputs["pos_emb_weight"][:, block, start:end] = weight
        cos, sin = rotary_tables(h, w, config.head_dim, merge, config.rope_theta)
        inputs["cos"][block, start:end] = cos
        inputs["sin"][block, start:end] = sin
        inputs["bound_min"][block, start:end] = start
        inputs["bound_max"][block, start:end] = end
        rows = torch.arange(frame.first_row, frame.first_row + frame.patches // area)
        place = slice(start // area, end // area)
        inputs["row_block_ids"][block, place] = item_blocks[frame.item][rows // capacity]
        inputs["row_offsets"][block, place] = rows % capacity
    inputs["write_block_ids"] = torch.full((num_blocks,), scratch_block_id, dtype=torch.int64)
    return inputs
