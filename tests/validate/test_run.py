"""The whole validation of the committed package, as the command runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vlmgen.cli import app
from vlmgen.validate.run import GROUPS


@pytest.mark.slow
def test_the_package_equals_hugging_face(repository: Path, tmp_path: Path) -> None:
    out, page = tmp_path / "report.json", tmp_path / "report.html"
    package = str(repository / "generated" / "qwen3_vl")
    arguments = ["validate", package, "--tiny", "--json", str(out), "--html", str(page)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    report = json.loads(out.read_text())
    rows = report["rows"]
    assert [row["group"] for row in rows if not row["passed"]] == []
    assert tuple(dict.fromkeys(row["group"] for row in rows)) == GROUPS
    for row in rows:
        fewest = 5 if row["group"] == "parallel" else 10
        assert row["inputs"] >= fewest, row
    mixtures = [row["inputs"] for row in rows if row["check"].startswith("mixtures")]
    assert mixtures == [250, 250]
    assert "checks passed" in page.read_text()
