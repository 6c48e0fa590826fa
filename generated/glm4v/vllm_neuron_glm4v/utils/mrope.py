"""Three-axis positions (time, height, width) of a prompt with images and videos.

Text moves all three axes on together. An image, or one frame of a video, is a block: its time
stands still at the block's start, height and width count its merged rows and columns from there.
The next token goes on at the start plus the longer side. Time stamps and markers between the
frames of a video are text. Frames stand under the image token; the features tell them from images.
`2 text, image of 2 x 3 rows, 1 text: t 01 222222 5 | h 01 222333 5 | w 01 234234 5`
Source: `get_rope_index` in transformers.models.glm4v.modeling_glm4v.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from ..config import Glm4vConfig

GRID_KEYS = {"image": "image_grid_thw", "video": "video_grid_thw"}


class PlaceholderError(ValueError):
    """Placeholder tokens of a prompt that do not fit the grids of its images and videos."""


def compute_mrope_positions(
    input_tokens: Sequence[int], mm_features: Sequence[Any], config: Glm4vConfig
) -> tuple[torch.Tensor, int]:
    """Positions of one request.

    Args:
        input_tokens: token ids of the prompt, placeholders expanded; length n.
        mm_features: vLLM's features: `modality`, `data` (with the grid), `mm_position` (`offset`,
            `length`).
        config: token ids and merge size.

    Returns:
        int64 `[3, n]` with axes t, h, w, and delta: position of a later token = its place + delta.

    Raises:
        PlaceholderError: a run of placeholders whose number or length differs from the grid.
    """
    tokens = np.asarray(input_tokens, dtype=np.int64)
    merge = config.vision_config.spatial_merge_size
    parts: list[np.ndarray] = []
    place, position = 0, 0
    for start, height, width in _frames(tokens, mm_features, config):
        text = start - place
        parts.append(np.broadcast_to(np.arange(position, position + text), (3, text)))
        position += text
        rows, cols = height // merge, width // merge
        block = np.indices((1, rows, cols)).reshape(3, -1) + position
        parts.append(block)
        position += max(rows, cols)
        place = start + rows * cols
    rest = len(tokens) - place
    parts.append(np.broadcast_to(np.arange(position, position + rest), (3, rest)))
    positions = np.concatenate(parts, axis=1)
    delta = int(positions.max()) + 1 - len(tokens) if len(tokens) else 0
    return torch.from_numpy(np.ascontiguousarray(positions)), delta


def _frames(
    tokens: np.ndarray, mm_features: Sequence[Any], config: Glm4vConfig
) -> Iterator[tuple[int, int, int]]:
    """(first token, height, width in patches) of every image or video frame, in prompt order."""
    area = config.vision_config.merge_area
    for feature in sorted(mm_features, key=lambda feature: feature.mm_position.offset):
        span, modality = feature.mm_position, feature.modality
        t, h, w = _grid(feature)
        runs = _runs(tokens[span.offset : span.offset + span.length] == config.image_token_id)
        if len(runs) != t:
            raise PlaceholderError(
                f"{modality} at token {span.offset}: {len(runs)} runs of placeholders for {t} "
                f"frames of grid {[t, h, w]}"
            )
        for first, length in runs:
            if length != h * w // area:
                raise PlaceholderError(
                    f"{modality} at token {span.offset}: a run of {length} placeholders, but a "
                    f"frame of grid {[t, h, w]} "
                    f"has {h * w // area} merged rows"
                )
            yield span.offset + first, h, w


def _grid(feature: Any) -> tuple[int, int, int]:
    """t, h, w of a feature; vLLM wraps processor tensors, tests may pass them bare."""
    value = feature.data[GRID_KEYS[feature.modality]]
    value = getattr(value, "data", value)
    t, h, w = np.asarray(value).reshape(-1).tolist()
    return t, h, w


def _runs(mask: np.ndarray) -> list[tuple[int, int]]:
    """(start, length) of every run of True: `0110100 -> (1, 2) (4, 1)`."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    return [
        (int(start), int(end - start)) for start, end in zip(edges[::2], edges[1::2], strict=True)
    ]
