"""The report of `vlmgen compile` as one HTML page without any other file."""

from __future__ import annotations

import html
import math
from collections import Counter
from collections.abc import Iterable, Sequence

from vlmgen.compile.graphs import KINDS
from vlmgen.compile.report import CompileReport, GraphReport

CORE_BYTES = 24 * 2**30
"""Memory of one logical core of Trainium2: 96 GiB over four of them."""
CORE_FLOPS = 667e12 / 4
"""Its peak in bfloat16: 667 TFLOP/s of a chip."""
CORE_BANDWIDTH = 2.9e12 / 4
"""Its bandwidth to memory: 2.9 TB/s of a chip."""

_PARTS = (
    ("weights", "#4269d0"),
    ("caches", "#efb118"),
    ("inputs", "#6cc5b0"),
    ("results", "#a463f2"),
    ("temporary", "#ff725c"),
)
_COLOURS = dict(zip(KINDS, ("#4269d0", "#ff725c", "#3ca951"), strict=True))
_STYLE = """
body{font:15px/1.45 system-ui,sans-serif;margin:2rem auto;max-width:72rem;padding:0 1rem;color:#222}
h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2.2rem}
table{border-collapse:collapse;width:100%}th,td{text-align:left;padding:.2rem .6rem;
border-bottom:1px solid #ddd;vertical-align:top}td.n{text-align:right;font-variant-numeric:
tabular-nums}code{background:#f3f3f3;padding:0 .2rem}dt{float:left;clear:left;width:9rem;
color:#666}dd{margin-left:9rem}.bad{color:#b00020;font-weight:600}.ok{color:#1b7f3b}
.bar{display:flex;height:1.1rem;background:#eee}.bar i{display:block;height:100%}
.key i{display:inline-block;width:.8rem;height:.8rem;margin:0 .3rem 0 .9rem}
svg text{font:12px system-ui,sans-serif;fill:#333}
"""


def page(report: CompileReport) -> str:
    """The whole page."""
    verdict = (
        f"<p class=ok>all {len(report.graphs)} graphs passed</p>"
        if report.passed
        else "<ul class=bad>" + "".join(f"<li>{_text(p)}</li>" for p in report.problems) + "</ul>"
    )
    facts = {
        "package": report.package,
        "checkpoint": report.checkpoint,
        "artifact cache": f"{report.hits} hits, {report.misses} misses",
        "deployment": ", ".join(f"{k} {v}" for k, v in report.deployment.to_dict().items()),
    }
    listed = "".join(f"<dt>{_text(k)}</dt><dd>{_text(v)}</dd>" for k, v in facts.items())
    title = f"{_text(report.title)}: compiled graphs"
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title>",
        f"<style>{_STYLE}</style><h1>{title}</h1>{verdict}<dl>{listed}</dl>",
        f"<h2>Graphs</h2>{_graphs(report.graphs)}",
        f"<h2>Memory of a rank</h2>{_memory(report)}",
        f"<h2>Roofline</h2>{_roofline(report.graphs)}",
        f"<h2>Operators</h2>{_census(report.graphs)}",
        f"<h2>Findings</h2>{_findings(report)}",
    ]
    if report.ranks:
        parts.append(f"<h2>Ranks</h2>{_ranks(report)}")
    return "\n".join([*parts, "</html>", ""])


def _graphs(graphs: Sequence[GraphReport]) -> str:
    head = ("graph", "why", "seconds", "FLOP by XLA", "by the spec", "ratio", "bytes",
            "FLOP per byte", "in place", "eager", "Hugging Face", "")  # fmt: skip
    rows = []
    for graph in graphs:
        cost, count, difference = graph.built.cost, graph.count, graph.difference
        uses = graph.built.caches
        passed = not list(graph.problems())
        rows.append(
            [
                graph.graph.name,
                graph.why,
                f"{sum(graph.built.seconds.values()):.2f}" + (" cached" * graph.built.hit),
                "" if cost is None else f"{cost.flops:.4g}",
                "" if count is None else f"{count.total:.4g}",
                "" if graph.flops_ratio is None else f"{graph.flops_ratio:.3f}",
                "" if cost is None else f"{cost.bytes:.3g}",
                "" if cost is None else f"{cost.intensity:.3g}",
                f"{sum(use.in_place for use in uses)} of {len(uses)} caches",
                "" if difference is None else f"{difference.eager:.1e}",
                "" if difference is None else f"{difference.hugging_face:.1e}",
                "ok" if passed else "FAIL",
            ]
        )
    return _table(head, rows)


def _memory(report: CompileReport) -> str:
    """Stacked bars against a core's memory, one rank's or each of several; the share is written."""
    costs = [(graph.graph.name, graph.built.cost) for graph in report.graphs if graph.built.cost]
    costs += [(f"{own.graph.name} on {own.layout.name}", own.cost) for own in report.ranks]
    largest = max((cost.memory for _, cost in costs), default=1)
    scale = CORE_BYTES if largest > CORE_BYTES / 50 else largest
    key = "".join(f"<i style='background:{colour}'></i>{name}" for name, colour in _PARTS)
    rows = []
    for name, cost in costs:
        cells = "".join(
            f"<i style='background:{colour};width:{100 * getattr(cost, part) / scale:.3f}%' "
            f"title='{part} {getattr(cost, part):,} bytes'></i>"
            for part, colour in _PARTS
        )
        share = f"{cost.memory / 2**20:,.1f} MiB, {cost.memory / CORE_BYTES:.3%} of 24 GiB"
        rows.append(
            f"<tr><td>{_text(name)}</td><td style='width:60%'><div class=bar>{cells}</div></td>"
            f"<td class=n>{share}</td></tr>"
        )
    full = "24 GiB" if scale == CORE_BYTES else f"{largest / 2**20:,.1f} MiB"
    return f"<p class=key>A full bar is {full}.{key}</p><table>{''.join(rows)}</table>"


