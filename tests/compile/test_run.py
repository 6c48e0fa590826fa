"""`vlmgen compile` as a user sees it, the second run, and that its limits can be missed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vlmgen.cli import app

pytestmark = [pytest.mark.needs_jax, pytest.mark.slow]

SIZES = {
    "max_model_len": 256,
    "token_buckets": [256],
    "seq_buckets": [1, 2],
    "vision_buckets": [256],
    "vision_block": 256,
}


@pytest.fixture
def arguments(repository: Path, tiny: Callable[[str], Path], tmp_path: Path) -> list[str]:
    buckets = tmp_path / "buckets.json"
    buckets.write_text(json.dumps(SIZES), encoding="utf-8")
    package, checkpoint = repository / "generated" / "qwen3_vl", tiny("qwen3_vl")
    return [
        "compile", str(package), "--checkpoint", str(checkpoint), "--buckets", str(buckets),
        "--cache", str(tmp_path / "cache"),
    ]  # fmt: skip


def test_graphs_are_listed_with_their_inputs(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, [*arguments, "--list", "--json"])
    assert result.exit_code == 0, result.output
    listed = json.loads(result.stdout)
    rows = {row["graph"]: row for row in listed["graphs"]}
    assert list(rows) == ["vision-256", "prefill-256", "decode-1", "decode-2"]
    assert rows["decode-2"]["why"] == "steps of 2 requests"
    assert "input_ids [2]" in rows["decode-2"]["inputs"]
    assert "block_table_tensor [2, 8]" in rows["decode-2"]["inputs"]
    assert "pixel_values [1, 256, 1536]" in rows["vision-256"]["inputs"]
    assert listed["deployment"]["seq_buckets"] == [1, 2]


def test_a_second_run_is_all_hits_and_offline_makes_a_miss_an_error(
    arguments: list[str], tmp_path: Path
) -> None:
    run = CliRunner().invoke
    one = [*arguments, "--only", "decode-1"]
    missing = run(app, [*one, "--offline"])
    assert missing.exit_code == 8 and "decode-1 is not in the cache" in missing.stderr  # VG919

    page = tmp_path / "report.html"
    first = run(app, [*one, "--json", "--emit", str(tmp_path / "out"), "--html", str(page)])
    assert first.exit_code == 0, first.output
    report = json.loads(first.stdout)
    assert report["cache"] == {"hits": 0, "misses": 1}
    (graph,) = report["graphs"]
    assert graph["passed"] and not graph["cached"]
    assert graph["difference"]["eager"] <= 1e-5 and graph["difference"]["hugging_face"] <= 1e-5
    assert len(graph["caches"]) == 6 and all(cache["in_place"] for cache in graph["caches"])
    assert graph["operators"]["scatter"] == 6  # keys and values of three layers
    assert graph["cost"]["aliased"] == graph["cost"]["caches"]
    texts = {path.name for path in (tmp_path / "out").iterdir()}
    assert texts == {"decode-1.stablehlo.mlir", "decode-1.optimised.hlo", "decode-1.json"}
    html = page.read_text(encoding="utf-8")
    assert "24 GiB" in html and "<svg" in html and "gather-of-rows" in html

    second = run(app, [*one, "--offline", "--json"])
    assert second.exit_code == 0, second.output
    again = json.loads(second.stdout)
    assert again["cache"] == {"hits": 1, "misses": 0}
    for name in ("program", "operators", "cost", "difference", "findings"):
        assert again["graphs"][0][name] == graph[name]

    # The texts can be had of what is cached, too.
    assert run(app, [*one, "--emit", str(tmp_path / "later"), "--no-run"]).exit_code == 0
    assert {path.name for path in (tmp_path / "later").iterdir()} == texts


def test_workers_fill_the_cache_from_shapes_alone(
    arguments: list[str], repository: Path, tiny: Callable[[str], Path]
) -> None:
    family = "qwen2_vl"  # of the fewest layers: two processes export at the same time
    arguments[1:4] = [str(repository / "generated" / family), "--checkpoint", str(tiny(family))]
    command = [*arguments, "--only", "decode-1", "--only", "decode-2", "--workers", "2", "--json"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["cache"] == {"hits": 0, "misses": 2}
    assert all(graph["cached"] and graph["passed"] for graph in report["graphs"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seq_bucket": [1]}, "unknown ['seq_bucket']"),
        ({"seq_buckets": 4}, "seq_buckets is 4; legal is a list of positive integers"),
        ({"max_model_len": 0}, "max_model_len is 0; legal is a positive integer"),
    ],
)
def test_a_file_of_buckets_is_checked(
    arguments: list[str], tmp_path: Path, change: dict[str, object], message: str
) -> None:
    (tmp_path / "buckets.json").write_text(json.dumps(change), encoding="utf-8")
    result = CliRunner().invoke(app, [*arguments, "--list"])
    assert result.exit_code == 2 and message in result.stderr


def test_an_unknown_graph_names_the_known_ones(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, [*arguments, "--only", "decode-3"])
    assert result.exit_code == 2
    assert "decode-3; legal: vision-256, prefill-256, decode-1, decode-2" in result.stderr


def test_limits_can_be_missed(
    repository: Path,
    seeded: Callable[..., Path],
    tiny: Callable[[str], Path],
    tmp_path: Path,
    rank: None,
) -> None:
    """A package that computes something else is compiled faithfully, and is not Hugging Face's."""
    from vlmgen.compile.artifacts import ArtifactCache
    from vlmgen.compile.graphs import Deployment, Graph
    from vlmgen.compile.run import compile_package

    sizes = {name: tuple(v) if isinstance(v, list) else v for name, v in SIZES.items()}
    deployment = Deployment(kv_block_size=32, cache_blocks=None, **sizes)
    package = seeded(
        "qwen3_vl", ("model.py", "self.scale = config.head_dim**-0.5", "self.scale = 0.1")
    )
    report = compile_package(
        package, tiny("qwen3_vl"), deployment, only=[Graph("decode", 2)],
        cache=ArtifactCache(tmp_path / "cache"),
    )  # fmt: skip
    (graph,) = report.graphs
    assert graph.difference.eager <= 1e-5 < graph.difference.hugging_face
    (problem,) = report.problems
    assert "from Hugging Face; the limit is 1e-05" in problem

    # An executable that is not the package's, a cache that is copied, a count that is wrong.
    good = replace(graph, difference=replace(graph.difference, hugging_face=0.0))
    assert not list(good.problems())
    assert list(replace(good, difference=replace(good.difference, eager=1.1e-5)).problems())
    copied = [replace(use, copies=1) for use in graph.built.caches]
    assert list(replace(good, built=replace(graph.built, caches=copied)).problems())
    half = replace(graph.count, matrices=graph.count.matrices / 2)
    (problem,) = replace(good, count=half).problems()
    assert "must agree within 5%" in problem
