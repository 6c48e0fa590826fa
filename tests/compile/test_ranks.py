"""Programs per rank: every legal split of the ranks gives what one rank gives."""

from __future__ import annotations

from pathlib import Path

import pytest

from vlmgen.compile.graphs import Deployment

pytestmark = [pytest.mark.needs_jax, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
FAMILIES = sorted(path.stem for path in (ROOT / "specs").glob("*.yaml"))
FAMILY = "qwen3_vl"
SMALL = Deployment(256, 32, (256,), (2,), (512,), 256)


@pytest.fixture(scope="module", autouse=True)
def vllm_library() -> None:
    """vLLM's C library, as other tests of this process may have loaded it.

    With it vLLM's process groups meet in shared memory, where the other ranks are not.
    """
    from vllm.platforms import current_platform

    current_platform.import_kernels()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints and the cache of this file."""
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def checkpoint(folder: Path) -> Path:
    """8 query heads and 2 KV heads, so that four ranks hold each KV head twice."""
    return parallel_checkpoint(FAMILY, folder)


def parallel_checkpoint(family: str, folder: Path) -> Path:
    """A tiny checkpoint whose heads and experts can be shared out."""
    from vlmgen.tiny.build import build_tiny

    return build_tiny(ROOT / "specs" / f"{family}.yaml", folder / family, seed=3, parallel=True)


@pytest.mark.matrix
def test_four_ranks_give_what_one_gives(checkpoint: Path, tmp_path: Path) -> None:
    from vlmgen.compile.artifacts import ArtifactCache
    from vlmgen.compile.run import compile_package

    package = ROOT / "generated" / FAMILY
    cache = ArtifactCache(tmp_path)
    report = compile_package(package, checkpoint, SMALL, cache=cache, world_sizes=(4,))
    assert report.problems == []
    layouts = {own.layout.name for own in report.ranks}
    assert layouts == {
        "tp 4, vision tp 1 x dp 4", "tp 4, vision tp 2 x dp 2", "tp 4, vision tp 4 x dp 1",
    }  # fmt: skip
    counts = {
        (own.layout.name, own.graph.kind): {
            kind: sum(c.count for c in own.collectives if c.kind == kind)
            for kind in ("all_reduce", "all_gather", "reduce_scatter")
        }
        for own in report.ranks
    }
    # Four layers: a gather before and a scatter after attention and MLP, the embedding's scatter,
    # the last gather, the head's; in decode a sum for each instead.
    name = "tp 4, vision tp 2 x dp 2"
    assert counts[name, "prefill"] == {"all_reduce": 0, "all_gather": 10, "reduce_scatter": 9}
    assert counts[name, "decode"] == {"all_reduce": 9, "all_gather": 1, "reduce_scatter": 0}
    assert counts[name, "vision"]["all_gather"] == 1  # the copies' rows, once
    assert counts["tp 4, vision tp 1 x dp 4", "vision"]["all_reduce"] == 0


@pytest.mark.matrix
@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_of_every_family_give_what_one_gives(
    family: str, folder: Path, tmp_path: Path
) -> None:
    from vlmgen.compile.artifacts import ArtifactCache
    from vlmgen.compile.run import compile_package

    report = compile_package(
        ROOT / "generated" / family, parallel_checkpoint(family, folder), SMALL,
        cache=ArtifactCache(tmp_path), world_sizes=(2,),
    )  # fmt: skip
    assert report.problems == []
    assert {own.graph.kind for own in report.ranks} == {"vision", "prefill", "decode"}


def test_an_illegal_split_says_why(checkpoint: Path) -> None:
    import json

    from vlmgen.compile.ranks import legal_layouts
    from vlmgen.compile.sizes import sizes_of_checkpoint
    from vlmgen.errors import UsageError
    from vlmgen.validate.package import load_package_spec

    spec = load_package_spec(ROOT / "generated" / FAMILY)
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    with pytest.raises(UsageError, match="heads per rank: 8 / 8 = 1 is odd"):
        legal_layouts(*sizes_of_checkpoint(spec, config), 8)


def test_a_rank_that_gets_another_ranks_cache_is_noticed(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the programs of ranks are in the cache: what compiles first, the second run takes."""
    from vlmgen.compile import ranks
    from vlmgen.compile.artifacts import ArtifactCache
    from vlmgen.compile.graphs import Graph
    from vlmgen.compile.run import compile_package

    def run(offline: bool):
        return compile_package(
            ROOT / "generated" / FAMILY, checkpoint, SMALL, only=[Graph("decode", 2)],
            cache=ArtifactCache(tmp_path), world_sizes=(2,), offline=offline,
        )  # fmt: skip

    good = run(offline=False)
    assert good.problems == [] and len(good.ranks) == 2
    assert not any(own.cached for own in good.ranks)
    own_share, calls = ranks._share, []

    def first_share(cache, heads, rank, world_size):
        calls.append(rank)
        return own_share(cache, heads, 0, world_size)

    monkeypatch.setattr(ranks, "_share", first_share)
    bad = run(offline=True)
    assert calls and any("differs by" in problem for problem in bad.problems)
    assert all(own.cached for own in bad.ranks) and bad.misses == 0
