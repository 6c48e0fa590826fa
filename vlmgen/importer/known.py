"""The families that are known, and how far a checkpoint is from each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from vlmgen.errors import SpecError, UsageError
from vlmgen.importer.reading import Reading, Readings
from vlmgen.render.chain import spec_texts
from vlmgen.render.templates import shipped_specs
from vlmgen.spec.load import load_spec
from vlmgen.spec.model import Spec

# What the generated package reads from config.json when it loads a checkpoint. Everything else
# that a spec states is built into the package.
READ_AT_LOAD = frozenset(
    """text.hidden_size text.num_layers text.vocab_size text.max_position_embeddings
    text.tie_word_embeddings text.norm.eps text.attention.num_heads text.attention.num_kv_heads
    text.attention.head_dim text.mlp.intermediate_size text.rope.theta text.rope.sections
    text.moe.num_experts text.moe.top_k text.moe.intermediate_size text.moe.first_dense
    text.moe.shared.count text.moe.routed_scale vision.hidden_size vision.depth
    vision.out_hidden_size vision.patch_embed.patch_size vision.patch_embed.temporal_patch_size
    vision.patch_embed.in_channels vision.position.num_embeddings vision.rope.theta
    vision.norm.eps vision.attention.num_heads vision.attention.window.size
    vision.attention.window.full_blocks vision.mlp.intermediate_size vision.merger.merge_size
    vision.merger.inner vision.deepstack.indices tokens.seconds.tokens_per_second
    tokens.image.id tokens.video.id tokens.vision_start.id tokens.vision_end.id
    tokens.video_start.id tokens.video_end.id""".split()
)
_ABSENT = object()


@dataclass(frozen=True)
class Known:
    """A known family.

    Args:
        path: Its spec file.
        spec: The spec.
    """

    path: Path
    spec: Spec


@dataclass(frozen=True)
class Difference:
    """An axis on which a checkpoint differs from a family.

    Args:
        reading: What the checkpoint says.
        known: What the family has; None for a part that it has not.
        read_at_load: Whether the package of the family takes the value from config.json.
    """

    reading: Reading
    known: Any
    read_at_load: bool


@dataclass(frozen=True)
class Match:
    """A checkpoint seen as one family.

    Args:
        known: The family.
        readings: What the checkpoint says of the axes.
        differences: Where it differs.
        unsure: Where it would differ by what is not there, which proves little.
        agreeing: Axes on which both agree.
    """

    known: Known
    readings: Readings
    differences: tuple[Difference, ...]
    unsure: tuple[Difference, ...]
    agreeing: tuple[Reading, ...]

    @property
    def structural(self) -> tuple[Difference, ...]:
        """Differences that the family's package does not read from config.json."""
        return tuple(d for d in self.differences if not d.read_at_load)

    @property
    def serves(self) -> bool:
        """Whether the family's package serves the checkpoint."""
        return not (self.structural or self.readings.refused or self.readings.conflicts)

    @property
    def distance(self) -> tuple[float, int, int, str]:
        """Smaller is nearer: structure first, then sizes, then the shortest path and the name.

        A value that is only read from what is absent counts for little.
        """
        readings = self.readings
        loose = len(readings.gaps) + len(readings.refused) + len(readings.conflicts)
        structure = len(self.structural) + loose + 0.25 * len(self.unsure)
        return structure, len(self.differences), len(self.known.path.parts), self.known.spec.family


def known_families(directories: Sequence[Path], without: Path | None = None) -> list[Known]:
    """Every family of the specs that ship and of some directories.

    Args:
        directories: Where to look, beside the specs that ship.
        without: A file to leave out.

    Raises:
        UsageError: A spec in a directory cannot be loaded, or names the family of another one.
    """
    found: dict[str, Known] = {}
    shipped = shipped_specs().resolve()
    for folder in dict.fromkeys([shipped, *(d.resolve() for d in directories)]):
        for path in sorted(folder.glob("*.yaml")):
            if without is not None and path == without.resolve():
                continue
            try:
                spec = _loaded(path, tuple(spec_texts(path).values()))
            except SpecError as error:
                if folder == shipped:
                    raise
                raise UsageError(
                    f"{path}: is no spec: {error.problems[0].message}",
                    hint="move it away, or name another directory with --specs",
                ) from None
            if spec.family not in found:
                found[spec.family] = Known(path, spec)
            elif found[spec.family].spec != spec:
                raise UsageError(
                    f"{found[spec.family].path} and {path} describe {spec.family!r} in two ways"
                )
    return [found[family] for family in sorted(found)]


@lru_cache(maxsize=256)
def _loaded(path: Path, content: tuple[bytes, ...]) -> Spec:
    """A spec, loaded once for what its files hold."""
    return load_spec(path)


def compare(known: Known, readings: Readings) -> Match:
    """Where the readings differ from what a family states."""
    data = known.spec.model_dump()
    data["vision"]["config_keys"] = known.spec.vision.keys.model_dump()
    differences: list[Difference] = []
    unsure: list[Difference] = []
    agreeing: list[Reading] = []
    for reading in readings:
        value = _value(data, reading.path)
        if reading.path == "weights.layouts":
            same = isinstance(reading.value, str)
        elif value is _ABSENT:
            # A part that neither has: the reading says that something inside it is absent too.
            same = reading.value is None
        else:
            same = _same(value, reading.value)
        if same:
            agreeing.append(reading)
            continue
        shown = None if value is _ABSENT else value
        at_load = reading.path in READ_AT_LOAD and _as_readable(reading, shown)
        found = Difference(reading, shown, at_load)
        (unsure if reading.weak and not at_load else differences).append(found)
    return Match(known, readings, tuple(differences), tuple(unsure), tuple(agreeing))


def _value(data: Mapping[str, Any], path: str) -> Any:
    value: Any = data
    for key in path.split("."):
        if not isinstance(value, Mapping) or key not in value:
            return _ABSENT
        value = value[key]
    return value


def _same(known: Any, value: Any) -> bool:
    if isinstance(known, (list, tuple)):
        return isinstance(value, (list, tuple)) and tuple(known) == tuple(value)
    if isinstance(known, bool) or isinstance(value, bool):
        return known is value
    if isinstance(known, Mapping):  # a part against its absence
        return False
    return bool(known == value)


def _as_readable(reading: Reading, known: Any) -> bool:
    """Whether a package that is built for one value can take another from config.json."""
    if reading.value is None or known is None:
        return False
    if reading.path == "text.moe.first_dense":  # the package has a dense MLP or has none
        return (reading.value == 0) == (known == 0)
    if reading.path == "vision.merger.inner":
        return isinstance(known, int) and isinstance(reading.value, int)
    return True
