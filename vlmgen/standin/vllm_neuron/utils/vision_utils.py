"""What the runner asks a model's factory about its vision side.

The factory is looked up in the plugin's own table, :func:`vllm_neuron.model.registry.get_models`,
and nowhere else: a class that only vLLM's registry knows counts as having neither helper.
"""

from __future__ import annotations

from typing import Any

from vllm_neuron.model import registry
from vllm_neuron.model.interfaces import SupportsMaxPixels, SupportsSpatialMerge

__all__ = ["get_max_pixels_token_count", "get_vision_token_merge_factor"]


def _factory(hf_config: Any) -> Any:
    architectures = getattr(hf_config, "architectures", None) or [None]
    # Attribute access at call time, so that an out-of-tree package may replace get_models.
    return dict(registry.get_models()).get(architectures[0])


def get_vision_token_merge_factor(hf_config: Any) -> int:
    """Return how many raw patches become one row of the language model.

    Args:
        hf_config: configuration whose first architecture names the factory.

    Returns:
        The factory's merge factor; 1 when the architecture is not in the plugin's table or its
        factory has no such helper.
    """
    factory = _factory(hf_config)
    if factory is None or not issubclass(factory, SupportsSpatialMerge):
        return 1
    return factory.get_vision_token_merge_factor(hf_config)


def get_max_pixels_token_count(hf_config: Any, max_pixels: int) -> int | None:
    """Return how many raw patches an item of ``max_pixels`` pixels can have.

    Args:
        hf_config: configuration whose first architecture names the factory.
        max_pixels: limit of the processor.

    Returns:
        Raw patches, or None when the factory cannot tell.
    """
    factory = _factory(hf_config)
    if factory is None or not issubclass(factory, SupportsMaxPixels):
        return None
    return factory.get_max_pixels_token_count(hf_config, max_pixels)
