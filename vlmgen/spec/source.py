"""YAML with the position of every key and value, and without YAML's traps.

A spec needs the plain part of YAML: mappings, lists and scalars. Anchors, aliases, tags, several
documents and duplicate keys are refused, and numbers must be written as YAML 1.1 and 1.2 read
them alike, so that an editor and vlmgen see the same value.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from vlmgen.errors import Problem, SpecError

Key = tuple[str | int, ...]

MAX_BYTES = 256 * 1024
MAX_DEPTH = 32
# The largest spec of this repository has some 600; reading this many takes half a second.
MAX_VALUES = 10_000
_LINE_BREAK = re.compile("\r\n|[\n\r\x85\u2028\u2029]")
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]{0,17})")
_FLOAT = re.compile(r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+)([eE][-+][0-9]+)?")
_TAG = "tag:yaml.org,2002:"


@dataclass(frozen=True)
class Span:
    """Where something stands: 1-based line and column, width in characters.

    `source` is the place of its file in `Document.sources`.
    """

    line: int
    column: int
    width: int
    source: int = 0


@dataclass
class Document:
    """A parsed spec file.

    Args:
        file: The path as the user wrote it.
        lines: The lines of the file without line ends.
        bases: The files that this one extends, nearest first, and their lines.
        data: Mappings as dict, lists as tuple, scalars as str, int, float, bool or None.
        keys: Path -> position of the key (or of the list item).
        values: Path -> position of the value.
        raw: Path -> the text of a plain (unquoted) scalar.
        problems: Faults found while reading that do not stop the reading.
        bad: Paths whose value cannot be used.
    """

    file: str
    lines: list[str]
    data: Any = None
    keys: dict[Key, Span] = field(default_factory=dict)
    values: dict[Key, Span] = field(default_factory=dict)
    raw: dict[Key, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    bad: set[Key] = field(default_factory=set)
    bases: list[tuple[str, list[str]]] = field(default_factory=list)

    @property
    def sources(self) -> list[tuple[str, list[str]]]:
        """Every file that values come from, and its lines; this one first."""
        return [(self.file, self.lines), *self.bases]

    def span(self, path: Key) -> Span:
        """The best place to show for a path: scalar value, else key, else an ancestor's."""
        while path:
            if path in self.values:
                return self.values[path]
            if path in self.keys:
                return self.keys[path]
            path = path[:-1]
        return Span(1, 1, max(1, len(self.line(1))))

    def key_span(self, path: Key) -> Span:
        """The place of a key, else of an ancestor."""
        while path:
            if path in self.keys:
                return self.keys[path]
            path = path[:-1]
        return self.span(())

    def line(self, number: int) -> str:
        """The text of a 1-based line, empty beyond the end."""
        return self.lines[number - 1] if 0 < number <= len(self.lines) else ""

    def problem(self, span: Span, message: str, **notes: str) -> Problem:
        """A problem at a place of this file or of one that it extends."""
        file, lines = self.sources[span.source]
        return Problem(
            file,
            span.line,
            span.column,
            message,
            source=lines[span.line - 1] if 0 < span.line <= len(lines) else "",
            width=span.width,
            **notes,
        )


class _Refused(Exception):
    """YAML that a spec may not use, at a mark."""

    def __init__(self, mark: yaml.Mark, width: int, message: str, rule: str) -> None:
        super().__init__(message)
        self.mark = mark
        self.width = width
        self.message = message
        self.rule = rule


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses anchors, aliases, tags and bulk before it builds nodes."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self.depth = 0
        self.values = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            raise _Refused(
                event.start_mark,
                _width(event.start_mark, event.end_mark),
                f"alias *{short(event.anchor)}",
                "a spec has no anchors and no aliases; write the value out",
            )
        if event.anchor is not None:
            raise _Refused(
                event.start_mark,
                len(event.anchor) + 1,
                f"anchor &{short(event.anchor)}",
                "a spec has no anchors and no aliases; write the value out",
            )
        if event.tag is not None:
            raise _Refused(
                event.start_mark,
                1,
                f"tag {short(event.tag)}",
                "a spec has no tags; write a plain value",
            )
        if self.depth >= MAX_DEPTH:
            raise _Refused(
                event.start_mark,
                1,
                f"more than {MAX_DEPTH} levels of nesting",
                f"a spec is at most {MAX_DEPTH} levels deep",
            )
        self.values += 1
        if self.values > MAX_VALUES:
            raise _Refused(
                event.start_mark,
                1,
                f"more than {MAX_VALUES} keys and values",
                f"a spec has at most {MAX_VALUES} keys and values",
            )
        self.depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1


