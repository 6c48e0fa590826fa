"""Byte-identical packages under every Python that vlmgen supports."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.render.test_generate import rendered_by

VERSIONS = ((3, 11), (3, 12), (3, 13))


def candidates(version: tuple[int, int]) -> Iterator[str]:
    """Interpreters that may be of a version: on the path, or side by side under pyenv."""
    name = f"python{version[0]}.{version[1]}"
    found = shutil.which(name)
    if found:
        yield found
    root = os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv"
    for directory in sorted(Path(root).glob(f"versions/{version[0]}.{version[1]}.*")):
        yield str(directory / "bin" / "python")


def interpreter(version: tuple[int, int]) -> str | None:
    """A working interpreter of a version, if this machine has one."""
    check = f"import ensurepip, sys, venv; sys.exit(sys.version_info[:2] != {version})"
    for candidate in candidates(version):
        try:
            run = subprocess.run([candidate, "-c", check], capture_output=True, timeout=30)
        except OSError:
            continue
        if run.returncode == 0:
            return candidate
    return None


@pytest.mark.slow
@pytest.mark.parametrize("version", [v for v in VERSIONS if v != sys.version_info[:2]])
def test_same_bytes(
    version: tuple[int, int],
    tmp_path: Path,
    repository: Path,
    qwen3_vl_spec: Path,
    offline_install: list[str],
) -> None:
    python = interpreter(version)
    if python is None:
        pytest.skip(f"this machine has no Python {version[0]}.{version[1]}")
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    subprocess.run([python, "-m", "venv", str(tmp_path / "venv")], check=True)
    other = str(tmp_path / "venv" / "bin" / "python")
    install = subprocess.run(
        [other, "-m", "pip", "install", *offline_install, *project["dependencies"]],
        capture_output=True,
        text=True,
    )
    assert install.returncode == 0, install.stderr
    here = rendered_by(sys.executable, qwen3_vl_spec, "1", repository)
    assert rendered_by(other, qwen3_vl_spec, "2", repository) == here
