"""Results of a validation: rows for a table, JSON, and a page to look at."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any

from vlmgen.pages import render_page
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
        pictures = {place: histogram(spread) for place, spread in self.errors.items()}
        return render_page(
            "vlmgen.validate",
            "report.html.j2",
            report=self,
            groups=[(group, list(rows)) for group, rows in groupby(self.rows, lambda r: r.group)],
            number=_number,
            pictures=pictures,
            limit_place=limit_place,
            axis=axis(),
            width=_ZERO + _WIDTH,
            height=_HEIGHT,
        )


_WIDTH, _HEIGHT, _ZERO = 288, 40, 20  # pixels: axis, bars, and the bar for "no error"


@dataclass(frozen=True)
class Bar:
    """One bar of a histogram, in pixels from the left and from the bottom."""

    kind: str
    x: float
    width: float
    height: float
    title: str


def histogram(spread: Comparison) -> list[Bar]:
    """Bars for the errors of all elements on a logarithmic axis.

    The bar left of the axis counts elements without an error. Heights are square roots of counts,
    so that the few large errors, which are what matters, can be seen.
    """
    step = _WIDTH / len(spread.bins)
    most = math.sqrt(max([spread.zero, *spread.bins, 1]))

    def bar(kind: str, x: float, width: float, count: int, title: str) -> Bar:
        height = max(1.0, math.sqrt(count) / most * _HEIGHT)
        return Bar(kind, x, width, height, f"{count} {title}")

    bars = [bar("zero", 0, _ZERO - 6, spread.zero, "without an error")] if spread.zero else []
    for index, count in enumerate(spread.bins):
        low = LOWEST_DECADE + index / BINS_PER_DECADE
        title = f"from {10**low:.1e} to {10 ** (low + 1 / BINS_PER_DECADE):.1e}"
        if count:
            bars.append(bar("error", _ZERO + index * step, step - 0.5, count, title))
    return bars


def limit_place(limit: float) -> float:
    """Where a limit is on the axis of a histogram, in pixels."""
    return _ZERO + (math.log10(limit) - LOWEST_DECADE) * _WIDTH / DECADES


def axis() -> list[tuple[float, str]]:
    """Places and labels of the axis of a histogram, in pixels."""
    labels = [
        (_ZERO + i * _WIDTH / DECADES, f"1e{LOWEST_DECADE + i}" if i < DECADES else "1")
        for i in range(0, DECADES, 2)
    ]
    return [(0.0, "0"), *labels]


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.2e}" if value and abs(value) < 0.01 else f"{value:.4g}"
