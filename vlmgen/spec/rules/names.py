"""Names of a spec that must differ or agree."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vlmgen.spec.rules.view import View, Violation, at_path, distinct
from vlmgen.spec.source import Key


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
    text = view[at_path("text.config_key")]
    if text == view[at_path("vision.config_key")]:
        yield Violation(
            at_path("vision.config_key"),
            f"text and vision both read the config key {text!r}",
            "each tower has a config key of its own",
        )


def input_keywords_differ(view: View) -> Iterator[Violation]:
    """The processor's keywords are one namespace."""
    yield from distinct(
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
    count = view.length(at_path("weights.layouts"))
    rows: list[Key] = [("weights", "layouts", index) for index in range(count)]
    yield from distinct(view, [(*row, "name") for row in rows], "layout names are distinct")
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
        yield from distinct(
            view,
            [(*at_path(parent), name) for name in names],
            "weight names of a part are distinct",
        )


def checkpoint_names_differ(view: View) -> Iterator[Violation]:
    """`--checkpoint NAME` means one row."""
    paths: list[Key] = []
    for index in range(view.length(("checkpoints",))):
        paths.append(("checkpoints", index, "name"))
        also: Key = ("checkpoints", index, "also")
        paths += [(*also, k) for k in range(view.length(also))]
    yield from distinct(view, paths, "checkpoint names are distinct")
