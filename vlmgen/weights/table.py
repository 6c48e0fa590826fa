"""Derive the weight table of a spec: parameter <- checkpoint keys + layout verb.

The table is data. Templates write it into the package's `weight_mapping.py`, `vlmgen show` prints
it, and the coverage proof checks it against the published checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from vlmgen.spec.types import stated

if TYPE_CHECKING:
    from vlmgen.spec.model import Spec
    from vlmgen.spec.text import TextMoe
    from vlmgen.spec.weights import DeepstackWeights, MergerWeights, MlpWeights, TextWeights

VERBS: Mapping[str, str] = {
    "rename": "as it is, or this rank's slice of it",
    "squeeze": "leading dimensions of one element dropped",
    "transpose": "a matrix, input dimension first",
    "shard_rows": "rows of a vocabulary",
    "flatten_transpose": "a kernel as wide as its stride, as a matrix over one patch",
    "window_conv": "a kernel as wide as its stride, as a matrix over the patches of a merge window",
    "fuse_qkv": "separate Q, K and V of the text side by side, each with its own heads",
    "fuse_vision_qkv": "separate Q, K and V of the tower side by side",
    "split_qkv_thirds": "this rank's heads out of each third of a fused matrix",
    "split_gate_up": "gate or up out of a matrix that holds the rows of both",
    "experts_in_out": "all experts in one tensor, input dimension first",
    "experts_out_in": "all experts in one tensor, output dimension first",
    "stack_experts": "one matrix per expert; for gate_up, gate and up of each in turn",
}
"""What a loader does with the keys of a row."""


@dataclass(frozen=True)
class WeightEntry:
    """One row of the table.

    Attributes:
        parameter: name in the package's module, with `{layer}`, `{block}` or `{level}` where it
            repeats.
        keys: checkpoint keys without the tower's prefix, in the order the loader takes them. Keys
            with `{expert}` stand for all of them, expert by expert.
        verb: how the keys become the parameter, one of `VERBS`.
    """

    parameter: str
    keys: tuple[str, ...]
    verb: str


@dataclass(frozen=True)
class WeightTable:
    """All rows, grouped by what they repeat over.

    Attributes:
        text: once in the text tower.
        text_layer: in every decoder layer.
        text_dense_layer: in the layers before the first with experts, where a family has both.
        text_expert_layer: in the layers with experts, where a family has both.
        head: the output head.
        vision: once in the tower.
        vision_block: in every block of the tower.
        vision_level: in every deepstack merger.
        projector: the tower's merger, where its keys have a prefix of their own.
    """

    text: tuple[WeightEntry, ...]
    text_layer: tuple[WeightEntry, ...]
    text_dense_layer: tuple[WeightEntry, ...]
    text_expert_layer: tuple[WeightEntry, ...]
    head: tuple[WeightEntry, ...]
    vision: tuple[WeightEntry, ...]
    vision_block: tuple[WeightEntry, ...]
    vision_level: tuple[WeightEntry, ...]
    projector: tuple[WeightEntry, ...]

    def groups(self) -> Iterator[tuple[str, tuple[WeightEntry, ...]]]:
        """(name, rows) of every group that has rows, in the order of the model."""
        for field in fields(self):
            rows = getattr(self, field.name)
            if rows:
                yield field.name, rows


def weight_table(spec: Spec) -> WeightTable:
    """The complete weight table of a spec.

    Args:
        spec: a loaded spec.

    Returns:
        Rows in the order of the model; every parameter of the package appears in exactly one row.
    """
    names = spec.weights.text
    layer, dense, experts = _text_layers(spec)
    merger = _merger(spec)
    beside = spec.weights.layouts[0].projector is not None
    return WeightTable(
        text=(
            WeightEntry("embed_tokens.weight", (f"{names.embed_tokens}.weight",), "shard_rows"),
            *_norm("norm", names.norm, spec.text.norm.kind),
        ),
        text_layer=tuple(layer),
        text_dense_layer=tuple(dense),
        text_expert_layer=tuple(experts),
        head=(WeightEntry("weight", ("weight",), "shard_rows"),),
        vision=(*_vision(spec), *(() if beside else merger)),
        vision_block=tuple(_vision_block(spec)),
        vision_level=tuple(_vision_level(spec)),
        projector=tuple(merger) if beside else (),
    )


# ---------------------------------------------------------------- rows


def _weight(parameter: str, key: str, verb: str = "transpose") -> WeightEntry:
    return WeightEntry(f"{parameter}_weight", (f"{key}.weight",), verb)


def _bias(parameter: str, key: str) -> WeightEntry:
    """A bias is whole or sharded, never transposed."""
    return WeightEntry(f"{parameter}_bias", (f"{key}.bias",), "rename")


def _linear(parameter: str, key: str, bias: bool, verb: str = "transpose") -> list[WeightEntry]:
    """Weight and bias of a projection."""
    return [_weight(parameter, key, verb), *([_bias(parameter, key)] if bias else [])]


def _norm(parameter: str, key: str, kind: str) -> list[WeightEntry]:
    names = ("weight", "bias") if kind == "layer" else ("weight",)
    return [WeightEntry(f"{parameter}.{name}", (f"{key}.{name}",), "rename") for name in names]


def _fused(parameter: str, keys: tuple[str, ...], bias: bool, verb: str) -> list[WeightEntry]:
    """Q, K and V as one matrix, and their biases in the same order."""
    return [
        WeightEntry(f"{parameter}_{kind}", tuple(f"{key}.{kind}" for key in keys), verb)
        for kind in (("weight", "bias") if bias else ("weight",))
    ]


def _gated(parameter: str, prefix: str, names: MlpWeights | TextWeights) -> list[WeightEntry]:
    """Gate, up and down projection of the text's gated MLP."""
    projections = (("gate", names.gate), ("up", names.up), ("down", names.down))
    return [_weight(f"{parameter}.{name}_proj", f"{prefix}{key}") for name, key in projections]


