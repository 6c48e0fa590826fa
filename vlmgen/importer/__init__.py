"""From a Hugging Face checkpoint to a spec: which known family serves it, or what differs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vlmgen.errors import OutputError, UsageError
from vlmgen.importer.from_config import config_readings
from vlmgen.importer.from_tensors import tensor_readings
from vlmgen.importer.headers import Checkpoint, read_checkpoint
from vlmgen.importer.known import (
    READ_AT_LOAD,
    Difference,
    Known,
    Match,
    compare,
    known_families,
)
from vlmgen.importer.names import TensorNames, Vocabulary, vocabulary
from vlmgen.importer.reading import Conflict, ContradictionError, Gap, Readings
from vlmgen.importer.write import family_name, new_spec
from vlmgen.spec.model import Spec

__all__ = ["ContradictionError", "ImportResult", "import_checkpoint"]


@dataclass(frozen=True)
class ImportResult:
    """What an import found.

    Args:
        checkpoint: What was read.
        match: The nearest family, with the differences and the evidence.
        ranking: Every known family, nearest first, with its structural differences.
        sizes_of: The published checkpoint of the same sizes, or empty.
        gaps: What could not be decided.
        family: Name of the new family; empty where nothing needs to be written.
        text: The spec to write; empty where nothing needs to be written or no spec can state it.
        path: The file it was written to, or None.
    """

    checkpoint: Checkpoint
    match: Match
    ranking: tuple[tuple[str, int], ...]
    sizes_of: str
    gaps: tuple[Gap, ...]
    family: str = ""
    text: str = ""
    path: Path | None = None

    @property
    def refused(self) -> tuple[Gap, ...]:
        """What the generator does not implement."""
        return tuple(self.match.readings.refused)

    @property
    def noted(self) -> tuple[Difference, ...]:
        """Differences that a published checkpoint of the same sizes has not."""
        if not self.sizes_of:
            return self.match.differences
        data = _towers(self.match.known.spec, self.sizes_of)
        return tuple(
            d
            for d in self.match.differences
            if not d.read_at_load or _at(data, d.reading.path, None) != d.reading.value
        )

    def to_dict(self) -> dict[str, Any]:
        """For `--json`."""
        known = self.match.known
        return {
            "checkpoint": self.checkpoint.name,
            "nearest": {
                "family": known.spec.family,
                "spec": str(known.path),
                "serves": self.match.serves,
                "published": self.sizes_of or None,
            },
            "ranking": [{"family": name, "differences": count} for name, count in self.ranking],
            "differences": [
                {
                    "path": d.reading.path,
                    "value": _plain(d.reading.value),
                    "known": _plain(d.known),
                    "evidence": d.reading.evidence,
                    "read_at_load": d.read_at_load,
                }
                for d in self.match.differences
            ],
            "decided": [
                {"path": r.path, "value": _plain(r.value), "evidence": r.evidence}
                for r in self.match.agreeing
            ],
            "undecided": [asdict(gap) for gap in self.gaps],
            "refused": [{"path": gap.path, "why": gap.why} for gap in self.refused],
            "family": self.family or None,
            "spec": self.text or None,
            "written": None if self.path is None else str(self.path),
        }


def import_checkpoint(
    path: Path,
    *,
    family: str = "",
    out: Path | None = None,
    specs: Sequence[Path] = (),
    force: bool = False,
) -> ImportResult:
    """Find the family that serves a checkpoint, or write a spec with what differs.

    Args:
        path: A checkpoint directory or a config.json.
        family: Name of a new family; with it a spec is written even where a known one serves.
        out: Where to write the spec; None writes nothing.
        specs: Directories of specs beside those that ship; that of `out` is among them.
        force: Overwrite `out`.

    Raises:
        CheckpointError: The checkpoint cannot be read, or breaks a rule of specs.
        ContradictionError: Its files contradict each other.
        UsageError: `family` is taken, or `out` exists.
    """
    checkpoint = read_checkpoint(path)
    directories = [*specs, *([out.parent] if out is not None and out.parent.is_dir() else [])]
    known = known_families(directories, without=out if force else None)
    words = vocabulary(entry.spec for entry in known)
    matches = sorted(_matches(checkpoint, known, words), key=lambda match: match.distance)
    best = matches[0]
    if best.readings.conflicts:
        raise _contradiction(checkpoint, best)
    ranking = tuple((m.known.spec.family, len(m.structural)) for m in matches)
    gaps = [*_taken(best), *_unsure(best), *_not_read(checkpoint, best)]
    result = ImportResult(checkpoint, best, ranking, _published(best), tuple(gaps))
    if best.readings.refused:
        return result
    others = [match.known for match in matches[1:]]
    if best.serves and not family:
        # The package would refuse values that break a rule, such as sections of a wrong sum.
        new_spec(checkpoint, best, others, words, "unwritten", Path("unwritten.yaml"))
        return result
    name = family or family_name(checkpoint.name)
    if any(name == entry.spec.family for entry in known):
        raise UsageError(
            (
                f"{name!r} is the name of a known family that does not describe this checkpoint"
                if not family
                else f"{name!r} is the name of a known family"
            ),
            hint="name the new one with --family",
        )
    if out is not None and os.path.lexists(out) and not force:
        raise UsageError(f"{out} exists", hint="name another file, or give --force")
    file = out or Path(f"{name}.yaml")
    _, text, taken = new_spec(checkpoint, best, others, words, name, file)
    if out is not None:
        _write(out, text)
    gaps += taken
    return ImportResult(checkpoint, best, ranking, _published(best), tuple(gaps), name, text, out)


def _matches(checkpoint: Checkpoint, known: Sequence[Known], words: Vocabulary) -> list[Match]:
    matches = []
    sorted_names: dict[tuple[str, ...], TensorNames] = {}
    for entry in known:
        readings = Readings()
        config_readings(checkpoint.config, entry.spec, readings)
        if checkpoint.shapes is not None:
            ignored = tuple(rule.pattern for rule in entry.spec.weights.ignored)
            if ignored not in sorted_names:
                sorted_names[ignored] = TensorNames(checkpoint.shapes, words, ignored)
            tensor_readings(sorted_names[ignored].unread(), entry.spec, readings)
        matches.append(compare(entry, readings))
    return matches


def _contradiction(checkpoint: Checkpoint, match: Match) -> ContradictionError:
    conflicts: list[Conflict] = match.readings.conflicts
    lines = "\n".join(
        f"  {conflict.path}\n    {conflict.first}\n    {conflict.second}" for conflict in conflicts
    )
    return ContradictionError(
        f"{checkpoint.name}: its files contradict each other (read as {match.known.spec.family}):\n"
        f"{lines}",
        conflicts,
        hint="one of the two is not of this checkpoint, or the checkpoint is damaged",
    )


def _taken(match: Match) -> list[Gap]:
    """What could not be decided, with the family's word for it."""
    spec = match.known.spec
    data = spec.model_dump(mode="json")
    gaps = []
    for gap in match.readings.gaps:
        value = _at(data, gap.path, None)
        plain = value is not None and not isinstance(value, (dict, list))
        gaps.append(Gap(gap.path, gap.why, f"{value}, as in {spec.family}" if plain else gap.taken))
    return gaps


