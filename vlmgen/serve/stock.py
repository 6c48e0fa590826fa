"""vLLM's own model class on vLLM's own CPU platform, to compare a package with."""

from __future__ import annotations

import sys
from pathlib import Path

from vlmgen.serve.launch import Server

# Every process of vLLM imports torchvision, whose operators may not load on this machine.
_START = """
import sys
from vlmgen.standin.torchvision_ops import TorchvisionFinder
from vlmgen.standin.vllm_metadata import VllmMetadataFinder
sys.meta_path.insert(0, TorchvisionFinder())
sys.meta_path.append(VllmMetadataFinder())
"""


def stock_server(checkpoint: Path, folder: Path, *options: str, **environment: str) -> Server:
    """`vllm serve` without package and stand-in, in float32.

    Args:
        checkpoint: Folder of a checkpoint.
        folder: For the log and caches.
        options: Further options of `vllm serve`.
        environment: Further variables.
    """
    hook = folder / "stock"
    hook.mkdir(parents=True, exist_ok=True)
    (hook / "sitecustomize.py").write_text(_START)
    command = [
        sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(checkpoint),
        "--host", "127.0.0.1", "--dtype", "float32", *options,
    ]  # fmt: skip
    stock = {
        "PYTHONPATH": str(hook),
        "VLLM_NEURON_CPU_MODE": "0",
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    return Server(command, folder, {**stock, **environment})
