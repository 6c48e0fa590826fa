"""Values of axes with the evidence for them, and what contradicts what."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from vlmgen.errors import VlmgenError

EXIT_CONTRADICTION = 7

Source = Literal["config", "tensors"]


class ContradictionError(VlmgenError):
    """config.json and the tensors, or two fields of config.json, say different things.

    Args:
        message: What contradicts what, every pair on lines of its own.
        conflicts: The pairs.
    """

    code = "VG909"
    exit_code = EXIT_CONTRADICTION

    def __init__(self, message: str, conflicts: list[Conflict], *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.conflicts = conflicts


@dataclass(frozen=True)
class Reading:
    """A value of one axis.

    Args:
        path: Dotted path in the spec.
        value: As a spec states it, lists as tuples.
        evidence: What says so: a config field, a key with its shape.
        source: Where that stands.
        weak: It follows from what is not there; anything else goes before it.
    """

    path: str
    value: Any
    evidence: str
    source: Source
    weak: bool = False


@dataclass(frozen=True)
class Conflict:
    """Two readings that exclude each other."""

    path: str
    first: str
    second: str


@dataclass(frozen=True)
class Gap:
    """Something that could not be decided, or that the generator does not implement.

    Args:
        path: Dotted path in the spec, or a subject.
        why: Why.
        taken: What was taken instead, or empty.
    """

    path: str
    why: str
    taken: str = ""


class Readings:
    """Readings of one checkpoint, seen as one family."""

    def __init__(self) -> None:
        self._of: dict[str, list[Reading]] = {}
        self.conflicts: list[Conflict] = []
        self.gaps: list[Gap] = []
        self.refused: list[Gap] = []

    def add(
        self, path: str, value: Any, evidence: str, source: Source, *, weak: bool = False
    ) -> None:
        """Take a reading; one that contradicts an earlier strong one becomes a conflict."""
        if isinstance(value, list):
            value = tuple(value)
        reading = Reading(path, value, evidence, source, weak)
        for other in self._of.get(path, ()):
            if other.value != value and not weak and not other.weak:
                self.conflict(path, other.evidence, evidence)
        self._of.setdefault(path, []).append(reading)

    def conflict(self, path: str, first: str, second: str) -> None:
        """Two facts that exclude each other."""
        found = Conflict(path, first, second)
        if found not in self.conflicts:
            self.conflicts.append(found)

    def gap(self, path: str, why: str, taken: str = "") -> None:
        """Something that could not be decided."""
        self.gaps.append(Gap(path, why, taken))

    def refuse(self, path: str, why: str) -> None:
        """Something that no spec can state today."""
        found = Gap(path, why)
        if found not in self.refused:
            self.refused.append(found)

    def get(self, path: str) -> Any:
        """The value of a path, None where there is none."""
        reading = self.reading(path)
        return None if reading is None else reading.value

    def reading(self, path: str) -> Reading | None:
        """The strongest reading of a path, the evidence of the others joined to it."""
        found = self._of.get(path)
        if not found:
            return None
        strong = [r for r in found if not r.weak] or found
        first = strong[0]
        agreeing = dict.fromkeys(r.evidence for r in strong if r.value == first.value)
        return Reading(path, first.value, "; ".join(agreeing), first.source, first.weak)

    def __contains__(self, path: str) -> bool:
        return path in self._of

    def __iter__(self) -> Iterator[Reading]:
        for path in self._of:
            reading = self.reading(path)
            if reading is not None:
                yield reading
