"""Programs per rank: every legal split of the ranks gives what one rank gives."""

from __future__ import annotations

from pathlib import Path

import pytest

from vlmgen.compile.graphs import Deployment

pytestmark = [pytest.mark.needs_jax, pytest.mark.slow]

FAMILY = "qwen3_vl"
SMALL = Deployment(256, 32, (256,), (2,), (512,), 256)


@pytest.fixture(scope="module")
def checkpoint(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """8 query heads and 2 KV heads, so that four ranks hold each KV head twice."""
    from vlmgen.tiny.build import build_tiny

    spec = repository / "specs" / f"{FAMILY}.yaml"
    return build_tiny(spec, tmp_path_factory.mktemp("ranks") / "tiny", seed=3, parallel=True)


def test_two_and_four_ranks_give_what_one_gives(
    repository: Path, checkpoint: Path, tmp_path: Path
) -> None:
    from vlmgen.compile.artifacts import ArtifactCache
    from vlmgen.compile.run import compile_package

    package = repository / "generated" / FAMILY
    report = compile_package(
        package, checkpoint, SMALL, cache=ArtifactCache(tmp_path), world_sizes=(2, 4)
    )
    assert report.problems == []
    layouts = {own.layout.name for own in report.ranks}
    assert layouts == {
        "tp 2, vision tp 1 x dp 2", "tp 2, vision tp 2 x dp 1",
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


def test_an_illegal_split_says_why(repository: Path, checkpoint: Path) -> None:
    import json

    from vlmgen.compile.ranks import legal_layouts
    from vlmgen.compile.sizes import sizes_of_checkpoint
    from vlmgen.errors import UsageError
    from vlmgen.validate.package import load_package_spec

    spec = load_package_spec(repository / "generated" / FAMILY)
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    with pytest.raises(UsageError, match="heads per rank: 8 / 8 = 1 is odd"):
        legal_layouts(*sizes_of_checkpoint(spec, config), 8)


def test_a_rank_that_gets_another_ranks_cache_is_noticed(
    repository: Path, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vlmgen.compile import ranks
    from vlmgen.compile.artifacts import ArtifactCache
    from vlmgen.compile.graphs import Graph
    from vlmgen.compile.run import compile_package

    own_share, calls = ranks._share, []

    def first_share(cache, heads, rank, world_size):
        calls.append(rank)
        return own_share(cache, heads, 0, world_size)

    monkeypatch.setattr(ranks, "_share", first_share)
    report = compile_package(
        repository / "generated" / FAMILY, checkpoint, SMALL, only=[Graph("decode", 2)],
        cache=ArtifactCache(tmp_path), world_sizes=(2,),
    )  # fmt: skip
    assert calls and any("differs by" in problem for problem in report.problems)