def _roofline(graphs: Sequence[GraphReport]) -> str:
    """FLOPs against FLOPs per byte, on logarithmic axes, below what a core can do."""
    points = [(g.graph, g.built.cost) for g in graphs if g.built.cost and g.built.cost.bytes]
    width, height, left, bottom = 720, 340, 70, 40
    low_x, high_x, low_y, high_y = -2.0, 4.0, 9.0, 15.0

    def place(intensity: float, flops: float) -> tuple[float, float]:
        x = (math.log10(max(intensity, 1e-9)) - low_x) / (high_x - low_x)
        y = (math.log10(max(flops, 1.0)) - low_y) / (high_y - low_y)
        return left + x * (width - left - 10), (height - bottom) * (1 - y) + 5

    ridge = CORE_FLOPS / CORE_BANDWIDTH
    roof = [
        place(10**low_x, CORE_BANDWIDTH * 10**low_x),
        place(ridge, CORE_FLOPS),
        place(10**high_x, CORE_FLOPS),
    ]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in roof)
    marks = []
    for exponent in range(int(low_x), int(high_x) + 1):
        x, _ = place(10**exponent, 1e9)
        marks.append(f"<text x='{x:.0f}' y='{height - 18}' text-anchor=middle>1e{exponent}</text>")
    for exponent in range(int(low_y), int(high_y) + 1):
        _, y = place(1, 10**exponent)
        marks.append(f"<text x='{left - 8}' y='{y:.0f}' text-anchor=end>1e{exponent}</text>")
    dots = []
    for graph, cost in points:
        reachable = min(CORE_FLOPS, cost.intensity * CORE_BANDWIDTH)
        x, y = place(cost.intensity, reachable)
        text = f"{graph.name}: {cost.intensity:.3g} FLOP per byte, at most {reachable:.3g} FLOP/s"
        dots.append(
            f"<circle cx='{x:.1f}' cy='{y:.1f}' r=5 fill='{_COLOURS[graph.kind]}' "
            f"fill-opacity=.75><title>{_text(text)}</title></circle>"
        )
    key = "".join(f"<i style='background:{c}'></i>{kind}" for kind, c in _COLOURS.items())
    return (
        f"<p class=key>One logical core of Trainium2: {CORE_FLOPS / 1e12:.0f} TFLOP/s in bfloat16, "
        f"{CORE_BANDWIDTH / 1e9:.0f} GB/s. A dot is the most that a graph can reach with the bytes "
        f"that XLA counts; left of the bend memory limits it.{key}</p>"
        f"<svg viewBox='0 0 {width} {height}' role=img aria-label=roofline>"
        f"<polyline points='{line}' fill=none stroke='#999' stroke-width=2 />"
        f"{''.join(marks)}{''.join(dots)}"
        f"<text x='{width / 2:.0f}' y='{height - 2}' text-anchor=middle>FLOP per byte</text>"
        f"<text x=12 y='{height / 2:.0f}' transform='rotate(-90 12 {height / 2:.0f})' "
        "text-anchor=middle>FLOP/s</text></svg>"
    )


def _census(graphs: Sequence[GraphReport]) -> str:
    """Bars of the operators of one graph of each kind, the first of its kind."""
    parts = []
    for kind in KINDS:
        first = next((g for g in graphs if g.graph.kind == kind and g.built.operators), None)
        if first is None:
            continue
        counts = Counter(first.built.operators).most_common(24)
        most = counts[0][1]
        rows = "".join(
            f"<tr><td><code>{_text(name)}</code></td><td style='width:60%'><div class=bar>"
            f"<i style='background:{_COLOURS[kind]};width:{100 * count / most:.2f}%'></i></div>"
            f"</td><td class=n>{count}</td></tr>"
            for name, count in counts
        )
        parts.append(f"<h3>{_text(first.graph.name)}</h3><table>{rows}</table>")
    return "".join(parts)


def _findings(report: CompileReport) -> str:
    head = ("severity", "code", "rule", "line", "code", "what", "graphs", "why", "legal")
    rows = [
        [
            finding.severity,
            finding.code,
            finding.rule,
            str(finding.place),
            finding.place.code,
            finding.message + (f" (inside {finding.inside})" if finding.inside else ""),
            finding.graph,
            finding.why,
            finding.legal,
        ]
        for finding in report.findings
    ]
    return _table(head, rows) if rows else "<p>none</p>"


def _ranks(report: CompileReport) -> str:
    head = ("layout", "graph", "collectives of a step", "FLOP", "weights", "one rank", "")
    rows = [
        [
            own.layout.name,
            own.graph.name,
            ", ".join(f"{c.count} {c.kind} of {c.bytes:,} B" for c in own.collectives),
            f"{own.cost.flops:.4g}",
            f"{own.cost.weights / 2**20:,.2f} MiB",
            f"{own.difference:.1e}",
            "ok" if own.passed else "FAIL",
        ]
        for own in report.ranks
    ]
    return _table(head, rows)


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    top = "".join(f"<th>{_text(cell)}</th>" for cell in head)
    body = "".join(
        "<tr>" + "".join(f"<td{_class(cell)}>{_text(cell)}</td>" for cell in row) + "</tr>"
        for row in rows
    )
    return f"<table><tr>{top}</tr>{body}</table>"


def _class(cell: str) -> str:
    return {"FAIL": " class=bad", "error": " class=bad", "ok": " class=ok"}.get(cell, "")


def _text(value: object) -> str:
    return html.escape(str(value))
