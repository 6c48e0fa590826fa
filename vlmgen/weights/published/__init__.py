"""Tensor names and shapes of the published checkpoints, as data, one JSON file per family.

The data does not come from vlmgen's weight table, so that the table can be proven against it. A
file holds:

    symbols     letter -> config field, quotient of two fields, or number
    repeats     index in a key -> field with the count, or pair of first and end
    layouts     name -> prefixes of the towers; published_layout names the one on the hub
    keys        tower -> key -> shape, a list of products of symbols and numbers
    ignored     the same, for keys that published files hold and no model reads; in no count
    config      what all checkpoints share of config.json, in the form on the hub
    checkpoints name -> what is its own; not verified where no copy of the config was found
    extends     another family, of which this file states only the differences; null takes an entry
                away; checkpoints are not inherited
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlmgen.errors import UsageError
from vlmgen.tiny.family import merge

FOLDER = Path(__file__).resolve().parent

Shape = tuple[int, ...]


@dataclass(frozen=True)
class PublishedCheckpoint:
    """One checkpoint as published.

    Args:
        name: Published name.
        config: Its config.json, as far as a model is built from it.
        keys: Tower -> key without the tower's prefix -> shape.
        ignored: The same, for keys that no model reads.
        parameters_billion: Its parameter count as its publisher states it.
        verified: A copy of its config was found.
    """

    name: str
    config: Mapping[str, Any]
    keys: Mapping[str, Mapping[str, Shape]]
    ignored: Mapping[str, Mapping[str, Shape]]
    parameters_billion: float
    verified: bool

    @property
    def tied(self) -> bool:
        """The head is the embedding."""
        text = self.config.get("text_config", {})
        return self.config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))

    def tensors(self, layout: Mapping[str, str]) -> dict[str, Shape]:
        """Full key -> shape in a layout (tower -> prefix), of what a model reads."""
        return _prefixed(self.keys, layout)

    def ignored_tensors(self, layout: Mapping[str, str]) -> dict[str, Shape]:
        """Full key -> shape in a layout, of what no model reads."""
        return _prefixed(self.ignored, layout)

    @property
    def num_parameters(self) -> int:
        """Elements of all tensors that a model reads."""
        shapes = (shape for keys in self.keys.values() for shape in keys.values())
        return sum(math.prod(shape) for shape in shapes)


def _prefixed(
    keys: Mapping[str, Mapping[str, Shape]], layout: Mapping[str, str]
) -> dict[str, Shape]:
    return {
        layout[tower] + key: shape for tower, rows in keys.items() for key, shape in rows.items()
    }


@dataclass(frozen=True)
class PublishedFamily:
    """All published checkpoints of a family.

    Args:
        layouts: Name of a key layout -> tower -> prefix.
        published_layout: The layout that is on the hub.
        checkpoints: By name.
    """

    layouts: Mapping[str, Mapping[str, str]]
    published_layout: str
    checkpoints: Mapping[str, PublishedCheckpoint]


def families() -> tuple[str, ...]:
    """Families whose published keys are recorded."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.json")))


def published_family(family: str) -> PublishedFamily:
    """Read a family's data.

    Args:
        family: Name of the family.

    Raises:
        UsageError: Nothing is recorded for it.
    """
    if family not in families():
        known = ", ".join(families())
        raise UsageError(f"no published keys are recorded for {family!r}; recorded: {known}")
    data = _read(family)
    checkpoints = {name: _checkpoint(data, name) for name in data["checkpoints"]}
    return PublishedFamily(data["layouts"], data["published_layout"], checkpoints)


def _read(family: str) -> dict[str, Any]:
    """A family's file, `extends` resolved."""
    data = json.loads((FOLDER / f"{family}.json").read_text(encoding="utf-8"))
    base = data.pop("extends", None)
    return merge({**_read(base), "checkpoints": {}}, data) if base else data


def _checkpoint(data: Mapping[str, Any], name: str) -> PublishedCheckpoint:
    own = dict(data["checkpoints"][name])
    parameters_billion, verified = own.pop("parameters_billion"), own.pop("verified", True)
    config = merge(data["config"], own)
    symbols = {symbol: _symbol(config, value) for symbol, value in data["symbols"].items()}
    ranges = {index: _range(config, value) for index, value in data["repeats"].items()}
    keys, ignored = (
        {tower: _expand(rows, symbols, ranges) for tower, rows in data.get(part, {}).items()}
        for part in ("keys", "ignored")
    )
    found = PublishedCheckpoint(name, config, keys, ignored, parameters_billion, verified)
    if found.tied:
        for tower in data["absent_when_tied"]:
            del keys[tower]
    return found


def _field(config: Mapping[str, Any], path: str) -> Any:
    """A field of config.json by its path, `section.name` or `name`."""
    value: Any = config
    for part in path.split("."):
        value = value[part]
    return value


def _symbol(config: Mapping[str, Any], value: int | str) -> int:
    """A number, a field, or a quotient of two fields."""
    if isinstance(value, int):
        return value
    first, *divisors = (_field(config, path) for path in value.split(" / "))
    for divisor in divisors:
        first, rest = divmod(first, divisor)
        assert rest == 0, value
    return first


def _range(config: Mapping[str, Any], value: str | list[Any]) -> range:
    """`range(count)` of a field, its length if it is a list, or a range of first and end."""
    if isinstance(value, str):
        count = _field(config, value)
        return range(len(count) if isinstance(count, list) else count)
    start, end = (x if isinstance(x, int) else _field(config, x) for x in value)
    return range(start, end)


def _expand(
    patterns: Mapping[str, list[str]], symbols: Mapping[str, int], ranges: Mapping[str, range]
) -> dict[str, Shape]:
    """Every key of every repetition, with its shape."""
    keys: dict[str, Shape] = {}
    for pattern, products in patterns.items():
        shape = tuple(
            math.prod(symbols[f] if f in symbols else int(f) for f in product.split("*"))
            for product in products
        )
        indexes = re.findall(r"\{(\w+)\}", pattern)
        for numbers in itertools.product(*(ranges[index] for index in indexes)):
            keys[pattern.format(**dict(zip(indexes, numbers, strict=True)))] = shape
    return keys
