"""Attention work and tower time of block packing, against three other ways to batch pictures.

Work counts query-key pairs that the attention computes, masked ones included:
    block packing       packed blocks * block^2   (this package; what is compiled per bucket)
    batch packing       pictures * largest^2      (every picture padded to the largest)
    sequence packing    (sum of patches)^2        (one long row, masked)
    one item per block  pictures * block^2        (the plugin's own Qwen3-VL)
Tower time is that of the package's own vision tower on the CPU, random weights, float32, with the
buckets 1, 2, ... 24 blocks, for block packing and for one item per block.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from measure import Row, finish, median, seconds_in_turn
from package import package_module

BLOCK = 1024
MIXED_NAME = "1024+512+256+128+128"
MIXED = ((32, 32), (16, 32), (16, 16), (8, 16), (8, 16))
THUMBNAILS = ((8, 16),) * 24
RANDOM_MIXES, RANDOM_TIMED = 100, 2
REPETITIONS = {MIXED_NAME: 9}  # the workload with a bound on time; others OTHERWISE
OTHERWISE = 2
THREADS = 1
TOWER = {
    "depth": 4,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_heads": 4,
    "out_hidden_size": 512,
    "deepstack_visual_indexes": (0, 1, 2),
    "dtype": torch.float32,
}
MERGE_AREA = 4

Grids = Sequence[tuple[int, int]]


def main() -> None:
    """Measure and print."""
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    rows, notes = work_rows()
    with tempfile.TemporaryDirectory(prefix="vlmgen-bench-") as folder, torch.no_grad():
        timed, timed_notes = time_rows(Path(folder))
    finish(
        "bench_packing: several pictures in one attention block",
        [*rows, *timed],
        [
            *notes,
            *timed_notes,
            f"torch threads {torch.get_num_threads()}; both packings in turn, median of "
            f"{REPETITIONS[MIXED_NAME]} turns (others {OTHERWISE}) after one warm-up",
        ],
    )


# --------------------------------------------------------------------------------------------- work


def work_rows() -> tuple[list[Row], list[str]]:
    """Query-key pairs of the three workloads."""
    rows = []
    for name, grids, floor in (
        (MIXED_NAME, MIXED, 2.0),
        ("24 x 128", THUMBNAILS, None),
    ):
        ours, others = attention_work(grids)
        for peer, theirs in others.items():
            least = floor or (1.0 if peer == "one item per block" else None)
            rows.append(
                Row(
                    f"work, {name}",
                    ours,
                    "pairs",
                    peer,
                    theirs,
                    theirs / ours,
                    f">= {least:g}x less" if least else "",
                    theirs >= least * ours if least else None,
                )
            )
    works = [attention_work(grids) for grids in random_mixes()]
    for peer in works[0][1]:
        ratios = [others[peer] / ours for ours, others in works]
        bounded = peer == "one item per block"
        rows.append(
            Row(
                f"work, {RANDOM_MIXES} random mixes, sum",
                sum(ours for ours, _ in works),
                "pairs",
                peer,
                sum(others[peer] for _, others in works),
                median(ratios),
                f"never more ({min(ratios):.2f} to {max(ratios):.2f})" if bounded else "",
                min(ratios) >= 1 if bounded else None,
            )
        )
    more = sum(others["batch packing"] < ours for ours, others in works)
    return rows, [
        "ratio of the random mixes: median over mixes",
        f"batch packing needs fewer pairs than blocks of {BLOCK} where all pictures are small and "
        f"alike: 24 x 128, and {more} of the {RANDOM_MIXES} random mixes",
    ]


def attention_work(grids: Grids) -> tuple[int, dict[str, int]]:
    """Pairs of block packing, and those of the other three by name."""
    sizes = [height * width for height, width in grids]
    blocks = blocks_of_bucket(grids)
    return blocks * BLOCK**2, {
        "batch packing": len(sizes) * max(sizes) ** 2,
        "sequence packing": sum(sizes) ** 2,
        "one item per block": len(sizes) * BLOCK**2,
    }


def blocks_of_bucket(grids: Grids) -> int:
    """Blocks of the compiled bucket that the package chooses."""
    batch = plan(grids)
    buckets = [BLOCK * n for n in range(1, len(THUMBNAILS) + 1)]
    return package_module("utils.block_packing").select_vision_blocks(
        batch, buckets=buckets, dp_size=1, free_blocks=len(grids)
    )


def plan(grids: Grids) -> Any:
    """The package's plan of one call with these pictures."""
    config = tower_config()
    patches = sum(height * width for height, width in grids)
    return package_module("utils.block_packing").plan_vision_batch(
        grid_thw=torch.tensor([[1, height, width] for height, width in grids]),
        keys=[str(i) for i in range(len(grids))],
        pixels_shape=(patches, config.patch_dim),
        config=config,
        block_size=BLOCK,
    )


