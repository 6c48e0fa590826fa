"""Every family: one graph of each kind is exported, lowered, compiled, run and equal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from vlmgen.compile.graphs import KINDS, Deployment

pytestmark = [pytest.mark.needs_jax, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
FAMILIES = sorted(path.stem for path in (ROOT / "specs").glob("*.yaml"))
SMALL = Deployment(256, 32, (256,), (2,), (512,), 256)


@pytest.mark.parametrize("family", FAMILIES)
def test_one_graph_of_each_kind(
    family: str, tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory, rank: None
) -> None:
    from vlmgen.compile.artifacts import ArtifactCache
    from vlmgen.compile.run import compile_package

    cache = ArtifactCache(tmp_path_factory.getbasetemp() / "artifacts")
    report = compile_package(ROOT / "generated" / family, tiny(family), SMALL, cache=cache)

    assert [graph.graph.kind for graph in report.graphs] == list(KINDS)
    assert report.problems == []
    assert [str(f) for f in report.findings if f.severity != "note"] == []
    for graph in report.graphs:
        assert graph.difference is not None and graph.difference.passed
        assert graph.built.caches and all(use.in_place for use in graph.built.caches)
        assert set(graph.built.layers.values()) <= {1, 2}  # dense layers before those with experts
        assert graph.flops_ratio is not None and abs(graph.flops_ratio - 1) < 0.05