def read_document(path: str | Path) -> Document:
    """Read a YAML file with positions.

    Args:
        path: The file, shown in messages as given.

    Returns:
        The document; its `problems` may be non-empty.

    Raises:
        SpecError: The file cannot be read, is not UTF-8, is empty or is not well-formed YAML.
    """
    return parse_document(read_text(Path(path), str(path)), str(path))


def parse_document(text: str, file: str) -> Document:
    """Parse YAML text with positions; see `read_document`.

    Args:
        text: The text, with or without a byte order mark.
        file: Name for messages.

    Raises:
        SpecError: The text is empty or is not well-formed YAML.
    """
    text = text.removeprefix("\ufeff")
    document = Document(file, _LINE_BREAK.split(text))
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
        finally:
            loader.dispose()
    except _Refused as refused:
        span = Span(refused.mark.line + 1, refused.mark.column + 1, refused.width)
        raise SpecError(
            [
                document.problem(
                    span, refused.message + " is not allowed", rule=refused.rule, code="VG504"
                )
            ]
        ) from None
    except yaml.reader.ReaderError as error:
        raise SpecError([_reader_problem(document, text, error)]) from None
    except yaml.MarkedYAMLError as error:
        raise SpecError([_syntax_problem(document, error)]) from None
    if node is None:
        raise SpecError(
            [
                Problem(
                    file, 0, 0, "the file is empty", rule="a spec is a YAML mapping", code="VG501"
                )
            ]
        )
    document.data = _build(document, node, ())
    return document


def read_text(path: Path, shown: str) -> str:
    """The text of a spec file, line ends as they are, without a byte order mark.

    Args:
        path: The file.
        shown: Its name for messages.

    Raises:
        SpecError: It cannot be read, is too large or is not UTF-8.
    """

    def fail(message: str, rule: str = "", hint: str = "") -> SpecError:
        return SpecError([Problem(shown, 0, 0, message, rule=rule, hint=hint, code="VG501")])

    try:
        if path.is_dir():
            raise fail("is a directory", rule="a spec is a YAML file")
        if path.exists() and not path.is_file():
            raise fail("is not a regular file", rule="a spec is a YAML file")
        with path.open("rb") as stream:
            content = stream.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise fail(
            "no such file", hint="give the path of a spec, such as specs/NAME.yaml"
        ) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise fail(f"cannot be read: {reason}") from None
    if len(content) > MAX_BYTES:
        raise fail(f"is larger than {MAX_BYTES} bytes", rule="a spec is a short text")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        start = content.rfind(b"\n", 0, error.start) + 1
        # A file in another encoding may hold anything: show what can be shown of the line.
        source = content[start:].split(b"\n", 1)[0].decode("utf-8", "replace").rstrip("\r")
        column = len(content[start : error.start].decode("utf-8", "replace")) + 1
        utf16 = content[:2] in (b"\xff\xfe", b"\xfe\xff")
        problem = Problem(
            shown,
            line,
            column,
            f"byte 0x{content[error.start]:02x} is not UTF-8",
            rule="a spec is UTF-8 text",
            hint="the file looks like UTF-16; save it as UTF-8" if utf16 else "",
            source=source,
            code="VG502",
        )
        raise SpecError([problem]) from None


def _reader_problem(document: Document, text: str, error: yaml.reader.ReaderError) -> Problem:
    before = text[: error.position]
    breaks = list(_LINE_BREAK.finditer(before))
    column = len(before) - (breaks[-1].end() if breaks else 0) + 1
    code = error.character if isinstance(error.character, int) else ord(error.character)
    return document.problem(
        Span(len(breaks) + 1, column, 1),
        f"character U+{code:04X} is not allowed in YAML",
        rule="a spec holds printable text",
        code="VG503",
    )


def _syntax_problem(document: Document, error: yaml.MarkedYAMLError) -> Problem:
    mark = error.problem_mark or error.context_mark
    line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
    # The end of the file is not a place that anyone can look at: show the last line with text.
    while line > 1 and not document.line(line).strip():
        line -= 1
        column = len(document.line(line)) + 1
    message = " ".join(part for part in (error.context, error.problem) if part)
    hint = ""
    if "\\t" in message or "\t" in document.line(line)[: column + 1]:
        hint = "indent with spaces, not with tabs"
    elif "mapping values are not allowed" in message:
        hint = "quote a text that contains ': '"
    elif error.context_mark and error.context_mark.line + 1 != line:
        hint = f"it began in line {error.context_mark.line + 1}"
    return document.problem(
        Span(line, column, 1), f"YAML syntax: {message}", hint=hint, code="VG503"
    )


