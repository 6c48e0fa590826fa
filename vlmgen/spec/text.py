"""The text tower's axes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from vlmgen.spec.types import (
    ConfigKey,
    Count,
    Epsilon,
    Layers,
    ModelType,
    OnlyFalse,
    Positions,
    Sequence,
    SpecModel,
    Theta,
)


class TextNorm(SpecModel):
    """Normalisation of the decoder layers and of the final hidden state."""

    kind: Literal["rms"] = Field(description="rms: RMS norm, the weight is the factor itself.")
    eps: Epsilon = Field(description="Epsilon inside the square root.")
    topology: Literal["pre"] = Field(
        description="pre: a norm before attention and one before the MLP."
    )
    cast: Literal["before_weight"] = Field(
        description="before_weight: normalise in float32, round to the model dtype, then multiply "
        "by the weight."
    )


class TextAttention(SpecModel):
    """Attention of a decoder layer."""

    kind: Literal["gqa"] = Field(description="gqa: grouped query heads.")
    num_heads: Count = Field(description="Query heads.")
    num_kv_heads: Count = Field(description="Key/value heads; divides num_heads.")
    head_dim: Count = Field(description="Width of one head, stated even where it is H / heads.")
    qkv_layout: Literal["separate"] = Field(
        description="separate: q, k and v are three matrices in the checkpoint."
    )
    qkv_bias: OnlyFalse = Field(description="Bias on the q, k and v projections.")
    output_bias: OnlyFalse = Field(description="Bias on the output projection.")
    qk_norm: Literal["head_rms_pre_rope"] = Field(
        description="head_rms_pre_rope: RMS norm over head_dim before the rotation, one weight "
        "shared by all heads."
    )

    @property
    def q_size(self) -> int:
        """Width of the query projection's output, heads x head_dim."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of the key (or value) projection's output, KV heads x head_dim."""
        return self.num_kv_heads * self.head_dim


class TextMlp(SpecModel):
    """Feed-forward part of a decoder layer."""

    kind: Literal["swiglu"] = Field(description="swiglu: down(act(gate(x)) * up(x)).")
    activation: Literal["silu"] = Field(description="Activation of the gate.")
    intermediate_size: Count = Field(description="Width between the projections.")
    layout: Literal["separate"] = Field(
        description="separate: gate and up are two matrices in the checkpoint."
    )
    bias: OnlyFalse = Field(description="Bias on the projections.")


class TextRope(SpecModel):
    """Rotary position embedding of the text tower."""

    kind: Literal["mrope"] = Field(
        description="mrope: three position axes (time, height, width) share the frequencies."
    )
    order: Literal["interleaved"] = Field(
        description="interleaved: t h w t h w ..., the surplus of t at the end."
    )
    sections: Annotated[Sequence[Count], Field(min_length=3, max_length=3)] = Field(
        description="Frequencies of t, h and w; they sum to head_dim * partial / 2."
    )
    pairing: Literal["half"] = Field(
        description="half: element i is rotated with element i + rotated/2."
    )
    partial: Annotated[float, Field(gt=0, le=1)] = Field(
        description="Share of each head that is rotated.", json_schema_extra={"enum": [1.0]}
    )
    theta: Theta = Field(description="Base of the frequencies.")


class TextSpec(SpecModel):
    """The text tower: structure, and the sizes of the default checkpoint."""

    config_key: ConfigKey = Field(description="Key of the text config in config.json.")
    model_type: ModelType = Field(description="model_type of the text config.")
    hidden_size: Count = Field(description="Width of the residual stream.")
    num_layers: Layers = Field(description="Decoder layers (num_hidden_layers in config.json).")
    vocab_size: Count = Field(description="Rows of the embedding table.")
    max_position_embeddings: Positions = Field(description="Longest context of the checkpoint.")
    tie_word_embeddings: bool = Field(
        description="true: the head is the embedding table and the checkpoint has no head tensor."
    )
    norm: TextNorm = Field(description="Norms of the decoder.")
    attention: TextAttention = Field(description="Attention of the decoder layers.")
    mlp: TextMlp = Field(description="MLP of the decoder layers.")
    rope: TextRope = Field(description="Rotary position embedding.")

    @property
    def rotary_dim(self) -> int:
        """Elements of each head that are rotated, head_dim * partial."""
        return int(self.attention.head_dim * self.rope.partial)
