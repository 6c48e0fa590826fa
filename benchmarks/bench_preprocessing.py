"""CPU preprocessing of the vision tower's inputs, against Hugging Face's own code for the same.

Ours is what `embed_multimodal` does between the processor's output and the compiled tower: plan
the blocks, choose the bucket, then rotary tables, interpolated positions, bounds and row
destinations, laid out as blocks. The peer is what `Qwen3VLVisionModel.forward` of transformers
computes from the grid alone: interpolation indices and weights, position ids, sequence bounds and
rotary tables. Sizes are those of Qwen3-VL-8B. Cold means that the package's caches of tables are
emptied before every turn; the bounds are on the cold figures.

The package also moves the pixels into the blocks and casts them to the model's dtype; transformers
only casts them. That is shown on lines of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from measure import Row, finish, median, seconds_in_turn
from package import package_module

BLOCK = 1024
LIMIT_MS = 25.0
REPETITIONS = 15
THREADS = 1
PICTURES = [(1, 32, 32)] * 30  # 512 x 512 pixels, patch 16
VIDEO = [(15, 32, 32)]  # 30 frames of 512 x 512, two to a temporal patch
# Thirty different grids of nearly as many patches: the caches help none of them.
DISTINCT = [(1, 2 * height, 2 * width) for height in range(8, 17) for width in range(12, 17)][-30:]

Grids = Sequence[tuple[int, int, int]]


def main() -> None:
    """Measure and print."""
    torch.set_num_threads(THREADS)
    rows: list[Row] = []
    notes: list[str] = []
    for name, grids, bounded in (
        ("30 pictures of 512 x 512", PICTURES, True),
        ("30-frame video of 512 x 512", VIDEO, True),
        ("30 pictures, all sizes different", DISTINCT, False),
    ):
        rows += measure(name, grids, bounded)
        notes.append(f"{name}: tables differ from Hugging Face's by {difference(grids):.1e}")
    finish(
        "bench_preprocessing: tables, positions, bounds and packing on the CPU",
        rows,
        [
            *notes,
            f"torch threads {torch.get_num_threads()}; {REPETITIONS} turns after one warm-up, all "
            "candidates in turn, median",
            "pixels: bfloat16 blocks filled from the processor's float32 rows",
        ],
    )


def measure(name: str, grids: Grids, bounded: bool) -> list[Row]:
    """Rows of one workload."""
    config, reference, grid = vision_config(), hugging_face(), torch.tensor(grids)
    pixels = torch.rand(int(grid.prod(1).sum()), config.patch_dim)
    # Without channels a patch holds nothing: all the work but that on pixels.
    bare, nothing = replace(config, in_channels=0), pixels[:, :0]

    def cold() -> None:
        forget_tables()
        prepare(grid, nothing, bare)

    def with_pixels() -> None:
        forget_tables()
        prepare(grid, pixels, config)

    times = seconds_in_turn(
        {
            "hf": lambda: reference(grid),
            "cold": cold,
            "warm": lambda: prepare(grid, nothing, bare),
            "pixels": with_pixels,
            "hf pixels": lambda: (reference(grid), pixels.to(config.dtype)),
        },
        REPETITIONS,
    )
    ms = {key: 1000 * median(seconds) for key, seconds in times.items()}
    ok = ms["cold"] <= min(LIMIT_MS, ms["hf"])
    return [
        Row(
            f"{name}, cold",
            ms["cold"],
            "ms",
            "transformers",
            ms["hf"],
            ms["cold"] / ms["hf"],
            f"<= 1.00x, <= {LIMIT_MS:g} ms" if bounded else "",
            ok if bounded else None,
        ),
        Row("  warm", ms["warm"], "ms", "transformers", ms["hf"], ms["warm"] / ms["hf"]),
        Row(
            "  cold, and the pixels",
            ms["pixels"],
            "ms",
            "transformers, and the cast",
            ms["hf pixels"],
            ms["pixels"] / ms["hf pixels"],
        ),
    ]


def prepare(
    grid: torch.Tensor, pixels: torch.Tensor, config: Any
) -> tuple[Any, dict[str, torch.Tensor]]:
    """The plan of one call, and all inputs of the tower."""
    packing = package_module("utils.block_packing")
    batch = packing.plan_vision_batch(
        grid_thw=grid,
        keys=[str(i) for i in range(len(grid))],
        pixels_shape=tuple(pixels.shape),
        config=config,
        block_size=BLOCK,
    )
    cache_blocks = sum(len(item.rows_per_cache_block) for item in batch.items)
    num_blocks = packing.select_vision_blocks(
        batch,
        buckets=[BLOCK * n for n in range(1, cache_blocks + 1)],
        dp_size=1,
        free_blocks=cache_blocks,
    )
    free = iter(range(cache_blocks))
    inputs = package_module("utils.preprocessing").build_tower_inputs(
        batch,
        pixels,
        num_blocks=num_blocks,
        block_ids={i.key: [next(free) for _ in i.rows_per_cache_block] for i in batch.items},
        scratch_block_id=cache_blocks,
        config=config,
    )
    return batch, inputs


def vision_config() -> Any:
    """The package's defaults: the tower of Qwen3-VL-8B."""
    return package_module("config").Qwen3VLVisionConfig()


