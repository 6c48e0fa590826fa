"""Completion of the shell, as `vlmgen --install-completion` sets it up."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def vlmgen(*arguments: str, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, "-m", "vlmgen", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        timeout=60,
        check=True,
    )
    return result.stdout


def completed(line: str) -> list[str]:
    """What bash is offered for a line with the cursor at its end."""
    words = line.split(" ")
    return vlmgen(
        _VLMGEN_COMPLETE="complete_bash", COMP_WORDS=line, COMP_CWORD=str(len(words) - 1)
    ).split()


def test_commands() -> None:
    assert completed("vlmgen mi") == ["migrate"]
    assert {"compare", "explain", "new", "watch"} <= set(completed("vlmgen "))


def test_options() -> None:
    assert "--origin" in completed("vlmgen show --or")
    assert "--format" in completed("vlmgen check --")


def test_codes() -> None:
    assert completed("vlmgen explain VG10")[:3] == ["VG101", "VG102", "VG103"]
    assert completed("vlmgen explain vg10")[:3] == ["vg101", "vg102", "vg103"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_every_shell(shell: str) -> None:
    assert "VLMGEN_COMPLETE" in vlmgen(_VLMGEN_COMPLETE=f"source_{shell}")


def test_bash_completes_with_the_script(tmp_path: Path) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash on this machine")
    program = tmp_path / "vlmgen"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m vlmgen "$@"\n')
    program.chmod(0o755)
    script = vlmgen(_VLMGEN_COMPLETE="source_bash")
    line = (
        "COMP_WORDS=(vlmgen compa); COMP_CWORD=1; _vlmgen_completion vlmgen; "
        'echo "${COMPREPLY[@]}"'
    )
    result = subprocess.run(
        [bash, "-c", f"{script}\n{line}"],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
        },
        timeout=60,
        check=True,
    )
    assert result.stdout.split() == ["compare"]


def test_installing_writes_into_the_start_up_file_of_the_shell(tmp_path: Path) -> None:
    """In a home of its own, from a bash, as the documentation says."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash on this machine")
    command = f'"{sys.executable}" -m vlmgen --install-completion; exit $?'
    result = subprocess.run(
        [bash, "-c", command],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)},
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    written = "\n".join(p.read_text() for p in tmp_path.rglob("*") if p.is_file())
    assert "_vlmgen_completion" in written
