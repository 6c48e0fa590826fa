"""Rules that tie several values of a spec together.

Each rule is a generator over a `View` of the raw values. Reading a value that the schema already
refused ends the rule silently, so that one slip is reported once and every other rule still runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from vlmgen.spec.axes import AXES, show
from vlmgen.spec.source import Key, dotted


@dataclass(frozen=True)
class Violation:
    """A broken rule.

    Args:
        path: The value to point at.
        message: What is wrong, with the numbers.
        rule: The rule.
        legal: What would be legal, or empty.
    """

    path: Key
    message: str
    rule: str
    legal: str = ""


class _Unavailable(Exception):
    """A value that the schema refused or that is missing."""


class View:
    """Read access to the values of a spec, by dotted path.

    Args:
        data: The spec as nested dicts and tuples.
        bad: Paths that the schema refused.
    """

    def __init__(self, data: Any, bad: Iterable[Key] = ()) -> None:
        self._data = data
        self._bad = tuple(bad)

    def __getitem__(self, path: Key) -> Any:
        for wrong in self._bad:
            short = min(len(wrong), len(path))
            if wrong[:short] == path[:short] and (len(wrong) > 0 or len(path) > 0):
                raise _Unavailable
        value = self._data
        for part in path:
            try:
                value = value[part]
            except (KeyError, IndexError, TypeError):
                raise _Unavailable from None
        return value

    def optional(self, path: Key) -> Any:
        """The value, or None where the key is left out."""
        parent, key = path[:-1], path[-1]
        value: Any = self._data
        for part in parent:
            try:
                value = value[part]
            except (KeyError, IndexError, TypeError):
                raise _Unavailable from None
        if isinstance(value, dict) and key not in value:
            return None
        return self[path]

    def is_bad(self, path: Key) -> bool:
        """Whether the schema refused the value or a part of it."""
        return any(wrong[: len(path)] == path for wrong in self._bad)

    def present(self, path: Key) -> bool:
        """Whether a value is stated and not null, whatever the schema says of its parts."""
        if any(wrong == path[: len(wrong)] for wrong in self._bad):
            raise _Unavailable
        value: Any = self._data
        for part in path:
            try:
                value = value[part]
            except (KeyError, IndexError, TypeError):
                return False
        return value is not None

    def length(self, path: Key) -> int:
        """Entries of a list that may hold refused values; 0 where there is no list."""
        value: Any = self._data
        for part in path:
            try:
                value = value[part]
            except (KeyError, IndexError, TypeError):
                return 0
        return len(value) if isinstance(value, (tuple, list)) else 0


def check_rules(data: Any, bad: Iterable[Key] = ()) -> list[Violation]:
    """Apply every rule.

    Args:
        data: The spec as nested dicts and sequences.
        bad: Paths that the schema refused; rules that read them do not run.

    Returns:
        The violations, in the order of the rules.
    """
    return [violation for found in broken_rules(data, bad).values() for violation in found]


def broken_rules(data: Any, bad: Iterable[Key] = ()) -> dict[str, list[Violation]]:
    """Name of every broken rule -> its violations; see `check_rules`."""
    view = View(data, bad)
    found: dict[str, list[Violation]] = {}
    for rule in SPEC_RULES:
        found.setdefault(rule.__name__, []).extend(_run(rule(view)))
    for index in range(view.length(("checkpoints",))):
        for checkpoint_rule in CHECKPOINT_RULES:
            found.setdefault(checkpoint_rule.__name__, []).extend(
                _run(checkpoint_rule(view, index))
            )
    return {name: violations for name, violations in found.items() if violations}


def _run(found: Iterator[Violation]) -> list[Violation]:
    violations: list[Violation] = []
    try:
        for violation in found:
            violations.append(violation)
    except _Unavailable:
        pass
    return violations


def _path(text: str) -> Key:
    return tuple(text.split("."))


# --- names ------------------------------------------------------------------------------------


def architecture_begins_with_prefix(view: View) -> Iterator[Violation]:
    """The factory is named as the architecture and the other classes share its prefix."""
    architecture, prefix = view[("architecture",)], view[("class_prefix",)]
    rule = "architecture is class_prefix followed by a capitalised rest, such as ForConditional..."
    if architecture.startswith(prefix):
        if not architecture[len(prefix) : len(prefix) + 1].isupper():
            yield Violation(
                ("architecture",),
                f"architecture {architecture!r} has no capitalised rest after {prefix!r}",
                rule,
            )
    elif architecture.lower().startswith(prefix.lower()):
        yield Violation(
            ("architecture",),
            f"architecture {architecture!r} and class_prefix {prefix!r} differ in case",
            rule,
            f"{prefix}{architecture[len(prefix):]}",
        )
    else:
        yield Violation(
            ("architecture",),
            f"architecture {architecture!r} does not begin with class_prefix {prefix!r}",
            rule,
        )


def config_keys_differ(view: View) -> Iterator[Violation]:
    """The towers have configs of their own."""
    text = view[_path("text.config_key")]
    if text == view[_path("vision.config_key")]:
        yield Violation(
            _path("vision.config_key"),
            f"text and vision both read the config key {text!r}",
            "each tower has a config key of its own",
        )


def input_keywords_differ(view: View) -> Iterator[Violation]:
    """The processor's keywords are one namespace."""
    yield from _distinct(
        view,
        [
            ("inputs", modality, key)
            for modality in ("image", "video")
            for key in ("pixels", "grid", "tiles")
        ],
        "the processor's keywords are distinct",
    )


