"""`vlmgen adopt`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vlmgen.options import JsonFlag, Layout, LayoutOption, TemplatesOption

NAME = "adopt"
EXAMPLE = "Example: vlmgen adopt vllm_neuron_mine --spec specs/mine.yaml --dry-run"


def command(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder of a package that vlmgen did not write.")
    ],
    spec: Annotated[Path, typer.Option(metavar="FILE", help="The spec that describes it.")],
    layout: LayoutOption = Layout.OUT_OF_TREE,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only report the differences.")
    ] = False,
    diff: Annotated[
        bool, typer.Option("--diff", help="Show the differences line by line.")
    ] = False,
    templates: TemplatesOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Take an existing package over: its differences become hand edits that updates carry."""
    from vlmgen.render.adopt import adopt
    from vlmgen.terminal import print_json

    result = adopt(directory, spec, layout.value, templates=templates, dry_run=dry_run)
    if as_json:
        data = result.to_dict()
        print_json({**data, "diff": result.diff} if diff else data)
        return
    if diff:
        print(result.diff, end="")
    for line in result.lines():
        print(line)
