"""Results of a validation: rows for a table, JSON, and a page to look at."""

from __future__ import annotations

import html
import json
import math
from dataclasses import asdict, dataclass, field
from typing import Any

from vlmgen.validate.compare import BINS_PER_DECADE, DECADES, LOWEST_DECADE, Comparison


@dataclass(frozen=True)
class Row:
    """One check.

    Args:
        group: Name of the group of checks.
        check: Name of the check in it.
        inputs: How many inputs were compared.
        value: What was measured, the worst of all inputs; None if it could not be.
        limit: Largest value that passes; None if there is none.
        passed: Whether it passed.
        detail: What a person should know besides.
    """

    group: str
    check: str
    inputs: int
    value: float | None
    limit: float | None
    passed: bool
    detail: str = ""


@dataclass
class Report:
    """Everything that one validation found.

    Args:
        title: Name of the model family.
        facts: What was run on what, for the head of the page.
        rows: The checks, in order.
        errors: (group, check) -> spread of the errors, where there is one.
    """

    title: str
    facts: dict[str, str] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    errors: dict[tuple[str, str], Comparison] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether every check passed, and there was at least one."""
        return bool(self.rows) and all(row.passed for row in self.rows)

    def compared(
        self, group: str, check: str, comparison: Comparison, limit: float, detail: str = ""
    ) -> None:
        """Add a row for a comparison; it passes when the worst error is within the limit."""
        self.errors[group, check] = comparison
        where = f"worst: {comparison.worst_input}" if comparison.worst else "no difference"
        self.rows.append(
            Row(
                group,
                check,
                comparison.inputs,
                comparison.worst,
                limit,
                comparison.inputs > 0 and comparison.worst <= limit,
                "; ".join(part for part in (detail, where) if part),
            )
        )

    def add(self, other: Report) -> None:
        """Add the rows of another report."""
        self.rows += other.rows
        self.errors.update(other.errors)

    def crashed(self, group: str, check: str, error: BaseException) -> None:
        """Add a failed row for an exception."""
        message = " ".join(str(error).split())[:300]
        self.rows.append(
            Row(group, check, 0, None, None, False, f"{type(error).__name__}: {message}")
        )

    def to_json(self) -> str:
        """Facts, rows and error histograms; numbers that JSON lacks become null."""
        rows: list[dict[str, Any]] = []
        for row in self.rows:
            entry = asdict(row)
            if row.value is not None and not math.isfinite(row.value):
                entry["value"] = None
            if (row.group, row.check) in self.errors:
                spread = self.errors[row.group, row.check]
                entry["histogram"] = {"zero": spread.zero, "bins": spread.bins}
            rows.append(entry)
        data = {
            "title": self.title,
            "passed": self.passed,
            "facts": self.facts,
            "histogram_bins": {
                "from": 10.0**LOWEST_DECADE,
                "per_decade": BINS_PER_DECADE,
                "count": DECADES * BINS_PER_DECADE,
            },
            "rows": rows,
        }
        return json.dumps(data, indent=2, ensure_ascii=False) + "\n"

    def to_html(self) -> str:
        """One page without any other file: verdict, facts, table, and a histogram per row."""
        failed = [row for row in self.rows if not row.passed]
        verdict = (
            f"all {len(self.rows)} checks passed"
            if self.passed
            else f"{len(failed)} of {len(self.rows)} checks failed"
        )
        facts = "".join(
            f"<dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd>"
            for name, value in self.facts.items()
        )
        bodies, previous = [], None
        for row in self.rows:
            if row.group != previous:
                bodies.append(
                    f'<tr class="group"><th colspan="6">{html.escape(row.group)}</th></tr>'
                )
                previous = row.group
            bodies.append(self._table_row(row))
        state = "ok" if self.passed else "bad"
        return _PAGE.format(
            title=html.escape(self.title),
            style=_STYLE,
            verdict=f'<p class="verdict {state}">{verdict}</p>',
            facts=facts,
            axis=_axis(),
            rows="\n".join(bodies),
        )

    def _table_row(self, row: Row) -> str:
        spread = self.errors.get((row.group, row.check))
        picture = "" if spread is None else histogram(spread, row.limit)
        state = "ok" if row.passed else "bad"
        cells = (
            f"<td>{html.escape(row.check)}<small>{html.escape(row.detail)}</small></td>",
            f'<td class="number">{row.inputs}</td>',
            f'<td class="number">{_number(row.value)}</td>',
            f'<td class="number">{_number(row.limit)}</td>',
            f'<td class="{state}">{"passed" if row.passed else "FAILED"}</td>',
            f"<td>{picture}</td>",
        )
        return f'<tr class="{state}">{"".join(cells)}</tr>'


_WIDTH, _HEIGHT, _ZERO = 288, 40, 20  # pixels: axis, bars, and the bar for "no error"


def histogram(spread: Comparison, limit: float | None) -> str:
    """Errors of all elements on a logarithmic axis as inline SVG; the limit is a line.

    The bar left of the axis counts elements without an error. Heights are square roots of counts,
    so that the few large errors, which are what matters, can be seen.
    """
    step = _WIDTH / len(spread.bins)
    top = math.sqrt(max([spread.zero, *spread.bins, 1]))
    bars = [_bar(0, _ZERO - 6, spread.zero, top, "zero", f"{spread.zero} without an error")]
    for index, count in enumerate(spread.bins):
        low = LOWEST_DECADE + index / BINS_PER_DECADE
        title = f"{count} from {10**low:.1e} to {10 ** (low + 1 / BINS_PER_DECADE):.1e}"
        bars.append(_bar(_ZERO + index * step, step - 0.5, count, top, "error", title))
    line = ""
    if limit:
        x = _ZERO + (math.log10(limit) - LOWEST_DECADE) * BINS_PER_DECADE * step
        line = f'<line x1="{x:.1f}" y1="0" x2="{x:.1f}" y2="{_HEIGHT}"/>'
    size = f'width="{_ZERO + _WIDTH}" height="{_HEIGHT}"'
    return f'<svg {size} role="img">{"".join(bars)}{line}</svg>'


def _bar(x: float, width: float, count: int, top: float, kind: str, title: str) -> str:
    if not count:
        return ""
    height = max(1.0, math.sqrt(count) / top * _HEIGHT)
    return (
        f'<rect class="{kind}" x="{x:.1f}" y="{_HEIGHT - height:.1f}" width="{width:.1f}" '
        f'height="{height:.1f}"><title>{title}</title></rect>'
    )


def _axis() -> str:
    """Labels of the error axis, for the head of the column."""
    step = _WIDTH / DECADES
    labels = "".join(
        f'<text x="{_ZERO + i * step:.1f}" y="12">{f"1e{LOWEST_DECADE + i}" if i < DECADES else 1}'
        "</text>"
        for i in range(0, DECADES, 2)
    )
    return f'<svg width="{_ZERO + _WIDTH}" height="16"><text x="0" y="12">0</text>{labels}</svg>'


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.2e}" if value and abs(value) < 0.01 else f"{value:.4g}"


_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 64rem; padding: 0 1rem;
  color: #1d2330; background: #fff; }
h1 { font-size: 1.5rem; margin: 0 0 .5rem; }
.verdict { font-size: 1.1rem; font-weight: 600; }
.ok { color: #17693a; } .bad { color: #b3261e; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; color: #505868; }
dt { font-weight: 600; } dd { margin: 0; }
table { border-collapse: collapse; width: 100%; margin-top: 1rem; }
th { text-align: left; font-weight: 600; vertical-align: bottom; }
thead th { border-bottom: 2px solid #1d2330; padding: .3rem .5rem; }
tr.group th { padding: 1.1rem .5rem .25rem; font-size: 1.05rem; }
td { border-top: 1px solid #dde1e8; padding: .3rem .5rem; vertical-align: top; }
tr td { color: #1d2330; } td.ok { color: #17693a; } td.bad { color: #b3261e; font-weight: 700; }
tr.bad { background: #fdeceb; }
td small { display: block; color: #6a7282; }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
svg { display: block; overflow: visible; } svg text { font-size: 10px; fill: #6a7282; }
rect.error { fill: #3f6fb5; } rect.zero { fill: #b9c3d3; }
line { stroke: #b3261e; stroke-width: 1.5; }
"""

_PAGE = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><title>Validation of {title}</title><style>{style}</style></head>
<body>
<h1>Validation of {title}</h1>
{verdict}
<dl>{facts}</dl>
<p>Errors are relative to the largest value of the reference. Each histogram counts all elements
of all inputs by their error, on a logarithmic axis; heights are square roots of counts, the grey
bar counts elements without an error, and the red line is the limit.</p>
<table>
<thead><tr><th>check</th><th class="number">inputs</th><th class="number">worst</th>
<th class="number">limit</th><th>result</th><th>errors{axis}</th></tr></thead>
<tbody>
{rows}
</tbody>
</table>
</body>
</html>
"""
