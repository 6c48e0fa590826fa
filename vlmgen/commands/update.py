"""`vlmgen update`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from vlmgen.options import JsonFlag, TemplatesOption

NAME = "update"
EXAMPLE = "Example: vlmgen update generated/NAME, or vlmgen update --all"


class OnConflict(StrEnum):
    """What an update does where a hand edit and the new version meet."""

    MARKERS = "markers"
    OURS = "ours"
    THEIRS = "theirs"
    FAIL = "fail"


def command(
    package: Annotated[
        Path | None,
        typer.Argument(metavar="[PKG]", help="A package.", show_default="the working directory"),
    ] = None,
    update_all: Annotated[
        bool, typer.Option("--all", help="The package of every spec in --specs.")
    ] = False,
    spec: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Its spec.", show_default="where it came from"),
    ] = None,
    on_conflict: Annotated[
        OnConflict,
        typer.Option(
            help="Where an edit and the new version meet: write conflict markers, keep the edit "
            "(ours), take the new text (theirs), or change nothing (fail)."
        ),
    ] = OnConflict.MARKERS,
    restore: Annotated[
        bool, typer.Option("--restore", help="Bring back generated files that were deleted.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only list what would change.")
    ] = False,
    templates: TemplatesOption = None,
    no_templates: Annotated[
        bool, typer.Option("--no-templates", help="Forget the folder of an earlier --templates.")
    ] = False,
    specs: Annotated[Path, typer.Option(help="Directory of the specs, for --all.")] = Path("specs"),
    generated: Annotated[Path, typer.Option(help="Directory of the packages, for --all.")] = Path(
        "generated"
    ),
    as_json: JsonFlag = False,
) -> None:
    """Regenerate packages and carry hand edits over."""
    from vlmgen.errors import UsageError
    from vlmgen.render import update as updating
    from vlmgen.terminal import print_json, progress

    if update_all and (package or spec):
        raise UsageError("name a package, or give --all (and not both)")
    keywords: dict[str, Any] = {
        "on_conflict": on_conflict.value,
        "templates": templates,
        "no_templates": no_templates,
        "restore": restore,
        "dry_run": dry_run,
    }
    absent: list[Path] = []
    with progress("updating"):
        if update_all:
            packages, absent = updating.update_all(specs, generated, **keywords)
        else:
            packages = [updating.update(package or Path("."), spec, **keywords)]
    if as_json:
        print_json({"packages": [p.to_dict() for p in packages], "absent": list(map(str, absent))})
    else:
        for line in updating.report(packages, absent, dry_run):
            print(line)
    if any(p.conflicts for p in packages):
        raise updating.conflict_error(packages, on_conflict.value)
