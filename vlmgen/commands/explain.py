"""`vlmgen explain`."""

from __future__ import annotations

from typing import Annotated

import typer

from vlmgen.options import JsonFlag

NAME = "explain"
EXAMPLE = "Example: vlmgen explain VG103"


def _codes(incomplete: str) -> list[tuple[str, str]]:
    """Codes for the shell's completion."""
    from vlmgen.explain import pages

    # A shell drops what does not begin as it was typed, in capitals or not.
    matching = [p for p in pages().values() if p.code.startswith(incomplete.upper())]
    return [(incomplete + p.code[len(incomplete) :], p.title) for p in matching]


def command(
    code: Annotated[
        str | None,
        typer.Argument(metavar="[CODE]", help="A code, VG103.", autocompletion=_codes),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Say what a code means and how to mend it; without a code, list them."""
    from dataclasses import asdict

    from vlmgen.explain import groups, page
    from vlmgen.terminal import print_json

    if code is not None:
        found = page(code)
        if as_json:
            print_json(asdict(found))
        else:
            print(found.text())
        return
    if as_json:
        print_json([asdict(p) for _, listed in groups() for p in listed])
        return
    for number, (about, listed) in enumerate(groups()):
        print(f"{'' if number == 0 else chr(10)}{about}")
        for p in listed:
            print(f"  {p.code}  {p.title}")