# ---------------------------------------------------------------- text


def _text_layers(spec: Spec) -> tuple[list[WeightEntry], list[WeightEntry], list[WeightEntry]]:
    """Rows of every layer, of the dense layers alone, and of those with experts alone."""
    names, norm, moe = spec.weights.text, spec.text.norm, spec.text.moe
    attention, prefix, own = spec.text.attention, names.layer, "layers.{layer}."
    rows = _norm(f"{own}input_layernorm", f"{prefix}{names.input_layernorm}", norm.kind)
    qkv = tuple(f"{prefix}{name}" for name in (names.q, names.k, names.v))
    rows += _fused(f"{own}self_attn.qkv_proj", qkv, attention.qkv_bias, "fuse_qkv")
    rows += _linear(f"{own}self_attn.o_proj", f"{prefix}{names.o}", attention.output_bias)
    if attention.qk_norm != "none":
        rows += _norm(f"{own}self_attn.q_layernorm", f"{prefix}{names.q_norm}", norm.kind)
        rows += _norm(f"{own}self_attn.k_layernorm", f"{prefix}{names.k_norm}", norm.kind)
    between = ["post_attention_layernorm"]
    if norm.topology == "sandwich":
        between = ["post_self_attn_layernorm", *between, "post_mlp_layernorm"]
    for name in between:
        rows += _norm(f"{own}{name}", f"{prefix}{getattr(names, name)}", norm.kind)
    if moe is None:
        return rows + _dense(spec), [], []
    if not moe.first_dense:
        return rows + _experts(spec, moe), [], []
    return rows, _dense(spec), _experts(spec, moe)


def _dense(spec: Spec) -> list[WeightEntry]:
    names, own = spec.weights.text, "layers.{layer}.mlp"
    if spec.text.mlp.layout == "separate":
        return _gated(own, names.layer, names)
    gate_up, down = f"{names.layer}{names.gate_up}", f"{names.layer}{names.down}"
    return [
        _weight(f"{own}.gate_proj", gate_up, "split_gate_up"),
        _weight(f"{own}.up_proj", gate_up, "split_gate_up"),
        _weight(f"{own}.down_proj", down),
    ]


def _experts(spec: Spec, moe: TextMoe) -> list[WeightEntry]:
    names, prefix = stated(spec.weights.text.moe), spec.weights.text.layer
    own = "layers.{layer}.mlp."
    gate_up: tuple[str, ...]
    rows = [_weight(f"{own}router", f"{prefix}{names.router}")]
    if moe.router == "sigmoid_bias":
        bias = f"{prefix}{names.correction_bias}"
        rows.append(WeightEntry(f"{own}correction_bias", (bias,), "rename"))
    if moe.checkpoint == "per_expert":
        one, verb = f"{prefix}{names.expert}", "stack_experts"
        gate_up = (f"{one}{names.gate}.weight", f"{one}{names.up}.weight")
        down = f"{one}{names.down}.weight"
    else:
        verb = {"fused_in_out": "experts_in_out", "fused_out_in": "experts_out_in"}[moe.checkpoint]
        gate_up, down = (f"{prefix}{names.gate_up}",), f"{prefix}{names.down}"
    rows.append(WeightEntry(f"{own}gate_up_weight", gate_up, verb))
    rows.append(WeightEntry(f"{own}down_weight", (down,), verb))
    if moe.shared is not None:
        rows += _gated(f"{own}shared", prefix, stated(names.shared))
    return rows


