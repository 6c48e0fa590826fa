"""Reads golden vectors: an ``index.json`` beside safetensors and JSON files.

Two layouts are understood, that of ``vlm`` (entries with ``topic``; every object is resolved) and
that of ``functional`` (entries with ``function``; one safetensors file per function).

An object with one key stands for a value::

    {"tensor": "case.q"}            fresh copy of that key of the entry's safetensors file
    {"dtype": "bfloat16"}           torch.bfloat16
    {"json": "tables.json#/a/0"}    that place of a JSON file, resolved in turn
    {"weights": "..."}              every key of tower.safetensors that starts with "weights."
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

FOLDER = Path(__file__).resolve().parent
WEIGHTS_PREFIX = "weights."


@functools.cache
def _json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _tensor(path: Path, key: str) -> torch.Tensor:
    with safe_open(path, framework="pt") as file:
        return file.get_tensor(key).clone()


def _weights(path: Path) -> dict[str, torch.Tensor]:
    with safe_open(path, framework="pt") as file:
        keys = [key for key in file.keys() if key.startswith(WEIGHTS_PREFIX)]
        return {key[len(WEIGHTS_PREFIX) :]: file.get_tensor(key).clone() for key in keys}


class Vector:
    """One entry of an index.

    Attributes:
        entry: the entry as it is in the file.
        folder: the folder of the index.
    """

    def __init__(self, entry: dict[str, Any], folder: Path) -> None:
        self.entry = entry
        self.folder = folder

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["entry"][name]
        except KeyError:
            raise AttributeError(f"a vector has no {name!r}") from None

    def __repr__(self) -> str:
        return f"<vector {self.name}>"

    @property
    def name(self) -> str:
        """Unique within the index: ``topic-case`` or ``function-case``."""
        return f"{self.entry.get('topic', self.entry['function'])}-{self.entry['case']}"

    @property
    def _safetensors(self) -> Path:
        file = self.entry.get("file", f"{self.entry['function']}.safetensors")
        return self.folder / Path(file).with_suffix(".safetensors")

    def resolve(self, value: Any) -> Any:
        """Replace every one-key object inside a value. Tensors are fresh copies each time."""
        if isinstance(value, list):
            return [self.resolve(item) for item in value]
        if not isinstance(value, dict):
            return value
        if len(value) == 1:
            (kind, what), *_ = value.items()
            if kind == "tensor" and isinstance(what, str):
                return _tensor(self._safetensors, what)
            if kind == "dtype" and isinstance(what, str) and hasattr(torch, what):
                return getattr(torch, what)
            if kind == "weights" and isinstance(what, str):
                return _weights(self.folder / "tower.safetensors")
            if kind == "json":
                return self.resolve(self._at(what))
        return {key: self.resolve(item) for key, item in value.items()}

    def _at(self, reference: str) -> Any:
        file, _, pointer = reference.partition("#")
        place = _json(self.folder / file)
        for token in pointer.split("/")[1:]:
            token = token.replace("~1", "/").replace("~0", "~")
            place = place[int(token)] if isinstance(place, list) else place[token]
        return place

    @property
    def args(self) -> dict[str, Any]:
        """Arguments, resolved; new tensors at every access."""
        return self.resolve(self.entry["args"])

    @property
    def outputs(self) -> Any:
        """Expected outputs, resolved."""
        return self.resolve(self.entry["outputs"])

    @property
    def mutated(self) -> dict[str, Any]:
        """Expected contents of arguments afterwards, resolved; empty when none changes."""
        return self.resolve(self.entry.get("mutated") or {})

    def check(self, actual: Any, expected: Any = ..., output: str | None = None) -> None:
        """Assert that a result equals the expected one within the entry's tolerance.

        Args:
            actual: result; by default all outputs, as a mapping, sequence or single value.
            expected: what to compare with; by default the entry's outputs.
            output: name of the output, where the tolerance depends on it.
        """
        if expected is ...:
            expected = self.outputs
        rule = self.entry.get("compare", "exact")
        if output is None and isinstance(rule, dict) and "rtol" not in rule:
            assert isinstance(actual, dict) and set(actual) == set(expected), self.name
            for name in expected:
                compare(actual[name], expected[name], self._tolerance(name), f"{self.name}.{name}")
            return
        compare(actual, expected, self._tolerance(output), self.name)

    def _tolerance(self, output: str | None) -> tuple[float, float] | None:
        rule = self.entry.get("compare", "exact")
        if isinstance(rule, dict) and "rtol" not in rule:
            rule = rule.get(output, "exact")  # tolerances by output; the others are exact
        if rule == "exact":
            return None
        if isinstance(rule, str):
            raise ValueError(f"{self.name}: {output} is compared as follows, by hand: {rule}")
        return rule["rtol"], rule["atol"]

    def expect_raises(self, call: Callable[[], Any]) -> None:
        """Assert that a call fails as recorded.

        A deliberate failure must have the recorded type and name the recorded numbers; an
        accidental one only has to fail.
        """
        expect_raises(call, self.entry["raises"], self.name)


def expect_raises(call: Callable[[], Any], raises: dict[str, Any], name: str) -> None:
    """Assert that ``call`` fails as a ``raises`` record says."""
    if not raises["deliberate"]:
        with pytest.raises(Exception):  # noqa: B017, the type is an accident of the recording
            call()
        return
    with pytest.raises(Exception) as caught:
        call()
    assert type(caught.value).__name__ == raises["type"], f"{name}: {caught.value!r}"
    said = {int(number) for number in re.findall(r"-?\d+", str(caught.value))}
    absent = set(raises.get("numbers", [])) - said
    assert not absent, f"{name}: the message lacks {sorted(absent)}: {caught.value}"


def compare(
    actual: Any, expected: Any, tolerance: tuple[float, float] | None, name: str = "value"
) -> None:
    """Assert equality of nested values; tensors by dtype, shape and value.

    Args:
        actual: result.
        expected: recorded value.
        tolerance: (rtol, atol) for tensors and floats, or None for exact.
        name: place, for the message.
    """
    if isinstance(expected, torch.Tensor):
        assert isinstance(actual, torch.Tensor), f"{name}: expected a tensor, got {actual!r}"
        assert actual.dtype == expected.dtype, f"{name}: {actual.dtype} != {expected.dtype}"
        assert actual.shape == expected.shape, f"{name}: {actual.shape} != {expected.shape}"
        rtol, atol = tolerance or (0.0, 0.0)
        torch.testing.assert_close(
            actual, expected, rtol=rtol, atol=atol, equal_nan=True, msg=lambda m: f"{name}: {m}"
        )
    elif isinstance(expected, dict):
        assert isinstance(actual, dict), f"{name}: expected a mapping, got {actual!r}"
        assert set(actual) == set(expected), f"{name}: keys {sorted(actual)} != {sorted(expected)}"
        for key in expected:
            compare(actual[key], expected[key], tolerance, f"{name}.{key}")
    elif isinstance(expected, list):
        assert isinstance(actual, list | tuple), f"{name}: expected a list, got {actual!r}"
        assert len(actual) == len(expected), f"{name}: {len(actual)} items, not {len(expected)}"
        for place, (one, other) in enumerate(zip(actual, expected, strict=True)):
            compare(one, other, tolerance, f"{name}[{place}]")
    elif isinstance(expected, float) and tolerance is not None:
        assert actual == pytest.approx(expected, rel=tolerance[0], abs=tolerance[1]), name
    else:
        assert (
            type(actual) is type(expected) and actual == expected
        ), f"{name}: {actual!r} != {expected!r}"


@functools.cache
def read_index(collection: str = "vlm") -> tuple[Vector, ...]:
    """Return every vector of a collection (a folder beside this file)."""
    folder = FOLDER / collection
    return tuple(Vector(entry, folder) for entry in _json(folder / "index.json"))


def vectors(*topics: str, collection: str = "vlm") -> list[Vector]:
    """Return the vectors of some topics (or functions), in the index's order.

    Raises:
        KeyError: a topic has no vector.
    """
    found = [
        vector
        for vector in read_index(collection)
        if vector.entry.get("topic", vector.entry["function"]) in topics
    ]
    present = {vector.entry.get("topic", vector.entry["function"]) for vector in found}
    for topic in topics:
        if topic not in present:
            raise KeyError(f"no vector of topic {topic!r} in {collection}")
    return found


def parametrize(
    *topics: str, collection: str = "vlm", where: Callable[[Vector], bool] | None = None
) -> pytest.MarkDecorator:
    """Parametrize a test over vectors; its argument is called ``vector``."""
    chosen: Iterable[Vector] = vectors(*topics, collection=collection)
    cases = [vector for vector in chosen if where is None or where(vector)]
    return pytest.mark.parametrize("vector", cases, ids=[vector.name for vector in cases])
