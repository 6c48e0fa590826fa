"""Settings and fixtures of this package's tests; they run on a CPU."""

import importlib.util
import os
import sys
from pathlib import Path

os.environ.setdefault("VLLM_NEURON_CPU_MODE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

try:
    import vllm_neuron  # noqa: F401
except ImportError:  # no plugin here: vlmgen's CPU stand-in answers the import
    from vlmgen import standin

    standin.activate()

if importlib.util.find_spec("vllm_neuron_internvl") is None:  # a checkout that is not installed
    sys.path.insert(0, str(Path(__file__).parents[1]))

import pytest
import torch
import transformers
from vllm_neuron.parallel import neuron_parallel_state

from .support import build_package, build_reference, save_checkpoint, tiny_config


@pytest.fixture(scope="session", autouse=True)
def process_groups(tmp_path_factory):
    """Groups of one rank, which the package's modules ask for."""
    if not torch.distributed.is_initialized():
        meeting_point = tmp_path_factory.mktemp("groups") / "init"
        neuron_parallel_state.init_neuron_distributed_environment(
            world_size=1,
            rank=0,
            local_rank=0,
            distributed_init_method=f"file://{meeting_point}",
            backend="gloo",
            tensor_parallel_size=1,
        )


@pytest.fixture(scope="session")
def config() -> transformers.PretrainedConfig:
    return tiny_config()


@pytest.fixture(scope="session")
def reference(config):
    return build_reference(config)


@pytest.fixture(scope="session")
def checkpoint(reference, tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("checkpoint")
    save_checkpoint(reference, folder)
    return str(folder)


@pytest.fixture(scope="session")
def model(config, checkpoint):
    return build_package(config, checkpoint)


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


@pytest.fixture
def rng() -> torch.Generator:
    return torch.Generator().manual_seed(1)
