"""Qwen2-VL for vLLM Neuron.

`register` is the entry point of the group `vllm.general_plugins`; vLLM calls it in every process.
"""

import logging

logger = logging.getLogger(__name__)

ARCHITECTURE = "Qwen2VLForConditionalGeneration"


def register() -> None:
    """Put the model into vLLM's registry and into the Neuron plugin's own table.

    Both are needed: the plugin looks up the merge factor and the pixel limit in its own table,
    and a class that is missing there counts as one patch per row, which makes every cache block
    4 times too large. Calling it again changes nothing.
    """
    from vllm import ModelRegistry
    from vllm_neuron.model import registry

    from .factory import Qwen2VLForConditionalGeneration

    ModelRegistry.register_model(ARCHITECTURE, Qwen2VLForConditionalGeneration)
    if (ARCHITECTURE, Qwen2VLForConditionalGeneration) in registry.get_models():
        return
    for name, other in registry.get_models():
        package = other.__module__.partition(".")[0]
        if name == ARCHITECTURE and package.startswith("vllm_neuron_") and package != __name__:
            logger.warning(
                "%s takes the place of %s for %s; name one of them in VLLM_PLUGINS to choose",
                __name__,
                package,
                ARCHITECTURE,
            )
    listed = registry.get_models

    def get_models() -> list[tuple[str, type]]:
        """The plugin's table, with this package's class under its architecture."""
        others = [(name, cls) for name, cls in listed() if name != ARCHITECTURE]
        return [*others, (ARCHITECTURE, Qwen2VLForConditionalGeneration)]

    registry.get_models = get_models
