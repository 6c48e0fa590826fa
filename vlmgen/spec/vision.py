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

    kind: Literal["conv3d", "conv2d"] = Field(
        description="conv3d: kernel = stride = (temporal_patch_size, patch_size, patch_size). "
        "conv2d: kernel = stride = (patch_size, patch_size), temporal_patch_size is 1."
    )
    patch_size: Annotated[int, Field(ge=1, le=256)] = Field(description="Side of a patch, pixels.")
    temporal_patch_size: Annotated[int, Field(ge=1, le=64)] = Field(
        description="Frames in one patch."
    )
    in_channels: Annotated[int, Field(ge=1, le=16)] = Field(description="Colour channels.")
    bias: bool = Field(description="Bias of the projection.")

    @property
    def patch_dim(self) -> int:
        """Width of one pixel row, C x T x p x p."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2


class VisionPosition(SpecModel):
    """Absolute positions added to the patch embedding."""

    kind: Literal["learned_bilinear", "learned_grid_sample_bicubic", "learned_fixed"] = Field(
        description="learned_bilinear: a square learned table, interpolated to the item's grid. "
        "learned_grid_sample_bicubic: sampled at patch centres by bicubic interpolation, corners "
        "not aligned, borders repeated. learned_fixed: one row per place of a tile."
    )
    align_corners: OnlyTrue | None = Field(
        default=None,
        description="For learned_bilinear. true: the first and last row of the grid meet those of "
        "the table.",
    )
    num_embeddings: Count = Field(
        description="Rows of the table: a square number, one more with a class token."
    )


class VisionRope(SpecModel):
    """Rotary position embedding of the vision tower."""

    kind: Literal["axial_half"] = Field(
        description="axial_half: head size / 4 frequencies for the row, as many for the column, "
        "the pair of lists twice, halves rotated, float32."
    )
    theta: Theta = Field(description="Base of the frequencies.")


class VisionNorm(SpecModel):
    """A norm of the tower."""

    kind: Literal["layer", "rms"] = Field(
        description="layer: layer norm with weight and bias. rms: RMS norm with a weight."
    )
    eps: Epsilon = Field(description="Epsilon inside the square root.")


class AttentionWindow(SpecModel):
    """Windows of the attention."""

    size: Count = Field(description="Side of a window, pixels.")
    full_blocks: Annotated[Sequence[Index], Field(min_length=1, max_length=4096)] = Field(
        description="Blocks that attend over the whole frame, ascending."
    )


class VisionAttention(SpecModel):
    """Attention of a tower block."""

    num_heads: Count = Field(description="Heads; divides hidden_size.")
    qkv_layout: Literal["fused_thirds", "separate"] = Field(
        description="In the checkpoint. fused_thirds: one matrix, rows [Q of all heads | K | V]. "
        "separate: three matrices."
    )
    qkv_bias: bool = Field(description="Bias on the q, k and v projections.")
    output_bias: bool = Field(description="Bias on the output projection.")
    qk_norm: Literal["none", "full_width_rms"] = Field(
        description="Norm of queries and keys. full_width_rms: RMS norm over all heads together."
    )
    bounds: Literal["frame", "window", "tile"] = Field(
        description="Unit inside which patches attend. frame: one frame of one item. window: a "
        "window of a frame, in some blocks the frame. tile: one tile with its class token."
    )
    window: AttentionWindow | None = Field(default=None, description="For bounds window.")


class VisionMlp(SpecModel):
    """Feed-forward part of a tower block."""

    kind: Literal["plain", "swiglu"] = Field(
        description="plain: fc2(act(fc1(x))). swiglu: down(act(gate(x)) * up(x))."
    )
    activation: Literal["gelu_tanh", "gelu", "quick_gelu", "silu"] = Field(
        description="gelu_tanh: GELU in the tanh form (hidden_act gelu_pytorch_tanh). gelu: exact "
        "GELU (erf). quick_gelu: x * sigmoid(1.702 x). silu: x * sigmoid(x)."
    )
    intermediate_size: Count = Field(description="Width between the projections.")
    bias: bool = Field(description="Bias on the projections.")


class Merger(SpecModel):
    """From merge_size x merge_size patches to one row of the text width."""

    op: Literal["window", "strided_conv"] = Field(
        description="window: norm, the patches of a window joined, fc1, act, fc2. strided_conv: a "
        "convolution of stride merge_size to the text width, fc1, norm, act, and a gated MLP."
    )
    merge_size: Annotated[int, Field(ge=1, le=16)] = Field(
        description="Side of a merge window, patches."
    )
    norm: Literal["layer", "rms"] = Field(description="Norm of the merger.")
    norm_eps: Epsilon = Field(description="Epsilon of the norm.")
    norm_position: Literal["before_merge", "after_merge"] = Field(
        description="before_merge: over one patch, before the window is joined. after_merge: over "
        "the joined window, or for strided_conv over the output of fc1."
    )
    inner: Literal["joined", "out"] | Count = Field(
        default="joined",
        description="Width between fc1 and fc2. joined: of the joined window. out: the text "
        "width. For strided_conv a number, the width of the gated MLP.",
    )
    activation: Literal["gelu"] = Field(description="gelu: exact GELU (erf).")
    bias: bool = Field(
        description="Bias on the linear layers; the convolution of strided_conv always has one."
    )


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


class VisionConfigKeys(SpecModel):
    """How the vision config of config.json states the sizes, where not under their names here."""

    hidden_size: Literal["hidden_size", "embed_dim"] = Field(
        default="hidden_size", description="Key of the tower's width."
    )
    depth: Literal["depth", "num_hidden_layers"] = Field(
        default="depth", description="Key of the number of blocks."
    )
    num_heads: Literal["num_heads", "num_attention_heads"] = Field(
        default="num_heads", description="Key of the number of heads."
    )
    intermediate_size: Literal["intermediate_size", "mlp_ratio", "out_hidden_size"] = Field(
        default="intermediate_size",
        description="Key of the MLP's width; mlp_ratio is times the tower's width.",
    )
    out_hidden_size: Literal["out_hidden_size", "hidden_size", "text_hidden_size"] = Field(
        default="out_hidden_size",
        description="Key of the width after the merger; text_hidden_size: the text config's.",
    )
    in_channels: Literal["in_channels", "num_channels"] = Field(
        default="in_channels", description="Key of the colour channels; in_chans is read as well."
    )
    num_embeddings: Literal["num_position_embeddings", "image_size"] = Field(
        default="num_position_embeddings",
        description="Key of the table's rows; image_size: (image_size / patch_size)^2 of them.",
    )
    merge_size: Literal["spatial_merge_size", "downsample_ratio"] = Field(
        default="spatial_merge_size",
        description="Key of the merge window; downsample_ratio: its inverse, at the top level.",
    )
    merger_size: Literal["intermediate_size"] | None = Field(
        default=None, description="Key of merger.inner, where that is a number."
    )
    norm_eps: Literal["rms_norm_eps", "layer_norm_eps"] | None = Field(
        default=None, description="Key of norm.eps; none: the model takes no other."
    )


class VisionSpec(SpecModel):
    """The vision tower: structure, and the sizes of the default checkpoint."""

    config_key: ConfigKey = Field(description="Key of the vision config in config.json.")
    config_keys: VisionConfigKeys | None = Field(
        default=None, description="Names of the sizes in config.json, where they differ."
    )
    model_type: ModelType = Field(description="model_type of the vision config.")
    hidden_size: Count = Field(description="Width of the tower.")
    depth: Layers = Field(description="Blocks of the tower.")
    out_hidden_size: Count = Field(description="Width after the merger; equals text.hidden_size.")
    input: Literal["patches_merge_order", "patches_raster", "tiles"] = Field(
        description="patches_merge_order: rows of C x T x p x p, the patches of one merge window "
        "adjacent. patches_raster: rows of C x p x p, row by row of the grid. tiles: square "
        "pictures C x side x side."
    )
    patch_embed: PatchEmbed = Field(description="Patch embedding.")
    class_token: Literal["first"] | None = Field(
        default=None,
        description="first: a learned token before the patches of a tile, dropped by the merger.",
    )
    embed_norm: VisionNorm | None = Field(
        default=None, description="Norm of the patch embedding, before positions are added."
    )
    position: VisionPosition | None = Field(default=None, description="Absolute positions.")
    rope: VisionRope | None = Field(default=None, description="Rotary positions.")
    norm: VisionNorm = Field(description="Norms of the blocks.")
    attention: VisionAttention = Field(description="Attention of the blocks.")
    mlp: VisionMlp = Field(description="MLP of the blocks.")
    layer_scale: bool = Field(
        default=False, description="A learned factor per channel on attention and MLP output."
    )
    final_norm: VisionNorm | None = Field(
        default=None, description="Norm after the last block, before the merger."
    )
    merger: Merger = Field(description="Merger at the end of the tower.")
    deepstack: Deepstack | None = Field(default=None, description="Deepstack levels.")

    @property
    def keys(self) -> VisionConfigKeys:
        """Names of the sizes in config.json."""
        return self.config_keys or VisionConfigKeys()

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
        return len(self.deepstack.indices) if self.deepstack else 0

    @property
    def merger_width(self) -> int:
        """Width between the merger's linear layers, `merger.inner` as a number."""
        inner = self.merger.inner
        if isinstance(inner, int):
            return inner
        return self.merged_width if inner == "joined" else self.out_hidden_size

    @property
    def lead(self) -> int:
        """Places before the patches of a unit: one merge window whose last holds the class
        token."""
        return self.merge_area if self.class_token else 0

    @property
    def fat_width(self) -> int:
        """Width of one encoder-cache row: the merged row and one row per deepstack level."""
        return self.out_hidden_size * (1 + self.num_levels)
