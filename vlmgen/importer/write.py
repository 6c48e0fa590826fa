"""The spec of a checkpoint: the nearest family's, and only what differs."""

from __future__ import annotations

import copy
import os
import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from vlmgen.errors import CheckpointError, SpecError
from vlmgen.importer.headers import Checkpoint, printable
from vlmgen.importer.known import Known, Match
from vlmgen.importer.names import Vocabulary
from vlmgen.importer.reading import Gap
from vlmgen.render.chain import base_path
from vlmgen.spec.load import load_spec_text
from vlmgen.spec.model import Spec
from vlmgen.spec.rules.conditions import PAIRED
from vlmgen.spec.rules.view import View

_STEP = 128
MAX_NAME = 41


def family_name(name: str) -> str:
    """A family name made of a directory's name."""
    text = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
    text = text if text[:1].isalpha() else f"family_{text}"
    return text[:MAX_NAME].rstrip("_")


def new_spec(
    checkpoint: Checkpoint,
    match: Match,
    others: Sequence[Known],
    vocabulary: Vocabulary,
    family: str,
    file: Path,
) -> tuple[Spec, str, list[Gap]]:
    """The spec of a checkpoint that no family's package serves.

    Args:
        checkpoint: The checkpoint.
        match: The nearest family.
        others: Families to take from what neither the checkpoint nor the nearest one states,
            nearest first.
        vocabulary: Names of tensors.
        family: Name of the new family.
        file: Where the spec will stand; `extends` is relative to it.

    Returns:
        The spec, its text, and what was taken from a family because nothing states it.

    Raises:
        CheckpointError: The checkpoint breaks a rule of specs.
    """
    base = match.known.spec
    gaps: list[Gap] = []
    data = _full(base)
    _set_identity(data, checkpoint, match, family, gaps)
    for difference in match.differences:
        _set(data, difference.reading.path, difference.reading.value, others, gaps)
    _fill_pairs(data, vocabulary, gaps)
    _fit_blocks(data, gaps)
    overlay = {"extends": _extends(match.known, file), **_overlay(_full(base), data)}
    text = _text(overlay, data["title"], file)
    try:
        spec = load_spec_text(text, str(file))
    except SpecError as error:
        problems = "\n".join(f"  - {problem.message}" for problem in error.problems)
        raise CheckpointError(
            f"no spec describes this checkpoint as {base.family} with its differences:\n{problems}",
            hint="the spec that breaks these rules:\n" + text,
        ) from None
    return spec, text, gaps


def _full(spec: Spec) -> dict[str, Any]:
    """Every value of a spec, defaults included, as plain data."""
    data = spec.model_dump(mode="json")
    data["vision"]["config_keys"] = spec.vision.keys.model_dump(mode="json")
    return data


def _set_identity(
    data: dict[str, Any], checkpoint: Checkpoint, match: Match, family: str, gaps: list[Gap]
) -> None:
    base, name = match.known.spec, _checkpoint_name(checkpoint.name)
    data |= {
        "family": family,
        "title": _title(checkpoint.name),
        "defaults_from": name,
        "checkpoints": [{"name": name, "text": {}, "vision": {}}],
    }
    gaps.append(
        Gap(
            "tiny",
            "no tiny checkpoint describes this family: `vlmgen validate` needs --checkpoint",
            base.tiny,
        )
    )
    architecture = match.readings.get("architecture")
    if architecture and architecture != base.architecture:
        prefix = re.match(r"(.+?)(?=For[A-Z]|Model$|$)", architecture)
        data["class_prefix"] = (
            prefix[1] if prefix and prefix[1] != architecture else base.class_prefix
        )
        gaps.append(
            Gap(
                "reference",
                f"the modules that define {printable(architecture)} are not in config.json",
                base.reference.module,
            )
        )


def _set(
    data: dict[str, Any], path: str, value: Any, others: Sequence[Known], gaps: list[Gap]
) -> None:
    """Set a value; a part that is not there begins as that of the nearest family that has it."""
    if path == "weights.layouts":
        text, vision, projector, head = value
        layout = {"name": "published", "text": text, "vision": vision, "projector": projector}
        data["weights"]["layouts"] = [{**layout, "head": head or "lm_head."}]
        return
    *parents, last = path.split(".")
    node: Any = data
    for depth, key in enumerate(parents):
        if node.get(key) is None:
            place = parents[: depth + 1]
            node[key] = _part_of(place, others, gaps)
        node = node[key]
    node[last] = list(value) if isinstance(value, tuple) else value


