"""Placeholder tokens, and the defaults for the plugin."""

from __future__ import annotations

import math
from collections.abc import Iterator

from vlmgen.spec.rules.view import View, Violation, at_path, distinct, listed, run
from vlmgen.spec.source import Key

TOKENS = ("image", "video", "vision_start", "vision_end", "video_start", "video_end")


def tokens_differ(view: View) -> Iterator[Violation]:
    """Placeholders are told apart by id, text and config key."""
    for key in ("id", "token", "config_key"):
        yield from distinct(
            view, [("tokens", name, key) for name in TOKENS], f"the {key}s of tokens are distinct"
        )


def token_ids_in_vocabulary(view: View) -> Iterator[Violation]:
    """Ids index the embedding table."""
    vocab = view[at_path("text.vocab_size")]
    for name in TOKENS:
        yield from run(_token_in_vocabulary(view, name, vocab))


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
    path = at_path("neuron.vision_attention_block_size")
    block = view[path]
    area = view[at_path("vision.merger.merge_size")] ** 2
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
    path = at_path("neuron.num_vision_tokens_buckets")
    sizes = view[path]
    if any(b <= a for a, b in zip(sizes, sizes[1:], strict=False)):
        yield Violation(
            path,
            f"buckets {listed(sizes)} are not ascending and distinct",
            "the runner takes the first bucket that is large enough",
            listed(sorted(set(sizes))),
        )
    block = view[at_path("neuron.vision_attention_block_size")]
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
    path = at_path("neuron.quantization")
    count = view.length(path)
    yield from distinct(view, [(*path, i) for i in range(count)], "modes are distinct")
