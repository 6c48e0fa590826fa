"""Where a package came from: its spec and its folder of template overrides, as a manifest says it.

A path is recorded relative to the package, as long as both lie in one place; a package outside the
project of its spec records the bare name, and no path of the machine gets into the manifest.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vlmgen.errors import UsageError
from vlmgen.render import templates as template_files
from vlmgen.render.chain import stated_templates
from vlmgen.render.manifest import Manifest

# Steps from a package up to what it shares with its spec: build/in-tree/<family> needs three.
MAX_UP = 3


@dataclass(frozen=True)
class Origin:
    """What a package is generated from, next to its spec.

    Args:
        spec: The spec as the manifest records it.
        search: Template folders, the first that has a template wins.
        overrides: The folder of template overrides, the first of `search`; None for none.
        templates_from: The folder as the manifest records it; None where the spec names it or
            there is none.
    """

    spec: str
    search: tuple[Path, ...]
    overrides: Path | None = None
    templates_from: str | None = None


def origin_of(
    spec_path: Path,
    target: Path | None = None,
    templates: Path | None = None,
    search: Sequence[Path] | None = None,
) -> Origin:
    """What a package of a spec is generated from.

    Args:
        spec_path: The spec file.
        target: The package's directory, from which recorded paths start; None for bare names.
        templates: Folder of overrides that the command line names; it goes before the spec's.
        search: Template folders below the overrides; by default those that ship with vlmgen.

    Raises:
        UsageError: There is no such folder of overrides.
    """
    overrides = templates or stated_templates(spec_path)
    packaged = tuple(search or template_files.directories())
    if overrides is None:
        return Origin(recorded(spec_path, target), packaged)
    if not overrides.is_dir():
        where = "--templates" if templates else f"`templates` in {spec_path}"
        raise UsageError(
            f"{where}: {overrides} is not a folder",
            hint="`vlmgen templates copy NAME --to DIR` starts one",
        )
    return Origin(
        recorded(spec_path, target),
        (overrides, *packaged),
        overrides,
        recorded(templates, target) if templates else None,
    )


def recorded(path: Path, target: Path | None) -> str:
    """A path as a manifest records it: relative to the package, or the bare name."""
    name = os.path.basename(os.path.abspath(path))
    if target is None:
        return name
    relative = Path(os.path.relpath(path, target)).as_posix()
    steps = relative.split("/").count("..")
    shared = os.path.commonpath([os.path.abspath(path), os.path.abspath(target)])
    if steps > MAX_UP or shared == os.sep:
        return name
    return relative if steps else f"./{relative}"


def spec_of(manifest: Manifest, target: Path) -> Path:
    """The spec that a package was generated from.

    Args:
        manifest: The package's manifest.
        target: The package's directory.

    Raises:
        UsageError: It is not where the manifest says, nor in `specs/`.
    """
    tried = []
    for candidate in _candidates(manifest.origin, target):
        if candidate.is_file():
            return candidate
        tried.append(str(candidate))
    stated = f"its manifest names {manifest.origin!r}" if manifest.origin else "it names none"
    raise UsageError(
        f"{target}: the spec of this package is not to be found; {stated}, and there is no "
        f"{' and no '.join(tried) or 'such file'}",
        hint="name it with --spec FILE",
    )


def templates_of(manifest: Manifest, target: Path) -> Path | None:
    """The folder of overrides that the command line once named for a package, if it is there.

    Raises:
        UsageError: The manifest names one that is not there.
    """
    if manifest.templates_from is None:
        return None
    folder = _beside(manifest.templates_from, target)
    if folder is None or not folder.is_dir():
        raise UsageError(
            f"{target}: was generated with the template overrides in {manifest.templates_from!r}, "
            "which is not there",
            hint="name the folder with --templates DIR, or go without it with --no-templates",
        )
    return folder


def overrides_folder(manifest: Manifest, target: Path) -> Path | None:
    """The folder of overrides of a package: that of the command line, or else the spec's.

    Raises:
        UsageError: It, or the spec, is not to be found.
    """
    return templates_of(manifest, target) or stated_templates(spec_of(manifest, target))


def _candidates(origin: str, target: Path) -> list[Path]:
    """Where a recorded spec may be; also `specs/` of the project and of the working directory."""
    name = origin.rsplit("/", 1)[-1] if origin else f"{target.resolve().name}.yaml"
    beside = _beside(origin, target)
    places = [beside] if beside else []
    places += [_normal(target / ".." / ".." / "specs" / name), Path("specs") / name]
    return list(dict.fromkeys(places))


def _beside(path: str, target: Path) -> Path | None:
    """A recorded path, None where it is a bare name."""
    if "/" not in path or path.startswith("/") or path.split("/").count("..") > MAX_UP:
        return None
    return _normal(target / path)


def _normal(path: Path) -> Path:
    """Without `a/..`: a message is for people."""
    return Path(os.path.normpath(path))
