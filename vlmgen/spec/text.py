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
    topology: Literal["pre", "sandwich"] = Field(
        description="pre: a norm before attention and one before the MLP. sandwich: also on the "
        "output of both, before it is added to the residual stream."
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
    qkv_bias: bool = Field(description="Bias on the q, k and v projections.")
    output_bias: OnlyFalse = Field(description="Bias on the output projection.")
    qk_norm: Literal["head_rms_pre_rope", "none"] = Field(
        description="head_rms_pre_rope: RMS norm over head_dim before the rotation, one weight "
        "shared by all heads. none: no norm."
    )
    bias_key: ConfigKey = Field(
        default="attention_bias",
        description="Key of the text config that states qkv_bias, where the file has it.",
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
    layout: Literal["separate", "fused_gate_up"] = Field(
        description="separate: gate and up are two matrices in the checkpoint. fused_gate_up: one "
        "matrix, the rows of gate first."
    )
    bias: OnlyFalse = Field(description="Bias on the projections.")


class TextRope(SpecModel):
    """Rotary position embedding of the text tower."""

    kind: Literal["mrope", "plain"] = Field(
        description="mrope: three position axes (time, height, width) share the frequencies. "
        "plain: one axis."
    )
    order: Literal["interleaved", "contiguous"] | None = Field(
        default=None,
        description="For mrope. interleaved: t h w t h w ..., the surplus of t at the end. "
        "contiguous: all of t, then all of h, then all of w.",
    )
    sections: Annotated[Sequence[Count], Field(min_length=3, max_length=3)] | None = Field(
        default=None,
        description="For mrope: frequencies of t, h and w; they sum to head_dim * partial / 2.",
    )
    pairing: Literal["half", "adjacent"] = Field(
        description="half: element i is rotated with element i + rotated/2. adjacent: element 2i "
        "with element 2i + 1."
    )
    partial: Annotated[float, Field(gt=0, le=1)] = Field(
        description="Share of each head that is rotated, from its start.",
        json_schema_extra={"enum": [1.0, 0.5]},
    )
    theta: Theta = Field(description="Base of the frequencies.")


class SharedExperts(SpecModel):
    """Experts that every token uses."""

    count: Annotated[int, Field(ge=1, le=64)] = Field(
        description="How many; together they are one MLP of count x moe.intermediate_size."
    )


class MoeConfigKeys(SpecModel):
    """Keys of the text config that state the sizes, the first that is there is read."""

    num_experts: Sequence[ConfigKey] = Field(default=("num_experts",), description="Experts.")
    top_k: Sequence[ConfigKey] = Field(
        default=("num_experts_per_tok",), description="Experts per token."
    )
    intermediate_size: Sequence[ConfigKey] = Field(
        default=("moe_intermediate_size",), description="Width of an expert."
    )
    first_dense: Sequence[ConfigKey] = Field(
        default=(), description="Dense layers at the start; none where the family has none."
    )
    shared: Sequence[ConfigKey] = Field(default=(), description="Shared experts.")
    renormalize: Sequence[ConfigKey] = Field(
        default=(), description="Renormalisation; none where the model does not read it."
    )
    routed_scale: Sequence[ConfigKey] = Field(
        default=(), description="Factor on the routed experts' output."
    )


class TextMoe(SpecModel):
    """Experts in the place of the MLP."""

    num_experts: Annotated[int, Field(ge=2, le=4096)] = Field(description="Routed experts.")
    top_k: Annotated[int, Field(ge=1, le=64)] = Field(description="Experts of one token.")
    intermediate_size: Count = Field(description="Width of one expert.")
    first_dense: Annotated[int, Field(ge=0, le=4096)] = Field(
        description="Layers at the start that have the MLP of `mlp` instead."
    )
    router: Literal["softmax", "sigmoid_bias"] = Field(
        description="softmax: over all experts, in float32, then the top k. sigmoid_bias: sigmoid "
        "scores in float32; a correction bias is added for the choice of the top k only."
    )
    renormalize: bool = Field(description="Weights of the chosen experts are made to sum to 1.")
    routed_scale: Annotated[float, Field(gt=0, le=1000)] = Field(
        default=1.0, description="Factor on the weights of the chosen experts."
    )
    shared: SharedExperts | None = Field(default=None, description="Experts of every token.")
    checkpoint: Literal["fused_in_out", "fused_out_in", "per_expert"] = Field(
        description="fused_in_out: all experts in one tensor, [E, H, 2I] and [E, I, H]. "
        "fused_out_in: [E, 2I, H] and [E, H, I]. per_expert: three matrices each. It is declared "
        "and never guessed from a shape."
    )
    config_keys: MoeConfigKeys = Field(
        default=MoeConfigKeys(), description="Names in the text config, where they differ."
    )


class TextSpec(SpecModel):
    """The text tower: structure, and the sizes of the default checkpoint."""

    config_key: ConfigKey = Field(description="Key of the text config in config.json.")
    flat_config: bool = Field(
        default=False,
        description="true: published files hold the text fields at the top level of config.json; "
        "the nested form is read as well.",
    )
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
    moe: TextMoe | None = Field(default=None, description="Experts, where the family has them.")

    @property
    def rotary_dim(self) -> int:
        """Elements of each head that are rotated, head_dim * partial."""
        return int(self.attention.head_dim * self.rope.partial)