def layouts_differ(view: View) -> Iterator[Violation]:
    """A layout is told from another by its name in messages and by its prefixes in checkpoints."""
    count = view.length(_path("weights.layouts"))
    rows: list[Key] = [("weights", "layouts", index) for index in range(count)]
    yield from _distinct(view, [(*row, "name") for row in rows], "layout names are distinct")
    seen: dict[tuple[str, ...], Any] = {}
    for row in rows:
        parts = ["text", "vision", "head"]
        if view.optional((*row, "projector")) is not None:
            parts.append("projector")
        prefixes = tuple(view[(*row, key)] for key in parts)
        if len(set(prefixes)) < len(parts):
            yield Violation(
                row,
                f"layout {view[(*row, 'name')]!r} uses one prefix for two parts",
                f"{', '.join(parts)} have prefixes of their own",
            )
        if prefixes in seen:
            yield Violation(
                row,
                f"layouts {seen[prefixes]!r} and {view[(*row, 'name')]!r} have the same prefixes",
                "layouts differ in a prefix",
            )
        seen[prefixes] = view[(*row, "name")]


def weight_names_differ(view: View) -> Iterator[Violation]:
    """Two parameters cannot come from one checkpoint key."""
    layer = (
        *("input_layernorm", "post_attention_layernorm", "post_self_attn_layernorm"),
        *("post_mlp_layernorm", "q", "k", "v", "o", "q_norm", "k_norm"),
    )
    block = ("norm1", "norm2", "qkv", "q", "k", "v", "q_norm", "k_norm", "proj", "fc1", "fc2")
    groups: list[tuple[str, tuple[str, ...]]] = [
        ("weights.text", ("embed_tokens", "norm")),
        ("weights.text", (*layer, "gate", "up", "gate_up", "down")),
        ("weights.text.moe", ("router", "correction_bias", "gate_up", "gate", "up", "down")),
        ("weights.text.moe.shared", ("gate", "up", "down")),
        (
            "weights.vision",
            ("patch_embed", "class_token", "embed_norm", "pos_embed", "final_norm"),
        ),
        ("weights.vision", (*block, "gate", "up", "down", "scale1", "scale2")),
        ("weights.vision.merger", ("norm", "fc1", "fc2", "conv", "gate", "up", "down")),
        ("weights.vision.deepstack", ("norm", "fc1", "fc2")),
    ]
    for parent, names in groups:
        yield from _distinct(
            view, [(*_path(parent), name) for name in names], "weight names of a part are distinct"
        )


def checkpoint_names_differ(view: View) -> Iterator[Violation]:
    """`--checkpoint NAME` means one row."""
    paths: list[Key] = []
    for index in range(view.length(("checkpoints",))):
        paths.append(("checkpoints", index, "name"))
        also: Key = ("checkpoints", index, "also")
        paths += [(*also, k) for k in range(view.length(also))]
    yield from _distinct(view, paths, "checkpoint names are distinct")


# --- text -------------------------------------------------------------------------------------


def sections_fill_the_rotated_half(view: View) -> Iterator[Violation]:
    """Every frequency of the rotated part belongs to one position axis."""
    if view[_path("text.rope.kind")] != "mrope":
        return
    yield from _sections(view, view[_path("text.attention.head_dim")], _path("text.rope.sections"))


def _sections(view: View, head_dim: int, at: Key, whose: str = "") -> Iterator[Violation]:
    partial = view[_path("text.rope.partial")]
    sections = view[_path("text.rope.sections")]
    if sections is None:
        return
    rotated = head_dim * partial
    if rotated != int(rotated) or int(rotated) % 2:
        yield Violation(
            at,
            f"head_dim {head_dim} x partial {partial} = {rotated:g}{whose} is not an even number",
            "the rotated part of a head is cut in two halves",
        )
        return
    half = int(rotated) // 2
    if sum(sections) != half:
        terms = " + ".join(map(str, sections))
        yield Violation(
            at,
            f"M-RoPE sections {terms} = {sum(sections)}, half of the rotated head is {half}{whose}",
            "sections sum to head_dim * partial / 2",
            f"three numbers that sum to {half}",
        )
        return
    if view.optional(_path("text.rope.order")) == "interleaved":
        for axis, name in ((1, "h"), (2, "w")):
            last = axis + 3 * (sections[axis] - 1)
            if last >= half:
                yield Violation(
                    at,
                    f"interleaved section {name} of {sections[axis]} ends at frequency {last}, "
                    f"there are {half}{whose}",
                    "h takes frequencies 1, 4, 7, ... and w 2, 5, 8, ... of the rotated half",
                    f"{name} at most {(half - 1 - axis) // 3 + 1}",
                )


