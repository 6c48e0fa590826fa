"""The report of `vlmgen compile` as one HTML page without any other file."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from vlmgen.compile.graphs import KINDS
from vlmgen.compile.report import CompileReport, GraphReport
from vlmgen.pages import render_page

CORE_BYTES = 24 * 2**30
"""Memory of one logical core of Trainium2: 96 GiB over four of them."""
CORE_FLOPS = 667e12 / 4
"""Its peak in bfloat16: 667 TFLOP/s of a chip."""
CORE_BANDWIDTH = 2.9e12 / 4
"""Its bandwidth to memory: 2.9 TB/s of a chip."""

_PARTS = {
    "weights": "#4269d0",
    "caches": "#efb118",
    "inputs": "#6cc5b0",
    "results": "#a463f2",
    "temporary": "#ff725c",
}
_COLOURS = dict(zip(KINDS, ("#4269d0", "#ff725c", "#3ca951"), strict=True))
_MOST_OPERATORS = 24


def page(report: CompileReport) -> str:
    """The whole page."""
    return render_page(
        "vlmgen.compile",
        "page.html.j2",
        report=report,
        memory=_memory(report),
        roofline=_roofline(report.graphs),
        census=list(_census(report.graphs)),
    )


def _memory(report: CompileReport) -> dict[str, Any]:
    """Stacked bars against a core's memory, one rank's or each of several; the share is written."""
    costs = [(graph.graph.name, graph.built.cost) for graph in report.graphs if graph.built.cost]
    costs += [(f"{own.graph.name} on {own.layout.name}", own.cost) for own in report.ranks]
    largest = max((cost.memory for _, cost in costs), default=1)
    scale = CORE_BYTES if largest > CORE_BYTES / 50 else largest
    rows = [
        {
            "name": name,
            "parts": [
                {
                    "colour": colour,
                    "percent": 100 * getattr(cost, part) / scale,
                    "title": f"{part} {getattr(cost, part):,} bytes",
                }
                for part, colour in _PARTS.items()
            ],
            "share": f"{cost.memory / 2**20:,.1f} MiB, {cost.memory / CORE_BYTES:.3%} of 24 GiB",
        }
        for name, cost in costs
    ]
    full = "24 GiB" if scale == CORE_BYTES else f"{largest / 2**20:,.1f} MiB"
    return {"full": full, "colours": _PARTS, "rows": rows}


def _roofline(graphs: Sequence[GraphReport]) -> dict[str, Any]:
    """FLOPs against FLOPs per byte, on logarithmic axes, below what a core can do."""
    width, height, left, bottom, top = 720, 350, 70, 40, 15
    low_x, high_x, low_y, high_y = -2, 4, 9, 15

    def place(intensity: float, flops: float) -> tuple[float, float]:
        x = (math.log10(max(intensity, 10.0**low_x)) - low_x) / (high_x - low_x)
        y = (math.log10(max(flops, 10.0**low_y)) - low_y) / (high_y - low_y)
        return left + x * (width - left - 20), (height - bottom - top) * (1 - y) + top

    ridge = CORE_FLOPS / CORE_BANDWIDTH
    roof = [
        place(10**low_x, CORE_BANDWIDTH * 10**low_x),
        place(ridge, CORE_FLOPS),
        place(10**high_x, CORE_FLOPS),
    ]
    marks = [
        {
            "x": place(10**exponent, 1)[0],
            "y": height - 18,
            "anchor": "middle",
            "text": f"1e{exponent}",
        }
        for exponent in range(low_x, high_x + 1)
    ]
    marks += [
        {"x": left - 8, "y": place(1, 10**exponent)[1], "anchor": "end", "text": f"1e{exponent}"}
        for exponent in range(low_y, high_y + 1)
    ]
    dots = []
    for own in graphs:
        cost = own.built.cost
        if cost is None or not cost.bytes:
            continue
        reachable = min(CORE_FLOPS, cost.intensity * CORE_BANDWIDTH)
        x, y = place(cost.intensity, reachable)
        text = f"{cost.intensity:.3g} FLOP per byte, at most {reachable:.3g} FLOP/s"
        title = f"{own.graph.name}: {text}"
        dots.append({"x": x, "y": y, "colour": _COLOURS[own.graph.kind], "title": title})
    core = (
        f"One logical core of Trainium2: {CORE_FLOPS / 1e12:.0f} TFLOP/s in bfloat16, "
        f"{CORE_BANDWIDTH / 1e9:.0f} GB/s."
    )
    return {
        "width": width, "height": height, "core": core, "colours": _COLOURS, "roof": roof,
        "marks": marks, "dots": dots,
    }  # fmt: skip


def _census(graphs: Sequence[GraphReport]) -> Iterator[dict[str, Any]]:
    """Bars of the operators of one graph of each kind, the first of its kind."""
    for kind in KINDS:
        first = next((g for g in graphs if g.graph.kind == kind and g.built.operators), None)
        if first is None:
            continue
        counts = Counter(first.built.operators).most_common(_MOST_OPERATORS)
        most = counts[0][1]
        rows = [
            {
                "name": name,
                "count": count,
                "colour": _COLOURS[kind],
                "percent": 100 * count / most,
                "title": f"{count} {name}",
            }
            for name, count in counts
        ]
        yield {"name": first.graph.name, "rows": rows}
