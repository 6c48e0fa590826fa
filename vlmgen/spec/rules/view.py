"""What rules read and what they yield."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from vlmgen.spec.axes import show
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


class Unavailable(Exception):
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
                raise Unavailable
        value = self._data
        for part in path:
            try:
                value = value[part]
            except (KeyError, IndexError, TypeError):
                raise Unavailable from None
        return value

    def optional(self, path: Key) -> Any:
        """The value, or None where the key is left out."""
        parent, key = path[:-1], path[-1]
        value: Any = self._data
        for part in parent:
            try:
                value = value[part]
            except (KeyError, IndexError, TypeError):
                raise Unavailable from None
        if isinstance(value, dict) and key not in value:
            return None
        return self[path]

    def is_bad(self, path: Key) -> bool:
        """Whether the schema refused the value or a part of it."""
        return any(wrong[: len(path)] == path for wrong in self._bad)

    def present(self, path: Key) -> bool:
        """Whether a value is stated and not null, whatever the schema says of its parts."""
        if any(wrong == path[: len(wrong)] for wrong in self._bad):
            raise Unavailable
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


def run(found: Iterator[Violation]) -> list[Violation]:
    violations: list[Violation] = []
    try:
        for violation in found:
            violations.append(violation)
    except Unavailable:
        pass
    return violations


def at_path(text: str) -> Key:
    return tuple(text.split("."))


# Section value -> the checkpoint's value.
DEFAULTS = {
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


def size_of(view: View, at: Key) -> Any:
    """A size of a checkpoint, or that of the section where the checkpoint states none."""
    if at[0] != "checkpoints":
        return view[at]
    own = view.optional(at)
    if own is not None:
        return own
    wanted = ".".join(map(str, at[2:]))
    return view[at_path(next(section for section, size in DEFAULTS.items() if size == wanted))]


def divisors(number: int) -> list[int]:
    """Divisors of a positive number, ascending."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def distinct(view: View, paths: list[Key], rule: str) -> Iterator[Violation]:
    seen: dict[Any, Key] = {}
    for path in paths:
        try:
            value = view[path]
        except Unavailable:
            continue
        if value is None:
            continue
        if value in seen:
            yield Violation(path, f"{dotted(path)} is {value!r}, as is {dotted(seen[value])}", rule)
        else:
            seen[value] = path


def name_of(view: View, index: int) -> str:
    return str(view[("checkpoints", index, "name")])


def listed(values: Iterable[Any]) -> str:
    return "[" + ", ".join(map(str, values)) + "]"


def numbers(values: Iterable[int]) -> str:
    return ", ".join(map(str, values))


def shown(value: Any) -> str:
    return listed(value) if isinstance(value, tuple) else show(value)
