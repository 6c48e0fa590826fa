"""Timing and printing that the benchmarks share.

Candidates that are compared run in turn within one process, so that a busy machine slows them all;
the first turn warms up and is thrown away, and the median of the others counts. Every benchmark
takes `--json` and ends with exit code 1 when a bound is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median

__all__ = ["ProcessCost", "Row", "finish", "median", "run_process", "seconds_in_turn"]


@dataclass(frozen=True)
class Row:
    """One line of a benchmark's table.

    Args:
        what: What was measured.
        value: The figure, in `unit`.
        unit: `s`, `ms`, `MB`, a count, ...
        peer: What it is compared with; empty for none.
        peer_value: The peer's figure, in the same unit.
        ratio: The figure of merit: how many times the peer's figure is ours, or the reverse where
            `bound` is a floor; None for none.
        bound: What is asked for, in words; empty where nothing is.
        ok: Whether it is met; None where nothing is asked for.
    """

    what: str
    value: float
    unit: str
    peer: str = ""
    peer_value: float | None = None
    ratio: float | None = None
    bound: str = ""
    ok: bool | None = None

    @property
    def verdict(self) -> str:
        """`ok`, `MISSED`, or nothing where there is no bound."""
        return {None: "", True: "ok", False: "MISSED"}[self.ok]


def seconds_in_turn(
    candidates: Mapping[str, Callable[[], object]], repetitions: int
) -> dict[str, list[float]]:
    """Wall-clock seconds of every candidate, run in turn: a b c, a b c, ...

    Args:
        candidates: What to call, by name.
        repetitions: Turns that count; one more comes first and is thrown away.

    Returns:
        `repetitions` times per candidate.
    """
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for turn in range(repetitions + 1):
        for name, call in candidates.items():
            start = time.perf_counter()
            call()
            if turn:
                times[name].append(time.perf_counter() - start)
    return times


@dataclass(frozen=True)
class ProcessCost:
    """What a finished process took.

    Args:
        wall: Seconds from start to end.
        cpu: User and system seconds; a busy machine stretches `wall`, hardly `cpu`.
    """

    wall: float
    cpu: float


def run_process(command: Sequence[str], environment: Mapping[str, str]) -> ProcessCost:
    """Run a command to its end.

    Raises:
        RuntimeError: It failed; the message holds what it printed.
    """
    start = time.perf_counter()
    process = subprocess.Popen(
        command, env=dict(environment), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    printed = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    process.stdout.close()
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}:\n{printed}")
    return ProcessCost(wall, usage.ru_utime + usage.ru_stime)


def finish(title: str, rows: Sequence[Row], notes: Sequence[str] = ()) -> None:
    """Print the table, or JSON with `--json`, and leave with 1 if a bound is missed, else 0.

    Args:
        title: Heading; also the benchmark's name in the JSON.
        rows: The figures.
        notes: Lines below the table: threads, repetitions, what else a reader must know.
    """
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("--json", action="store_true", help="print JSON")
    as_json = parser.parse_args().json
    load = os.getloadavg()[0]
    machine = f"{os.cpu_count()} cores, load {load:.1f}, Python {platform.python_version()}"
    if as_json:
        report = {
            "benchmark": title,
            "machine": machine,
            "rows": [asdict(row) for row in rows],
            "notes": list(notes),
        }
        print(json.dumps(report, indent=2))
    else:
        print(f"{title}  ({machine})\n")
        print(table(rows))
        for note in notes:
            print(f"  {note}")
        print()
    sys.exit(1 if any(row.ok is False for row in rows) else 0)


def table(rows: Sequence[Row]) -> str:
    """The rows as aligned text."""
    lines = [("", "figure", "", "against", "its figure", "ratio", "asked for", "")]
    for row in rows:
        lines.append(
            (
                row.what,
                figure(row.value),
                row.unit,
                row.peer,
                "" if row.peer_value is None else figure(row.peer_value),
                "" if row.ratio is None else f"{row.ratio:.2f}",
                row.bound,
                row.verdict,
            )
        )
    numeric = (1, 4, 5)
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  "
        + "  ".join(
            cell.rjust(width) if i in numeric else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def figure(value: float) -> str:
    """Three or four significant digits; whole numbers with thousands marks."""
    if value == int(value) and abs(value) >= 1:
        return f"{int(value):,}"
    return f"{value:.1f}" if abs(value) >= 100 else f"{value:.3g}" if value else "0"
