"""Whether kernels run, and the context a compiled forward runs in."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from vllm_neuron import envs

__all__ = ["can_run_kernel", "model_forward_context"]


def can_run_kernel(device: torch.Tensor | torch.device | str = "") -> bool:
    """Tell whether a Neuron kernel can run; the stand-in's functions never have one.

    Args:
        device: a tensor, a device or a device string.

    Returns:
        The plugin's rule: False with ``VLLM_NEURON_DISABLE_NKI_KERNELS``; in CPU mode True only
        with ``NKI_SIMULATOR``; otherwise True for any device but the CPU.
    """
    if envs.VLLM_NEURON_DISABLE_NKI_KERNELS:
        return False
    if envs.VLLM_NEURON_CPU_MODE:
        return envs.NKI_SIMULATOR
    kind = device.device.type if isinstance(device, torch.Tensor) else str(device).split(":")[0]
    return kind != "cpu"


def model_forward_context(vllm_config: Any) -> AbstractContextManager[None]:
    """Return the context for one forward call of the runner.

    Args:
        vllm_config: vLLM's configuration; only ``model_config.enforce_eager`` is read.

    Returns:
        A null context for eager CPU mode, otherwise one in which recompiling is an error.
    """
    eager = bool(getattr(getattr(vllm_config, "model_config", None), "enforce_eager", False))
    if envs.VLLM_NEURON_CPU_MODE and eager:
        return nullcontext()
    return torch.compiler.set_stance("fail_on_recompile")
