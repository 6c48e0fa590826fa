"""The validation of every committed package, as the command runs it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from vlmgen.cli import app
from vlmgen.validate.run import GROUPS

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