def _unsure(match: Match) -> list[Gap]:
    return [
        Gap(d.reading.path, f"{d.reading.evidence}, which proves little", f"{_plain(d.known)}")
        for d in match.unsure
    ]


def _not_read(checkpoint: Checkpoint, match: Match) -> list[Gap]:
    """What neither config.json nor a tensor can say, and the family's word for it."""
    spec, gaps = match.known.spec, []
    name = f"as in {spec.family}"
    if checkpoint.shapes is None:
        gaps.append(Gap("tensors", "no safetensors were read; names, biases and norms", name))
    if match.structural:
        gaps += [
            Gap(path, "neither config.json nor tensors state it", f"{value}, {name}")
            for path, value in (
                ("text.rope.pairing", spec.text.rope.pairing),
                ("tokens.positions", spec.tokens.positions),
                ("tokens.video_prompt", spec.tokens.video_prompt),
                ("vision.input", spec.vision.input),
            )
        ]
    for token_name, token in spec.tokens:
        text = checkpoint.token_texts.get(match.readings.get(f"tokens.{token_name}.id") or -1)
        if text is not None and text != token.token:
            gaps.append(
                Gap(f"tokens.{token_name}.token", f"the tokenizer has {text!r}", token.token)
            )
    return gaps


def _published(match: Match) -> str:
    """The published checkpoint of the family that has the sizes that were read."""
    spec = match.known.spec
    read = {
        r.path: r.value
        for r in match.readings
        if r.path in READ_AT_LOAD and not isinstance(r.value, float)
    }
    for entry in spec.checkpoints:
        data = _towers(spec, entry.name)
        if all(_at(data, path, value) == value for path, value in read.items()):
            return entry.name
    return ""


def _towers(spec: Spec, name: str) -> dict[str, Any]:
    sizes = spec.checkpoint(name)
    return {"text": sizes.text.model_dump(), "vision": sizes.vision.model_dump()}


def _at(data: Any, path: str, default: Any) -> Any:
    for key in path.split("."):
        if not isinstance(data, dict) or key not in data:
            return default
        data = data[key]
    return default if data is None else data


def _write(out: Path, text: str) -> None:
    if out.is_symlink() or (out.exists() and not out.is_file()):
        raise OutputError(f"{out}: is no regular file; nothing was written")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8", newline="\n")
    except OSError as error:
        raise OutputError(f"{out}: cannot be written: {error.strerror}") from None


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
