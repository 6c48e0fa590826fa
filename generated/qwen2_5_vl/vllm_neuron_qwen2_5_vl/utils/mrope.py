"""Three-axis positions (time, height, width) of a prompt with images and videos.

Text moves all three axes on together. An image or video is a block of merged frames, rows and
columns, counted on the three axes from where it begins; frames count in time. The next token
goes on after the largest position so far, on whichever axis that is.
`1 text, video of 3 frames of 1 x 2 rows, 1 text: t 0 112233 4 | h 0 111111 4 | w 0 121212 4`
Source: `get_mrope_input_positions` of vllm.model_executor.models.qwen2_5_vl. `get_rope_index` of
transformers.models.qwen2_5_vl.modeling_qwen2_5_vl goes on at the start plus
the longer side, which is less after a video of more temporal positions than that.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..config import Qwen2_5_VLConfig

GRID_KEYS = {"image": "image_grid_thw", "video": "video_grid_thw"}


class PlaceholderError(ValueError):
    """Placeholder tokens of a prompt that do not fit the grids of its images and videos."""


def compute_mrope_positions(
    input_tokens: Sequence[int], mm_features: Sequence[Any], config: Qwen2_5_VLConfig
) -> tuple[torch.Tensor, int]:
    """Positions of one request.

    Args:
        input_tokens: token ids of the prompt, placeholders expanded; length n.
        mm_features: vLLM's features: `modality`, `data` (with the grid, and for a video the
            seconds per frame), `mm_position` (`offset`,
            `length`).
        config: token ids, positions per second and merge size.

    Returns:
        int64 `[3, n]` with axes t, h, w, and delta: position of a later token = its place + delta.

    Raises:
        PlaceholderError: placeholders whose number or place differs from the grid.
    """
    tokens = np.asarray(input_tokens, dtype=np.int64)
    merge = config.vision_config.spatial_merge_size
    parts: list[np.ndarray] = []
    place, position = 0, 0
    for feature in sorted(mm_features, key=lambda feature: feature.mm_position.offset):
        t, h, w = _value(feature, GRID_KEYS[feature.modality])
        start = _first_token(tokens, feature, t * h * w // merge**2, config)
        text = start - place
        parts.append(np.broadcast_to(np.arange(position, position + text), (3, text)))
        block = np.indices((t, h // merge, w // merge)).reshape(3, -1)
        if feature.modality == "video":
            scaled = block[0] * _positions_per_frame(feature, config)
            block[0] = scaled.astype(np.int64)  # rounded down
        parts.append(block + position + text)
        position += text + int(block.max()) + 1
        place = start + block.shape[1]
    rest = len(tokens) - place
    parts.append(np.broadcast_to(np.arange(position, position + rest), (3, rest)))
    positions = np.concatenate(parts, axis=1)
    delta = int(positions.max()) + 1 - len(tokens) if len(tokens) else 0
    return torch.from_numpy(np.ascontiguousarray(positions)), delta


def _first_token(tokens: np.ndarray, feature: Any, rows: int, config: Qwen2_5_VLConfig) -> int:
    """First placeholder of a feature, whose placeholders must be one run of `rows`."""
    token_ids = {"image": config.image_token_id, "video": config.video_token_id}
    span, modality = feature.mm_position, feature.modality
    own = tokens[span.offset : span.offset + span.length] == token_ids[modality]
    places = np.flatnonzero(own)
    if len(places) != rows or rows == 0 or places[-1] - places[0] + 1 != rows:
        raise PlaceholderError(
            f"{modality} at token {span.offset}: {len(places)} placeholders from "
            f"{places[:1].tolist()} to {places[-1:].tolist()}; its grid asks for one run of {rows}"
        )
    return span.offset + int(places[0])


def _positions_per_frame(feature: Any, config: Qwen2_5_VLConfig) -> float:
    """Temporal positions from one merged frame of a video to the next."""
    per_frame = 1.0
    if "second_per_grid_ts" in feature.data:
        (per_frame,) = _value(feature, "second_per_grid_ts")
    return per_frame * config.vision_config.tokens_per_second


def _value(feature: Any, key: str) -> list:
    """Numbers of a processor tensor; vLLM wraps it, tests may pass it bare."""
    value = feature.data[key]
    return np.asarray(getattr(value, "data", value)).reshape(-1).tolist()
