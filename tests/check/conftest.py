"""Edited copies of the committed package, and tiny packages made of one snippet."""

from __future__ import annotations

import ast
import shutil
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from vlmgen.check.finding import Finding
from vlmgen.check.source import PackageSource, read_package


@pytest.fixture(scope="session")
def package(repository: Path) -> Path:
    """The committed Qwen3-VL package."""
    return repository / "generated" / "qwen3_vl"


@pytest.fixture
def edited(package: Path, tmp_path: Path) -> Callable[[str, str, str], Path]:
    """Copy the package and replace text in one module; the text must be there.

    The module is first written as `ast.unparse` writes it, one statement a line, so that the
    formatting of the templates does not matter here.
    """

    def edit(name: str, old: str, new: str) -> Path:
        root = tmp_path / "qwen3_vl"
        if not root.exists():
            shutil.copytree(package, root, ignore=shutil.ignore_patterns("__pycache__"))
        path = next(root.glob("vllm_neuron_*")) / name
        text = ast.unparse(ast.parse(path.read_text()))
        assert old in text, f"{name} does not contain {old!r}"
        path.write_text(text.replace(old, new))
        return root

    return edit


@pytest.fixture
def snippet(tmp_path: Path) -> Callable[..., PackageSource]:
    """A package whose model.py is a snippet, after the usual imports."""

    def make(code: str, **files: str) -> PackageSource:
        home = tmp_path / "package" / "vllm_neuron_tiny"
        home.mkdir(parents=True, exist_ok=True)
        head = (
            "import torch\nfrom torch import nn\nimport vllm_neuron.functional as NF\n"
            "import vllm_neuron.nn as neuron_nn\n\n"
        )
        files = {"__init__": "", "config": "", "factory": "", **files}
        for name, text in files.items():
            (home / f"{name}.py").write_text(textwrap.dedent(text))
        (home / "model.py").write_text(head + textwrap.dedent(code))
        return read_package(home.parent)

    return make


def codes(findings: list[Finding]) -> set[str]:
    """The codes of findings."""
    return {finding.code for finding in findings}
