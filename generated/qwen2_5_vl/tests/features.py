"""Images and videos of a prompt, found in the output of the Hugging Face processor.

A video is one run of placeholders, as an image is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .driver import Feature, FieldElement, grid_items, make_feature, runs_of


def features_of(inputs: Mapping[str, Any], config: Any) -> list[Feature]:
    """Features of one prompt.

    Args:
        inputs: `input_ids` `[1, n]`, pixels and grids of the images and videos there are, and for
            videos perhaps `second_per_grid_ts`.
        config: The Hugging Face configuration, for the placeholder ids.

    Returns:
        The features in prompt order.
    """
    tokens = inputs["input_ids"][0].tolist()
    found = []
    runs = iter(runs_of(tokens, config.image_token_id))
    for data in grid_items(inputs, "pixel_values", "image_grid_thw"):
        found.append(make_feature("image", data, tokens, *next(runs)))
    runs = iter(runs_of(tokens, config.video_token_id))
    seconds = inputs.get("second_per_grid_ts")
    for index, data in enumerate(grid_items(inputs, "pixel_values_videos", "video_grid_thw")):
        if seconds is not None:
            data["second_per_grid_ts"] = FieldElement(seconds[index], "batched")
        found.append(make_feature("video", data, tokens, *next(runs)))
    return sorted(found, key=lambda feature: feature.mm_position.offset)
