"""Images and videos of a prompt, found in the output of the Hugging Face processor.

A time stamp and a pair of markers of its own stand around every frame of a video.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .driver import Feature, FieldElement, grid_items, make_feature, runs_of


def features_of(inputs: Mapping[str, Any], config: Any) -> list[Feature]:
    """Features of one prompt.

    Args:
        inputs: `input_ids` `[1, n]`, and pixels and grids of the images and videos there are.
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
    for data in grid_items(inputs, "pixel_values_videos", "video_grid_thw"):
        frames = [next(runs) for _ in range(int(data["video_grid_thw"].data[0]))]
        # `<start> 0.5s <start> v v <end> 1.5s <start> v v <end> <end>`: the item begins after the
        # outer start marker, and ends with the last frame's own end marker.
        inner = frames[0][0] - 1
        outer = max(i for i in range(inner) if tokens[i] == config.vision_start_token_id)
        # vLLM hands these on as well; a model must put up with them.
        data["timestamps"] = FieldElement([float(i) for i in range(len(frames))], "batched")
        place = (outer + 1, frames[-1][1] + 1)
        found.append(make_feature("video", data, tokens, *place, embed=config.video_token_id))
    return sorted(found, key=lambda feature: feature.mm_position.offset)