def forget_tables() -> None:
    """Empty the package's caches."""
    preprocessing = package_module("utils.preprocessing")
    for cached in ("patch_order", "rotary_tables", "position_taps"):
        getattr(preprocessing, cached).cache_clear()


def hugging_face() -> Callable[[torch.Tensor], tuple[torch.Tensor, ...]]:
    """What transformers computes from the grids: cos, sin, table rows, weights, bounds."""
    from transformers import Qwen3VLConfig, vision_utils
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionRotaryEmbedding

    own = vision_config()
    sizes = ("hidden_size", "num_heads", "num_position_embeddings", "spatial_merge_size", "depth")
    config = Qwen3VLConfig(vision_config={size: getattr(own, size) for size in sizes}).vision_config
    rotary, merge = Qwen3VLVisionRotaryEmbedding(config), own.spatial_merge_size
    device_only = torch.empty(0)

    def positions(grid: torch.Tensor) -> tuple[torch.Tensor, ...]:
        index, weight = vision_utils.get_vision_interpolation_indices_and_weights(
            grid,
            num_grid_per_side=own.position_grid_side,
            mode="bilinear",
            align_corners=True,
            spatial_merge_size=merge,
        )
        position_ids = vision_utils.get_vision_position_ids(grid, merge)
        bounds, _ = vision_utils.get_vision_attention_seqlens(grid, config)
        return *rotary(device_only, position_ids), index, weight, bounds

    return positions


def difference(grids: Grids) -> float:
    """Largest difference of a rotary table or an interpolation weight from Hugging Face's.

    Raises:
        RuntimeError: A patch takes other rows of the position table.
    """
    grid, config = torch.tensor(grids), replace(vision_config(), in_channels=0)
    cos, sin, index, weight, _ = hugging_face()(grid)
    batch, ours = prepare(grid, torch.empty(len(cos), 0), config)
    worst = 0.0
    for frame, (block, offset) in zip(batch.frames, batch.places, strict=True):
        theirs = slice(frame.first_patch, frame.first_patch + frame.patches)
        place = slice(offset, offset + frame.patches)
        if not torch.equal(ours["pos_emb_idx"][:, block, place].long(), index[theirs].T):
            raise RuntimeError(f"{frame}: other rows of the position table than transformers")
        for mine, other in (
            (ours["cos"][block, place], cos[theirs]),
            (ours["sin"][block, place], sin[theirs]),
            (ours["pos_emb_weight"][:, block, place], weight[theirs].T),
        ):
            worst = max(worst, float((mine - other).abs().max()))
    return worst


if __name__ == "__main__":
    main()
