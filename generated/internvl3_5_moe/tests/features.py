"""Images and videos of a prompt, found in the output of the Hugging Face processor.

An image is one run of placeholders for all its tiles. Every frame of a video is a tile with a
label and a pair of markers of its own, under the same token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .driver import Feature, FieldElement, make_feature, runs_of

KEYS = {
    "image": ("pixel_values", "image_num_patches", "image_token_id"),
    "video": ("pixel_values_videos", "video_num_patches", "video_token_id"),
}
"""What vLLM calls the tiles, their number, and a token id that a model must put up with."""


def features_of(
    inputs: Mapping[str, Any], config: Any, frames: Sequence[int] = ()
) -> list[Feature]:
    """Features of one prompt.

    Args:
        inputs: `input_ids` `[1, n]`, and the tiles of images and videos together, in prompt order,
            `pixel_values` `[tiles, C, side, side]`.
        config: The Hugging Face configuration, for the placeholder id and the rows of a tile.
        frames: Of every item, in prompt order, the number of frames of a video, 0 for an image;
            the output does not say it.

    Returns:
        The features in prompt order.
    """
    tokens, token = inputs["input_ids"][0].tolist(), config.image_token_id
    runs = iter(runs_of(tokens, token))
    found, seen = [], 0
    for number in frames:
        modality = "video" if number else "image"
        own = [next(runs) for _ in range(number or 1)]
        tiles = number or (own[0][1] - own[0][0]) // config.image_seq_length
        pixels, counts, unused = KEYS[modality]
        data = {
            pixels: FieldElement(inputs["pixel_values"][seen : seen + tiles]),
            counts: FieldElement(torch.tensor(tiles), "batched"),
            unused: FieldElement(torch.tensor(token), "shared"),
        }
        seen += tiles
        place = (own[0][0] - 1, own[-1][1] + 1)  # `<img> c c </img>`
        found.append(make_feature(modality, data, tokens, *place, embed=token))
    return found
