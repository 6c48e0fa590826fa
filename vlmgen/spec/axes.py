"""Axis values as data: what the templates implement, and what other families will need.

A spec may only state a value that a template implements. A value that some family needs but that
no template implements yet is refused by name, which tells the author that the spelling is right
and the generator is what lacks it. Adding the template means moving the value from `later` to
`implemented` here and adding it to the `Literal` in the model; a test keeps the two equal.
"""

from __future__ import annotations

from dataclasses import dataclass, field

Value = str | bool | float | None


@dataclass(frozen=True)
class Axis:
    """One axis of the spec.

    Args:
        implemented: Values that a template renders today.
        later: Values known from other families -> the families that use them.
    """

    implemented: tuple[Value, ...]
    later: dict[Value, tuple[str, ...]] = field(default_factory=dict)


_QWEN3_5 = ("qwen3_5", "qwen3_5_moe")
_SIGLIP = ("gemma3", "llava_onevision", "idefics3", "smolvlm")

# Dotted path in the spec -> axis. List indices are left out of the path.
AXES: dict[str, Axis] = {
    "text.norm.kind": Axis(("rms",), {"rms_zero_centered": (*_QWEN3_5, "gemma3")}),
    "text.norm.topology": Axis(("pre", "sandwich")),
    "text.norm.cast": Axis(("before_weight",), {"after_weight": (*_QWEN3_5, "gemma3")}),
    "text.attention.kind": Axis(
        ("gqa",),
        {
            "gqa_gated": _QWEN3_5,
            "gated_delta": _QWEN3_5,
            "mla": ("kimi_vl", "kimi_k25"),
        },
    ),
    "text.attention.qkv_layout": Axis(("separate",)),
    "text.attention.output_bias": Axis((False,)),
    "text.attention.qk_norm": Axis(
        ("head_rms_pre_rope", "none"), {"head_l2_post_rope": ("llama4",)}
    ),
    "text.mlp.kind": Axis(("swiglu",), {"geglu_tanh": ("gemma3",)}),
    "text.mlp.activation": Axis(("silu",), {"gelu_tanh": ("gemma3",)}),
    "text.mlp.layout": Axis(("separate", "fused_gate_up")),
    "text.mlp.bias": Axis((False,)),
    "text.rope.kind": Axis(("mrope", "plain")),
    "text.rope.order": Axis(("interleaved", "contiguous")),
    "text.rope.pairing": Axis(("half", "adjacent")),
    "text.rope.partial": Axis((1.0, 0.5), {0.25: _QWEN3_5}),
    "text.moe.router": Axis(("softmax", "sigmoid_bias"), {"sigmoid_top1_on_input": ("llama4",)}),
    "text.moe.checkpoint": Axis(("fused_in_out", "fused_out_in", "per_expert")),
    "vision.input": Axis(
        ("patches_merge_order", "patches_raster", "tiles"),
        {"padded_nchw_sizes": ("pixtral", "mistral3")},
    ),
    "vision.patch_embed.kind": Axis(("conv3d", "conv2d"), {"linear": ("llama4",)}),
    "vision.class_token": Axis(("first",), {"last": ("llama4",)}),
    "vision.embed_norm.kind": Axis(("layer", "rms")),
    "vision.final_norm.kind": Axis(("layer", "rms")),
    "vision.position.kind": Axis(
        ("learned_bilinear", "learned_grid_sample_bicubic", "learned_fixed"),
        {"learned_bicubic": ("kimi_k25",), "learned_bucketed": ("idefics3", "smolvlm")},
    ),
    "vision.position.align_corners": Axis((True,), {False: ("keye",)}),
    "vision.rope.kind": Axis(
        ("axial_half",),
        {
            "pixtral_split": ("pixtral", "mistral3"),
            "adjacent_wh": ("kimi_k25",),
            "llama4_complex": ("llama4",),
        },
    ),
    "vision.norm.kind": Axis(("layer", "rms")),
    "vision.attention.qkv_layout": Axis(("fused_thirds", "separate")),
    "vision.attention.qk_norm": Axis(("none", "full_width_rms")),
    "vision.attention.bounds": Axis(
        ("frame", "window", "tile"),
        {
            "clip": ("kimi_k25",),
            "image": ("pixtral", "mistral3"),
            "padding_mask": ("idefics3", "smolvlm"),
        },
    ),
    "vision.mlp.kind": Axis(("plain", "swiglu")),
    "vision.mlp.activation": Axis(("gelu_tanh", "gelu", "quick_gelu", "silu")),
    "vision.config_keys.hidden_size": Axis(("hidden_size", "embed_dim")),
    "vision.config_keys.depth": Axis(("depth", "num_hidden_layers")),
    "vision.config_keys.num_heads": Axis(("num_heads", "num_attention_heads")),
    "vision.config_keys.intermediate_size": Axis(
        ("intermediate_size", "mlp_ratio", "out_hidden_size")
    ),
    "vision.config_keys.out_hidden_size": Axis(
        ("out_hidden_size", "hidden_size", "text_hidden_size")
    ),
    "vision.config_keys.in_channels": Axis(("in_channels", "num_channels")),
    "vision.config_keys.num_embeddings": Axis(("num_position_embeddings", "image_size")),
    "vision.config_keys.merge_size": Axis(("spatial_merge_size", "downsample_ratio")),
    "vision.config_keys.merger_size": Axis(("intermediate_size",)),
    "vision.config_keys.norm_eps": Axis(("rms_norm_eps", "layer_norm_eps")),
    "vision.merger.op": Axis(
        ("window", "strided_conv"),
        {
            "unfold": ("mistral3",),
            "avg_pool": ("gemma3",),
            "mean_time": ("kimi_k25",),
            "bilinear_pool": ("llava_onevision",),
        },
    ),
    "vision.merger.norm": Axis(("layer", "rms"), {"none": ("pixtral", "llava_onevision")}),
    "vision.merger.norm_position": Axis(("before_merge", "after_merge")),
    "vision.merger.inner": Axis(("joined", "out")),
    "vision.merger.activation": Axis(("gelu",)),
    "vision.deepstack.merger.norm": Axis(("layer",)),
    "vision.deepstack.merger.norm_position": Axis(("after_merge",)),
    "vision.deepstack.merger.activation": Axis(("gelu",)),
    "vision.deepstack.merger.bias": Axis((True,)),
    "vision.deepstack.inject": Axis(("after_layer",)),
    "tokens.positions": Axis(("mrope_per_frame", "mrope_block", "sequence")),
    "tokens.video_prompt": Axis(
        ("per_frame_timestamp", "one_run", "per_frame_image_token", "per_frame_label", "none")
    ),
    "neuron.quantization": Axis(
        ("none", "bf16"), {"mxfp8": ("the plugin's own package, text tower only",)}
    ),
}

# Keys that some family needs and that the schema does not have yet -> the families.
LATER_KEYS: dict[str, tuple[str, ...]] = {
    "text.layer_types": (*_QWEN3_5, "gemma3", "llama4"),
    "text.embed_scale": ("gemma3",),
    "text.attention.scale": ("gemma3", "kimi_k25"),
    "text.attention.temperature": ("llama4",),
    "text.rope.scaling": ("gemma3", "llama4", "kimi_k25"),
    "vision.feature": ("llava_onevision", "pixtral"),
    "tokens.mask": ("gemma3",),
    "weights.rename": ("llava_onevision",),
}


def show(value: Value) -> str:
    """A value as a spec writes it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)
