"""Images and videos of a prompt, found in the output of the Hugging Face processor.

Frames of a video stand under the image token; `mm_token_type_ids` tells them from images.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .driver import Feature, grid_items, make_feature, runs_of

IMAGE, VIDEO = 1, 2  # of mm_token_type_ids


def features_of(inputs: Mapping[str, Any], config: Any) -> list[Feature]:
    """Features of one prompt.

    Args:
        inputs: `input_ids` and `mm_token_type_ids` `[1, n]`, and pixels and grids of the images
            and videos there are.
        config: The Hugging Face configuration, for the ids of the markers.

    Returns:
        The features in prompt order.
    """
    tokens = inputs["input_ids"][0].tolist()
    types = inputs["mm_token_type_ids"][0].tolist() if "mm_token_type_ids" in inputs else []
    found = []
    runs = iter(runs_of(types, IMAGE))
    for data in grid_items(inputs, "pixel_values", "image_grid_thw"):
        found.append(make_feature("image", data, tokens, *next(runs)))
    ends = [i for i, token in enumerate(tokens) if token == config.video_end_token_id]
    starts = [i for i, token in enumerate(tokens) if token == config.video_start_token_id]
    videos = grid_items(inputs, "pixel_values_videos", "video_grid_thw")
    for data, first, last in zip(videos, starts, ends, strict=False):
        # `<start of video> <start> i i <end> 0 <start> i i <end> 1 <end of video>`
        place = (first, last + 1)
        found.append(make_feature("video", data, tokens, *place, embed=config.image_token_id))
    return sorted(found, key=lambda feature: feature.mm_position.offset)
