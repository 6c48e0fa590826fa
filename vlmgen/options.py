"""Arguments and options that several commands have."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Format(StrEnum):
    """For whom faults are printed."""

    TEXT = "text"
    GITHUB = "github"


class Layout(StrEnum):
    """Where a package is meant to live."""

    OUT_OF_TREE = "out-of-tree"
    IN_TREE = "in-tree"


SpecArgument = Annotated[Path, typer.Argument(metavar="SPEC", help="A spec, specs/NAME.yaml.")]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON.")]
FormatOption = Annotated[
    Format,
    typer.Option("--format", help="text, or github: faults as annotations of GitHub Actions."),
]
TemplatesOption = Annotated[
    Path | None,
    typer.Option("--templates", metavar="DIR", help="Folder of template overrides."),
]
OutOption = Annotated[
    Path | None,
    typer.Option("--out", "-o", help="Directory of the package.", show_default="generated/FAMILY"),
]
LayoutOption = Annotated[
    Layout, typer.Option(help="A package of its own, or modules for the plugin's tree.")
]
ForceFlag = Annotated[bool, typer.Option("--force", help="Overwrite edited files.")]