def partial_is_generated(view: View) -> Iterator[Violation]:
    """The share of a head that is rotated is an axis with numbers as values."""
    path = _path("text.rope.partial")
    value = view[path]
    axis = AXES["text.rope.partial"]
    if value not in axis.implemented:
        users = axis.later.get(value)
        message = f"text.rope.partial is {value:g}"
        if users:
            message = (
                f"{value:g} is a known value of text.rope.partial (needed by {', '.join(users)}) "
                "that this version of vlmgen does not generate"
            )
        yield Violation(
            path,
            message,
            "the rotated share is one that a template implements",
            ", ".join(show(v) for v in axis.implemented),
        )


def kv_heads_divide_heads(view: View) -> Iterator[Violation]:
    """Grouped attention gives every KV head the same number of query heads."""
    yield from _kv_heads(
        view, _path("text.attention.num_heads"), _path("text.attention.num_kv_heads")
    )


def _kv_heads(view: View, heads_at: Key, kv_at: Key) -> Iterator[Violation]:
    heads, kv_heads = _size(view, heads_at), _size(view, kv_at)
    if heads % kv_heads:
        yield Violation(
            kv_at,
            f"num_heads {heads} is not divisible by num_kv_heads {kv_heads}",
            "KV heads divide the query heads",
            _numbers(divisors(heads)),
        )


# --- vision -----------------------------------------------------------------------------------


def vision_heads(view: View) -> Iterator[Violation]:
    """Heads share the width, and axial rotation cuts a head in four."""
    yield from _vision_heads(view, _path("vision.hidden_size"), _path("vision.attention.num_heads"))


