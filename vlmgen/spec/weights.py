"""Names of the checkpoint's tensors. `.weight` and `.bias` are added by the weight table."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from vlmgen.spec.types import (
    BlockPrefix,
    KeyPattern,
    LayerPrefix,
    LevelPrefix,
    Prose,
    Sequence,
    SpecModel,
    WeightName,
    WeightPrefix,
)


class Layout(SpecModel):
    """One published way to prefix the keys."""

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,40}$")] = Field(
        description="Name of the layout, for messages."
    )
    text: WeightPrefix = Field(description="Prefix of the text tower's keys.")
    vision: WeightPrefix = Field(description="Prefix of the vision tower's keys.")
    head: WeightPrefix = Field(description="Prefix of the output head's keys.")


class TextWeights(SpecModel):
    """Keys of the text tower, after the layout's prefix."""

    embed_tokens: WeightName = Field(description="Embedding table.")
    norm: WeightName = Field(description="Final norm.")
    layer: LayerPrefix = Field(description="Prefix of a decoder layer.")
    input_layernorm: WeightName = Field(description="Norm before attention.")
    post_attention_layernorm: WeightName = Field(description="Norm before the MLP.")
    q: WeightName = Field(description="Query projection.")
    k: WeightName = Field(description="Key projection.")
    v: WeightName = Field(description="Value projection.")
    o: WeightName = Field(description="Output projection.")
    q_norm: WeightName = Field(description="Norm of the queries.")
    k_norm: WeightName = Field(description="Norm of the keys.")
    gate: WeightName = Field(description="Gate projection.")
    up: WeightName = Field(description="Up projection.")
    down: WeightName = Field(description="Down projection.")


class MergerWeights(SpecModel):
    """Keys of the merger."""

    prefix: WeightPrefix = Field(description="Prefix of the merger.")
    norm: WeightName = Field(description="Norm.")
    fc1: WeightName = Field(description="First linear layer.")
    fc2: WeightName = Field(description="Second linear layer.")


class DeepstackWeights(SpecModel):
    """Keys of the deepstack mergers."""

    prefix: LevelPrefix = Field(description="Prefix of one level's merger.")
    norm: WeightName = Field(description="Norm.")
    fc1: WeightName = Field(description="First linear layer.")
    fc2: WeightName = Field(description="Second linear layer.")


class VisionWeights(SpecModel):
    """Keys of the vision tower, after the layout's prefix."""

    patch_embed: WeightName = Field(description="Patch embedding.")
    pos_embed: WeightName = Field(description="Learned position table.")
    block: BlockPrefix = Field(description="Prefix of a tower block.")
    norm1: WeightName = Field(description="Norm before attention.")
    norm2: WeightName = Field(description="Norm before the MLP.")
    qkv: WeightName = Field(description="Fused query, key and value projection.")
    proj: WeightName = Field(description="Output projection.")
    fc1: WeightName = Field(description="First linear layer of the MLP.")
    fc2: WeightName = Field(description="Second linear layer of the MLP.")
    merger: MergerWeights = Field(description="The merger's keys.")
    deepstack: DeepstackWeights = Field(description="The deepstack mergers' keys.")


class Ignored(SpecModel):
    """Checkpoint keys that no parameter needs."""

    pattern: KeyPattern = Field(description="The keys; * stands for any characters.")
    reason: Prose = Field(description="Why they are not needed.")


class WeightsSpec(SpecModel):
    """Names of the checkpoint's tensors."""

    layouts: Annotated[Sequence[Layout], Field(min_length=1, max_length=8)] = Field(
        description="Published layouts; the first is the one that published checkpoints have."
    )
    text: TextWeights = Field(description="Keys of the text tower.")
    vision: VisionWeights = Field(description="Keys of the vision tower.")
    ignored: Sequence[Ignored] = Field(description="Keys to leave out, each with a reason.")
