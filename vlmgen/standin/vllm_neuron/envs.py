"""Environment variables of the plugin, read when they are asked for.

The names ``VLLM_NEURON_CPU_MODE`` and the like are attributes of this module; reading one reads
the environment.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

__all__ = ["get_compile_backend_name"]

_TRUE_SPELLINGS = frozenset({"1", "true", "yes", "on"})


def _flag(name: str) -> bool:
    return os.environ.get(name, "").strip().lower() in _TRUE_SPELLINGS


def _readers() -> dict[str, Callable[[], Any]]:
    flags = (
        "VLLM_NEURON_CPU_MODE",
        "VLLM_NEURON_CPU_COMPILE",
        "VLLM_NEURON_DISABLE_NKI_KERNELS",
        "VLLM_NEURON_DEBUG_MODE",
        "VLLM_NEURON_SKIP_PREFILL_WARMUP",
        "VLLM_NEURON_SKIP_DECODE_WARMUP",
        "VLLM_NEURON_SKIP_PREFILL_DECODE_WARMUP",
        "VLLM_NEURON_SKIP_ENCODER_WARMUP",
        "VLLM_NEURON_DISABLE_WARMUP_COMPILE",
        "NKI_SIMULATOR",
    )
    readers: dict[str, Callable[[], Any]] = {name: partial(_flag, name) for name in flags}
    readers["VLLM_NEURON_LOG_LEVEL"] = lambda: os.environ.get("VLLM_NEURON_LOG_LEVEL", "INFO")
    readers["VLLM_NEURON_BACKEND"] = lambda: os.environ.get("VLLM_NEURON_BACKEND") or None
    readers["VLLM_NEURON_BARRIER_TIMEOUT"] = lambda: int(
        os.environ.get("VLLM_NEURON_BARRIER_TIMEOUT", "3600")
    )
    return readers


_READERS = _readers()


def __getattr__(name: str) -> Any:
    if name in _READERS:
        return _READERS[name]()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_READERS])


def get_compile_backend_name() -> str:
    """Return the name of the ``torch.compile`` backend.

    The plugin names its compiler here (``neuron_libtorch`` or ``neuron``). The stand-in has no
    compiler: ``eager`` traces the whole graph, which is what shows a graph break, and runs it as
    it is.
    """
    return "eager"
