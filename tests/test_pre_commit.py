"""The hooks of .pre-commit-hooks.yaml, run as pre-commit would run them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from vlmgen.cli import app
from vlmgen.reference import commands

ROOT = Path(__file__).resolve().parents[1]
HOOKS: dict[str, dict[str, Any]] = {
    hook["id"]: hook for hook in yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
}
runner = CliRunner()


def run(hook: str, *files: str):
    """The hook's command with the files that match, in the working directory."""
    found = HOOKS[hook]
    program, *arguments = shlex.split(found["entry"])
    assert program == "vlmgen"
    if found.get("pass_filenames", True):
        arguments += [file for file in files if re.search(found["files"], file)]
    return runner.invoke(app, arguments)


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_names_a_command_and_says_what_it_does(hook: str) -> None:
    found = HOOKS[hook]
    # What pre-commit asks of a hook; the package is installed into an environment of its own.
    assert {"id", "name", "entry", "language", "files"} <= set(found)
    assert found["language"] == "python" and found["description"].endswith(".")
    assert shlex.split(found["entry"])[1] in commands(app)
    assert f"`{hook}`" in (ROOT / "docs" / "editors-and-ci.md").read_text("utf-8")


def test_the_files_of_a_hook() -> None:
    pattern = HOOKS["vlmgen-spec"]["files"]
    assert re.search(pattern, "specs/qwen3_vl.yaml")
    for other in ("specs/results/qwen3_vl.json", "generated/q/spec.yaml", "docs/specs/x.yaml.md"):
        assert not re.search(pattern, other)


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "specs").mkdir()
    (tmp_path / "specs" / "a.yaml").write_bytes((ROOT / "specs" / "qwen3_vl.yaml").read_bytes())
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_specs_with_and_without_problems(workplace: Path) -> None:
    assert run("vlmgen-spec", "specs/a.yaml", "README.md").exit_code == 0
    text = (workplace / "specs/a.yaml").read_text("utf-8")
    (workplace / "specs/b.yaml").write_text(text.replace("depth: 27", "depth: none"))
    result = run("vlmgen-spec", "specs/a.yaml", "specs/b.yaml")
    assert result.exit_code == 3 and "specs/b.yaml:45:10: VG513" in result.stderr


def test_an_older_spec_is_rewritten_which_fails_the_commit(workplace: Path) -> None:
    """pre-commit fails a commit whose files a hook changed."""
    path = workplace / "specs" / "a.yaml"
    path.write_text(path.read_text("utf-8").replace("vlmgen: 1", "vlmgen: 0"))
    assert run("vlmgen-migrate", "specs/a.yaml").exit_code == 0
    assert "vlmgen: 1" in path.read_text("utf-8")


def test_drift(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vlmgen.check.run.run_checks", lambda *a, **k: [])
    result = run("vlmgen-drift")
    assert result.exit_code == 4 and "VG007 generated/qwen3_vl: " in result.stdout
