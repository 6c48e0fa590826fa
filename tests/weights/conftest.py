"""Edited copies of the committed package, as the coverage proof reads them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from vlmgen.check.source import PackageSource, read_package


@pytest.fixture
def edited(edited: Callable[[str, str, str], Path]) -> Callable[[str, str, str], PackageSource]:
    """The package with text replaced in one module, read."""
    return lambda name, old, new: read_package(edited(name, old, new))
