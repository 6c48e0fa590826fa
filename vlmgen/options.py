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


SpecArgument = Annotated[Path, typer.Argument(metavar="SPEC", help="A spec, specs/NAME.yaml.")]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON.")]
FormatOption = Annotated[
    Format,
    typer.Option("--format", help="text, or github: faults as annotations of GitHub Actions."),
]
