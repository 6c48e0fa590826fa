"""Qwen2.5-VL for vLLM Neuron.

`register` is the entry point of the group `vllm.general_plugins`; vLLM calls it in every process.
"""

ARCHITECTURE = "Qwen2_5_VLForConditionalGeneration"


def register() -> None:
    """Put the model into vLLM's registry and into the Neuron plugin's own table.

    Both are needed: the plugin looks up the merge factor and the pixel limit in its own table,
    and a class that is missing there counts as one patch per row, which makes every cache block
    4 times too large. Calling it again changes nothing.
    """
    from vllm import ModelRegistry
    from vllm_neuron.model import registry

    from .factory import Qwen2_5_VLForConditionalGeneration

    ModelRegistry.register_model(ARCHITECTURE, Qwen2_5_VLForConditionalGeneration)
    if (ARCHITECTURE, Qwen2_5_VLForConditionalGeneration) in registry.get_models():
        return
    listed = registry.get_models

    def get_models() -> list[tuple[str, type]]:
        """The plugin's table, with this package's class under its architecture."""
        others = [(name, cls) for name, cls in listed() if name != ARCHITECTURE]
        return [*others, (ARCHITECTURE, Qwen2_5_VLForConditionalGeneration)]

    registry.get_models = get_models
