"""How long `vlmgen new specs/qwen3_vl.yaml` takes as a whole process, and what it imports.

The peers are processes of the same interpreter in the same turns: one that does nothing, and one
that only imports the libraries that generation needs.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from measure import ProcessCost, Row, finish, median, run_process
from package import ROOT

REPETITIONS = 7
NEW_LIMIT, UNCHANGED_LIMIT = 2.0, 0.8  # seconds
LIBRARIES = "import jinja2, pydantic, yaml, black"
HEAVY = ("torch", "transformers", "vllm")
MODULES = ("vlmgen", "vlmgen.cli")


def main() -> None:
    """Measure and print."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory(prefix="vlmgen-bench-") as folder:
        costs = measure(Path(folder), environment)
    imports, nothing = costs["libraries"], costs["nothing"]
    rows = []
    for name, what, limit in (
        ("new", "vlmgen new specs/qwen3_vl.yaml", NEW_LIMIT),
        ("unchanged", "the same again, nothing changed", UNCHANGED_LIMIT),
    ):
        wall, library_wall = wall_of(costs[name]), wall_of(imports)
        rows.append(
            Row(
                what,
                wall,
                "s",
                LIBRARIES,
                library_wall,
                wall / library_wall,
                f"<= {limit} s",
                wall <= limit,
            )
        )
        cpu, idle_cpu = cpu_of(costs[name]), cpu_of(nothing)
        rows.append(Row("  its user + system time", cpu, "s", "pass", idle_cpu, cpu / idle_cpu))
    rows.append(
        Row(LIBRARIES, wall_of(imports), "s", "pass", wall_of(nothing))  # the floor of both figures
    )
    for module in MODULES:
        found = heavy_imports(module, environment)
        rows.append(
            Row(f"import {module}: heavy modules", len(found), "", bound="none", ok=not found)
        )
    fastest = {name: min(cost.wall for cost in costs[name]) for name in ("new", "unchanged")}
    finish(
        "bench_generate: a whole process, median wall clock",
        rows,
        [
            f"{REPETITIONS} turns after one warm-up, each: new, unchanged, libraries, nothing",
            f"fastest turn: new {fastest['new']:.2f} s, unchanged {fastest['unchanged']:.2f} s",
            f"heavy modules: {', '.join(HEAVY)}",
        ],
    )


def measure(folder: Path, environment: dict[str, str]) -> dict[str, list[ProcessCost]]:
    """Costs of every kind of process; `new` writes into a fresh directory each time."""
    generate = [sys.executable, "-m", "vlmgen", "new", str(ROOT / "specs" / "qwen3_vl.yaml")]
    costs: dict[str, list[ProcessCost]] = {}
    for turn in itertools.count():
        target = folder / f"turn{turn}" / "qwen3_vl"
        commands = {
            "new": [*generate, "--out", str(target)],
            "unchanged": [*generate, "--out", str(target)],
            "libraries": [sys.executable, "-c", LIBRARIES],
            "nothing": [sys.executable, "-c", "pass"],
        }
        for name, command in commands.items():
            cost = run_process(command, environment)
            if turn:
                costs.setdefault(name, []).append(cost)
        if turn == REPETITIONS:
            return costs


def wall_of(costs: list[ProcessCost]) -> float:
    """Median wall-clock seconds."""
    return median(cost.wall for cost in costs)


def cpu_of(costs: list[ProcessCost]) -> float:
    """Median user and system seconds."""
    return median(cost.cpu for cost in costs)


def heavy_imports(module: str, environment: dict[str, str]) -> list[str]:
    """Those of `HEAVY` that a fresh interpreter holds after importing `module`."""
    code = f"import sys, {module}; print(*(set({HEAVY!r}) & set(sys.modules)))"
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    return run.stdout.split()


if __name__ == "__main__":
    main()
