"""One live server, one tiny checkpoint and one Hugging Face model for all tests here."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from tests.serve.prompts import VIDEO_OPTIONS
from vlmgen.serve.launch import Server, package_server

ROOT = Path(__file__).parents[2]
MAX_MODEL_LEN = 1024
JSON_WRITER = {"backend": "xgrammar", "disable_any_whitespace": True}
CONFIG = {
    "neuron_config": {"num_batched_tokens_buckets": [256, 1024], "num_seqs_buckets": [1, 8]},
    "vision_neuron_config": {
        "vision_attention_block_size": 256,
        "num_vision_tokens_buckets": [256, 1024],
    },
}
OPTIONS = (
    "--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", "8",
    "--served-model-name", "tiny", "--media-io-kwargs", json.dumps(VIDEO_OPTIONS),
    # A random model would fill the room between the tokens of a JSON text with spaces.
    "--structured-outputs-config", json.dumps(JSON_WRITER),
    "--additional-config",
)  # fmt: skip


os.environ["VLLM_SERVER_DEV_MODE"] = "1"  # for `Server.worker_state`


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    """Two processes that each spin on every core wait for one another most of the time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def package() -> Path:
    return ROOT / "generated" / "qwen3_vl"


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    from vlmgen.tiny.build import build_tiny

    return build_tiny("qwen3_vl", tmp_path_factory.mktemp("serve") / "tiny")


@pytest.fixture(scope="session")
def server(package, checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    with package_server(package, checkpoint, folder, *OPTIONS, json.dumps(CONFIG)) as running:
        yield running


@pytest.fixture
def client(server: Server):
    return server.client()


@pytest.fixture(scope="session")
def reference(checkpoint):
    from vlmgen.spec.load import load_spec
    from vlmgen.validate.reference import Reference

    return Reference(checkpoint, load_spec(ROOT / "specs" / "qwen3_vl.yaml"))
