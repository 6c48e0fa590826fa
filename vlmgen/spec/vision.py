"""The vision tower's axes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from vlmgen.spec.types import (
    ConfigKey,
    Count,
    Epsilon,
    Index,
    Layers,
    ModelType,
    OnlyTrue,
    Sequence,
    SpecModel,
    Theta,
)


class PatchEmbed(SpecModel):
    """From pixels to the first hidden state of a patch."""

    kind: Literal["conv3d"] = Field(
        description="conv3d: kernel = stride = (temporal_patch_size, patch_size, patch_size)."
    )
    patch_size: Annotated[int, Field(ge=1, le=256)] = Field(description="Side of a patch, pixels.")
    temporal_patch_size: Annotated[int, Field(ge=1, le=64)] = Field(
        description="Frames in one patch."
    )
    in_channels: Annotated[int, Field(ge=1, le=16)] = Field(description="Colour channels.")
    bias: OnlyTrue = Field(description="Bias of the projection.")

    @property
    def patch_dim(self) -> int:
        """Width of one pixel row, C x T x p x p."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2


class VisionPosition(SpecModel):
    """Absolute positions added to the patch embedding."""

    kind: Literal["learned_bilinear"] = Field(
        description="learned_bilinear: a square learned table, interpolated to the item's grid."
    )
    align_corners: OnlyTrue = Field(
        description="true: the first and last row of the grid meet those of the table."
    )
    num_embeddings: Count = Field(description="Rows of the table, a square number.")


class VisionRope(SpecModel):
    """Rotary position embedding of the vision tower."""

    kind: Literal["axial_half"] = Field(
        description="axial_half: head size / 4 frequencies for the row, as many for the column, "
        "the pair of lists twice, halves rotated, float32."
    )
    theta: Theta = Field(description="Base of the frequencies.")


class VisionNorm(SpecModel):
    """Norms of the tower's blocks."""

    kind: Literal["layer"] = Field(description="layer: layer norm with weight and bias.")
    eps: Epsilon = Field(description="Epsilon inside the square root.")


class VisionAttention(SpecModel):
    """Attention of a tower block."""

    num_heads: Count = Field(description="Heads; divides hidden_size.")
    qkv_layout: Literal["fused_thirds"] = Field(
        description="fused_thirds: one matrix, rows [Q of all heads | K | V]."
    )
    qkv_bias: OnlyTrue = Field(description="Bias on the q, k and v projections.")
    output_bias: OnlyTrue = Field(description="Bias on the output projection.")
    qk_norm: Literal["none"] = Field(description="Norm of queries and keys.")
    bounds: Literal["frame"] = Field(
        description="Unit inside which patches attend. frame: one frame of one item."
    )


class VisionMlp(SpecModel):
    """Feed-forward part of a tower block."""

    kind: Literal["plain"] = Field(description="plain: fc2(act(fc1(x))).")
    activation: Literal["gelu_tanh"] = Field(
        description="gelu_tanh: GELU in the tanh form (hidden_act gelu_pytorch_tanh)."
    )
    intermediate_size: Count = Field(description="Width between fc1 and fc2.")
    bias: OnlyTrue = Field(description="Bias on fc1 and fc2.")


class Merger(SpecModel):
    """From merge_size x merge_size patches to one row of the text width."""

    op: Literal["window"] = Field(
        description="window: patches arrive in merge order, the window is a reshape."
    )
    merge_size: Annotated[int, Field(ge=1, le=16)] = Field(
        description="Side of a merge window, patches."
    )
    norm: Literal["layer"] = Field(description="Norm of the merger.")
    norm_eps: Epsilon = Field(description="Epsilon of the norm.")
    norm_position: Literal["before_merge"] = Field(
        description="before_merge: over one patch, before the window is joined."
    )
    activation: Literal["gelu"] = Field(description="gelu: exact GELU (erf).")
    bias: OnlyTrue = Field(description="Bias on fc1 and fc2.")


class DeepstackMerger(SpecModel):
    """The merger of one deepstack level; its merge size is that of the tower's merger."""

    norm: Literal["layer"] = Field(description="Norm of the merger.")
    norm_eps: Epsilon = Field(description="Epsilon of the norm.")
    norm_position: Literal["after_merge"] = Field(
        description="after_merge: over the joined window."
    )
    activation: Literal["gelu"] = Field(description="gelu: exact GELU (erf).")
    bias: OnlyTrue = Field(description="Bias on fc1 and fc2.")


class Deepstack(SpecModel):
    """Tower blocks whose output is merged on its own and added to the text."""

    indices: Annotated[Sequence[Index], Field(min_length=1, max_length=64)] = Field(
        description="Tower blocks, 0-based and ascending; level k is the k-th of them."
    )
    merger: DeepstackMerger = Field(description="Merger of each level.")
    inject: Literal["after_layer"] = Field(
        description="after_layer: level k is added to the output of decoder layer k."
    )


class VisionSpec(SpecModel):
    """The vision tower: structure, and the sizes of the default checkpoint."""

    config_key: ConfigKey = Field(description="Key of the vision config in config.json.")
    model_type: ModelType = Field(description="model_type of the vision config.")
    hidden_size: Count = Field(description="Width of the tower.")
    depth: Layers = Field(description="Blocks of the tower.")
    out_hidden_size: Count = Field(description="Width after the merger; equals text.hidden_size.")
    input: Literal["patches_merge_order"] = Field(
        description="patches_merge_order: rows of C x T x p x p, the patches of one merge window "
        "adjacent."
    )
    patch_embed: PatchEmbed = Field(description="Patch embedding.")
    position: VisionPosition = Field(description="Absolute positions.")
    rope: VisionRope = Field(description="Rotary positions.")
    norm: VisionNorm = Field(description="Norms of the blocks.")
    attention: VisionAttention = Field(description="Attention of the blocks.")
    mlp: VisionMlp = Field(description="MLP of the blocks.")
    merger: Merger = Field(description="Merger at the end of the tower.")
    deepstack: Deepstack = Field(description="Deepstack levels.")

    @property
    def head_dim(self) -> int:
        """Width of one head, hidden_size / heads."""
        return self.hidden_size // self.attention.num_heads

    @property
    def merge_area(self) -> int:
        """Patches of one merge window, the m of the runner contract."""
        return self.merger.merge_size**2

    @property
    def merged_width(self) -> int:
        """Width of a joined merge window, hidden_size x merge area."""
        return self.hidden_size * self.merge_area

    @property
    def num_levels(self) -> int:
        """Deepstack levels."""
        return len(self.deepstack.indices)

    @property
    def fat_width(self) -> int:
        """Width of one encoder-cache row: the merged row and one row per deepstack level."""
        return self.out_hidden_size * (1 + self.num_levels)
