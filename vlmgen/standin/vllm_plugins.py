"""Entry points through which a vLLM process finds the stand-in.

vLLM loads the group ``vllm.platform_plugins`` in every process before anything else of its own,
so this is also where ``import vllm_neuron`` is made to work.
"""

from __future__ import annotations

from vlmgen import standin

__all__ = ["PLATFORM_CLASS", "platform", "register"]

PLATFORM_CLASS = "vllm_neuron.vllm.platform.NeuronPlatform"


def platform() -> str | None:
    """Entry point of the group ``vllm.platform_plugins``.

    Returns:
        The platform class when ``VLLM_NEURON_CPU_MODE`` is on and no plugin is installed; None
        otherwise, so that vLLM runs as if the stand-in were not there.
    """
    if not standin.cpu_mode():
        return None
    return PLATFORM_CLASS if standin.activate() == "standin" else None


def register() -> None:
    """Entry point of the group ``vllm.general_plugins``: register the packages named for serving.

    See :mod:`vlmgen.serve.packages`; does nothing when none is named.
    """
    from vlmgen.serve.packages import register_named_packages

    if standin.cpu_mode():
        standin.activate()
    register_named_packages()
