"""The names under which known families store their tensors, by the part of the model they are."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vlmgen.importer.headers import Shape
from vlmgen.spec.model import Spec


@dataclass(frozen=True)
class Vocabulary:
    """Names by place in the `weights` section of a spec, from every known spec.

    Args:
        names: Dotted place such as `text.q` -> the names known for it.
        prefixes: `text`, `vision`, `projector`, `head` -> prefixes known for it.
    """

    names: Mapping[str, tuple[str, ...]]
    prefixes: Mapping[str, tuple[str, ...]]

    def of(self, place: str) -> tuple[str, ...]:
        """Names known for a place."""
        return self.names.get(place, ())


def vocabulary(specs: Iterable[Spec]) -> Vocabulary:
    """The names that some specs state."""
    names: dict[str, dict[str, None]] = {}
    prefixes: dict[str, dict[str, None]] = {}
    for spec in specs:
        for part in ("text", "vision"):
            data = getattr(spec.weights, part).model_dump(exclude_none=True)
            for place, name in _leaves(data, part):
                names.setdefault(place, {})[name] = None
        for layout in spec.weights.layouts:
            for part in ("text", "vision", "projector", "head"):
                prefix = getattr(layout, part)
                if prefix is not None:
                    prefixes.setdefault(part, {})[prefix] = None
    return Vocabulary(
        {place: tuple(sorted(found)) for place, found in names.items()},
        {part: tuple(found) for part, found in prefixes.items()},
    )


def _leaves(data: Mapping[str, Any], path: str) -> Iterator[tuple[str, str]]:
    for key, value in data.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{path}.{key}")
        else:
            yield f"{path}.{key}", value


@dataclass
class Group:
    """The tensors of one repeated part, such as the decoder layers.

    Args:
        prefix: Everything before the number.
        members: Number -> name after the number and its dot -> shape.
    """

    prefix: str
    members: dict[int, dict[str, Shape | None]] = field(default_factory=dict)

    def key(self, number: int, name: str) -> str:
        """The whole key of a tensor."""
        return f"{self.prefix}{number}.{name}"


class TensorNames:
    """Tensor names, sorted by prefix into the parts of a model.

    Args:
        shapes: Name -> shape, None where it is not known.
        known: Names of known families.
        ignored: Patterns of keys that no parameter needs.
    """

    def __init__(
        self, shapes: Mapping[str, Shape | None], known: Vocabulary, ignored: Sequence[str] = ()
    ) -> None:
        patterns = [_matcher(pattern) for pattern in ignored]
        self.ignored = {k for k in shapes if any(p.fullmatch(k) for p in patterns)}
        self.shapes = {k: s for k, s in shapes.items() if k not in self.ignored}
        self.known = known
        self.unused = set(self.shapes)
        self.text_prefix = self._prefix("text.embed_tokens", "text.layer")
        self.vision_prefix = self._prefix("vision.patch_embed", "vision.block")
        self.layers, self.layer_name = self._group(self.text_prefix, "text.layer")
        self.blocks, self.block_name = self._group(self.vision_prefix, "vision.block")
        self.levels, self.level_name = self._group(self.vision_prefix, "vision.deepstack.prefix")
        self.merger_prefix, self.projector = self._merger()
        self.head = next((k for k in self.shapes if k.endswith("lm_head.weight")), None)
        self._experts: dict[str, dict[int, tuple[set[int], set[str]]]] = {}

    def experts(self, template: str) -> dict[int, tuple[set[int], set[str]]]:
        """Layer -> the numbers of its experts, and the keys of their tensors."""
        if template not in self._experts:
            start, end = template.split("{expert}")
            found: dict[int, tuple[set[int], set[str]]] = {}
            for number, members in (self.layers.members if self.layers else {}).items():
                numbers, keys = found.setdefault(number, (set(), set()))
                for name in members:
                    if name.startswith(start):
                        expert, _, rest = name[len(start) :].partition(end)
                        if rest and expert.isdigit():
                            numbers.add(int(expert))
                            keys.add(f"{self.layers.prefix}{number}.{name}")  # type: ignore[union-attr]
            self._experts[template] = found
        return self._experts[template]

    def unread(self) -> TensorNames:
        """The same names, none of them used yet."""
        again = copy.copy(self)
        again.unused = set(self.shapes)
        return again

    def take(self, key: str) -> Shape | None:
        """The shape of a tensor that has a part in the model."""
        self.unused.discard(key)
        return self.shapes.get(key)

    def one(self, prefix: str, place: str, suffixes: Sequence[str] = ("weight",)) -> str | None:
        """The known name of a single tensor that is there, and marks its tensors as used."""
        for name in self.known.of(place):
            keys = [f"{prefix}{name}.{s}" if s else f"{prefix}{name}" for s in suffixes]
            if keys[0] in self.shapes:
                for key in keys:
                    self.unused.discard(key)
                return name
        return None

    def _prefix(self, first: str, repeated: str) -> str | None:
        """What stands before a tensor of a known name, in whose company the layers are."""
        found: dict[str, int] = {}
        for name in self.known.of(first):
            tail = f"{name}.weight"
            for key in self.shapes:
                if key.endswith(tail) and key[: -len(tail)][-1:] in ("", "."):
                    found[key[: -len(tail)]] = len(tail)
        if len(found) > 1:
            starts = [name.partition("{")[0] for name in self.known.of(repeated)]
            found = {
                prefix: length
                for prefix, length in found.items()
                if any(key.startswith(prefix + start) for start in starts for key in self.shapes)
            }
        return max(found, key=lambda prefix: (found[prefix], prefix)) if found else None

    def _group(self, prefix: str | None, place: str) -> tuple[Group | None, str | None]:
        if prefix is None:
            return None, None
        for name in self.known.of(place):
            group = Group(prefix + name.partition("{")[0])
            pattern = re.compile(re.escape(group.prefix) + r"(\d{1,6})\.(.+)")
            for key, shape in self.shapes.items():
                match = pattern.fullmatch(key)
                if match:
                    group.members.setdefault(int(match[1]), {})[match[2]] = shape
            if group.members:
                return group, name
        return None, None

    def _merger(self) -> tuple[str | None, bool]:
        """Prefix of the merger's keys, and whether it lies beside the tower."""
        for own in self.known.of("vision.merger.prefix"):
            prefix = f"{self.vision_prefix}{own}"
            if any(f"{prefix}{name}.weight" in self.shapes for name in self._merger_names()):
                return prefix, False
        inside = (self.layers.prefix if self.layers else "\0", self.vision_prefix or "\0")
        for name in self._merger_names():
            tail = f".{name}.weight"
            for key in sorted(self.shapes):
                if key.endswith(tail) and not key.startswith(inside):
                    return key[: -len(tail) + 1], True
        return None, False

    def _merger_names(self) -> tuple[str, ...]:
        return self.known.of("vision.merger.fc1")


def _matcher(pattern: str) -> re.Pattern[str]:
    return re.compile(".*".join(map(re.escape, pattern.split("*"))))
