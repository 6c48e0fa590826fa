"""Published checkpoints and their sizes."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from vlmgen.spec.types import (
    CheckpointName,
    ClassName,
    Count,
    DottedPath,
    Index,
    Layers,
    ModulePath,
    Positions,
    Sequence,
    SpecModel,
)


class CheckpointText(SpecModel):
    """Text sizes of one checkpoint. A size that is left out is that of the `text` section."""

    hidden_size: Count = Field(description="Width of the residual stream.")
    num_layers: Layers = Field(description="Decoder layers.")
    num_heads: Count = Field(description="Query heads.")
    num_kv_heads: Count = Field(description="Key/value heads.")
    intermediate_size: Count = Field(description="Width between the MLP projections.")
    tie_word_embeddings: bool = Field(description="Whether the head is the embedding table.")
    head_dim: Count | None = Field(default=None, description="Head width, if it differs.")
    vocab_size: Count | None = Field(default=None, description="Vocabulary, if it differs.")
    max_position_embeddings: Positions | None = Field(
        default=None, description="Longest context, if it differs."
    )


class CheckpointVision(SpecModel):
    """Vision sizes of one checkpoint."""

    hidden_size: Count = Field(description="Width of the tower.")
    depth: Layers = Field(description="Blocks of the tower.")
    num_heads: Count = Field(description="Heads.")
    intermediate_size: Count = Field(description="Width between fc1 and fc2.")
    out_hidden_size: Count = Field(description="Width after the merger.")
    deepstack: Annotated[Sequence[Index], Field(min_length=1, max_length=64)] = Field(
        description="Deepstack block indices."
    )


class Checkpoint(SpecModel):
    """One published size."""

    name: CheckpointName = Field(description="Published name, without the organisation.")
    also: Sequence[CheckpointName] = Field(
        default=(), description="Other published checkpoints of the same sizes."
    )
    text: CheckpointText = Field(description="Sizes of the text tower.")
    vision: CheckpointVision = Field(description="Sizes of the vision tower.")


class Reference(SpecModel):
    """Where Hugging Face transformers defines the family."""

    module: ModulePath = Field(description="The modelling module.")
    config_class: ClassName = Field(description="Config class of the family.")
    model_class: ClassName = Field(description="Class with the language-model head.")
    text_path: DottedPath = Field(description="Attribute path of the text tower.")
    vision_path: DottedPath = Field(description="Attribute path of the vision tower.")
