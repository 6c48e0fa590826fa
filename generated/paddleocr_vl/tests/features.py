"""Images of a prompt, found in the output of the Hugging Face processor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .driver import Feature, grid_items, make_feature, runs_of


def features_of(inputs: Mapping[str, Any], config: Any) -> list[Feature]:
    """Features of one prompt.

    Args:
        inputs: `input_ids` `[1, n]`, and pixels and grids of the images there are.
        config: The Hugging Face configuration, for the placeholder id.

    Returns:
        The features in prompt order.
    """
    tokens = inputs["input_ids"][0].tolist()
    runs = iter(runs_of(tokens, config.image_token_id))
    return [  # the pixels of each image on their own, as vLLM's processor keeps them
        make_feature("image", data, tokens, *next(runs))
        for data in grid_items(inputs, "pixel_values", "image_grid_thw", kind="batched")
    ]
