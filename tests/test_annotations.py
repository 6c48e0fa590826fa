"""`--format github`: faults as workflow commands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from vlmgen.annotations import annotation, problem_annotation
from vlmgen.check.finding import Finding
from vlmgen.cli import app
from vlmgen.errors import Problem

ROOT = Path(__file__).resolve().parents[1]
runner = CliRunner()


def read(line: str) -> tuple[dict[str, str], str]:
    """Properties and message, as the runner of GitHub Actions reads a line."""
    found = re.fullmatch(r"::error ([^\r\n]*?)::([^\r\n]*)", line)
    assert found, line

    def unescaped(text: str, *more: tuple[str, str]) -> str:
        for code, character in (*more, ("%0D", "\r"), ("%0A", "\n"), ("%25", "%")):
            text = text.replace(code, character)
        return text

    pairs = (pair.split("=", 1) for pair in found[1].split(","))
    properties = {k: unescaped(v, ("%3A", ":"), ("%2C", ",")) for k, v in pairs}
    return properties, unescaped(found[2])


def test_an_annotation() -> None:
    assert annotation("a/b.py", 7, 3, "VG103", "one\ntwo: 50 %") == (
        "::error file=a/b.py,line=7,col=3,title=VG103::one%0Atwo: 50 %25"
    )
    assert annotation("a,b.py", 0, 0, "VG007", "x") == "::error file=a%2Cb.py,title=VG007::x"


def test_files_below_the_working_directory_are_relative_to_it(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "file=specs/x.yaml," in annotation(str(tmp_path / "specs/x.yaml"), 1, 0, "t", "m")
    assert "file=/elsewhere/x.yaml," in annotation("/elsewhere/x.yaml", 1, 0, "t", "m")


TEXT = st.text(st.characters(codec="utf-8"), max_size=40)


@given(TEXT, TEXT, TEXT, TEXT)
def test_any_text_is_one_line_and_reads_back(
    message: str, rule: str, legal: str, hint: str
) -> None:
    problem = Problem("x.yaml", 4, 2, message, rule=rule, legal=legal, hint=hint, code="VG514")
    properties, said = read(problem_annotation(problem))
    assert properties == {"file": "x.yaml", "line": "4", "col": "2", "title": "VG514"}
    notes = [("rule", rule), ("legal", legal), ("hint", hint)]
    assert said == "\n".join([message, *(f"{label}: {text}" for label, text in notes if text)])


# --- commands -----------------------------------------------------------------------------------


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    text = (ROOT / "specs" / "qwen3_vl.yaml").read_text("utf-8")
    (tmp_path / "broken.yaml").write_text(text.replace("  hidden_size: 4096", "  hiden_size: 1"))
    monkeypatch.chdir(tmp_path)
    return "broken.yaml"


@pytest.mark.parametrize(
    "arguments",
    [["new"], ["show"], ["show", "--origin"], ["parallel"], ["check"], ["compare", "broken.yaml"]],
)
def test_problems_of_a_spec(broken: str, arguments: list[str]) -> None:
    result = runner.invoke(app, [*arguments, broken, "--format", "github"])
    assert result.exit_code == 3
    properties, said = read(result.stdout.splitlines()[0])
    assert properties["file"] == "broken.yaml" and properties["title"] == "VG511"
    assert properties["col"] == "3" and said.startswith("unknown key 'hiden_size' in text")
    assert "1 problem in the spec" in result.stderr  # the log keeps the readable form


def test_a_newer_spec_in_migrate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.yaml").write_text("vlmgen: 9\n")
    result = runner.invoke(app, ["migrate", "x.yaml", "--format", "github"])
    assert result.stdout.startswith("::error file=x.yaml,line=1,col=9,title=VG542::")


def test_findings_of_check(monkeypatch: pytest.MonkeyPatch) -> None:
    finding = Finding("pkg/model.py", 7, "VG103", "unknown keyword", "remove it")
    monkeypatch.setattr("vlmgen.check.run.run_checks", lambda *a, **k: [finding])
    result = runner.invoke(app, ["check", "pkg", "--format", "github"])
    assert (result.exit_code, result.stderr) == (4, "1 finding\n")
    properties, said = read(result.stdout.rstrip("\n"))
    assert properties == {"file": "pkg/model.py", "line": "7", "title": "VG103"}
    assert said == f"unknown keyword ({finding.rule}) -> remove it"


def test_drift_of_check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from vlmgen.render.drift import Difference

    difference = Difference("q/x.py", "changed", "generated/q/x.py: differs", "-a\n+b\n")
    monkeypatch.setattr(
        "vlmgen.render.drift.drift", lambda specs, generated, templates: [difference]
    )
    monkeypatch.setattr("vlmgen.check.run.run_checks", lambda *a, **k: [])
    monkeypatch.chdir(tmp_path)
    result = runner.invoke(app, ["check", "--all", "--format", "github"])
    assert result.exit_code == 4
    properties, said = read(result.stdout.rstrip("\n"))
    assert properties == {"file": "generated/q/x.py", "title": "VG007"}
    assert said == "generated/q/x.py: differs"


def test_diff(monkeypatch: pytest.MonkeyPatch) -> None:
    from vlmgen.render.attribution import Cause, Hunk
    from vlmgen.render.difference import FileChange, PackageDifference

    template = (Cause("template", "package/x.py.j2"),)
    found = [
        PackageDifference(Path("generated/same"), Path("specs/same.yaml"), "same"),
        PackageDifference(Path("generated/gone"), Path("specs/gone.yaml"), "no package"),
        PackageDifference(
            Path("generated/q"),
            Path("specs/q.yaml"),
            "changed",
            template,
            (
                FileChange(
                    "x.py", "changed", template, (Hunk(12, 3, 12, 3, template, ("-a\n", "+b\n")),)
                ),
                FileChange("y.py", "new", (), (Hunk(0, 0, 1, 3, (), ("+a\n",) * 3),)),
            ),
        ),
    ]
    monkeypatch.setattr("vlmgen.render.difference.differences", lambda *a, **k: found)
    result = runner.invoke(app, ["diff", "--check", "--format", "github"])
    assert result.exit_code == 4
    gone, changed, new = map(read, result.stdout.splitlines())
    assert gone == ({"file": "generated/gone", "title": "VG007"}, "no package")
    assert changed[0] == {"file": "generated/q/x.py", "line": "12", "title": "VG007"}
    assert changed[1].endswith("(+1 -1): a template package/x.py.j2 (changed)")
    assert "line" not in new[0]


def test_without_faults_it_is_like_text() -> None:
    spec = str(ROOT / "specs" / "qwen3_vl.yaml")
    result = runner.invoke(app, ["check", spec, "--format", "github"])
    assert (result.exit_code, result.stdout) == (0, "checked 1 spec(s): no problems\n")