def _part_of(place: Sequence[str], others: Sequence[Known], gaps: list[Gap]) -> dict[str, Any]:
    for other in others:
        node: Any = _full(other.spec)
        for key in place:
            node = (node or {}).get(key)
        if node is not None:
            path = ".".join(place)
            gaps.append(Gap(path, "not every value in it is stated", f"as in {other.spec.family}"))
            return copy.deepcopy(node)
    return {}


def _fill_pairs(data: dict[str, Any], vocabulary: Vocabulary, gaps: list[Gap]) -> None:
    """Take away what no value asks for any more, and name what a value asks for anew."""
    for names, condition in PAIRED:
        for name in names:
            *parents, last = name.split(".")
            node: Any = data
            for key in parents:
                node = node.get(key) if isinstance(node, Mapping) else None
            if node is None:
                continue
            wanted = condition.holds(View(data))
            if not wanted and node.get(last) is not None:
                node[last] = None
            elif wanted and node.get(last) is None:
                known = vocabulary.of(name.removeprefix("weights."))
                if known:
                    node[last] = known[0]
                    gaps.append(Gap(name, f"no tensor shows it; {condition.rule}", known[0]))


def _fit_blocks(data: dict[str, Any], gaps: list[Gap]) -> None:
    """A vision block takes a whole tile."""
    vision, neuron = data["vision"], data["neuron"]
    if vision["input"] != "tiles" or not vision.get("position"):
        return
    rows, area = vision["position"]["num_embeddings"], vision["merger"]["merge_size"] ** 2
    slots = rows - 1 + area if vision["class_token"] else rows
    if slots > neuron["vision_attention_block_size"]:
        unit = _STEP * area
        block = -(-slots // unit) * unit
        neuron["vision_attention_block_size"] = block
        neuron["num_vision_tokens_buckets"] = [block, 4 * block, 13 * block]
        gaps.append(Gap("neuron", f"a tile takes {slots} places", f"blocks of {block}"))


def _overlay(base: Mapping[str, Any], target: Mapping[str, Any]) -> dict[str, Any]:
    """What to state so that the merge of both is the target."""
    changed: dict[str, Any] = {}
    for key, value in target.items():
        inherited = base.get(key)
        if key in base and inherited == value:
            continue
        if isinstance(value, Mapping) and isinstance(inherited, Mapping):
            changed[key] = _overlay(inherited, value)
        else:
            changed[key] = _without_defaults(value) if inherited is None else value
    return changed


def _without_defaults(value: Any) -> Any:
    """A part that is new, without its empty entries."""
    if isinstance(value, Mapping):
        return {k: _without_defaults(v) for k, v in value.items() if v is not None}
    return value


def _extends(known: Known, file: Path) -> str:
    """How a spec at `file` names the family's spec."""
    name = known.path.name
    if base_path(name, file).resolve() == known.path.resolve():
        return name
    return Path(os.path.relpath(known.path.resolve(), file.absolute().parent)).as_posix()


def _text(overlay: Mapping[str, Any], title: str, file: Path) -> str:
    schema = file.absolute().parent / ".." / "vlmgen" / "spec" / "schema.json"
    pragma = "# yaml-language-server: $schema=../vlmgen/spec/schema.json\n#\n"
    parts = [pragma if schema.is_file() else "", f"# {title}, read from the checkpoint.\n"]
    for key, value in overlay.items():
        nested = isinstance(value, (dict, list))
        dumped = yaml.safe_dump(value, sort_keys=False, width=100, default_flow_style=None)
        dumped = dumped.removesuffix("...\n").rstrip("\n")
        if nested and not dumped.startswith(("{", "[")):
            dumped = "\n" + textwrap.indent(dumped, "  ")
        else:
            dumped = " " + dumped
        parts.append(("\n" if nested else "") + f"{key}:{dumped}\n")
    return "".join(parts)


def _title(name: str) -> str:
    text = re.sub(r"[^A-Za-z0-9 ._+()-]+", " ", name).strip(" ._+()-")
    return text[:80] or "Imported"


def _checkpoint_name(name: str) -> str:
    text = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("._-")
    return text[:96] or "imported"
