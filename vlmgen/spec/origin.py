"""Where every value of a spec was written: its file and line, or the schema's default."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlmgen.spec.extends import resolve_extends
from vlmgen.spec.load import load_spec
from vlmgen.spec.source import Document, Key, dotted, read_document
from vlmgen.spec.types import SpecModel

if TYPE_CHECKING:
    from rich.console import Console

DEFAULT = "default"


@dataclass(frozen=True)
class Origin:
    """One value of a resolved spec.

    Args:
        path: Dotted path, `checkpoints[0].text.hidden_size`.
        value: The value; a list is one value.
        file: The file it was written in, empty for a default of the schema.
        line: 1-based line, 0 for a default.
        column: 1-based column, 0 for a default.
    """

    path: str
    value: Any
    file: str = ""
    line: int = 0
    column: int = 0

    @property
    def place(self) -> str:
        """`file:line`, or `default`."""
        return f"{self.file}:{self.line}" if self.file else DEFAULT

    def to_dict(self) -> dict[str, Any]:
        """Plain data; a default has no place."""
        place = {"file": self.file, "line": self.line, "column": self.column} if self.file else {}
        value = list(self.value) if isinstance(self.value, tuple) else self.value
        return {"path": self.path, "value": value, "origin": self.place, **place}


def spec_origins(path: str | Path) -> list[Origin]:
    """Every value of a spec with the place it comes from, in the order of the schema.

    Args:
        path: The spec file.

    Returns:
        One row per scalar and per list of scalars. What a file leaves out is the schema's default.

    Raises:
        SpecError: The spec is faulty.
    """
    spec = load_spec(path)
    document = resolve_extends(read_document(path), Path(path))
    return list(_origins(document, spec, ()))


def _origins(document: Document, value: Any, path: Key) -> Iterator[Origin]:
    if isinstance(value, SpecModel):
        for name in type(value).model_fields:
            yield from _origins(document, getattr(value, name), (*path, name))
    elif isinstance(value, tuple) and any(isinstance(item, SpecModel) for item in value):
        for index, item in enumerate(value):
            yield from _origins(document, item, (*path, index))
    else:
        yield _origin(document, value, path)


def _origin(document: Document, value: Any, path: Key) -> Origin:
    if path not in document.values and path not in document.keys:
        return Origin(dotted(path), value)
    # The key stands where its line begins; an item of a list has a place of its own.
    span = document.keys.get(path) or document.values[path]
    file, _ = document.sources[span.source]
    return Origin(dotted(path), value, file, span.line, span.column)


def print_origins(origins: list[Origin], console: Console) -> None:
    """Print values and places, a section of the table per section of the spec.

    Args:
        origins: Rows of `spec_origins`.
        console: Where to.
    """
    from rich.table import Table
    from rich.text import Text

    from vlmgen.spec.compare import shown

    table = Table("path", "value", "from")
    block = ""
    for row in origins:
        section = row.path.partition(".")[0].partition("[")[0]
        if section != block and section != row.path:
            table.add_section()
            block = section
        table.add_row(Text(row.path), Text(shown(row.value)), Text(row.place))
    console.print(table)
