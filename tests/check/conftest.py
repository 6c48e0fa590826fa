"""Tiny packages made of one snippet."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from vlmgen.check.finding import Finding
from vlmgen.check.source import PackageSource, read_package


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