# ---------------------------------------------------------------- vision


def _vision(spec: Spec) -> list[WeightEntry]:
    """What is in the tower once, without the merger."""
    names, vision = spec.weights.vision, spec.vision
    rows = _linear(
        "patch_embed.proj", names.patch_embed, vision.patch_embed.bias, "flatten_transpose"
    )
    if vision.class_token is not None:
        rows.append(WeightEntry("patch_embed.class_token", (stated(names.class_token),), "squeeze"))
    if vision.embed_norm is not None:
        rows += _norm("embed_norm", stated(names.embed_norm), vision.embed_norm.kind)
    if vision.position is not None:
        bare, table = vision.class_token is not None, stated(names.pos_embed)
        key, verb = (table, "squeeze") if bare else (f"{table}.weight", "rename")
        rows.append(WeightEntry("pos_embed.pos_embed_weight", (key,), verb))
    if vision.final_norm is not None:
        rows += _norm("final_norm", stated(names.final_norm), vision.final_norm.kind)
    return rows


def _vision_block(spec: Spec) -> list[WeightEntry]:
    names, vision, own = spec.weights.vision, spec.vision, "blocks.{block}."
    attention, mlp, prefix = vision.attention, vision.mlp, names.block
    rows = _norm(f"{own}norm1", f"{prefix}{names.norm1}", vision.norm.kind)
    rows += _norm(f"{own}norm2", f"{prefix}{names.norm2}", vision.norm.kind)
    if attention.qkv_layout == "separate":
        keys = tuple(f"{prefix}{name}" for name in (names.q, names.k, names.v))
        rows += _fused(f"{own}attn.qkv", keys, attention.qkv_bias, "fuse_vision_qkv")
    else:
        keys = (f"{prefix}{names.qkv}",)
        rows += _fused(f"{own}attn.qkv", keys, attention.qkv_bias, "split_qkv_thirds")
    if attention.qk_norm != "none":
        rows.append(_weight(f"{own}attn.q_norm", f"{prefix}{names.q_norm}", "rename"))
        rows.append(_weight(f"{own}attn.k_norm", f"{prefix}{names.k_norm}", "rename"))
    rows += _linear(f"{own}attn.proj", f"{prefix}{names.proj}", attention.output_bias)
    if vision.layer_scale:
        rows += [
            WeightEntry(f"{own}{scale}", (f"{prefix}{getattr(names, scale)}",), "rename")
            for scale in ("scale1", "scale2")
        ]
    for name in ("fc1", "fc2") if mlp.kind == "plain" else ("gate", "up", "down"):
        rows += _linear(f"{own}mlp.{name}", f"{prefix}{getattr(names, name)}", mlp.bias)
    return rows


def _merger(spec: Spec) -> list[WeightEntry]:
    names, merger = spec.weights.vision.merger, spec.vision.merger
    prefix = names.prefix or ""
    if merger.op == "window":
        return _window_merger("merger", names, merger.norm, merger.bias, prefix)
    rows = _linear("merger.conv", stated(names.conv), True, "window_conv")
    rows += _linear("merger.fc1", f"{prefix}{names.fc1}", merger.bias)
    rows += _norm("merger.norm", f"{prefix}{names.norm}", merger.norm)
    for name in ("gate", "up", "down"):
        rows += _linear(f"merger.{name}", f"{prefix}{getattr(names, name)}", merger.bias)
    return rows


def _window_merger(
    parameter: str, names: MergerWeights | DeepstackWeights, norm: str, bias: bool, prefix: str
) -> list[WeightEntry]:
    return [
        *_norm(f"{parameter}.norm", f"{prefix}{names.norm}", norm),
        *_linear(f"{parameter}.fc1", f"{prefix}{names.fc1}", bias),
        *_linear(f"{parameter}.fc2", f"{prefix}{names.fc2}", bias),
    ]


def _vision_level(spec: Spec) -> list[WeightEntry]:
    deepstack = spec.vision.deepstack
    if deepstack is None:
        return []
    names = stated(spec.weights.vision.deepstack)
    own, merger = "deepstack_merger_list.{level}", deepstack.merger
    return _window_merger(own, names, merger.norm, merger.bias, names.prefix)
