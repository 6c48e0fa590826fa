"""The sizes that a spec states for a checkpoint, next to those of the published config.json."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from vlmgen.spec.derive import text_parameters, vision_parameters

if TYPE_CHECKING:
    from vlmgen.spec.model import ResolvedCheckpoint, Spec
    from vlmgen.spec.text import TextSpec
    from vlmgen.spec.vision import VisionSpec
    from vlmgen.weights.published import PublishedCheckpoint

Size = tuple[str, Any, Any]
"""Name, value by the spec, value by the published config."""

# Fields that a text config may leave to its class.
_OPTIONAL = ("max_position_embeddings",)


def sizes_of(
    spec: Spec, resolved: ResolvedCheckpoint, checkpoint: PublishedCheckpoint
) -> Iterator[Size]:
    """Every size of a checkpoint, by the spec and as published.

    Args:
        spec: Names the fields of config.json.
        resolved: The spec's sizes of this checkpoint.
        checkpoint: The published config and tensors.

    Yields:
        The name, the spec's value, and the published value, None where the config lacks it.
    """
    config, text, vision = checkpoint.config, resolved.text, resolved.vision
    section = config.get(spec.text.config_key, config)
    for name, value, wanted in _text(text, section):
        yield f"{text.config_key}.{name}", value, wanted
    for name, value, wanted in _vision(vision, config[vision.config_key]):
        yield f"{vision.config_key}.{name}", value, wanted
    if vision.keys.merge_size == "downsample_ratio":
        yield "downsample_ratio", 1 / vision.merger.merge_size, config.get("downsample_ratio")
    if vision.keys.out_hidden_size == "text_hidden_size":
        yield f"{text.config_key}.hidden_size", vision.out_hidden_size, section["hidden_size"]
    yield "tie_word_embeddings", text.tie_word_embeddings, checkpoint.tied
    counted = text_parameters(text) + vision_parameters(vision)
    yield "the number of parameters", counted, checkpoint.num_parameters


def _text(text: TextSpec, published: Mapping[str, Any]) -> Iterator[Size]:
    for name, value in {
        "hidden_size": text.hidden_size,
        "num_hidden_layers": text.num_layers,
        "num_attention_heads": text.attention.num_heads,
        "num_key_value_heads": text.attention.num_kv_heads,
        "intermediate_size": text.mlp.intermediate_size,
        "vocab_size": text.vocab_size,
        "max_position_embeddings": text.max_position_embeddings,
        "rms_norm_eps": text.norm.eps,
    }.items():
        yield name, value, published.get(name, value if name in _OPTIONAL else None)
    derived = published["hidden_size"] // published["num_attention_heads"]
    yield "head_dim", text.attention.head_dim, published.get("head_dim", derived)
    if text.moe is None:
        return
    for size, keys in text.moe.config_keys:
        stated = [key for key in keys if key in published]
        if keys:
            value = getattr(text.moe, size)
            name = stated[0] if stated else keys[0]
            yield name, getattr(value, "count", value), published.get(name)


def _vision(vision: VisionSpec, published: Mapping[str, Any]) -> Iterator[Size]:
    keys, inner = vision.keys, vision.mlp.intermediate_size
    patch = _side(published["patch_size"])
    sizes: list[tuple[str, float | list[int]]] = [
        (keys.hidden_size, vision.hidden_size),
        (keys.depth, vision.depth),
        (keys.num_heads, vision.attention.num_heads),
    ]
    if keys.intermediate_size == "mlp_ratio":
        sizes.append(("mlp_ratio", inner / vision.hidden_size))
    else:
        sizes.append((keys.intermediate_size, inner))
    if keys.merger_size is not None:
        sizes.append((keys.merger_size, vision.merger_width))
    if keys.out_hidden_size != "text_hidden_size":
        sizes.append((keys.out_hidden_size, vision.out_hidden_size))
    if keys.merge_size != "downsample_ratio":
        sizes.append((keys.merge_size, vision.merger.merge_size))
    if vision.patch_embed.temporal_patch_size > 1:
        sizes.append(("temporal_patch_size", vision.patch_embed.temporal_patch_size))
    if vision.deepstack is not None:
        sizes.append(("deepstack_visual_indexes", list(vision.deepstack.indices)))
    if (window := vision.attention.window) is not None:
        sizes += [("window_size", window.size), ("fullatt_block_indexes", list(window.full_blocks))]
    yield "patch_size", vision.patch_embed.patch_size, patch
    if vision.position is not None:
        rows = vision.position.num_embeddings - (1 if vision.class_token else 0)
        if keys.num_embeddings == "image_size":  # what is left of a patch at the edge is cut off
            shown = _side(published["image_size"]) // patch
            yield "image_size, in patches", math.isqrt(rows), shown
        else:
            sizes.append((keys.num_embeddings, rows))
    for name, value in sizes:
        yield name, value, published.get(name)


def _side(size: Any) -> int:
    """The side of a square that is stated as one number or as two."""
    return size[0] if isinstance(size, list) else size