def random_mixes() -> list[Grids]:
    """Mixes of 1 to 24 pictures, each side 2 to 32 patches."""
    draw = random.Random(0)
    sides = range(2, 33, 2)
    return [
        [(draw.choice(sides), draw.choice(sides)) for _ in range(draw.randint(1, len(THUMBNAILS)))]
        for _ in range(RANDOM_MIXES)
    ]


# --------------------------------------------------------------------------------------------- time


def time_rows(folder: Path) -> tuple[list[Row], list[str]]:
    """Tower time of block packing against one item per block, and how far their outputs differ."""
    from vllm_neuron.parallel import neuron_parallel_state

    neuron_parallel_state.init_neuron_distributed_environment(
        world_size=1,
        rank=0,
        local_rank=0,
        distributed_init_method=f"file://{folder / 'rendezvous'}",
        backend="gloo",
        tensor_parallel_size=1,
    )
    tower = random_tower()
    workloads = {
        MIXED_NAME: (MIXED, 2.0),
        "24 x 128": (THUMBNAILS, 1.0),
    } | {f"random mix {i}": (mix, None) for i, mix in enumerate(random_mixes()[:RANDOM_TIMED])}
    rows, difference = [], 0.0
    for name, (grids, floor) in workloads.items():
        packed, single = (tower_call(tower, grids, alone) for alone in (False, True))
        ours, theirs = packed(), single()
        difference = max(difference, float((ours - theirs).abs().max() / theirs.abs().max()))
        times = seconds_in_turn(
            {"packed": packed, "single": single}, REPETITIONS.get(name, OTHERWISE)
        )
        ms = {key: 1000 * median(seconds) for key, seconds in times.items()}
        ratio = ms["single"] / ms["packed"]
        blocks = blocks_of_bucket(grids)
        rows.append(
            Row(
                f"tower, {name}: {blocks} {'block' if blocks == 1 else 'blocks'}",
                ms["packed"],
                "ms",
                f"one item per block: {len(grids)}",
                ms["single"],
                ratio,
                f">= {floor:g}x less" if floor else "",
                ratio >= floor if floor else None,
            )
        )
    neuron_parallel_state.destroy_neuron_distributed_environment()
    return rows, [
        f"tower: width {TOWER['hidden_size']}, depth {TOWER['depth']}, {TOWER['num_heads']} heads, "
        f"float32; the merged rows of both packings differ by at most {difference:.1e} of the "
        "largest",
    ]


def tower_config() -> Any:
    """Configuration of the tower that is measured."""
    return package_module("config").Qwen3VLVisionConfig(**TOWER)


def random_tower() -> torch.nn.Module:
    """The package's tower with weights of unit gain."""
    tower = package_module("vision_encoder").Qwen3VLVisionModel(tower_config())
    for parameter in tower.parameters():
        if parameter.dim() == 1:
            parameter.copy_(1 + 0.1 * torch.randn(parameter.shape))
        else:
            parameter.copy_(torch.randn(parameter.shape) * parameter.shape[0] ** -0.5)
    return tower.eval()


def tower_call(tower: torch.nn.Module, grids: Grids, alone: bool) -> Any:
    """A function that runs the tower on these pictures and returns the cache blocks they fill.

    Args:
        tower: The tower.
        grids: Height and width of every picture.
        alone: Give each picture a block of its own.
    """
    config, batch = tower_config(), plan(grids)
    blocks = blocks_of_bucket(grids)
    if alone:
        places = tuple((i, 0) for i in range(len(grids)))
        batch, blocks = replace(batch, places=places, num_packed_blocks=len(grids)), len(grids)
    generator = torch.Generator().manual_seed(1)
    patches = sum(height * width for height, width in grids)
    inputs = package_module("utils.preprocessing").build_tower_inputs(
        batch,
        torch.randn(patches, config.patch_dim, generator=generator),
        num_blocks=blocks,
        block_ids={item.key: [i] for i, item in enumerate(batch.items)},
        scratch_block_id=len(grids),
        config=config,
    )
    cache = torch.zeros(len(grids) + 1, BLOCK // MERGE_AREA, config.fat_width)
    return lambda: tower(**inputs, encoder_cache_buffer=cache)[: len(grids)]


if __name__ == "__main__":
    main()
