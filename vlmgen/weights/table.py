"""Derive the weight table of a spec: parameter <- checkpoint keys + layout verb.

The table is data. Templates write it into the package's `weight_mapping.py`, `vlmgen show` prints
it, and the coverage proof checks it against the published checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vlmgen.spec.model import Spec


@dataclass(frozen=True)
class WeightEntry:
    """One row of the table.

    Attributes:
        parameter: name in the package's module, with `{layer}`, `{block}` or `{level}` where it
            repeats.
        keys: checkpoint keys without the tower's prefix, in the order the loader takes them.
        verb: how the keys become the parameter: `rename`, `transpose`, `fuse_qkv` (separate Q, K,
            V side by side), `split_qkv_thirds` (this rank's heads out of each third),
            `flatten_transpose` (a convolution kernel), `shard_rows` (vocabulary).
    """

    parameter: str
    keys: tuple[str, ...]
    verb: str


@dataclass(frozen=True)
class WeightTable:
    """All rows, grouped by what they repeat over."""

    text: tuple[WeightEntry, ...]
    text_layer: tuple[WeightEntry, ...]
    head: tuple[WeightEntry, ...]
    vision: tuple[WeightEntry, ...]
    vision_block: tuple[WeightEntry, ...]
    vision_level: tuple[WeightEntry, ...]

    def groups(self) -> Iterator[tuple[str, tuple[WeightEntry, ...]]]:
        """(name, rows) of every group that has rows, in the order of the model."""
        for name in ("text", "text_layer", "head", "vision", "vision_block", "vision_level"):
            rows = getattr(self, name)
            if rows:
                yield name, rows


def _both(parameter: str, key: str, verb: str) -> list[WeightEntry]:
    """Weight and bias of a projection; the bias is sharded but never transposed."""
    bias_verb = "split_qkv_thirds" if verb == "split_qkv_thirds" else "rename"
    return [
        WeightEntry(f"{parameter}_weight", (f"{key}.weight",), verb),
        WeightEntry(f"{parameter}_bias", (f"{key}.bias",), bias_verb),
    ]


def _norm(parameter: str, key: str, kind: str) -> list[WeightEntry]:
    names = ("weight", "bias") if kind == "layer" else ("weight",)
    return [WeightEntry(f"{parameter}.{name}", (f"{key}.{name}",), "rename") for name in names]


def _text_layer(spec: Spec) -> list[WeightEntry]:
    names, kind = spec.weights.text, spec.text.norm.kind
    prefix, own = names.layer, "layers.{layer}."
    rows = _norm(f"{own}input_layernorm", f"{prefix}{names.input_layernorm}", kind)
    rows.append(
        WeightEntry(
            f"{own}self_attn.qkv_proj_weight",
            tuple(f"{prefix}{name}.weight" for name in (names.q, names.k, names.v)),
            "fuse_qkv",
        )
    )
    rows.append(
        WeightEntry(f"{own}self_attn.o_proj_weight", (f"{prefix}{names.o}.weight",), "transpose")
    )
    if spec.text.attention.qk_norm != "none":
        rows += _norm(f"{own}self_attn.q_layernorm", f"{prefix}{names.q_norm}", kind)
        rows += _norm(f"{own}self_attn.k_layernorm", f"{prefix}{names.k_norm}", kind)
    rows += _norm(
        f"{own}post_attention_layernorm", f"{prefix}{names.post_attention_layernorm}", kind
    )
    rows += [
        WeightEntry(f"{own}mlp.{name}_proj_weight", (f"{prefix}{key}.weight",), "transpose")
        for name, key in (("gate", names.gate), ("up", names.up), ("down", names.down))
    ]
    return rows


def _merger(parameter: str, names, norm_kind: str) -> list[WeightEntry]:
    prefix = names.prefix
    return [
        *_norm(f"{parameter}.norm", f"{prefix}{names.norm}", norm_kind),
        *_both(f"{parameter}.fc1", f"{prefix}{names.fc1}", "transpose"),
        *_both(f"{parameter}.fc2", f"{prefix}{names.fc2}", "transpose"),
    ]


def _vision_block(spec: Spec) -> list[WeightEntry]:
    names, kind = spec.weights.vision, spec.vision.norm.kind
    prefix = names.block
    return [
        *_norm("blocks.{block}.norm1", f"{prefix}{names.norm1}", kind),
        *_norm("blocks.{block}.norm2", f"{prefix}{names.norm2}", kind),
        *_both("blocks.{block}.attn.qkv", f"{prefix}{names.qkv}", "split_qkv_thirds"),
        *_both("blocks.{block}.attn.proj", f"{prefix}{names.proj}", "transpose"),
        *_both("blocks.{block}.mlp.fc1", f"{prefix}{names.fc1}", "transpose"),
        *_both("blocks.{block}.mlp.fc2", f"{prefix}{names.fc2}", "transpose"),
    ]


def weight_table(spec: Spec) -> WeightTable:
    """The complete weight table of a spec.

    Args:
        spec: a loaded spec.

    Returns:
        Rows in the order of the model; every parameter of the package appears in exactly one row.
    """
    names, vision = spec.weights, spec.vision
    deepstack = (
        _merger(
            "deepstack_merger_list.{level}", names.vision.deepstack, vision.deepstack.merger.norm
        )
        if vision.deepstack is not None
        else []
    )
    return WeightTable(
        text=(
            WeightEntry(
                "embed_tokens.weight", (f"{names.text.embed_tokens}.weight",), "shard_rows"
            ),
            *_norm("norm", names.text.norm, spec.text.norm.kind),
        ),
        text_layer=tuple(_text_layer(spec)),
        head=(WeightEntry("weight", ("weight",), "shard_rows"),),
        vision=(
            *_both("patch_embed.proj", names.vision.patch_embed, "flatten_transpose"),
            WeightEntry(
                "pos_embed.pos_embed_weight", (f"{names.vision.pos_embed}.weight",), "rename"
            ),
            *_merger("merger", names.vision.merger, vision.merger.norm),
        ),
        vision_block=tuple(_vision_block(spec)),
        vision_level=tuple(deepstack),
    )
