"""The validation of every committed package, as the command runs it."""

from __future__ import annotations

import json
import os
import time
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from vlmgen.cli import app
from vlmgen.validate.run import GROUPS, validate

ROOT = Path(__file__).resolve().parents[2]
FAMILIES = sorted(path.parent.name for path in (ROOT / "generated").glob("*/spec.yaml"))
# What takes seconds: modules, positions, and the logits of every prompt.
SHORT = ("vision modules", "text modules", "end to end/prefill logits", "positions")
# Places that count from 0 need no mixtures; some prompts only have a composed reference.
FEWEST = {"one axis": 2, "composed reference": 5}
WHOLE = [
    family if family == "qwen3_vl" else pytest.param(family, marks=pytest.mark.matrix)
    for family in FAMILIES
]


def rows_of(family: str, folder: Path, *options: str) -> list[dict[str, Any]]:
    """Rows of a validation that must pass, with its page beside."""
    out, page = folder / "report.json", folder / "report.html"
    arguments = ["validate", str(ROOT / "generated" / family), "--tiny", "--json", str(out)]
    result = CliRunner().invoke(app, [*arguments, "--html", str(page), *options])
    assert result.exit_code == 0, result.output
    assert "checks passed" in page.read_text()
    rows = json.loads(out.read_text())["rows"]
    assert [row for row in rows if not row["passed"]] == []
    return rows


@pytest.mark.parametrize("family", FAMILIES)
def test_modules_positions_and_logits_equal_hugging_face(family: str, tmp_path: Path) -> None:
    rows = rows_of(family, tmp_path, *(word for name in SHORT for word in ("--only", name)))
    assert {row["group"] for row in rows} == {name.partition("/")[0] for name in SHORT}
    assert len(rows) >= 12
    assert all(row["inputs"] > 0 for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("family", WHOLE)
def test_the_package_equals_hugging_face(family: str, tmp_path: Path) -> None:
    rows = rows_of(family, tmp_path)
    assert tuple(dict.fromkeys(row["group"] for row in rows)) == GROUPS
    for row in rows:
        fewest = 5 if row["group"] == "parallel" else FEWEST.get(row["check"], 10)
        assert row["inputs"] >= fewest, row
    mixtures = [row["inputs"] for row in rows if row["check"].startswith("mixtures")]
    one_axis = "one axis" in {row["check"] for row in rows}
    assert mixtures == ([] if one_axis else [250, 250])


def test_an_interrupted_validation_leaves_no_ranks_behind() -> None:
    """The ranks work beside the other groups; they end when the command is stopped amid those."""
    ranks: list[int] = []

    def interrupt(message: str) -> None:
        if message == "text modules":
            deadline = time.monotonic() + 120
            while not ranks and time.monotonic() < deadline:
                ranks.extend(child.pid for child in active_children() if child.name == "rank1")
                time.sleep(0.05)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        validate(
            ROOT / "generated" / "qwen3_vl",
            tiny=True,
            only=["text modules", "parallel"],
            progress=interrupt,
        )
    assert ranks
    assert not [child for child in active_children() if child.name.startswith("rank")]
    with pytest.raises(ProcessLookupError):
        os.kill(ranks[0], 0)
