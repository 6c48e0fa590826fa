"""Names of the checkpoint's tensors. `.weight` and `.bias` are added by the weight table."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from vlmgen.spec.types import (
    BlockPrefix,
    ExpertPrefix,
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
    projector: WeightPrefix | None = Field(
        default=None, description="Prefix of the merger's keys, where it lies beside the tower."
    )
    head: WeightPrefix = Field(description="Prefix of the output head's keys.")


class MlpWeights(SpecModel):
    """Keys of a gated MLP."""

    gate: WeightName = Field(description="Gate projection.")
    up: WeightName = Field(description="Up projection.")
    down: WeightName = Field(description="Down projection.")


class MoeWeights(SpecModel):
    """Keys of the experts, after the layer's prefix."""

    router: WeightName = Field(description="Router projection.")
    correction_bias: WeightName | None = Field(
        default=None, description="Bias of the choice of experts; stored without .weight."
    )
    gate_up: WeightName | None = Field(
        default=None, description="Gate and up of all experts, one tensor without .weight."
    )
    expert: ExpertPrefix | None = Field(default=None, description="Prefix of one expert.")
    gate: WeightName | None = Field(default=None, description="Gate projection of one expert.")
    up: WeightName | None = Field(default=None, description="Up projection of one expert.")
    down: WeightName = Field(
        description="Down projection, of one expert or of all in one tensor without .weight."
    )
    shared: MlpWeights | None = Field(default=None, description="The shared experts.")


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
    q_norm: WeightName | None = Field(default=None, description="Norm of the queries.")
    k_norm: WeightName | None = Field(default=None, description="Norm of the keys.")
    post_self_attn_layernorm: WeightName | None = Field(
        default=None, description="Norm of the attention's output (sandwich)."
    )
    post_mlp_layernorm: WeightName | None = Field(
        default=None, description="Norm of the MLP's output (sandwich)."
    )
    gate: WeightName | None = Field(default=None, description="Gate projection.")
    up: WeightName | None = Field(default=None, description="Up projection.")
    gate_up: WeightName | None = Field(default=None, description="Gate and up in one matrix.")
    down: WeightName | None = Field(default=None, description="Down projection.")
    moe: MoeWeights | None = Field(default=None, description="The experts' keys.")


class MergerWeights(SpecModel):
    """Keys of the merger."""

    prefix: WeightPrefix | None = Field(
        default=None,
        description="Prefix of the merger; none: that of the layout's projector alone.",
    )
    norm: WeightName = Field(description="Norm.")
    fc1: WeightName = Field(description="First linear layer.")
    fc2: WeightName | None = Field(default=None, description="Second linear layer.")
    conv: WeightName | None = Field(
        default=None, description="The convolution of strided_conv, after the tower's prefix."
    )
    gate: WeightName | None = Field(default=None, description="Gate projection of strided_conv.")
    up: WeightName | None = Field(default=None, description="Up projection of strided_conv.")
    down: WeightName | None = Field(default=None, description="Down projection of strided_conv.")


class DeepstackWeights(SpecModel):
    """Keys of the deepstack mergers."""

    prefix: LevelPrefix = Field(description="Prefix of one level's merger.")
    norm: WeightName = Field(description="Norm.")
    fc1: WeightName = Field(description="First linear layer.")
    fc2: WeightName = Field(description="Second linear layer.")


class VisionWeights(SpecModel):
    """Keys of the vision tower, after the layout's prefix."""

    patch_embed: WeightName = Field(description="Patch embedding.")
    class_token: WeightName | None = Field(
        default=None, description="Class token; stored without .weight."
    )
    embed_norm: WeightName | None = Field(default=None, description="Norm of the patch embedding.")
    pos_embed: WeightName | None = Field(
        default=None,
        description="Learned position table; stored without .weight where there is a class token.",
    )
    block: BlockPrefix = Field(description="Prefix of a tower block.")
    norm1: WeightName = Field(description="Norm before attention.")
    norm2: WeightName = Field(description="Norm before the MLP.")
    qkv: WeightName | None = Field(
        default=None, description="Fused query, key and value projection."
    )
    q: WeightName | None = Field(default=None, description="Query projection.")
    k: WeightName | None = Field(default=None, description="Key projection.")
    v: WeightName | None = Field(default=None, description="Value projection.")
    q_norm: WeightName | None = Field(default=None, description="Norm of the queries.")
    k_norm: WeightName | None = Field(default=None, description="Norm of the keys.")
    proj: WeightName = Field(description="Output projection.")
    scale1: WeightName | None = Field(
        default=None, description="Layer scale of attention; stored without .weight."
    )
    scale2: WeightName | None = Field(
        default=None, description="Layer scale of the MLP; stored without .weight."
    )
    fc1: WeightName | None = Field(default=None, description="First linear layer of the MLP.")
    fc2: WeightName | None = Field(default=None, description="Second linear layer of the MLP.")
    gate: WeightName | None = Field(default=None, description="Gate projection of the MLP.")
    up: WeightName | None = Field(default=None, description="Up projection of the MLP.")
    down: WeightName | None = Field(default=None, description="Down projection of the MLP.")
    final_norm: WeightName | None = Field(default=None, description="Norm after the last block.")
    merger: MergerWeights = Field(description="The merger's keys.")
    deepstack: DeepstackWeights | None = Field(
        default=None, description="The deepstack mergers' keys."
    )


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
