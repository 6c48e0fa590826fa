"""vLLM's own class of an architecture, as a second reference for positions."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from vlmgen.validate.driver import Feature

if TYPE_CHECKING:
    from vlmgen.spec import Spec


def upstream_positions(
    spec: Spec, config: Any, token_ids: Sequence[int], features: Sequence[Feature]
) -> tuple[torch.Tensor, int]:
    """vLLM's three-axis positions of a prompt.

    Args:
        spec: Names vLLM's class.
        config: The Hugging Face configuration.
        token_ids: The prompt, placeholders expanded.
        features: Its images and videos.

    Returns:
        int64 `[3, n]`, axes t, h, w, and delta: position of a later token = its place + delta.
    """
    module = importlib.import_module(spec.reference.vllm_module)
    upstream = getattr(module, spec.reference.vllm_class or spec.architecture)
    model = upstream.__new__(upstream)  # only the configuration is read
    model.config = config
    positions, delta = model.get_mrope_input_positions(list(token_ids), list(features))
    return positions, int(delta)
