"""Sizes of the published checkpoints."""

from __future__ import annotations

from collections.abc import Iterator

from vlmgen.spec.rules.pairings import full_blocks_fit, top_k_fits
from vlmgen.spec.rules.tokens import TOKENS
from vlmgen.spec.rules.towers import (
    deepstack_fits,
    ends_at_text_width,
    kv_heads_divide,
    sections_fill,
    vision_heads_divide,
)
from vlmgen.spec.rules.view import DEFAULTS, View, Violation, at_path, name_of, run, shown
from vlmgen.spec.source import Key, dotted


def checkpoint_sections(view: View, index: int) -> Iterator[Violation]:
    """Sections fill the rotated half of a checkpoint that has a head width of its own."""
    at: Key = ("checkpoints", index, "text", "head_dim")
    head_dim = view.optional(at)
    if head_dim is not None:
        yield from sections_fill(view, head_dim, at, f" in {name_of(view, index)}")


def checkpoint_kv_heads(view: View, index: int) -> Iterator[Violation]:
    """As for the text section."""
    text: Key = ("checkpoints", index, "text")
    yield from kv_heads_divide(view, (*text, "num_heads"), (*text, "num_kv_heads"))


def checkpoint_vision_heads(view: View, index: int) -> Iterator[Violation]:
    """As for the vision section."""
    vision: Key = ("checkpoints", index, "vision")
    yield from vision_heads_divide(view, (*vision, "hidden_size"), (*vision, "num_heads"))


def checkpoint_out_width(view: View, index: int) -> Iterator[Violation]:
    """As for the vision section."""
    row: Key = ("checkpoints", index)
    yield from ends_at_text_width(
        view, (*row, "text", "hidden_size"), (*row, "vision", "out_hidden_size")
    )


def checkpoint_deepstack(view: View, index: int) -> Iterator[Violation]:
    """As for the vision section."""
    row: Key = ("checkpoints", index)
    yield from deepstack_fits(
        view,
        (*row, "vision", "deepstack"),
        (*row, "vision", "depth"),
        (*row, "text", "num_layers"),
    )


def checkpoint_parts(view: View, index: int) -> Iterator[Violation]:
    """A checkpoint has sizes of parts that the spec has."""
    for part, names in _CHECKPOINT_PARTS.items():
        if view.present(at_path(part)):
            continue
        for name in names:
            at: Key = ("checkpoints", index, *at_path(name))
            if view.optional(at) is not None:
                yield Violation(
                    at, f"{name} is stated in {name_of(view, index)}, but {part} is null",
                    f"{name} is a size of {part}", "null",
                )  # fmt: skip


def checkpoint_windows(view: View, index: int) -> Iterator[Violation]:
    """As for the vision section."""
    depth: Key = ("checkpoints", index, "vision", "depth")
    if view.optional(depth) is not None:
        yield from full_blocks_fit(view, depth, f" in {name_of(view, index)}")


def checkpoint_experts(view: View, index: int) -> Iterator[Violation]:
    """As for the text section."""
    experts: Key = ("checkpoints", index, "text", "num_experts")
    if view.optional(experts) is not None and view.present(at_path("text.moe")):
        yield from top_k_fits(view, experts, f" in {name_of(view, index)}")


def checkpoint_vocabulary(view: View, index: int) -> Iterator[Violation]:
    """Token ids index the table of a checkpoint that has a vocabulary of its own."""
    at: Key = ("checkpoints", index, "text", "vocab_size")
    vocab = view.optional(at)
    if vocab is not None:
        for name in TOKENS:
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
    for section, size in DEFAULTS.items():
        yield from run(_same_as_default(view, at_path(section), (*row, *at_path(size)), wanted))


def _same_as_default(view: View, at: Key, size_at: Key, name: str) -> Iterator[Violation]:
    stated, published = view[at], view.optional(size_at)
    if published is None:
        return
    if isinstance(stated, (tuple, list)):
        stated, published = tuple(stated), tuple(published)
    if stated != published:
        yield Violation(
            at,
            f"{dotted(at)} is {shown(stated)}, but {name} has {shown(published)}",
            "text and vision state the sizes of the checkpoint that defaults_from names",
            shown(published),
        )
