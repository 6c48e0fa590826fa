"""The wheel alone, in an empty environment, generates the committed packages."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest


def run(*command: str | Path, cwd: Path) -> str:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VLLM_"))}
    result = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


def files(directory: Path) -> dict[str, bytes]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and not {"__pycache__", ".pytest_cache"} & set(path.parts)
    }


@pytest.fixture(scope="module")
def wheel(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the tracked parts of the repository."""
    source = tmp_path_factory.mktemp("source")
    for name in ("vlmgen", "templates", "specs"):
        shutil.copytree(
            repository / name, source / name, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(repository / name, source / name)
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", cwd=source)
    (built,) = (source / "dist").glob("*.whl")
    return built


def test_wheel_holds_templates_specs_and_data(wheel: Path, repository: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for top, inside in (("templates", "vlmgen/_templates"), ("specs", "vlmgen/_specs")):
        for path in (repository / top).rglob("*"):
            if path.is_file():
                assert f"{inside}/{path.relative_to(repository / top).as_posix()}" in names
    for path in (repository / "vlmgen").rglob("*"):
        if path.is_file() and path.suffix in (".py", ".json", ".typed"):
            assert path.relative_to(repository).as_posix() in names
    assert {name.split("/")[0] for name in names} == {"vlmgen", "vlmgen-0.1.0.dist-info"}


@pytest.mark.slow
def test_wheel_generates_in_an_empty_environment(
    wheel: Path, repository: Path, tmp_path: Path, offline_install: list[str]
) -> None:
    run(sys.executable, "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    run(python, "-m", "pip", "install", *offline_install, wheel, cwd=tmp_path)
    for module in ("torch", "transformers"):
        absent = f"import importlib.util; assert importlib.util.find_spec({module!r}) is None"
        run(python, "-c", absent, cwd=tmp_path)
    specs = tmp_path / "specs"
    (specs / "results").mkdir(parents=True)
    for spec in sorted((repository / "specs").glob("*.yaml")):
        shutil.copy(spec, specs)
        results = repository / "specs" / "results" / f"{spec.stem}.json"
        if results.is_file():
            shutil.copy(results, specs / "results")
        named = f"specs/{spec.name}"
        run(tmp_path / "venv" / "bin" / "vlmgen", "new", named, cwd=tmp_path)
        generated = files(tmp_path / "generated" / spec.stem)
        assert generated == files(repository / "generated" / spec.stem)
        again = run(python, "-m", "vlmgen", "new", named, cwd=tmp_path)
        assert "unchanged" in again
