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


_QWEN2 = ("qwen2_vl", "qwen2_5_vl")
_GLM_DENSE = ("glm4v", "glm46v")
_GLM = ("glm4v", "glm46v", "glm4v_moe")
_QWEN3_5 = ("qwen3_5", "qwen3_5_moe")
_SIGLIP = ("gemma3", "llava_onevision", "idefics3", "smolvlm")

# Dotted path in the spec -> axis. List indices are left out of the path.
AXES: dict[str, Axis] = {
    "text.norm.kind": Axis(("rms",), {"rms_zero_centered": (*_QWEN3_5, "gemma3")}),
    "text.norm.topology": Axis(("pre",), {"sandwich": (*_GLM_DENSE, "gemma3")}),
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
    "text.attention.qkv_bias": Axis(
        (False,), {True: (*_QWEN2, *_GLM, "internvl3", "ovis2", "llava_onevision")}
    ),
    "text.attention.output_bias": Axis((False,)),
    "text.attention.qk_norm": Axis(
        ("head_rms_pre_rope",),
        {
            "none": (*_QWEN2, *_GLM, "paddleocr_vl", "internvl3"),
            "head_l2_post_rope": ("llama4",),
        },
    ),
    "text.mlp.kind": Axis(("swiglu",), {"geglu_tanh": ("gemma3",)}),
    "text.mlp.activation": Axis(("silu",), {"gelu_tanh": ("gemma3",)}),
    "text.mlp.layout": Axis(("separate",), {"fused_gate_up": _GLM_DENSE}),
    "text.mlp.bias": Axis((False,)),
    "text.rope.kind": Axis(
        ("mrope",),
        {"plain": ("internvl3", "internvl3_5", "gemma3", "mistral3", "pixtral", *_SIGLIP[1:])},
    ),
    "text.rope.order": Axis(
        ("interleaved",), {"contiguous": (*_QWEN2, *_GLM, "paddleocr_vl", "keye")}
    ),
    "text.rope.pairing": Axis(("half",), {"adjacent": (*_GLM_DENSE, "llama4", "kimi_k25")}),
    "text.rope.partial": Axis((1.0,), {0.5: _GLM, 0.25: _QWEN3_5}),
    "vision.input": Axis(
        ("patches_merge_order",),
        {
            "patches_raster": ("paddleocr_vl", "keye", "kimi_k25"),
            "tiles_nchw": ("internvl3", "llama4", "ovis2", *_SIGLIP),
            "padded_nchw_sizes": ("pixtral", "mistral3"),
        },
    ),
    "vision.patch_embed.kind": Axis(
        ("conv3d",),
        {"conv2d": ("paddleocr_vl", "pixtral", "mistral3", *_SIGLIP), "linear": ("llama4",)},
    ),
    "vision.patch_embed.bias": Axis((True,), {False: (*_QWEN2, "pixtral", "mistral3", "llama4")}),
    "vision.position.kind": Axis(
        ("learned_bilinear",),
        {
            "none": (*_QWEN2, "pixtral"),
            "learned_bicubic": ("kimi_k25", "internvl3"),
            "learned_grid_sample_bicubic": _GLM,
            "learned_fixed": ("gemma3", "llava_onevision", "ovis2", "llama4"),
            "learned_bucketed": ("idefics3", "smolvlm"),
        },
    ),
    "vision.position.align_corners": Axis((True,), {False: ("keye",)}),
    "vision.rope.kind": Axis(
        ("axial_half",),
        {
            "none": ("internvl3", "ovis2", *_SIGLIP),
            "pixtral_split": ("pixtral", "mistral3"),
            "adjacent_wh": ("kimi_k25",),
            "llama4_complex": ("llama4",),
        },
    ),
    "vision.norm.kind": Axis(
        ("layer",), {"rms": ("qwen2_5_vl", *_GLM, "pixtral", "ovis2", "internvl_6b")}
    ),
    "vision.attention.qkv_layout": Axis(
        ("fused_thirds",),
        {"separate": ("internvl3", "paddleocr_vl", "pixtral", "ovis2", "llama4", *_SIGLIP)},
    ),
    "vision.attention.qkv_bias": Axis((True,), {False: (*_GLM, "pixtral", "ovis2", "internvl_6b")}),
    "vision.attention.output_bias": Axis((True,), {False: (*_GLM, "pixtral", "ovis2")}),
    "vision.attention.qk_norm": Axis(("none",), {"full_width_rms": ("internvl_6b",)}),
    "vision.attention.bounds": Axis(
        ("frame",),
        {
            "window": ("qwen2_5_vl",),
            "clip": ("kimi_k25",),
            "tile": ("internvl3", "gemma3", "llama4", "ovis2", "llava_onevision"),
            "image": ("pixtral", "mistral3"),
            "padding_mask": ("idefics3", "smolvlm"),
        },
    ),
    "vision.mlp.kind": Axis(("plain",), {"swiglu": ("qwen2_5_vl", *_GLM, "pixtral", "ovis2")}),
    "vision.mlp.activation": Axis(
        ("gelu_tanh",),
        {
            "gelu": ("internvl3", "llama4"),
            "quick_gelu": ("qwen2_vl",),
            "silu": ("qwen2_5_vl", *_GLM, "pixtral", "ovis2"),
        },
    ),
    "vision.mlp.bias": Axis((True,), {False: (*_GLM, "pixtral", "ovis2")}),
    "vision.merger.op": Axis(
        ("window",),
        {
            "regroup": ("paddleocr_vl", "keye"),
            "pixel_shuffle": ("internvl3", "idefics3", "smolvlm", "llama4"),
            "unfold": ("mistral3",),
            "strided_conv": _GLM,
            "avg_pool": ("gemma3",),
            "mean_time": ("kimi_k25",),
            "bilinear_pool": ("llava_onevision",),
        },
    ),
    "vision.merger.norm": Axis(
        ("layer",),
        {"rms": ("qwen2_5_vl", "gemma3", "mistral3"), "none": ("pixtral", "llava_onevision")},
    ),
    "vision.merger.norm_position": Axis(("before_merge",), {"after_merge": ("internvl3", "keye")}),
    "vision.merger.activation": Axis(("gelu",)),
    "vision.merger.bias": Axis((True,), {False: (*_GLM,)}),
    "vision.deepstack": Axis((), {None: (*_QWEN2, *_GLM, *_QWEN3_5, "paddleocr_vl", "internvl3")}),
    "vision.deepstack.merger.norm": Axis(("layer",)),
    "vision.deepstack.merger.norm_position": Axis(("after_merge",)),
    "vision.deepstack.merger.activation": Axis(("gelu",)),
    "vision.deepstack.merger.bias": Axis((True,)),
    "vision.deepstack.inject": Axis(("after_layer",)),
    "tokens.positions": Axis(
        ("mrope_per_frame",),
        {
            "mrope_block": _QWEN2,
            "sequence": ("internvl3", "gemma3", "mistral3", "pixtral", "llama4", "ovis2"),
        },
    ),
    "tokens.video_prompt": Axis(
        ("per_frame_timestamp",),
        {
            "none": ("paddleocr_vl", "gemma3", "mistral3", "pixtral", "llama4", "ovis2"),
            "one_run": (*_QWEN2, "llava_onevision"),
            "per_frame_label": ("internvl3",),
        },
    ),
    "neuron.quantization": Axis(
        ("none", "bf16"), {"mxfp8": ("qwen3_vl of the plugin, text tower only",)}
    ),
}

