"""A generated Qwen3-VL package, a tiny checkpoint of it, and one rank of process groups."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from vlmgen.standin import ranks

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = REPOSITORY / "generated" / "qwen3_vl"
if str(PACKAGE) not in sys.path:
    sys.path.insert(0, str(PACKAGE))


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    """Process groups of one rank; those of an earlier test module are used where they stand."""
    if torch.distributed.is_initialized():
        yield
        return
    with ranks.one_rank():
        yield


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint with tokenizer and processor; tests copy it before they change it."""
    from vlmgen.tiny.build import build_tiny

    return build_tiny("qwen3_vl", tmp_path_factory.mktemp("tiny") / "qwen3_vl")
