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
    VllmModule,
)


class CheckpointText(SpecModel):
    """Text sizes of one checkpoint. A size that is left out is that of the `text` section."""

    hidden_size: Count | None = Field(default=None, description="Width of the residual stream.")
    num_layers: Layers | None = Field(default=None, description="Decoder layers.")
    num_heads: Count | None = Field(default=None, description="Query heads.")
    num_kv_heads: Count | None = Field(default=None, description="Key/value heads.")
    intermediate_size: Count | None = Field(
        default=None, description="Width between the MLP projections."
    )
    moe_intermediate_size: Count | None = Field(default=None, description="Width of an expert.")
    num_experts: Count | None = Field(default=None, description="Routed experts.")
    tie_word_embeddings: bool | None = Field(
        default=None, description="Whether the head is the embedding table."
    )
    head_dim: Count | None = Field(default=None, description="Head width.")
    vocab_size: Count | None = Field(default=None, description="Vocabulary.")
    max_position_embeddings: Positions | None = Field(default=None, description="Longest context.")


class CheckpointVision(SpecModel):
    """Vision sizes of one checkpoint. A size that is left out is that of the `vision` section."""

    hidden_size: Count | None = Field(default=None, description="Width of the tower.")
    depth: Layers | None = Field(default=None, description="Blocks of the tower.")
    num_heads: Count | None = Field(default=None, description="Heads.")
    intermediate_size: Count | None = Field(default=None, description="Width of the MLP.")
    out_hidden_size: Count | None = Field(default=None, description="Width after the merger.")
    deepstack: Annotated[Sequence[Index], Field(min_length=1, max_length=64)] | None = Field(
        default=None, description="Deepstack block indices."
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
    """Where Hugging Face transformers and vLLM define the family."""

    module: ModulePath = Field(description="The modelling module.")
    vllm_module: VllmModule = Field(description="The module of vLLM's own class.")
    vllm_class: ClassName | None = Field(
        default=None, description="vLLM's own class, where it is not named as the architecture."
    )
    config_class: ClassName = Field(description="Config class of the family.")
    model_class: ClassName = Field(description="Class with the language-model head.")
    text_path: DottedPath = Field(description="Attribute path of the text tower.")
    vision_path: DottedPath = Field(description="Attribute path of the vision tower.")
    projector_path: DottedPath | None = Field(
        default=None, description="Attribute path of the merger, where it lies beside the tower."
    )
