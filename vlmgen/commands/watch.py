"""`vlmgen watch`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vlmgen.options import SpecArgument

NAME = "watch"
EXAMPLE = "Example: vlmgen watch specs/NAME.yaml"


def command(
    spec: SpecArgument,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="Directory of the package.", show_default="generated/FAMILY"
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite edited files.")] = False,
) -> None:
    """Regenerate a package whenever its spec, what it extends or a template changes."""
    from vlmgen.render.generate import generate
    from vlmgen.spec.source import read_text
    from vlmgen.watch import changes, watch, watched_files

    read_text(spec, str(spec))  # a name that is misspelt is no change to wait for
    try:
        watch(
            spec,
            lambda: generate(spec, out=out, force=force),
            changes(lambda: watched_files(spec)),
        )
    except KeyboardInterrupt:
        print("stopped")
