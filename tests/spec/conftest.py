"""The Qwen3-VL spec as text, and edits of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from vlmgen.errors import Problem, SpecError
from vlmgen.spec.load import load_spec_text
from vlmgen.spec.model import Spec

ROOT = Path(__file__).resolve().parents[2]
SPEC_PATH = ROOT / "specs" / "qwen3_vl.yaml"


@pytest.fixture(scope="session")
def spec_text() -> str:
    """The spec file's text."""
    return SPEC_PATH.read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def spec(spec_text: str) -> Spec:
    """The loaded spec."""
    return load_spec_text(spec_text, "qwen3_vl.yaml")


@pytest.fixture
def problems_of(spec_text: str) -> Callable[..., list[Problem]]:
    """Problems of the spec after (old, new) edits, each of a text that stands in the spec."""

    def edit(*edits: tuple[str, str]) -> list[Problem]:
        text = spec_text
        for old, new in edits:
            assert old in text, f"the spec no longer holds {old!r}"
            text = text.replace(old, new, 1)
        with pytest.raises(SpecError) as caught:
            load_spec_text(text, "x.yaml")
        return caught.value.problems

    return edit
