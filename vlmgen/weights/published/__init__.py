"""Tensor names and shapes of the published checkpoints, as data, one JSON file per family.

The data does not come from vlmgen's weight table, so that the table can be proven against it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlmgen.errors import UsageError

FOLDER = Path(__file__).resolve().parent

Shape = tuple[int, ...]


@dataclass(frozen=True)
class PublishedCheckpoint:
    """One checkpoint as published.

    Args:
        name: Published name.
        config: Its config.json, as far as a model is built from it.
        keys: Tower -> key without the tower's prefix -> shape.
        parameters_billion: Its parameter count as its publisher states it.
    """

    name: str
    config: Mapping[str, Any]
    keys: Mapping[str, Mapping[str, Shape]]
    parameters_billion: float

    def tensors(self, layout: Mapping[str, str]) -> dict[str, Shape]:
        """Full key -> shape in a layout (tower -> prefix)."""
        return {
            layout[tower] + key: shape
            for tower, keys in self.keys.items()
            for key, shape in keys.items()
        }

    @property
    def num_parameters(self) -> int:
        """Elements of all tensors."""
        shapes = (shape for keys in self.keys.values() for shape in keys.values())
        return sum(math.prod(shape) for shape in shapes)


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
    path = FOLDER / f"{family}.json"
    if family not in families():
        known = ", ".join(families())
        raise UsageError(f"no published keys are recorded for {family!r}; recorded: {known}")
    data = json.loads(path.read_text(encoding="utf-8"))
    checkpoints = {name: _checkpoint(data, name) for name in data["checkpoints"]}
    return PublishedFamily(data["layouts"], data["published_layout"], checkpoints)


def _checkpoint(data: Mapping[str, Any], name: str) -> PublishedCheckpoint:
    own = data["checkpoints"][name]
    config = {k: v for k, v in data["config"].items() if not isinstance(v, dict)}
    config["tie_word_embeddings"] = own["tie_word_embeddings"]
    for section, common in data["config"].items():
        if isinstance(common, dict):
            config[section] = {**common, **own[section]}
    symbols = {symbol: _field(config, path) for symbol, path in data["symbols"].items()}
    counts = {index: _count(_field(config, path)) for index, path in data["repeats"].items()}
    absent = data["absent_when_tied"] if config["tie_word_embeddings"] else ()
    keys = {
        tower: _expand(patterns, symbols, counts)
        for tower, patterns in data["keys"].items()
        if tower not in absent
    }
    return PublishedCheckpoint(name, config, keys, own["parameters_billion"])


def _field(config: Mapping[str, Any], path: str) -> Any:
    section, _, name = path.partition(".")
    return config[section][name]


def _count(value: int | list[int]) -> int:
    return value if isinstance(value, int) else len(value)


def _expand(
    patterns: Mapping[str, list[str]], symbols: Mapping[str, int], counts: Mapping[str, int]
) -> dict[str, Shape]:
    """Every key of every repetition, with its shape."""
    keys: dict[str, Shape] = {}
    for pattern, products in patterns.items():
        shape = tuple(
            math.prod(symbols[f] if f in symbols else int(f) for f in product.split("*"))
            for product in products
        )
        index = next((name for name in counts if "{" + name + "}" in pattern), None)
        if index is None:
            keys[pattern] = shape
            continue
        for number in range(counts[index]):
            keys[pattern.replace("{" + index + "}", str(number))] = shape
    return keys
