"""The one exception tree of vlmgen. Each type is one kind of user-visible failure.

The command line prints the message of a `VlmgenError` without a traceback and ends with its exit
code; any other exception is a fault of vlmgen and keeps its traceback.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass

EXIT_USAGE = 2
EXIT_BAD_SPEC = 3
EXIT_CHECK_FAILED = 4
EXIT_VALIDATION_FAILED = 5
EXIT_CONFLICT = 6

SHOWN_PROBLEMS = 50
LONGEST_LINE = 240


class VlmgenError(Exception):
    """Base of everything a user can cause.

    Every type has a `code` with a page that `vlmgen explain` shows.

    Args:
        message: What was wrong, where, the value, the rule and what would be legal.
        hint: One more sentence on how to go on, or empty.
    """

    code: str = ""
    exit_code: int = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def render(self) -> str:
        """Text for a terminal, without a trailing newline."""
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message


class UsageError(VlmgenError):
    """A command was called with arguments that make no sense together."""

    code = "VG901"
    exit_code = EXIT_USAGE


class OutputError(VlmgenError):
    """The output directory may not be written: foreign files, a symlink, no rights."""

    code = "VG902"
    exit_code = EXIT_USAGE


class MissingDependencyError(VlmgenError):
    """A command needs an optional dependency (extra) that is not installed."""

    code = "VG903"
    exit_code = EXIT_USAGE


@dataclass(frozen=True)
class Problem:
    """One fault in a spec file.

    Args:
        file: The path as the user wrote it.
        line: 1-based line, 0 if the file as a whole is meant.
        column: 1-based column of the first offending character, 0 with `line` 0.
        message: What is wrong, with the value.
        rule: The rule that was broken, or empty when the message says it.
        legal: What would be legal, or empty.
        hint: How to mend it, or empty.
        source: The offending line without its line end.
        width: How many characters the caret line marks.
        path: Dotted path of the value in the spec, such as `text.rope.sections`.
        code: What kind of fault it is; `vlmgen explain` has a page for it.
    """

    file: str
    line: int
    column: int
    message: str
    rule: str = ""
    legal: str = ""
    hint: str = ""
    source: str = ""
    width: int = 1
    path: str = ""
    code: str = ""

    def render(self) -> str:
        """The problem as `file:line:column: code message` with the line, a caret and the notes."""
        where = f"{self.file}:{self.line}:{self.column}" if self.line else self.file
        lines = [
            f"{where}: {self.code} {self.message}" if self.code else f"{where}: {self.message}"
        ]
        if self.line:
            number = str(self.line)
            gutter = " " * len(number)
            source, start = _window(self.source, self.column - 1)
            lines.append(f"{number} | {_printable(source)}")
            pad = "".join("\t" if c == "\t" else " " * _cells(c) for c in source[:start])
            marked = source[start : start + self.width]
            lines.append(f"{gutter} | {pad}{'^' * max(1, sum(map(_cells, marked)))}")
        for label, text in (("rule", self.rule), ("legal", self.legal), ("hint", self.hint)):
            if text:
                lines.append(f"  = {label}: {text}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, str | int]:
        """The fields that a script wants, for `--json`."""
        return {
            "file": self.file,
            "line": self.line,
            "column": self.column,
            "code": self.code,
            "path": self.path,
            "message": self.message,
            "rule": self.rule,
            "legal": self.legal,
            "hint": self.hint,
        }


class SpecError(VlmgenError):
    """A spec that cannot be read or that breaks rules; carries every problem found.

    Args:
        problems: All problems; of several files, those of the first come first.
    """

    code = "VG904"
    exit_code = EXIT_BAD_SPEC

    def __init__(self, problems: Iterable[Problem]) -> None:
        found = list(problems)
        files = [problem.file for problem in found]
        self.problems: list[Problem] = sorted(
            found, key=lambda p: (files.index(p.file), p.line, p.column, p.message)
        )
        super().__init__("\n\n".join(p.render() for p in self.problems[:SHOWN_PROBLEMS]))

    def render(self) -> str:
        count = len(self.problems)
        noun = "problem" if count == 1 else "problems"
        rest = f"; the first {SHOWN_PROBLEMS} are shown" if count > SHOWN_PROBLEMS else ""
        return f"{self.message}\n\n{count} {noun} in the spec{rest}"


class CheckpointError(VlmgenError):
    """A checkpoint or its config.json that does not fit the spec."""

    code = "VG905"
    exit_code = EXIT_BAD_SPEC


class CheckFailed(VlmgenError):
    """`vlmgen check` found something."""

    code = "VG906"
    exit_code = EXIT_CHECK_FAILED


class CompileFailed(VlmgenError):
    """`vlmgen compile` found a graph that does not compile, or not to what it should.

    Args:
        problems: One text per problem.
    """

    code = "VG918"
    exit_code = EXIT_CHECK_FAILED

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = list(problems)
        count = len(self.problems)
        noun = "problem" if count == 1 else "problems"
        super().__init__("\n".join([*self.problems, f"{count} {noun} in the graphs"]))


class ValidationFailed(VlmgenError):
    """`vlmgen validate` measured a difference from Hugging Face beyond its limit."""

    code = "VG907"
    exit_code = EXIT_VALIDATION_FAILED


def _window(line: str, place: int) -> tuple[str, int]:
    """What is shown of a line, and where in it the place is."""
    if len(line) <= LONGEST_LINE:
        return line, place
    first = max(0, min(place - LONGEST_LINE // 4, len(line) - LONGEST_LINE))
    before, after = "... " if first else "", " ..." if first + LONGEST_LINE < len(line) else ""
    shown = f"{before}{line[first : first + LONGEST_LINE]}{after}"
    return shown, place - first + len(before)


class ConflictError(VlmgenError):
    """Hand edits and a new version want different things, or a foreign file is in the way."""

    code = "VG916"
    exit_code = EXIT_CONFLICT


def _cells(character: str) -> int:
    """Terminal cells of one character, so that a caret stands right below wide characters."""
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def _printable(text: str) -> str:
    """Control characters as a replacement mark, so that a file cannot drive the terminal."""
    return "".join(
        c if c == "\t" or unicodedata.category(c) not in ("Cc", "Cf") else "\ufffd" for c in text
    )
