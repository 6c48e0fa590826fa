"""Edited copies of the committed package."""

from __future__ import annotations

import ast
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from vlmgen.check.source import PackageSource, read_package


@pytest.fixture(scope="session")
def package(repository: Path) -> Path:
    """The committed Qwen3-VL package."""
    return repository / "generated" / "qwen3_vl"


@pytest.fixture
def edited(package: Path, tmp_path: Path) -> Callable[[str, str, str], PackageSource]:
    """The package with text replaced in one module; the text must be there.

    The module is first written as `ast.unparse` writes it, one statement a line, so that the
    formatting of the templates does not matter here.
    """

    def edit(name: str, old: str, new: str) -> PackageSource:
        root = tmp_path / "qwen3_vl"
        if not root.exists():
            shutil.copytree(package, root, ignore=shutil.ignore_patterns("__pycache__"))
        path = next(root.glob("vllm_neuron_*")) / name
        text = ast.unparse(ast.parse(path.read_text()))
        assert old in text, f"{name} does not contain {old!r}"
        path.write_text(text.replace(old, new))
        return read_package(root)

    return edit
