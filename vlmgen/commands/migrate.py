"""`vlmgen migrate`."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated

import typer

from vlmgen.options import Format, FormatOption

NAME = "migrate"
EXAMPLE = "Example: vlmgen migrate specs/mine.yaml"


def command(
    specs: Annotated[list[Path], typer.Argument(metavar="SPEC...", help="Specs to rewrite.")],
    diff: Annotated[bool, typer.Option("--diff", help="Only show the changes.")] = False,
    output_format: FormatOption = Format.TEXT,
) -> None:
    """Rewrite specs of an older format, keeping comments and order."""
    from vlmgen.files import replace_file
    from vlmgen.spec.migrate import migrate_file
    from vlmgen.spec.source import read_text
    from vlmgen.spec.versions import FORMAT

    # All are read before any is written.
    migrations = [(path, migrate_file(path)) for path in specs]
    for path, migration in migrations:
        if migration.version == FORMAT:
            print(f"{path}: format {FORMAT}, nothing to do")
            continue
        if diff:
            before = read_text(path, str(path)).splitlines(keepends=True)
            after = migration.text.removeprefix("\ufeff").splitlines(keepends=True)
            lines = difflib.unified_diff(before, after, f"a/{path}", f"b/{path}")
            print("".join(line if line.endswith("\n") else f"{line}\n" for line in lines), end="")
            continue
        replace_file(path, migration.text.encode("utf-8"))
        print(f"{path}: format {migration.version} -> {FORMAT}")
        for note in migration.notes:
            print(f"  {note}")
