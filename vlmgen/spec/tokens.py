"""Placeholder tokens, prompt scheme and processor keywords."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from vlmgen.spec.types import ConfigKey, SpecModel, TokenId, TokenText


class Token(SpecModel):
    """A special token of the tokenizer."""

    token: TokenText = Field(description="The token's text in the tokenizer.")
    id: TokenId = Field(description="Its id, below the vocabulary size.")
    config_key: ConfigKey = Field(description="The key of config.json that holds the id.")


class Seconds(SpecModel):
    """Temporal positions in seconds."""

    input: ConfigKey = Field(description="Keyword of the processor: seconds per temporal patch.")
    config_key: ConfigKey = Field(description="Key of the vision config that holds the factor.")
    tokens_per_second: Annotated[int, Field(ge=1, le=1000)] = Field(
        description="Temporal positions per second."
    )


class TokensSpec(SpecModel):
    """Placeholders of the prompt and how positions run across them."""

    image: Token = Field(description="Stands for one merged row of a picture.")
    video: Token | None = Field(
        default=None,
        description="Stands for one merged row of a video, or names it before it is expanded.",
    )
    vision_start: Token | None = Field(default=None, description="Before a picture or a frame.")
    vision_end: Token | None = Field(default=None, description="After a picture or a frame.")
    video_start: Token | None = Field(default=None, description="Before a whole video.")
    video_end: Token | None = Field(default=None, description="After a whole video.")
    positions: Literal["mrope_per_frame", "mrope_block", "sequence"] = Field(
        description="mrope_per_frame: every frame is a block of its own with one temporal step. "
        "mrope_block: a whole video is one block with a temporal axis. sequence: vision tokens "
        "count as text."
    )
    seconds: Seconds | None = Field(
        default=None,
        description="For mrope_block: the temporal axis counts time instead of temporal patches.",
    )
    video_prompt: Literal[
        "per_frame_timestamp", "one_run", "per_frame_image_token", "per_frame_label", "none"
    ] = Field(
        description="per_frame_timestamp: a time stamp as text before every frame. one_run: one "
        "run of placeholders. per_frame_image_token: frames under the image token, the time after "
        "each. per_frame_label: a numbered line of text and a tile per frame. none: no videos."
    )


class ModalityInputs(SpecModel):
    """Keywords of one modality."""

    pixels: ConfigKey = Field(description="Keyword of the pixel rows.")
    grid: ConfigKey | None = Field(
        default=None, description="Keyword of the grids, rows of (t, h, w) in patches."
    )
    tiles: ConfigKey | None = Field(
        default=None, description="Keyword of the numbers of tiles, for the input `tiles`."
    )


class InputsSpec(SpecModel):
    """Keywords of the Hugging Face processor, as vLLM hands them to embed_multimodal."""

    image: ModalityInputs = Field(description="Keywords of pictures.")
    video: ModalityInputs | None = Field(default=None, description="Keywords of videos.")
