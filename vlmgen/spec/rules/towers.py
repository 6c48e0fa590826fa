"""Sizes of the two towers, in their sections and in checkpoints."""

from __future__ import annotations

import math
from collections.abc import Iterator

from vlmgen.spec.axes import AXES, show
from vlmgen.spec.rules.view import View, Violation, at_path, divisors, listed, numbers, size_of
from vlmgen.spec.source import Key


def sections_fill_the_rotated_half(view: View) -> Iterator[Violation]:
    """Every frequency of the rotated part belongs to one position axis."""
    if view[at_path("text.rope.kind")] != "mrope":
        return
    yield from sections_fill(
        view, view[at_path("text.attention.head_dim")], at_path("text.rope.sections")
    )


def sections_fill(view: View, head_dim: int, at: Key, whose: str = "") -> Iterator[Violation]:
    partial = view[at_path("text.rope.partial")]
    sections = view[at_path("text.rope.sections")]
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
    if view.optional(at_path("text.rope.order")) == "interleaved":
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
    path = at_path("text.rope.partial")
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
    yield from kv_heads_divide(
        view, at_path("text.attention.num_heads"), at_path("text.attention.num_kv_heads")
    )


def kv_heads_divide(view: View, heads_at: Key, kv_at: Key) -> Iterator[Violation]:
    heads, kv_heads = size_of(view, heads_at), size_of(view, kv_at)
    if heads % kv_heads:
        yield Violation(
            kv_at,
            f"num_heads {heads} is not divisible by num_kv_heads {kv_heads}",
            "KV heads divide the query heads",
            numbers(divisors(heads)),
        )


# --- vision -----------------------------------------------------------------------------------


def vision_heads(view: View) -> Iterator[Violation]:
    """Heads share the width, and axial rotation cuts a head in four."""
    yield from vision_heads_divide(
        view, at_path("vision.hidden_size"), at_path("vision.attention.num_heads")
    )


def vision_heads_divide(view: View, hidden_at: Key, heads_at: Key) -> Iterator[Violation]:
    hidden, heads = size_of(view, hidden_at), size_of(view, heads_at)
    unit = 4 if view.present(at_path("vision.rope")) else 1
    legal = numbers(n for n in divisors(hidden) if hidden // n % unit == 0)
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
    path = at_path("vision.position.num_embeddings")
    extra = 1 if view.present(at_path("vision.class_token")) else 0
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
    yield from ends_at_text_width(
        view, at_path("text.hidden_size"), at_path("vision.out_hidden_size")
    )


def ends_at_text_width(view: View, text_at: Key, out_at: Key) -> Iterator[Violation]:
    text, out = size_of(view, text_at), size_of(view, out_at)
    if text != out:
        yield Violation(
            out_at,
            f"out_hidden_size {out} differs from the text hidden_size {text}",
            "the tower's output is as wide as the text",
            str(text),
        )


def deepstack_indices(view: View) -> Iterator[Violation]:
    """Levels are tower blocks, in order, and each has a decoder layer to go to."""
    yield from deepstack_fits(
        view,
        at_path("vision.deepstack.indices"),
        at_path("vision.depth"),
        at_path("text.num_layers"),
    )


def deepstack_fits(view: View, at: Key, depth_at: Key, layers_at: Key) -> Iterator[Violation]:
    if not view.present(at_path("vision.deepstack")):
        return
    indices = size_of(view, at)
    if any(b <= a for a, b in zip(indices, indices[1:], strict=False)):
        yield Violation(
            at,
            f"deepstack indices {listed(indices)} are not ascending and distinct",
            "level k is the k-th index; indices ascend",
            listed(sorted(set(indices))),
        )
    depth = size_of(view, depth_at)
    for position, index in enumerate(indices):
        if index >= depth:
            yield Violation(
                (*at, position),
                f"deepstack index {index} is beyond the tower's depth {depth}",
                "a deepstack index is a tower block",
                f"0 to {depth - 1}",
            )
    layers = size_of(view, layers_at)
    if len(indices) > layers:
        yield Violation(
            at,
            f"{len(indices)} deepstack levels, but {layers} decoder layers",
            "level k goes to decoder layer k",
            f"at most {layers} levels",
        )
