"""Tiny checkpoints as their headers, built once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from vlmgen.tiny.family import family_names, load_family

from .checkpoints import Headers, read_headers


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Headers]:
    """Headers of a tiny family in one of its layouts, or `as_saved`, or its published one."""
    pytest.importorskip("torch")
    from vlmgen.tiny.build import build_tiny

    made: dict[tuple[str, str], Headers] = {}

    def headers(family: str, layout: str = "") -> Headers:
        assert family in family_names()
        layout = layout or load_family(family)["published_layout"]
        if (family, layout) not in made:
            folder = tmp_path_factory.mktemp("tiny") / family
            saved = layout == "as_saved"
            build_tiny(family, folder, layout=None if saved else layout, as_saved=saved)
            made[family, layout] = read_headers(folder)
        return made[family, layout].copy()

    return headers


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a test writes its checkpoint."""
    return tmp_path / "My-VLM-7B"
