"""`vlmgen compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vlmgen.options import Format, FormatOption, JsonFlag

EXAMPLE = "Example: vlmgen compare specs/NAME.yaml specs/OTHER.yaml"
NAME = "compare"


def command(
    left: Annotated[Path, typer.Argument(metavar="A", help="A spec.")],
    right: Annotated[Path, typer.Argument(metavar="B", help="Another, or the same one, changed.")],
    output_format: FormatOption = Format.TEXT,
    as_json: JsonFlag = False,
) -> None:
    """Show what two specs say differently, and what that does to weights, splits and memory."""
    from vlmgen.spec.compare import compare_specs, print_comparison
    from vlmgen.spec.load import load_spec
    from vlmgen.terminal import console, print_json

    comparison = compare_specs(load_spec(left), load_spec(right))
    if as_json:
        print_json(comparison.to_dict())
    else:
        print_comparison(comparison, console())
