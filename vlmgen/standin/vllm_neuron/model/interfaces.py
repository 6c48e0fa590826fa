"""Runtime-checkable protocols the runner tests models and factories against.

``isinstance`` and ``issubclass`` look for the method's name only; signatures are not compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch

__all__ = [
    "SupportsDisaggEncoder",
    "SupportsMRoPE",
    "SupportsMaxPixels",
    "SupportsSpatialMerge",
    "SupportsVisionWarmup",
]


@runtime_checkable
class SupportsVisionWarmup(Protocol):
    """The model (not the factory) can make inputs for compiling its vision tower."""

    def build_vision_synthetic_inputs(
        self, bucket: int, vision_neuron_config: Any, device: torch.device | str
    ) -> dict[str, torch.Tensor]:
        """Return keyword arguments for ``visual`` without cache buffer and write ids.

        Args:
            bucket: number of raw patches, one of the vision buckets.
            vision_neuron_config: block size and data parallel size.
            device: where the tensors are made.
        """
        ...


@runtime_checkable
class SupportsMRoPE(Protocol):
    """The model computes three-axis positions for a prompt."""

    def get_mrope_input_positions(
        self, input_tokens: Sequence[int], mm_features: Sequence[Any]
    ) -> tuple[torch.Tensor, int]:
        """Return positions int64 ``[3, n]`` (time, height, width) and the decode offset.

        Args:
            input_tokens: the ``n`` prompt token ids, placeholders expanded.
            mm_features: vLLM's multimodal features in prompt order.
        """
        ...


@runtime_checkable
class SupportsSpatialMerge(Protocol):
    """The factory knows how many raw patches make one language model row."""

    @classmethod
    def get_vision_token_merge_factor(cls, hf_config: Any) -> int:
        """Return the merge area, 4 for a 2 x 2 merge."""
        ...


@runtime_checkable
class SupportsMaxPixels(Protocol):
    """The factory knows how many raw patches a pixel limit allows."""

    @classmethod
    def get_max_pixels_token_count(cls, hf_config: Any, max_pixels: int) -> int:
        """Return the raw patches of one item of ``max_pixels`` pixels."""
        ...


@runtime_checkable
class SupportsDisaggEncoder(Protocol):
    """The factory can describe an item to a language model in another process."""

    @classmethod
    def get_epd_kwargs(cls, item: Any) -> dict[str, Any]:
        """Return the keyword arguments that travel with an item."""
        ...
