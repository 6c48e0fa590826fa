"""Pack image and video frames into fixed-size attention blocks, several to a block.

The tower attends within blocks of `block_size` patches. One item per block would spend a whole
block on a thumbnail; here frames are placed first-fit decreasing, so small ones share.
Encoder-cache blocks are another matter: they hold rows of one item only, and the tower writes
every row by a (cache block, offset) pair.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..config import Glm4vVisionConfig, next_block_size


class VisionInputError(ValueError):
    """Pixels, grids or settings that the tower cannot take; raised before anything is allocated."""


@dataclass(frozen=True)
class Frame:
    """What attends to itself: an image, or one temporal patch of a video.

    `first_patch` counts rows of the pixel tensor, `first_row` merged rows of the frame's item.
    """

    item: int
    height: int
    width: int
    first_patch: int
    first_row: int

    @property
    def patches(self) -> int:
        """Patches of the frame, height * width."""
        return self.height * self.width


@dataclass(frozen=True)
class Item:
    """One image or video: its cache key, and the rows it puts into each of its cache blocks."""

    key: str
    rows_per_cache_block: tuple[int, ...]


@dataclass(frozen=True)
class VisionBatch:
    """Items, their frames, and where each frame lies: `places[i] = (block, offset in patches)`."""

    items: tuple[Item, ...]
    frames: tuple[Frame, ...]
    places: tuple[tuple[int, int], ...]
    num_packed_blocks: int
    block_size: int
    merge_area: int


def pack_first_fit_decreasing(
    sizes: Sequence[int], block_size: int
) -> tuple[list[tuple[int, int]], int]:
    """Place sizes into blocks, largest first, each into the first block with room.

    Args:
        sizes: patches of each frame, none above `block_size`.
        block_size: patches of a block.

    Returns:
        `(block, offset)` of every size, in the order given, and the number of blocks.
        `256 1024 128 512 128, block 1024 -> (1, 512) (0, 0) (1, 768) (1, 0) (1, 896), 2 blocks`
    """
    places = [(0, 0)] * len(sizes)
    used: list[int] = []
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        size = sizes[index]
        block = next((b for b, filled in enumerate(used) if filled + size <= block_size), len(used))
        if block == len(used):
            used.append(0)
        places[index] = (block, used[block])
        used[block] += size
    return places, len(used)


def plan_vision_batch(
    *,
    grid_thw: torch.Tensor,
    keys: Sequence[str],
    pixels_shape: tuple[int, ...],
    config: Glm4vVisionConfig,
    block_size: int,
) -> VisionBatch:
    """Check one call's items and pack their frames.

    Args:
        grid_thw: int64 `[items, 3]`: temporal, height, width, in patches.
        keys: one cache key per item; a repeated key stands for the same content and is encoded
            once.
        pixels_shape: shape of the pixel tensor, `(sum of t*h*w, patch_dim)`.
        config: the tower's configuration.
        block_size: patches of an attention block.

    Raises:
        VisionInputError: counts or shapes that disagree, a grid that the merge size does not
            divide, or a frame above the block size.
    """
    merge, area = config.spatial_merge_size, config.merge_area
    grids = [] if grid_thw is None else [tuple(row) for row in grid_thw.reshape(-1, 3).tolist()]
    if not grids:
        raise VisionInputError("no image or video was given: the grid is empty")
    if len(grids) != len(keys):
        raise VisionInputError(
            f"{len(grids)} grids but {len(keys)} cache keys; every item needs one of each"
        )
    total = sum(t * h * w for t, h, w in grids)
    expected = (total, config.patch_dim)
    if tuple(pixels_shape) != expected:
        raise VisionInputError(
            f"pixels have shape {list(pixels_shape)}; the grids {grids} ask for {list(expected)}"
        )
    items: list[Item] = []
    frames: list[Frame] = []
    seen: set[str] = set()
    first_patch = 0
    for (t, h, w), key in zip(grids, keys, strict=True):
        if min(t, h, w) < 1 or h % merge or w % merge:
            raise VisionInputError(
                f"grid {[t, h, w]}: height and width must be positive multiples of the merge "
                f"size {merge}"
            )
        if h * w > block_size:
            raise VisionInputError(
                f"an image or frame of {h} x {w} = {h * w} patches does not fit a vision "
                f"attention block of {block_size}; "
                "the smallest legal vision_attention_block_size for it is "
                f"{next_block_size(h * w, area)}"
            )
        if key not in seen:
            seen.add(key)
            rows_per_frame = h * w // area
            for frame in range(t):
                frames.append(
                    Frame(len(items), h, w, first_patch + frame * h * w, frame * rows_per_frame)
                )
            items.append(Item(key, _rows_per_cache_block(t * rows_per_frame, block_size // area)))
        first_patch += t * h * w
    places, blocks = pack_first_fit_decreasing([frame.patches for frame in frames], block_size)
    return VisionBatch(tuple(items), tuple(frames), tuple(places), blocks, block_size, area)


def _rows_per_cache_block(rows: int, capacity: int) -> tuple[int, ...]:
    """`rows 10, capacity 4 -> (4, 4, 2)`."""
    full, rest = divmod(rows, capacity)
    return (capacity,) * full + ((rest,) if rest else ())


def select_vision_blocks(
    batch: VisionBatch, *, buckets: Sequence[int] | None, dp_size: int, free_blocks: int
) -> int:
    """Number of vision blocks of the smallest compiled bucket that holds the packed frames.

    Args:
        batch: the packed frames.
        buckets: compiled sizes in patches; None means one block.
        dp_size: vision data-parallel size; a bucket's blocks are rounded up to a multiple of it.
        free_blocks: cache blocks that can ever be allocated (all but scratch).

    Raises:
        VisionInputError: no bucket is large enough, or the items need more cache blocks than one
            request can read or than the cache has.
    """
    size, sizes = batch.block_size, sorted(buckets or [batch.block_size])
    cache_blocks = sum(len(item.rows_per_cache_block) for item in batch.items)
    readable = -(-sizes[-1] // size)
    if cache_blocks > readable:
        raise VisionInputError(
            f"{len(batch.items)} items need {cache_blocks} encoder-cache blocks, but one request "
            f"can read {readable} "
            f"(largest vision bucket {sizes[-1]} / block {size}); raise the largest of "
            "num_vision_tokens_buckets to at "
            f"least {cache_blocks * size}"
        )
    if cache_blocks > free_blocks:
        raise VisionInputError(
            f"{len(batch.items)} items need {cache_blocks} encoder-cache blocks, but the cache "
            f"has {free_blocks}; "
            f"set encoder_cache_num_blocks to at least {cache_blocks + 1}"
        )
    for bucket in sizes:
        blocks = -(-bucket // size)
        if blocks >= batch.num_packed_blocks:
            return -(-blocks // dp_size) * dp_size
    raise VisionInputError(
        f"the frames pack into {batch.num_packed_blocks} blocks of {size} patches, more than the "
        "largest vision bucket "
        f"{sizes[-1]} holds; raise it to at least {batch.num_packed_blocks * size}"
    )
