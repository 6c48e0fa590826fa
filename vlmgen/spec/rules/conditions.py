"""What stands in a spec if and only if something else does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from vlmgen.spec.axes import show
from vlmgen.spec.rules.view import Unavailable, View, Violation, at_path, run


@dataclass(frozen=True)
class Condition:
    """What a part of the spec depends on.

    Args:
        holds: Whether it is so in a spec.
        rule: What must be so, in words.
        now: What is so in a spec, in words.
    """

    holds: Callable[[View], bool]
    rule: str
    now: Callable[[View], str]


def is_(path: str, *values: str | bool, default: bool | None = None) -> Condition:
    at = at_path(path)

    def value(view: View) -> Any:
        if not view.present(at[:-1]):
            raise Unavailable
        stated = view.optional(at)
        return default if stated is None else stated

    def now(view: View) -> str:
        return f"{path} is {show(value(view))}"

    *most, last = map(show, values)
    words = f"{', '.join(most)} or {last}" if most else last
    return Condition(lambda view: value(view) in values, f"{path} is {words}", now)


def has(path: str) -> Condition:
    at = at_path(path)

    def now(view: View) -> str:
        return f"{path} is {'stated' if view.present(at) else 'null'}"

    return Condition(lambda view: view.present(at), f"{path} is stated", now)


def not_(condition: Condition) -> Condition:
    rule = condition.rule.replace(" is ", " is not ", 1)
    return Condition(lambda view: not condition.holds(view), rule, condition.now)


def both(*conditions: Condition) -> Condition:
    def now(view: View) -> str:
        broken = [c for c in conditions if not c.holds(view)] or conditions
        return " and ".join(condition.now(view) for condition in broken)

    return Condition(
        lambda view: all(condition.holds(view) for condition in conditions),
        " and ".join(condition.rule for condition in conditions),
        now,
    )


def _has_dense_layer(view: View) -> bool:
    return not view.present(at_path("text.moe")) or view[at_path("text.moe.first_dense")] > 0


_MOE = has("text.moe")
_DENSE = Condition(
    _has_dense_layer,
    "a layer has a dense MLP",
    lambda view: f"{'a' if _has_dense_layer(view) else 'no'} layer has a dense MLP",
)
_FUSED_MLP = is_("text.mlp.layout", "fused_gate_up")
_PER_EXPERT = is_("text.moe.checkpoint", "per_expert")
_MROPE = is_("text.rope.kind", "mrope")
_QK_NORM = not_(is_("text.attention.qk_norm", "none"))
_SANDWICH = is_("text.norm.topology", "sandwich")
_GATED_TOWER = is_("vision.mlp.kind", "swiglu")
_FUSED_TOWER = is_("vision.attention.qkv_layout", "fused_thirds")
_TOWER_QK_NORM = is_("vision.attention.qk_norm", "full_width_rms")
_CONV = is_("vision.merger.op", "strided_conv")
TILES = is_("vision.input", "tiles")
_SCALED = is_("vision.layer_scale", True, default=False)

# What stands in the spec if and only if something else does.
PAIRED: tuple[tuple[tuple[str, ...], Condition], ...] = (
    (("text.rope.order", "text.rope.sections"), _MROPE),
    (("vision.attention.window",), is_("vision.attention.bounds", "window")),
    (("vision.position.align_corners",), is_("vision.position.kind", "learned_bilinear")),
    (("vision.config_keys.merger_size",), _CONV),
    (("inputs.image.tiles",), TILES),
    (("inputs.image.grid",), not_(TILES)),
    (("inputs.video",), not_(is_("tokens.video_prompt", "none"))),
    (
        ("tokens.video",),
        is_("tokens.video_prompt", "per_frame_timestamp", "one_run", "per_frame_image_token"),
    ),
    (("weights.text.q_norm", "weights.text.k_norm"), _QK_NORM),
    (("weights.text.post_self_attn_layernorm", "weights.text.post_mlp_layernorm"), _SANDWICH),
    (("weights.text.gate", "weights.text.up"), both(_DENSE, not_(_FUSED_MLP))),
    (("weights.text.gate_up",), both(_DENSE, _FUSED_MLP)),
    (("weights.text.down",), _DENSE),
    (("weights.text.moe",), _MOE),
    (("weights.text.moe.correction_bias",), is_("text.moe.router", "sigmoid_bias")),
    (("weights.text.moe.gate_up",), not_(_PER_EXPERT)),
    (
        ("weights.text.moe.expert", "weights.text.moe.gate", "weights.text.moe.up"),
        _PER_EXPERT,
    ),
    (("weights.text.moe.shared",), has("text.moe.shared")),
    (("weights.vision.class_token",), has("vision.class_token")),
    (("weights.vision.embed_norm",), has("vision.embed_norm")),
    (("weights.vision.pos_embed",), has("vision.position")),
    (("weights.vision.final_norm",), has("vision.final_norm")),
    (("weights.vision.scale1", "weights.vision.scale2"), _SCALED),
    (("weights.vision.qkv",), _FUSED_TOWER),
    (("weights.vision.q", "weights.vision.k", "weights.vision.v"), not_(_FUSED_TOWER)),
    (("weights.vision.q_norm", "weights.vision.k_norm"), _TOWER_QK_NORM),
    (("weights.vision.fc1", "weights.vision.fc2"), not_(_GATED_TOWER)),
    (("weights.vision.gate", "weights.vision.up", "weights.vision.down"), _GATED_TOWER),
    (("weights.vision.merger.fc2",), not_(_CONV)),
    (tuple(f"weights.vision.merger.{name}" for name in ("conv", "gate", "up", "down")), _CONV),
    (("weights.vision.deepstack",), has("vision.deepstack")),
)


def parts_are_paired(view: View) -> Iterator[Violation]:
    """What one value asks for is stated, and nothing is stated that no value asks for."""
    for names, condition in PAIRED:
        for name in names:
            yield from run(_pair(view, name, condition))


def _pair(view: View, name: str, condition: Condition) -> Iterator[Violation]:
    path = at_path(name)
    if not view.present(path[:-1]) or view.is_bad(path):
        return
    stated = view.present(path)
    if stated != condition.holds(view):
        yield Violation(
            path,
            f"{name} is {'stated' if stated else 'missing'}, but {condition.now(view)}",
            f"{name} is stated if and only if {condition.rule}",
            "null" if stated else "",
        )
