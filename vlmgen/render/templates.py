"""The template files: where they lie, what they are called, what they hold."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from vlmgen.errors import OutputError

NAME = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9_.-]*/)*[A-Za-z0-9_][A-Za-z0-9_.-]*\Z")


def directories() -> tuple[Path, ...]:
    """The packaged templates of an installed vlmgen, or `templates/` of the repository."""
    package = Path(__file__).resolve().parent.parent
    for candidate in (package / "_templates", package.parent / "templates"):
        if candidate.is_dir():
            return (candidate,)
    raise OutputError(f"vlmgen has no templates: neither {package}/_templates nor ../templates")


def shipped_specs() -> Path:
    """The specs of an installed vlmgen, or `specs/` of the repository."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "_specs"
    return installed if installed.is_dir() else package.parent / "specs"


def read(search: Sequence[Path], name: str) -> bytes:
    """The bytes of a template, with line feeds only.

    Args:
        search: Directories, the first that has the template wins.
        name: Path within a directory, with forward slashes.

    Raises:
        jinja2.TemplateNotFound: No directory has it.
    """
    if NAME.match(name):
        for directory in search:
            try:
                return (directory / name).read_bytes().replace(b"\r\n", b"\n")
            except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
                continue
    import jinja2

    raise jinja2.TemplateNotFound(name)


def is_not_found(error: Exception) -> bool:
    """Whether an exception is jinja2.TemplateNotFound, without importing jinja2 for it."""
    return type(error).__name__ == "TemplateNotFound"


def names(search: Sequence[Path], folder: str, suffix: str) -> list[str]:
    """Names of the templates directly in a folder of any directory, sorted."""
    found = {
        f"{folder}/{path.name}"
        for directory in search
        for path in (directory / folder).glob("*" + suffix)
        if NAME.match(path.name) and path.is_file()
    }
    return sorted(found)