def _width(start: yaml.Mark, end: yaml.Mark) -> int:
    return max(1, end.column - start.column) if start.line == end.line else 1


def _span(document: Document, node: yaml.Node) -> Span:
    start, end = node.start_mark, node.end_mark
    if start.line == end.line:
        return Span(start.line + 1, start.column + 1, max(1, end.column - start.column))
    rest = document.line(start.line + 1)[start.column :].rstrip()
    return Span(start.line + 1, start.column + 1, max(1, len(rest)))


def _build(document: Document, node: yaml.Node, path: Key) -> Any:
    if isinstance(node, yaml.ScalarNode):
        document.values[path] = _span(document, node)
        return _scalar(document, node, path)
    if node.flow_style:
        document.values[path] = _span(document, node)
    if isinstance(node, yaml.SequenceNode):
        items = []
        for index, child in enumerate(node.value):
            document.keys[(*path, index)] = _span(document, child)
            items.append(_build(document, child, (*path, index)))
        return tuple(items)
    return _mapping(document, node, path)


def _mapping(document: Document, node: yaml.Node, path: Key) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key_node, value_node in node.value:
        span = _span(document, key_node)
        if not isinstance(key_node, yaml.ScalarNode) or not _is_text(key_node):
            kind = key_node.tag.removeprefix(_TAG)
            is_scalar = isinstance(key_node, yaml.ScalarNode)
            shown = (
                f"{short(key_node.value)} is read as {kind}, not"
                if is_scalar
                else f"is a {kind}, not"
            )
            document.problems.append(
                document.problem(
                    span,
                    f"key {shown} as text" if is_scalar else f"key {shown} text",
                    rule="every key is text",
                    hint=(
                        "YAML reads yes, no, on and off as booleans; quote the key"
                        if kind == "bool"
                        else ""
                    ),
                    code="VG505",
                )
            )
            continue
        key = key_node.value
        child = (*path, key)
        if key in result:
            first = document.keys[child].line
            document.problems.append(
                document.problem(
                    span,
                    f"key {short(key)!r} is given twice",
                    rule="every key of a mapping stands once",
                    hint=f"it is first given in line {first}",
                    code="VG506",
                )
            )
            document.bad.add(child)
            continue
        document.keys[child] = span
        result[key] = _build(document, value_node, child)
    return result


def _is_text(node: yaml.ScalarNode) -> bool:
    # '<<', '=' and dates have tags of their own in YAML 1.1; as keys they are text to be refused.
    return node.tag in (_TAG + "str", _TAG + "merge", _TAG + "value", _TAG + "timestamp")


def _scalar(document: Document, node: yaml.ScalarNode, path: Key) -> Any:
    text: str = node.value
    if node.style is None:
        document.raw[path] = text
    kind = node.tag.removeprefix(_TAG)
    if kind == "null":
        return None
    if kind == "bool":
        return text.lower() in ("true", "yes", "on")
    if kind == "int":
        if _INTEGER.fullmatch(text):
            return int(text)
        return _refuse_number(document, path, text)
    if kind == "float":
        value = float(text) if _FLOAT.fullmatch(text) else math.nan
        if math.isfinite(value):
            return value
        return _refuse_number(document, path, text)
    return text


def _refuse_number(document: Document, path: Key, text: str) -> str:
    document.problems.append(
        document.problem(
            document.values[path],
            f"number {short(text)} is not written plainly",
            rule="numbers are finite decimals of at most 18 digits, without leading zeros, "
            "underscores, colons or prefixes, which YAML versions read differently",
            legal="such as 5000000, 0.5 or 1.0e-6",
            path=dotted(path),
            code="VG507",
        )
    )
    document.bad.add(path)
    return text


def dotted(path: Key) -> str:
    """A path as a person writes it, `checkpoints[0].text.hidden_size`."""
    parts: list[str] = []
    for part in path:
        if isinstance(part, int):
            parts.append(f"[{part}]")
        else:
            parts.append(f".{short(part)}" if parts else short(part))
    return "".join(parts)


def short(text: str) -> str:
    """The beginning of a text, for a message."""
    return text if len(text) <= 60 else text[:57] + "..."