# Keys that some family needs and that the schema does not have yet -> the families.
LATER_KEYS: dict[str, tuple[str, ...]] = {
    "extends": ("every family that is a variant of another",),
    "text.moe": ("qwen3_vl_moe", "glm4v_moe", "qwen3_5_moe", "internvl3_5", "llama4", "kimi_k25"),
    "text.layer_types": (*_QWEN3_5, "gemma3", "llama4"),
    "text.embed_scale": ("gemma3",),
    "text.attention.scale": ("gemma3", "kimi_k25"),
    "text.attention.temperature": ("llama4",),
    "text.rope.scaling": ("gemma3", "llama4", "kimi_k25"),
    "vision.embed_norm": (*_GLM, "ovis2", "pixtral", "llama4"),
    "vision.cls": ("internvl3", "llama4"),
    "vision.layer_scale": ("internvl3",),
    "vision.final_norm": (*_GLM, "paddleocr_vl", "ovis2", *_SIGLIP),
    "vision.feature": ("llava_onevision", "pixtral"),
    "vision.downsample": _GLM,
    "vision.attention.window": ("qwen2_5_vl",),
    "tokens.mask": ("gemma3",),
    "tokens.tokens_per_image": ("gemma3", "internvl3", "llama4", "pixtral", "mistral3"),
    "tokens.timestamp": (*_GLM, "smolvlm", "kimi_k25"),
    "weights.rename": (*_QWEN2, "internvl3", "llava_onevision"),
    "weights.keep_float32": ("glm4v_moe", *_QWEN3_5),
}


def show(value: Value) -> str:
    """A value as a spec writes it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)
