"""`vlmgen migrate`: rewrite a spec of an older format, keeping its comments, order and style.

A step changes the text at the places of the values that it is about and nowhere else. A library
that reads YAML and writes it again would lay out every line anew: a spec aligns its comments and
keeps tables of sizes on long lines.
"""

from __future__ import annotations

import re
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from vlmgen.errors import SpecError
from vlmgen.spec.source import Document, Key, dotted, parse_document, read_text
from vlmgen.spec.versions import FORMAT, KEY, refuse_other_versions

# As in YAML 1.1, or the end of the text.
_LINE_END = re.compile("\r\n|[\n\r\x85\u2028\u2029]|\\Z")
_TRANSFORMERS = re.compile(r"transformers\.models\.([a-z_][a-z0-9_]*)\.")


@dataclass(frozen=True)
class SetValue:
    """Another plain value in the place of one that is there.

    Args:
        path: The value.
        value: The new one.
    """

    path: Key
    value: str | int


@dataclass(frozen=True)
class InsertKey:
    """A new key with a plain value.

    Args:
        path: The new key; the mapping that it goes into is there.
        value: Its value.
        after: The key that it follows; None for the first place.
    """

    path: Key
    value: str | int
    after: str | None = None


Edit = SetValue | InsertKey


@dataclass(frozen=True)
class Step:
    """From one format to the next.

    Args:
        version: The format that the step reads.
        what: What the next format changes, for people.
        edits: Edits for a spec of that format, its version aside.
    """

    version: int
    what: str
    edits: Callable[[dict[str, Any]], Iterator[tuple[Edit, str]]]


@dataclass(frozen=True)
class Migration:
    """A spec in the current format.

    Args:
        text: Its text.
        version: The format that it had; equal to `FORMAT` if there was nothing to do.
        notes: What was changed, a line each.
    """

    text: str
    version: int
    notes: tuple[str, ...]


def _name_the_vllm_module(data: dict[str, Any]) -> Iterator[tuple[Edit, str]]:
    reference = data.get("reference")
    if not isinstance(reference, dict) or "vllm_module" in reference:
        return
    found = _TRANSFORMERS.match(str(reference.get("module")))
    if found:
        value = f"vllm.model_executor.models.{found[1]}"
        yield (
            InsertKey(("reference", "vllm_module"), value, after="module"),
            f"reference.vllm_module: {value}, after reference.module; check that vLLM has it",
        )


# Step n reads format n.
STEPS = (
    Step(0, "reference.vllm_module names the module of vLLM's own class", _name_the_vllm_module),
)


def migrate_file(path: str | Path) -> Migration:
    """The text of a spec file in the current format; writes nothing.

    Raises:
        SpecError: As `migrate_text`, or the file cannot be read.
    """
    text = read_text(Path(path), str(path))
    with Path(path).open("rb") as stream:
        marked = stream.read(len(BOM_UTF8)) == BOM_UTF8
    return migrate_text("\ufeff" * marked + text, str(path))


def migrate_text(text: str, file: str = "<text>") -> Migration:
    """A spec's text in the current format.

    Args:
        text: The text, with or without a byte order mark.
        file: Its name, for messages.

    Returns:
        The text with the same comments, order, style and line ends.

    Raises:
        SpecError: It is not well-formed, its format is newer than this vlmgen, or it is written in
            a way that a step cannot change.
    """
    document = parse_document(text, file)
    first = _version(document)
    notes: list[str] = []
    for step in STEPS[first:FORMAT]:
        data = document.data
        planned = list(step.edits(data))
        stated: Edit = (SetValue if KEY in data else InsertKey)((KEY,), step.version + 1)
        edits = [stated, *(edit for edit, _ in planned)]
        text = _edited(document, text, edits)
        document = parse_document(text, file)
        if document.problems or document.data != _expected(data, edits):
            raise _unmovable(document, ())
        notes += [note for _, note in planned]
    return Migration(text, first, tuple(notes))


