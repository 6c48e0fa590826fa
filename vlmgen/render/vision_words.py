"""What the vision templates need to know of a spec beyond single axes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vlmgen.render.escaping import Rendered, dotted
from vlmgen.spec.types import stated

if TYPE_CHECKING:
    from vlmgen.spec.model import Spec
    from vlmgen.spec.vision import VisionSpec

MERGE_ORDER = "patches_merge_order"
# Activation in the spec -> `hidden_act` of a config.json.
HIDDEN_ACT = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_tanh": "gelu_pytorch_tanh",
    "quick_gelu": "quick_gelu",
}
# Rows of the position table that are weighted for one patch.
TAPS = {"learned_bilinear": (4, "four"), "learned_grid_sample_bicubic": (16, "sixteen")}

# Shape of the processor's pixels, for docstrings: of a tensor, and with what its first size is.
PIXELS = {
    "patches_merge_order": ("`[patches, patch_dim]`", "(sum of t*h*w, patch_dim)"),
    "patches_raster": ("`[patches, C, p, p]`", "(sum of t*h*w, C, p, p)"),
    "tiles": ("`[tiles, C, side, side]`", "(sum of tiles, C, side, side)"),
}


def vision_words(spec: Spec) -> dict[str, Any]:
    """Values for the templates of the tower, of its inputs and of their tests.

    Args:
        spec: The spec.
    """
    vision = spec.vision
    deepstack, merger = vision.deepstack, vision.merger
    taps, taps_word = TAPS.get(vision.position.kind, (0, "")) if vision.position else (0, "")
    products, sums = _biases(vision)
    inputs = tower_inputs(vision)
    table = ("pos_emb_idx", "pos_emb_weight") if taps else ()
    return {
        "taps": taps,
        "taps_word": taps_word,
        "tower_inputs": inputs,
        "block_inputs": [name for name in inputs if name not in table],
        "input_parts": _input_parts(vision),
        "bound_inputs": ["bound", *(["window"] if vision.attention.window else [])],
        "pixels_shape": Rendered(PIXELS[vision.input][0]),
        "pixels_expected": Rendered(PIXELS[vision.input][1]),
        "products_without_bias": False in products,
        "sums_with_bias": True in sums,
        "sums_without_bias": False in sums,
        "vision_loaders": _loaders(vision),
        "vision_structure": _structure(vision),
        **_hugging_face_names(spec),
        "merger_flag": deepstack is not None and merger.norm_position == "before_merge",
    }


def _hugging_face_names(spec: Spec) -> dict[str, Any]:
    """Paths of Hugging Face's modules, from the names of their weights."""
    names, reference = spec.weights.vision, spec.reference
    blocks = names.block.removesuffix(".{block}.")
    root = f"{reference.vision_path}."
    norms = [
        ("blocks.0.norm1", f"{root}{blocks}.0.{names.norm1}"),
        ("blocks.0.norm2", f"{root}{blocks}.0.{names.norm2}"),
    ]
    if names.embed_norm:
        norms.append(("embed_norm", f"{root}{names.embed_norm}"))
    if names.final_norm:
        norms.append(("final_norm", f"{root}{names.final_norm}"))
    prefix = names.merger.prefix
    merger = f"{reference.projector_path}." if prefix is None else f"{root}{prefix}"
    norms.append(("merger.norm", f"{merger}{names.merger.norm}"))
    return {
        "hf_blocks": dotted(blocks),
        "hf_attention": dotted(stated(names.qkv or names.q).rpartition(".")[0]),
        "hf_mlp": dotted(stated(names.fc1 or names.gate).rpartition(".")[0]),
        "hf_merger": dotted(prefix.rstrip(".")) if prefix else "",
        "hf_norms": norms,
    }


def _input_parts(vision: VisionSpec) -> list[str]:
    """What there is to compute beside bounds and destinations, in words."""
    parts = {"rotary tables": vision.rope is not None, "patch order": vision.input != MERGE_ORDER}
    if vision.position is not None:
        parts["interpolated positions"] = vision.position.kind in TAPS
    return [name for name, there in parts.items() if there]


def tower_inputs(vision: VisionSpec) -> list[str]:
    """Names of the tower's per-patch arguments, in order."""
    names = ["pixel_values"]
    if vision.position is not None:
        names.append("pos_emb_idx")
        if vision.position.kind in TAPS:
            names.append("pos_emb_weight")
    if vision.rope is not None:
        names += ["cos", "sin"]
    names += ["bound_min", "bound_max"]
    if vision.attention.window is not None:
        names += ["window_min", "window_max"]
    return names


def _structure(vision: VisionSpec) -> list[tuple[str, Any, str]]:
    """Fields of the vision config that are structure: name, the value that is generated, axis."""
    attention, tiles = vision.attention, vision.input == "tiles"
    rows: list[tuple[str, Any, str]] = [
        ("hidden_act", HIDDEN_ACT[vision.mlp.activation], "vision.mlp.activation")
    ]
    if tiles or not attention.qkv_bias:  # other towers have the bias without a field for it
        rows.append(("attention_bias", attention.qkv_bias, "vision.attention.qkv_bias"))
    if tiles:
        rows += [
            ("use_qk_norm", attention.qk_norm != "none", "vision.attention.qk_norm"),
            ("norm_type", f"{vision.norm.kind}_norm", "vision.norm.kind"),
            ("use_absolute_position_embeddings", vision.position is not None, "vision.position"),
            ("use_mask_token", False, "vision.patch_embed"),
        ]
    if vision.deepstack is None:
        rows.append(("deepstack_visual_indexes", [], "vision.deepstack"))
    if attention.window is None:
        rows.append(("fullatt_block_indexes", [], "vision.attention.window"))
        rows.append(("window_size", None, "vision.attention.window"))
    return rows


def _biases(vision: VisionSpec) -> tuple[set[bool], set[bool]]:
    """Whether the products of the tower have a bias: those of one rank, those summed over ranks."""
    attention, mlp, merger = vision.attention, vision.mlp, vision.merger
    products = {vision.patch_embed.bias, attention.qkv_bias, mlp.bias, merger.bias}
    return products, {attention.output_bias, mlp.bias, merger.bias}


def _loaders(vision: VisionSpec) -> list[str]:
    """Functions of `weight_loaders.py` that the tower's parameters use, sorted."""
    attention = vision.attention
    names = {
        "column_parallel_loader",
        "patch_embed_loader",
        "row_parallel_loader",
        "vision_qkv_loader",
        "whole_loader",
    }
    conv = vision.merger.op == "strided_conv"
    if vision.mlp.bias or vision.merger.bias or conv or attention.qk_norm != "none":
        names.add("column_parallel_bias_loader")
    if attention.qkv_bias:
        names.add("vision_qkv_bias_loader")
    if conv:
        names.add("merge_conv_loader")
    if vision.class_token is not None:
        names.add("squeezed_loader")
    return sorted(names)
