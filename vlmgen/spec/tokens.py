"""Placeholder tokens, prompt scheme and processor keywords."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from vlmgen.spec.types import ConfigKey, SpecModel, TokenId, TokenText


class Token(SpecModel):
    """A special token of the tokenizer."""

    token: TokenText = Field(description="The token's text in the tokenizer.")
    id: TokenId = Field(description="Its id, below the vocabulary size.")
    config_key: ConfigKey = Field(description="The key of config.json that holds the id.")


class TokensSpec(SpecModel):
    """Placeholders of the prompt and how positions run across them."""

    image: Token = Field(description="Stands for one merged row of a picture.")
    video: Token = Field(description="Stands for one merged row of a video.")
    vision_start: Token = Field(description="Before a picture or a frame.")
    vision_end: Token = Field(description="After a picture or a frame.")
    positions: Literal["mrope_per_frame"] = Field(
        description="mrope_per_frame: every frame is a block of its own with one temporal step."
    )
    video_prompt: Literal["per_frame_timestamp"] = Field(
        description="per_frame_timestamp: a time stamp as text before every frame."
    )


class ModalityInputs(SpecModel):
    """Keywords of one modality."""

    pixels: ConfigKey = Field(description="Keyword of the pixel rows.")
    grid: ConfigKey = Field(description="Keyword of the grids, rows of (t, h, w) in patches.")


class InputsSpec(SpecModel):
    """Keywords of the Hugging Face processor, as vLLM hands them to embed_multimodal."""

    image: ModalityInputs = Field(description="Keywords of pictures.")
    video: ModalityInputs = Field(description="Keywords of videos.")
