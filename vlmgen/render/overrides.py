"""A user's own templates, searched before those that ship with vlmgen.

A folder of overrides mirrors `templates/`: a file of the same name takes the place of the packaged
one, whole files and blocks alike. `vlmgen templates copy` starts one, and keeps the original beside
it, in `.vlmgen/originals/`, so that it can be told later whether the original changed, and how.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import vlmgen
from vlmgen.errors import OutputError, UsageError
from vlmgen.files import replace_file
from vlmgen.render import templates
from vlmgen.render.manifest import FOLDER, sha256
from vlmgen.render.merge import find_conflicts, merge

ORIGINALS = f"{FOLDER}/originals"

State = Literal["packaged", "overridden", "outdated", "unrecorded", "added"]


@dataclass(frozen=True)
class Template:
    """One template as a search finds it.

    Args:
        name: Its name.
        state: `packaged`; `overridden` by a copy whose original is the packaged one; `outdated`
            where the original changed since; `unrecorded` where the original was not kept; `added`
            where no packaged template has the name.
        difference: Unified diff from the original as it was copied to the packaged one of today;
            empty but for `outdated`.
    """

    name: str
    state: State
    difference: str = ""


def every_template(folder: Path | None = None) -> list[Template]:
    """Every template, packaged or the user's, sorted by name.

    Args:
        folder: The user's folder of overrides, None for none.

    Raises:
        UsageError: There is no such folder.
    """
    if folder and not folder.is_dir():
        raise UsageError(
            f"--templates: {folder} is not a folder",
            hint="`vlmgen templates copy NAME --to DIR` starts one",
        )
    packaged = set(_names(templates.directories()[0]))
    own = set(_names(folder)) if folder else set()
    return [
        _state(name, folder) if folder and name in own else Template(name, "packaged")
        for name in sorted(packaged | own)
    ]


def overrides_of(folder: Path) -> list[Template]:
    """The templates in a folder of overrides, sorted by name."""
    return [_state(name, folder) for name in _names(folder)]


def show(name: str, folder: Path | None = None) -> str:
    """The text of a template.

    Args:
        name: Its name, such as `blocks/text/norm_rms.py.j2`.
        folder: A folder of overrides to search first, None for none.

    Raises:
        UsageError: There is no such template.
    """
    search = [folder] if folder else []
    return _read([*search, *templates.directories()], name).decode("utf-8", "replace")


@dataclass(frozen=True)
class Copied:
    """What copying a template did.

    Args:
        path: The override.
        status: `new`; `unchanged` where the override and its original are there already; `merged`
            with what changed in the original since it was copied; `conflict` where the override
            holds conflict markers now.
        conflicts: Lines in conflict, as `start-end`.
    """

    path: Path
    status: Literal["new", "unchanged", "merged", "conflict"]
    conflicts: tuple[str, ...] = ()


def copy(name: str, folder: Path) -> Copied:
    """Copy a packaged template into a folder of overrides, and keep its original.

    Where the override is there already, the changes of the original since then are merged into it.

    Args:
        name: The template.
        folder: The folder of overrides; made if it does not exist.

    Raises:
        UsageError: There is no such template.
        OutputError: The override is there and its original is not known, it still holds conflict
            markers, or the folder cannot be written.
    """
    packaged = _read(templates.directories(), name)
    override, original = folder / name, folder / ORIGINALS / name
    status: Literal["new", "unchanged", "merged", "conflict"] = "new"
    text = packaged
    if override.exists():
        here = override.read_bytes()
        before = _original(folder, name)
        if find_conflicts(here):
            raise OutputError(
                f"{override}: holds a conflict that is not resolved", hint="edit it until none is"
            )
        if before is None:
            raise OutputError(
                f"{override}: is there, and what it was copied from is not known, so nothing can "
                "be merged into it",
                hint="move it away, copy the template, and carry your changes over",
            )
        merged = merge(before, here, packaged)
        text = (
            merged.take("ours")
            if merged.is_clean
            else merged.marked(f"vlmgen {vlmgen.__version__}")
        )
        status = "unchanged" if before == packaged else "merged" if merged.is_clean else "conflict"
    if status != "unchanged":
        # The original last: killed in between, the next run merges the same once more.
        for path, content in ((override, text), (original, packaged)):
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise OutputError(f"{path}: cannot be written: {error.strerror}") from error
            replace_file(path, content)
    places = tuple(f"{place.start}-{place.end}" for place in find_conflicts(text))
    return Copied(override, status, places)


def _state(name: str, folder: Path) -> Template:
    try:
        packaged = _read(templates.directories(), name)
    except UsageError:
        return Template(name, "added")
    original = _original(folder, name)
    if original is None:
        return Template(name, "unrecorded")
    if sha256(original) == sha256(packaged):
        return Template(name, "overridden")
    difference = difflib.unified_diff(
        original.decode("utf-8", "replace").splitlines(keepends=True),
        packaged.decode("utf-8", "replace").splitlines(keepends=True),
        f"{name} (as it was copied)",
        f"{name} (vlmgen {vlmgen.__version__})",
    )
    return Template(name, "outdated", "".join(difference))


def _original(folder: Path, name: str) -> bytes | None:
    try:
        return (folder / ORIGINALS / name).read_bytes().replace(b"\r\n", b"\n")
    except OSError:
        return None


def _names(folder: Path) -> list[str]:
    """Names of the templates in a folder, hidden folders left out."""
    found = (path.relative_to(folder).as_posix() for path in folder.rglob("*.j2") if path.is_file())
    return sorted(name for name in found if templates.NAME.match(name))


def _read(search: Sequence[Path], name: str) -> bytes:
    try:
        return templates.read(search, name)
    except Exception as error:
        if not templates.is_not_found(error):
            raise
    close = difflib.get_close_matches(name, _names(search[-1]), 3, 0.5)
    raise UsageError(
        f"there is no template {name!r}"
        + (f"; did you mean {' or '.join(close)}?" if close else ""),
        hint="`vlmgen templates list` names them all",
    )