def _vision_heads(view: View, hidden_at: Key, heads_at: Key) -> Iterator[Violation]:
    hidden, heads = _size(view, hidden_at), _size(view, heads_at)
    unit = 4 if view.present(_path("vision.rope")) else 1
    legal = _numbers(n for n in divisors(hidden) if hidden // n % unit == 0)
    if hidden % heads:
        yield Violation(
            heads_at,
            f"hidden_size {hidden} is not divisible by num_heads {heads}",
            "vision heads divide the width",
            legal,
        )
    elif hidden // heads % unit:
        yield Violation(
            heads_at,
            f"head size {hidden} / {heads} = {hidden // heads} is not a multiple of 4",
            "axial rotation uses head size / 4 frequencies for rows and as many for columns",
            legal,
        )


def position_table_is_square(view: View) -> Iterator[Violation]:
    """The learned table is a square grid."""
    path = _path("vision.position.num_embeddings")
    extra = 1 if view.present(_path("vision.class_token")) else 0
    rows = view[path] - extra
    side = math.isqrt(rows)
    if side * side != rows:
        more = " and one for the class token" if extra else ""
        yield Violation(
            path,
            f"num_embeddings {rows + extra} is not a square number{more}",
            f"the position table is a square grid{more}",
            f"such as {side * side + extra} ({side} x {side}{' + 1' * extra}) or "
            f"{(side + 1) ** 2 + extra} ({side + 1} x {side + 1}{' + 1' * extra})",
        )


def tower_ends_at_text_width(view: View) -> Iterator[Violation]:
    """Merged rows take the place of token embeddings."""
    yield from _out_width(view, _path("text.hidden_size"), _path("vision.out_hidden_size"))


def _out_width(view: View, text_at: Key, out_at: Key) -> Iterator[Violation]:
    text, out = _size(view, text_at), _size(view, out_at)
    if text != out:
        yield Violation(
            out_at,
            f"out_hidden_size {out} differs from the text hidden_size {text}",
            "the tower's output is as wide as the text",
            str(text),
        )


def deepstack_indices(view: View) -> Iterator[Violation]:
    """Levels are tower blocks, in order, and each has a decoder layer to go to."""
    yield from _deepstack(
        view,
        _path("vision.deepstack.indices"),
        _path("vision.depth"),
        _path("text.num_layers"),
    )


def _deepstack(view: View, at: Key, depth_at: Key, layers_at: Key) -> Iterator[Violation]:
    if not view.present(_path("vision.deepstack")):
        return
    indices = _size(view, at)
    if any(b <= a for a, b in zip(indices, indices[1:], strict=False)):
        yield Violation(
            at,
            f"deepstack indices {_listed(indices)} are not ascending and distinct",
            "level k is the k-th index; indices ascend",
            _listed(sorted(set(indices))),
        )
    depth = _size(view, depth_at)
    for position, index in enumerate(indices):
        if index >= depth:
            yield Violation(
                (*at, position),
                f"deepstack index {index} is beyond the tower's depth {depth}",
                "a deepstack index is a tower block",
                f"0 to {depth - 1}",
            )
    layers = _size(view, layers_at)
    if len(indices) > layers:
        yield Violation(
            at,
            f"{len(indices)} deepstack levels, but {layers} decoder layers",
            "level k goes to decoder layer k",
            f"at most {layers} levels",
        )


# --- tokens, neuron ---------------------------------------------------------------------------

_TOKENS = ("image", "video", "vision_start", "vision_end", "video_start", "video_end")


def tokens_differ(view: View) -> Iterator[Violation]:
    """Placeholders are told apart by id, text and config key."""
    for key in ("id", "token", "config_key"):
        yield from _distinct(
            view, [("tokens", name, key) for name in _TOKENS], f"the {key}s of tokens are distinct"
        )


def token_ids_in_vocabulary(view: View) -> Iterator[Violation]:
    """Ids index the embedding table."""
    vocab = view[_path("text.vocab_size")]
    for name in _TOKENS:
        yield from _run(_token_in_vocabulary(view, name, vocab))


def _token_in_vocabulary(view: View, name: str, vocab: int) -> Iterator[Violation]:
    path: Key = ("tokens", name, "id")
    token = view[path]
    if token >= vocab:
        yield Violation(
            path,
            f"token id {token} of {name} is not below vocab_size {vocab}",
            "token ids index the embedding table",
            f"0 to {vocab - 1}",
        )


def block_size(view: View) -> Iterator[Violation]:
    """A vision block is a whole number of device tiles and of merge windows."""
    path = _path("neuron.vision_attention_block_size")
    block = view[path]
    area = view[_path("vision.merger.merge_size")] ** 2
    unit = math.lcm(128, area)
    if block % unit:
        lower = block // unit * unit
        near = [n for n in (lower, lower + unit) if n]
        yield Violation(
            path,
            f"block size {block} is not a multiple of {unit}",
            f"the block size is a multiple of 128 and of the merge area {area}",
            "such as " + " or ".join(map(str, near)),
        )


def buckets(view: View) -> Iterator[Violation]:
    """Buckets are whole numbers of blocks, from small to large."""
    path = _path("neuron.num_vision_tokens_buckets")
    sizes = view[path]
    if any(b <= a for a, b in zip(sizes, sizes[1:], strict=False)):
        yield Violation(
            path,
            f"buckets {_listed(sizes)} are not ascending and distinct",
            "the runner takes the first bucket that is large enough",
            _listed(sorted(set(sizes))),
        )
    block = view[_path("neuron.vision_attention_block_size")]
    for index, size in enumerate(sizes):
        if size % block:
            lower = size // block * block
            near = [n for n in (lower, lower + block) if n]
            yield Violation(
                (*path, index),
                f"bucket {size} is not a multiple of the block size {block}",
                "a bucket is a whole number of vision blocks",
                "such as " + " or ".join(map(str, near)),
            )


def quantization_modes(view: View) -> Iterator[Violation]:
    """A mode is listed once."""
    path = _path("neuron.quantization")
    count = view.length(path)
    yield from _distinct(view, [(*path, i) for i in range(count)], "modes are distinct")


# --- pairings ---------------------------------------------------------------------------------


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


def _is(path: str, *values: str | bool, default: bool | None = None) -> Condition:
    at = _path(path)

    def value(view: View) -> Any:
        if not view.present(at[:-1]):
            raise _Unavailable
        stated = view.optional(at)
        return default if stated is None else stated

    def now(view: View) -> str:
        return f"{path} is {show(value(view))}"

    *most, last = map(show, values)
    words = f"{', '.join(most)} or {last}" if most else last
    return Condition(lambda view: value(view) in values, f"{path} is {words}", now)


def _has(path: str) -> Condition:
    at = _path(path)

    def now(view: View) -> str:
        return f"{path} is {'stated' if view.present(at) else 'null'}"

    return Condition(lambda view: view.present(at), f"{path} is stated", now)


def _not(condition: Condition) -> Condition:
    rule = condition.rule.replace(" is ", " is not ", 1)
    return Condition(lambda view: not condition.holds(view), rule, condition.now)


def _both(*conditions: Condition) -> Condition:
    def now(view: View) -> str:
        broken = [c for c in conditions if not c.holds(view)] or conditions
        return " and ".join(condition.now(view) for condition in broken)

    return Condition(
        lambda view: all(condition.holds(view) for condition in conditions),
        " and ".join(condition.rule for condition in conditions),
        now,
    )


def _has_dense_layer(view: View) -> bool:
    return not view.present(_path("text.moe")) or view[_path("text.moe.first_dense")] > 0


_MOE = _has("text.moe")
_DENSE = Condition(
    _has_dense_layer,
    "a layer has a dense MLP",
    lambda view: f"{'a' if _has_dense_layer(view) else 'no'} layer has a dense MLP",
)
_FUSED_MLP = _is("text.mlp.layout", "fused_gate_up")
_PER_EXPERT = _is("text.moe.checkpoint", "per_expert")
_MROPE = _is("text.rope.kind", "mrope")
_QK_NORM = _not(_is("text.attention.qk_norm", "none"))
_SANDWICH = _is("text.norm.topology", "sandwich")
_GATED_TOWER = _is("vision.mlp.kind", "swiglu")
_FUSED_TOWER = _is("vision.attention.qkv_layout", "fused_thirds")
_TOWER_QK_NORM = _is("vision.attention.qk_norm", "full_width_rms")
_CONV = _is("vision.merger.op", "strided_conv")
_TILES = _is("vision.input", "tiles")
_SCALED = _is("vision.layer_scale", True, default=False)

# What stands in the spec if and only if something else does.
PAIRED: tuple[tuple[tuple[str, ...], Condition], ...] = (
    (("text.rope.order", "text.rope.sections"), _MROPE),
    (("vision.attention.window",), _is("vision.attention.bounds", "window")),
    (("vision.position.align_corners",), _is("vision.position.kind", "learned_bilinear")),
    (("vision.config_keys.merger_size",), _CONV),
    (("inputs.image.tiles",), _TILES),
    (("inputs.image.grid",), _not(_TILES)),
    (("inputs.video",), _not(_is("tokens.video_prompt", "none"))),
    (
        ("tokens.video",),
        _is("tokens.video_prompt", "per_frame_timestamp", "one_run", "per_frame_image_token"),
    ),
    (("weights.text.q_norm", "weights.text.k_norm"), _QK_NORM),
    (("weights.text.post_self_attn_layernorm", "weights.text.post_mlp_layernorm"), _SANDWICH),
    (("weights.text.gate", "weights.text.up"), _both(_DENSE, _not(_FUSED_MLP))),
    (("weights.text.gate_up",), _both(_DENSE, _FUSED_MLP)),
    (("weights.text.down",), _DENSE),
    (("weights.text.moe",), _MOE),
    (("weights.text.moe.correction_bias",), _is("text.moe.router", "sigmoid_bias")),
    (("weights.text.moe.gate_up",), _not(_PER_EXPERT)),
    (
        ("weights.text.moe.expert", "weights.text.moe.gate", "weights.text.moe.up"),
        _PER_EXPERT,
    ),
    (("weights.text.moe.shared",), _has("text.moe.shared")),
    (("weights.vision.class_token",), _has("vision.class_token")),
    (("weights.vision.embed_norm",), _has("vision.embed_norm")),
    (("weights.vision.pos_embed",), _has("vision.position")),
    (("weights.vision.final_norm",), _has("vision.final_norm")),
    (("weights.vision.scale1", "weights.vision.scale2"), _SCALED),
    (("weights.vision.qkv",), _FUSED_TOWER),
    (("weights.vision.q", "weights.vision.k", "weights.vision.v"), _not(_FUSED_TOWER)),
    (("weights.vision.q_norm", "weights.vision.k_norm"), _TOWER_QK_NORM),
    (("weights.vision.fc1", "weights.vision.fc2"), _not(_GATED_TOWER)),
    (("weights.vision.gate", "weights.vision.up", "weights.vision.down"), _GATED_TOWER),
    (("weights.vision.merger.fc2",), _not(_CONV)),
    (tuple(f"weights.vision.merger.{name}" for name in ("conv", "gate", "up", "down")), _CONV),
    (("weights.vision.deepstack",), _has("vision.deepstack")),
)


def parts_are_paired(view: View) -> Iterator[Violation]:
    """What one value asks for is stated, and nothing is stated that no value asks for."""
    for names, condition in PAIRED:
        for name in names:
            yield from _run(_pair(view, name, condition))


def _pair(view: View, name: str, condition: Condition) -> Iterator[Violation]:
    path = _path(name)
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


def positions_fit_the_rope(view: View) -> Iterator[Violation]:
    """Three-axis positions need a three-axis rotation, and the other way round."""
    kind, positions = view[_path("text.rope.kind")], view[_path("tokens.positions")]
    if (kind == "mrope") == (positions == "sequence"):
        yield Violation(
            _path("tokens.positions"),
            f"tokens.positions is {positions}, but text.rope.kind is {kind}",
            "mrope rotates by three-axis positions (mrope_per_frame, mrope_block), plain by places "
            "in the sequence",
            "sequence" if kind == "plain" else "mrope_per_frame, mrope_block",
        )
    seconds = view.present(_path("tokens.seconds"))
    if seconds and positions != "mrope_block":
        yield Violation(
            _path("tokens.seconds"),
            f"tokens.seconds is stated, but tokens.positions is {positions}",
            "only a video that is one block (mrope_block) has a temporal axis to scale",
            "null",
        )


_VIDEO_PROMPTS = {
    "mrope_per_frame": ("per_frame_timestamp", "per_frame_image_token", "none"),
    "mrope_block": ("one_run", "none"),
    "sequence": ("per_frame_label", "none"),
}


def video_prompt_fits_the_positions(view: View) -> Iterator[Violation]:
    """Frames that are blocks of their own stand apart in the prompt; one block stands in a run."""
    positions, prompt = view[_path("tokens.positions")], view[_path("tokens.video_prompt")]
    legal = _VIDEO_PROMPTS[positions]
    if prompt not in legal:
        yield Violation(
            _path("tokens.video_prompt"),
            f"tokens.video_prompt is {prompt}, but tokens.positions is {positions}",
            "per-frame positions need the frames apart in the prompt, a block needs one run",
            ", ".join(legal),
        )


def bounds_fit_the_input(view: View) -> Iterator[Violation]:
    """Tiles attend within themselves; a class token needs a unit of its own to stand in."""
    bounds = view[_path("vision.attention.bounds")]
    if (bounds == "tile") != _TILES.holds(view):
        yield Violation(
            _path("vision.attention.bounds"),
            f"vision.attention.bounds is {bounds}, but {_TILES.now(view)}",
            "patches attend within a tile if and only if the input is tiles",
            "tile" if _TILES.holds(view) else "frame, window",
        )
    if view.present(_path("vision.class_token")) and bounds != "tile":
        yield Violation(
            _path("vision.class_token"),
            f"vision.class_token is stated, but vision.attention.bounds is {bounds}",
            "a class token belongs to one tile; frames and windows of any size have none",
            "null, or vision.input tiles with bounds tile",
        )


def position_table_fits_the_input(view: View) -> Iterator[Violation]:
    """A table without interpolation is for pictures of one size."""
    if not view.present(_path("vision.position")):
        return
    tiles, kind = _TILES.holds(view), view[_path("vision.position.kind")]
    if (kind == "learned_fixed") != tiles:
        yield Violation(
            _path("vision.position.kind"),
            f"vision.position.kind is {kind}, but {_TILES.now(view)}",
            "a table that is not interpolated (learned_fixed) is for tiles, which have one size",
            "learned_fixed" if tiles else "learned_bilinear, learned_grid_sample_bicubic",
        )


def tiles_are_whole(view: View) -> Iterator[Violation]:
    """A tile is cut along merge windows and fits a vision block."""
    if not _TILES.holds(view) or not view.present(_path("vision.position")):
        return
    at = _path("vision.position.num_embeddings")
    class_token = view.present(_path("vision.class_token"))
    side, merge = math.isqrt(view[at] - class_token), view[_path("vision.merger.merge_size")]
    if side % merge:
        yield Violation(
            at,
            f"tiles of {side} x {side} patches are not cut whole by merge_size {merge}",
            "the side of a tile is a whole number of merge windows",
            f"a table of such a side, as {(side // merge + 1) * merge}",
        )
    slots = side * side + class_token * merge**2
    block_at = _path("neuron.vision_attention_block_size")
    if slots > view[block_at]:
        yield Violation(
            block_at,
            f"block size {view[block_at]} is below the {slots} places that a tile takes",
            "a tile and its class token, which takes a merge window, fit one vision block",
            f"at least {slots}",
        )


def windows_are_whole(view: View) -> Iterator[Violation]:
    """A window is cut along merge windows; blocks that see the frame exist."""
    if not view.present(_path("vision.attention.window")):
        return
    at = _path("vision.attention.window.size")
    unit = view[_path("vision.patch_embed.patch_size")] * view[_path("vision.merger.merge_size")]
    if view[at] % unit:
        near = [n for n in (view[at] // unit * unit, (view[at] // unit + 1) * unit) if n]
        yield Violation(
            at,
            f"a window of {view[at]} pixels is not a multiple of {unit}",
            "a window is a whole number of merge windows (patch_size x merge_size)",
            "such as " + " or ".join(map(str, near)),
        )
    blocks_at = _path("vision.attention.window.full_blocks")
    blocks = view[blocks_at]
    if list(blocks) != sorted(set(blocks)):
        yield Violation(
            blocks_at,
            f"full_blocks {_listed(blocks)} are not ascending and distinct",
            "full_blocks are tower blocks, ascending and distinct",
            _listed(sorted(set(blocks))),
        )
    yield from _full_blocks(view, _path("vision.depth"))


def _full_blocks(view: View, depth_at: Key, whose: str = "") -> Iterator[Violation]:
    if not view.present(_path("vision.attention.window")):
        return
    at, depth = _path("vision.attention.window.full_blocks"), _size(view, depth_at)
    if max(view[at]) >= depth:
        yield Violation(
            depth_at if whose else at,
            f"full_blocks {_listed(view[at])} go beyond the tower's depth {depth}{whose}",
            "full_blocks are tower blocks",
            f"at least {max(view[at]) + 1} blocks" if whose else f"0 to {depth - 1}",
        )


def experts_fit(view: View) -> Iterator[Violation]:
    """A token has no more experts than there are, and some layer has experts."""
    if not view.present(_path("text.moe")):
        return
    yield from _top_k(view, _path("text.moe.num_experts"))
    dense, layers = view[_path("text.moe.first_dense")], view[_path("text.num_layers")]
    if dense >= layers:
        yield Violation(
            _path("text.moe.first_dense"),
            f"first_dense {dense} leaves none of {layers} layers with experts",
            "some layer has experts",
            f"0 to {layers - 1}",
        )


def _top_k(view: View, experts_at: Key, whose: str = "") -> Iterator[Violation]:
    at = _path("text.moe.top_k")
    experts, top_k = _size(view, experts_at), view[at]
    if top_k > experts:
        yield Violation(
            experts_at if whose else at,
            f"top_k is {top_k}, but num_experts is {experts}{whose}",
            "top_k is at most num_experts",
            f"at least {top_k}" if whose else f"1 to {experts}",
        )


def patch_embedding_is_flat(view: View) -> Iterator[Violation]:
    """A two-dimensional convolution sees one frame."""
    at = _path("vision.patch_embed.temporal_patch_size")
    if view[_path("vision.patch_embed.kind")] == "conv2d" and view[at] != 1:
        yield Violation(
            at,
            f"temporal_patch_size is {view[at]}, but patch_embed.kind is conv2d",
            "a two-dimensional convolution sees one frame",
            "1, or patch_embed.kind conv3d",
        )


def merger_is_whole(view: View) -> Iterator[Violation]:
    """The merger's inner width is a number exactly where its MLP is gated."""
    at, op = _path("vision.merger.inner"), view[_path("vision.merger.op")]
    inner = view.optional(at)
    if isinstance(inner, int) != (op == "strided_conv"):
        yield Violation(
            at,
            f"merger.inner is {'joined' if inner is None else inner}, but merger.op is {op}",
            "inner is the width of the gated MLP of strided_conv, else joined or out",
            "a number" if op == "strided_conv" else "joined, out",
        )
    if view.present(_path("vision.deepstack")) and op != "window":
        yield Violation(
            _path("vision.deepstack"),
            f"vision.deepstack is stated, but merger.op is {op}",
            "a deepstack level is merged like a window",
            "null, or merger.op window",
        )


def merger_has_a_prefix(view: View) -> Iterator[Violation]:
    """The merger's keys begin with a prefix of their own, or with that of the layout."""
    inside = view.present(_path("weights.vision.merger.prefix"))
    for index in range(view.length(_path("weights.layouts"))):
        at: Key = ("weights", "layouts", index, "projector")
        if view.present(at) == inside:
            yield Violation(
                at,
                (
                    "projector and weights.vision.merger.prefix are both stated"
                    if inside
                    else "neither projector nor weights.vision.merger.prefix is stated"
                ),
                "the merger lies in the tower (merger.prefix) or beside it (projector)",
            )


# --- checkpoints ------------------------------------------------------------------------------


def checkpoint_sections(view: View, index: int) -> Iterator[Violation]:
    """Sections fill the rotated half of a checkpoint that has a head width of its own."""
    at: Key = ("checkpoints", index, "text", "head_dim")
    head_dim = view.optional(at)
    if head_dim is not None:
        yield from _sections(view, head_dim, at, f" in {_name(view, index)}")


def checkpoint_kv_heads(view: View, index: int) -> Iterator[Violation]:
    """As for the text section."""
    text: Key = ("checkpoints", index, "text")
    yield from _kv_heads(view, (*text, "num_heads"), (*text, "num_kv_heads"))


def checkpoint_vision_heads(view: View, index: int) -> Iterator[Violation]:
    """As for the vision section."""
    vision: Key = ("checkpoints", index, "vision")
    yield from _vision_heads(view, (*vision, "hidden_size"), (*vision, "num_heads"))


def checkpoint_out_width(view: View, index: int) -> Iterator[Violation]:
    """As for the vision section."""
    row: Key = ("checkpoints", index)
    yield from _out_width(view, (*row, "text", "hidden_size"), (*row, "vision", "out_hidden_size"))


def checkpoint_deepstack(view: View, index: int) -> Iterator[Violation]:
    """As for the vision section."""
    row: Key = ("checkpoints", index)
    yield from _deepstack(
        view,
        (*row, "vision", "deepstack"),
        (*row, "vision", "depth"),
        (*row, "text", "num_layers"),
    )


def checkpoint_parts(view: View, index: int) -> Iterator[Violation]:
    """A checkpoint has sizes of parts that the spec has."""
    for part, names in _CHECKPOINT_PARTS.items():
        if view.present(_path(part)):
            continue
        for name in names:
            at: Key = ("checkpoints", index, *_path(name))
            if view.optional(at) is not None:
                yield Violation(
                    at, f"{name} is stated in {_name(view, index)}, but {part} is null",
                    f"{name} is a size of {part}", "null",
                )  # fmt: skip


def checkpoint_windows(view: View, index: int) -> Iterator[Violation]:
    """As for the vision section."""
    depth: Key = ("checkpoints", index, "vision", "depth")
    if view.optional(depth) is not None:
        yield from _full_blocks(view, depth, f" in {_name(view, index)}")


def checkpoint_experts(view: View, index: int) -> Iterator[Violation]:
    """As for the text section."""
    experts: Key = ("checkpoints", index, "text", "num_experts")
    if view.optional(experts) is not None and view.present(_path("text.moe")):
        yield from _top_k(view, experts, f" in {_name(view, index)}")


def checkpoint_vocabulary(view: View, index: int) -> Iterator[Violation]:
    """Token ids index the table of a checkpoint that has a vocabulary of its own."""
    at: Key = ("checkpoints", index, "text", "vocab_size")
    vocab = view.optional(at)
    if vocab is not None:
        for name in _TOKENS:
            if not view.present(("tokens", name)):
                continue
            token = view[("tokens", name, "id")]
            if token >= vocab:
                yield Violation(
                    at,
                    f"token id {token} of {name} is not below vocab_size {vocab}",
                    "token ids index the embedding table",
                    f"at least {token + 1}",
                )


# Part of a tower -> the checkpoint's sizes of it.
_CHECKPOINT_PARTS = {
    "text.moe": ("text.moe_intermediate_size", "text.num_experts"),
    "vision.deepstack": ("vision.deepstack",),
}

# Section value -> the checkpoint's value.
_DEFAULTS = {
    "text.moe.intermediate_size": "text.moe_intermediate_size",
    "text.moe.num_experts": "text.num_experts",
    "text.hidden_size": "text.hidden_size",
    "text.num_layers": "text.num_layers",
    "text.tie_word_embeddings": "text.tie_word_embeddings",
    "text.attention.num_heads": "text.num_heads",
    "text.attention.num_kv_heads": "text.num_kv_heads",
    "text.mlp.intermediate_size": "text.intermediate_size",
    "text.attention.head_dim": "text.head_dim",
    "text.vocab_size": "text.vocab_size",
    "text.max_position_embeddings": "text.max_position_embeddings",
    "vision.hidden_size": "vision.hidden_size",
    "vision.depth": "vision.depth",
    "vision.out_hidden_size": "vision.out_hidden_size",
    "vision.attention.num_heads": "vision.num_heads",
    "vision.mlp.intermediate_size": "vision.intermediate_size",
    "vision.deepstack.indices": "vision.deepstack",
}


def defaults_are_a_checkpoint(view: View) -> Iterator[Violation]:
    """`text` and `vision` state the sizes of the checkpoint that `defaults_from` names."""
    wanted = view[("defaults_from",)]
    names = [view[("checkpoints", i, "name")] for i in range(view.length(("checkpoints",)))]
    if wanted not in names:
        yield Violation(
            ("defaults_from",),
            f"defaults_from {wanted!r} is not the name of a listed checkpoint",
            "defaults_from names an entry of checkpoints",
            ", ".join(names),
        )
        return
    row: Key = ("checkpoints", names.index(wanted))
    for section, size in _DEFAULTS.items():
        yield from _run(_same_as_default(view, _path(section), (*row, *_path(size)), wanted))


def _same_as_default(view: View, at: Key, size_at: Key, name: str) -> Iterator[Violation]:
    stated, published = view[at], view.optional(size_at)
    if published is None:
        return
    if isinstance(stated, (tuple, list)):
        stated, published = tuple(stated), tuple(published)
    if stated != published:
        yield Violation(
            at,
            f"{dotted(at)} is {_value(stated)}, but {name} has {_value(published)}",
            "text and vision state the sizes of the checkpoint that defaults_from names",
            _value(published),
        )


# --- small parts ------------------------------------------------------------------------------


def _size(view: View, at: Key) -> Any:
    """A size of a checkpoint, or that of the section where the checkpoint states none."""
    if at[0] != "checkpoints":
        return view[at]
    own = view.optional(at)
    if own is not None:
        return own
    wanted = ".".join(map(str, at[2:]))
    return view[_path(next(section for section, size in _DEFAULTS.items() if size == wanted))]


def divisors(number: int) -> list[int]:
    """Divisors of a positive number, ascending."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def _distinct(view: View, paths: list[Key], rule: str) -> Iterator[Violation]:
    seen: dict[Any, Key] = {}
    for path in paths:
        try:
            value = view[path]
        except _Unavailable:
            continue
        if value is None:
            continue
        if value in seen:
            yield Violation(path, f"{dotted(path)} is {value!r}, as is {dotted(seen[value])}", rule)
        else:
            seen[value] = path


def _name(view: View, index: int) -> str:
    return str(view[("checkpoints", index, "name")])


def _listed(values: Iterable[Any]) -> str:
    return "[" + ", ".join(map(str, values)) + "]"


def _numbers(values: Iterable[int]) -> str:
    return ", ".join(map(str, values))


def _value(value: Any) -> str:
    return _listed(value) if isinstance(value, tuple) else show(value)


SPEC_RULES: tuple[Callable[[View], Iterator[Violation]], ...] = (
    architecture_begins_with_prefix,
    config_keys_differ,
    input_keywords_differ,
    layouts_differ,
    weight_names_differ,
    checkpoint_names_differ,
    sections_fill_the_rotated_half,
    partial_is_generated,
    kv_heads_divide_heads,
    vision_heads,
    position_table_is_square,
    tower_ends_at_text_width,
    deepstack_indices,
    tokens_differ,
    token_ids_in_vocabulary,
    block_size,
    buckets,
    quantization_modes,
    defaults_are_a_checkpoint,
    parts_are_paired,
    positions_fit_the_rope,
    video_prompt_fits_the_positions,
    bounds_fit_the_input,
    position_table_fits_the_input,
    tiles_are_whole,
    windows_are_whole,
    experts_fit,
    patch_embedding_is_flat,
    merger_is_whole,
    merger_has_a_prefix,
)

CHECKPOINT_RULES: tuple[Callable[[View, int], Iterator[Violation]], ...] = (
    checkpoint_sections,
    checkpoint_kv_heads,
    checkpoint_vision_heads,
    checkpoint_out_width,
    checkpoint_deepstack,
    checkpoint_parts,
    checkpoint_windows,
    checkpoint_experts,
    checkpoint_vocabulary,
)
