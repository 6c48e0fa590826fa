"""Findings as workflow commands of GitHub Actions, which shows them beside the lines of a change.

Source: GitHub's documentation, "Workflow commands for GitHub Actions": `::error
file=..,line=..,col=..,title=..::message`, with %, line ends and, in properties, : and , escaped.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from vlmgen.errors import Problem

if TYPE_CHECKING:
    from vlmgen.render.difference import PackageDifference


def annotation(file: str, line: int, column: int, title: str, message: str) -> str:
    """One annotation.

    Args:
        file: The file; below the working directory, relative to it.
        line: 1-based line, 0 for the file as a whole.
        column: 1-based column, 0 for the line as a whole.
        title: What stands above the message, a code.
        message: The message; it may have several lines.
    """
    properties = {"file": _relative(file)}
    if line:
        properties["line"] = str(line)
    if line and column:
        properties["col"] = str(column)
    properties["title"] = title
    shown = ",".join(f"{name}={_property(value)}" for name, value in properties.items())
    return f"::error {shown}::{_data(message)}"


def problem_annotation(problem: Problem) -> str:
    """A problem of a spec, its notes below the message."""
    notes = [("rule", problem.rule), ("legal", problem.legal), ("hint", problem.hint)]
    lines = [problem.message, *(f"{label}: {text}" for label, text in notes if text)]
    title = problem.code or "spec"
    return annotation(problem.file, problem.line, problem.column, title, "\n".join(lines))


def difference_annotations(difference: PackageDifference) -> Iterator[str]:
    """One annotation per file of a package that a regeneration would change."""
    if difference.state == "same":
        return
    if difference.state != "changed":
        yield annotation(str(difference.package), 0, 0, "VG007", difference.state)
    for file in difference.files:
        causes = ", ".join(cause.text() for cause in file.causes)
        message = f"a regeneration would change this file (+{file.added} -{file.removed})"
        message += f": {causes}" if causes else ""
        first = file.hunks[0].old_start if file.status == "changed" else 0
        place = (difference.package / file.path).as_posix()
        yield annotation(place, first, 0, "VG007", message)


def _relative(file: str) -> str:
    path, here = Path(file), Path.cwd()
    if path.is_absolute() and path.is_relative_to(here):
        return path.relative_to(here).as_posix()
    return path.as_posix()


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
