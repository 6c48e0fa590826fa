"""What every test of vlmgen relies on: CPU mode, no network, few threads."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# The same examples in every run, and no verdict by the clock of a busy machine.
settings.register_profile(
    "vlmgen", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("vlmgen")

os.environ.setdefault("VLLM_NEURON_CPU_MODE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "2")

from vlmgen import standin  # noqa: E402

standin.activate()


@pytest.fixture(scope="session")
def repository() -> Path:
    """The repository's top directory."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def qwen3_vl_spec(repository: Path) -> Path:
    """The spec of Qwen3-VL."""
    return repository / "specs" / "qwen3_vl.yaml"


@pytest.fixture(scope="session")
def offline_install() -> list[str]:
    """Arguments of `pip install` that take vlmgen's dependencies from wheels fetched at set-up."""
    wheelhouse = Path(sys.prefix) / "wheelhouse"
    if not wheelhouse.is_dir():
        pytest.skip("no wheels at hand; `make install` fetches them")
    return ["--quiet", "--no-index", "--find-links", str(wheelhouse)]
