"""`vlmgen templates list | show | copy`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vlmgen.options import JsonFlag, TemplatesOption

NAME = "templates"
HELP = "List, show and copy the templates, to override some of them."
LIST_EXAMPLE = "Example: vlmgen templates list --templates my_templates"
SHOW_EXAMPLE = "Example: vlmgen templates show blocks/text/norm_rms.py.j2"
COPY_EXAMPLE = "Example: vlmgen templates copy blocks/text/norm_rms.py.j2 --to my_templates"


def list_templates(templates: TemplatesOption = None, as_json: JsonFlag = False) -> None:
    """List every template, and what a folder of overrides does to it."""
    from vlmgen.render.overrides import every_template
    from vlmgen.terminal import print_json

    found = every_template(templates)
    if as_json:
        print_json([vars(template) for template in found])
        return
    for template in found:
        print(f"{template.state:10} {template.name}")


def show_template(
    name: Annotated[str, typer.Argument(metavar="NAME", help="As `list` names it.")],
    templates: TemplatesOption = None,
) -> None:
    """Print a template, the override of it where there is one."""
    from vlmgen.render.overrides import show

    print(show(name, templates), end="")


def copy_template(
    name: Annotated[str, typer.Argument(metavar="NAME", help="As `list` names it.")],
    to: Annotated[Path, typer.Option(metavar="DIR", help="Folder of template overrides.")],
    as_json: JsonFlag = False,
) -> None:
    """Copy a template for editing; into an existing copy, merge what changed since."""
    from vlmgen.errors import ConflictError
    from vlmgen.render.overrides import copy
    from vlmgen.terminal import print_json

    copied = copy(name, to)
    if as_json:
        print_json({"path": str(copied.path), "status": copied.status,
                    "conflicts": list(copied.conflicts)})  # fmt: skip
    else:
        for place in [f":{lines}" for lines in copied.conflicts] or [""]:
            print(f"{copied.status:9} {copied.path}{place}")
    if copied.conflicts:
        raise ConflictError(
            f"{copied.path}: {len(copied.conflicts)} conflict"
            + ("s" if len(copied.conflicts) > 1 else ""),
            hint="edit the file until no marker is left",
        )


# Name, function and example of every command of the group.
COMMANDS = (
    ("list", list_templates, LIST_EXAMPLE),
    ("show", show_template, SHOW_EXAMPLE),
    ("copy", copy_template, COPY_EXAMPLE),
)