def _version(document: Document) -> int:
    """The format that a file states; the oldest had no key for it and no `extends` either."""
    data = document.data
    if not isinstance(data, dict) or document.problems:
        raise SpecError(
            document.problems
            or [
                document.problem(
                    document.span(()), "no spec", rule="a spec is a YAML mapping", code="VG513"
                )
            ]
        )
    stated = data.get(KEY)
    if KEY not in data:
        return FORMAT if "extends" in data else 0
    if type(stated) is not int or stated < 0:
        raise SpecError(
            [
                document.problem(
                    document.span((KEY,)),
                    f"{KEY} is no version",
                    rule="the version of the spec format is a number",
                    legal=f"0 to {FORMAT}",
                    path=KEY,
                    code="VG513",
                )
            ]
        )
    if stated > FORMAT:
        refuse_other_versions(document)
    return stated


# ---------------------------------------------------------------- text


def _edited(document: Document, text: str, edits: list[Edit]) -> str:
    """The text with every edit made, from the last place to the first."""
    mark = "\ufeff" if text.startswith("\ufeff") else ""
    text = text.removeprefix(mark)
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    changes = [_change(document, text, root, edit) for edit in edits]
    for start, end, new in sorted(changes, reverse=True):
        text = text[:start] + new + text[end:]
    return mark + text


def _change(document: Document, text: str, root: yaml.Node, edit: Edit) -> tuple[int, int, str]:
    """(start, end, new text) of one edit."""
    node = _mapping(document, root, edit.path[:-1])
    key, value = str(edit.path[-1]), str(edit.value)
    entries = {name.value: entry for name, entry in node.value}
    if isinstance(edit, SetValue):
        old = entries[key]
        if not isinstance(old, yaml.ScalarNode):
            raise _unmovable(document, edit.path)
        return old.start_mark.index, old.end_mark.index, value
    if edit.after is None:
        place = node.value[0][0].start_mark.index
        return place, place, f"{key}: {value}, " if node.flow_style else f"{key}: {value}" + (
            _line_end(text, place) + " " * node.start_mark.column
        )  # fmt: skip
    previous = entries.get(edit.after)
    if not isinstance(previous, yaml.ScalarNode) or previous.style in ("|", ">"):
        raise _unmovable(document, edit.path)
    place = previous.end_mark.index
    if node.flow_style:
        return place, place, f", {key}: {value}"
    end = _LINE_END.search(text, place)
    assert end is not None  # the pattern matches the end of the text
    line = f"{_line_end(text, place)}{' ' * node.start_mark.column}{key}: {value}"
    return end.start(), end.start(), line


def _mapping(document: Document, root: yaml.Node, path: Key) -> yaml.MappingNode:
    node = root
    for part in path:
        node = next(value for key, value in node.value if key.value == part)
    if not isinstance(node, yaml.MappingNode) or not node.value:
        raise _unmovable(document, path)
    return node


def _line_end(text: str, place: int) -> str:
    """How the line ends that a place is on; a line feed for the last one."""
    found = _LINE_END.search(text, place)
    return (found[0] if found else "") or "\n"


def _expected(data: dict[str, Any], edits: list[Edit]) -> dict[str, Any]:
    """What a text must say after the edits."""
    wanted = dict(data)
    for edit in edits:
        inner = wanted
        for part in edit.path[:-1]:
            inner[str(part)] = dict(inner[str(part)])
            inner = inner[str(part)]
        inner[str(edit.path[-1])] = edit.value
    return wanted


def _unmovable(document: Document, path: Key) -> SpecError:
    where = f" at {dotted(path)}" if path else ""
    problem = document.problem(
        document.span(path),
        f"the spec is written in a way that cannot be migrated{where}",
        rule="a key and its value stand on one line",
        hint="write it plainly, or make the changes by hand: docs/reference/spec.md",
        path=dotted(path),
        code="VG543",
    )
    return SpecError([problem])
