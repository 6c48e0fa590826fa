"""What `vlmgen compile` prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from vlmgen.compile.findings import SEVERITIES

if TYPE_CHECKING:
    from rich.console import Console

    from vlmgen.compile.graphs import Deployment, Graph
    from vlmgen.compile.published import PublishedReport
    from vlmgen.compile.ranks import RankReport
    from vlmgen.compile.report import CompileReport, GraphReport


def print_deployment(
    deployment: Deployment, graphs: Sequence[Graph], shapes: dict[str, str], console: Console
) -> None:
    """Graphs of a deployment, their inputs and why each exists."""
    table = Table("graph", "why", "inputs")
    for graph in graphs:
        table.add_row(graph.name, deployment.why(graph), Text(shapes.get(graph.name, "")))
    console.print(table)
    console.print(f"{len(graphs)} graphs")


def print_report(report: CompileReport, console: Console, notes: bool = False) -> None:
    """One row per graph, the findings, and what the cache did."""
    table = Table(
        "graph", "operators", "s", "MFLOP", "of spec", "temp MB", "in place", "eager",
        "Hugging Face", "passed",
    )  # fmt: skip
    for graph in report.graphs:
        table.add_row(*map(Text, _cells(graph)))
    console.print(table)
    if report.ranks:
        ranks = Table("layout", "graph", "collectives of a step", "MFLOP", "one rank", "passed")
        for own in report.ranks:
            ranks.add_row(*map(Text, _rank_cells(own)))
        console.print(ranks)
    for finding in report.findings:
        if notes or finding.severity != "note":
            console.print(Text(str(finding)), soft_wrap=True)
    counts = {
        severity: sum(f.severity == severity for f in report.findings) for severity in SEVERITIES
    }
    listed = ", ".join(f"{count} {name}s" for name, count in counts.items())
    console.print(f"findings: {listed}; cache: {report.hits} hits, {report.misses} misses")


def print_published(reports: Sequence[PublishedReport], console: Console) -> None:
    """One row per graph of every checkpoint."""
    table = Table(
        "checkpoint", "graph", "layers", "GFLOP", "of spec", "weights GiB", "caches GiB",
        "temp GiB", "s", "passed",
    )  # fmt: skip
    for own in reports:
        sizes = (own.weights, own.caches, own.temporary)
        table.add_row(
            own.checkpoint,
            own.graph.name,
            own.layers,
            f"{own.flops / 1e9:,.4g}",
            f"{own.ratio:.3f}",
            *(f"{size / 2**30:.2f}" for size in sizes),
            f"{own.seconds:.0f}",
            "FAIL" if own.problem else "ok",
        )
    console.print(table)


def _rank_cells(ranks: RankReport) -> list[str]:
    counts = (f"{c.count} {c.kind} of {c.bytes} B" for c in ranks.collectives)
    return [
        ranks.layout.name,
        ranks.graph.name,
        ", ".join(counts),
        f"{ranks.cost.flops / 1e6:.4g}",
        f"{ranks.difference:.1e}",
        "ok" if ranks.passed else "FAIL",
    ]


def _cells(graph: GraphReport) -> list[str]:
    built, cost = graph.built, graph.built.cost
    seconds = f"{sum(built.seconds.values()):.2f}" + (" cached" if built.hit else "")
    difference, ratio = graph.difference, graph.flops_ratio
    in_place = sum(use.in_place for use in built.caches)
    return [
        graph.graph.name,
        str(sum(built.operators.values()) or ""),
        seconds,
        "" if cost is None else f"{cost.flops / 1e6:.4g}",
        "" if ratio is None else f"{ratio:.3f}",
        "" if cost is None else f"{cost.temporary / 1e6:.3g}",
        f"{in_place} of {len(built.caches)}" if built.caches else "",
        "" if difference is None else f"{difference.eager:.1e}",
        "" if difference is None else f"{difference.hugging_face:.1e}",
        "ok" if graph.passed else "FAIL",
    ]
