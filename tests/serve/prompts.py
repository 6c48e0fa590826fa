"""The same prompts for a server and for Hugging Face: ten of each media mix."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image

from vlmgen.validate.pictures import moving_view, picture
from vlmgen.validate.reference import VIDEO_FPS, Media, Prompt, Reference

MIXES = ("text", "image", "video", "image and video")
PER_MIX = 10
NEW_TOKENS = 32
# Frames travel one by one, so that both sides see the same pixels.
VIDEO_OPTIONS = {"video": {"fps": VIDEO_FPS, "num_frames": -1}}

_NAMES = ("coffee", "rocket", "chelsea", "camera", "coins", "astronaut", "china", "flower")
_SIZES = ((128, 192), (192, 96), (32, 32), (160, 160), (96, 256), (64, 64), (256, 128), (96, 96))
_QUESTIONS = ("What is that?", "Name the colours.", "Who?", "Count!", "Describe it in one word.")


def image(index: int) -> Media:
    """One of many pictures, all different in content or size."""
    height, width = _SIZES[index % len(_SIZES)]
    return Media("image", picture(_NAMES[(index * 3) % len(_NAMES)], height, width))


def video(index: int) -> Media:
    """One of many videos, 4 to 8 frames."""
    frames = 4 + index % 5
    return Media("video", moving_view(_NAMES[index % len(_NAMES)], frames, 64, 96))


def parts_of(mix: str, index: int) -> list[str | Media]:
    """Parts of a prompt: texts, pictures and videos in order."""
    question = _QUESTIONS[index % len(_QUESTIONS)]
    if mix == "text":
        return [f"{index}. " + "The capital of France is Paris. " * (1 + 2 * index) + question]
    if mix == "image":
        several = [image(index + step) for step in range(1 + index % 3)]
        return [*several, question]
    if mix == "video":
        return [video(index), question]
    if index % 2:
        return [image(index), "then", video(index), question]
    return [video(index), "then", image(index), question]


def messages_of(parts: Sequence[str | Media]) -> list[dict[str, Any]]:
    """A user message of the OpenAI API."""
    return [{"role": "user", "content": [content_of(part) for part in parts]}]


def content_of(part: str | Media) -> dict[str, Any]:
    """One part of a message; pictures as PNG, videos frame by frame."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if part.kind == "image":
        return {
            "type": "image_url",
            "image_url": {"url": f"data:image/png;base64,{png(part.pixels)}"},
        }
    frames = ",".join(png(frame) for frame in part.pixels)
    return {"type": "video_url", "video_url": {"url": f"data:video/jpeg;base64,{frames}"}}


def png(pixels: np.ndarray) -> str:
    """Base64 of a PNG file."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


@torch.no_grad()
def greedy(
    reference: Reference, prompt: Prompt, new_tokens: int = NEW_TOKENS
) -> tuple[list[int], list[float]]:
    """Tokens that Hugging Face generates, and the log-probability of each."""
    reference.model.generation_config.eos_token_id = None
    out = reference.model.generate(
        **prompt.inputs,
        max_new_tokens=new_tokens,
        do_sample=False,
        use_cache=True,
        output_logits=True,
        return_dict_in_generate=True,
    )
    tokens = out.sequences[0, len(prompt.token_ids) :].tolist()
    logprobs = torch.cat(out.logits).float().log_softmax(-1)
    return tokens, [float(row[token]) for row, token in zip(logprobs, tokens, strict=True)]
