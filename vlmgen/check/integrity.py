"""Whether the files of a package are the ones that vlmgen wrote."""

from __future__ import annotations

from pathlib import Path

from vlmgen.check.finding import Finding
from vlmgen.errors import UsageError
from vlmgen.render.edits import read_edits
from vlmgen.render.manifest import EDITS_PATH, MANIFEST_PATH, read_manifest, sha256
from vlmgen.render.merge import find_conflicts
from vlmgen.render.origin import overrides_folder
from vlmgen.render.overrides import overrides_of
from vlmgen.render.publish import CACHE_DIRECTORIES


def check_integrity(root: Path) -> list[Finding]:
    """Compare a package with its manifest.

    Args:
        root: Directory of the package.

    Returns:
        One finding per file that is edited, missing or foreign, or one if there is no manifest.
    """
    manifest = read_manifest(root)
    if manifest is None:
        return [
            Finding(
                root.joinpath(MANIFEST_PATH).as_posix(),
                1,
                "VG003",
                "there is no manifest",
                "generate the package with `vlmgen new`",
            )
        ]
    record = root / EDITS_PATH
    taken_over = read_edits(record.read_bytes() if record.is_file() else None, str(record))
    findings = []
    for name, digest in sorted(manifest.files.items()):
        path = root / name
        content = path.read_bytes() if path.is_file() else None
        here = None if content is None else sha256(content)
        if here == digest:
            continue
        conflicts = find_conflicts(content or b"")
        findings += [
            Finding(
                path.as_posix(),
                place.start,
                "VG006",
                f"lines {place.start} to {place.end} are a conflict",
                "edit them until no marker is left, then `vlmgen update`",
            )
            for place in conflicts
        ]
        if conflicts or (name in taken_over.edits and taken_over.edits[name] == here):
            continue
        if content is None:
            message, fix = "is missing", "`vlmgen update --restore` brings it back"
        else:
            message = "was edited after it was generated"
            fix = "`vlmgen update` takes the edit over, `vlmgen new --force` drops it"
        findings.append(Finding(path.as_posix(), 1, "VG004", message, fix))
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root)
        known = inside.as_posix() in manifest.files or inside.as_posix() in taken_over.own
        if known or CACHE_DIRECTORIES & set(inside.parts):
            continue
        fix = "move it out of the package"
        findings.append(Finding(path.as_posix(), 1, "VG004", "was not generated", fix))
    return findings


def check_overrides(root: Path, templates: Path | None = None) -> list[Finding]:
    """Compare the template overrides that a package uses with what they were copied from.

    Args:
        root: Directory of the package.
        templates: The folder of overrides; by default where the manifest or the spec says.

    Returns:
        One finding per override whose original changed since, with what changed in it.
    """
    manifest = read_manifest(root)
    if manifest is None or not manifest.overrides:
        return []
    try:
        folder = templates or overrides_folder(manifest, root)
    except UsageError as error:
        return [Finding(root.as_posix(), 1, "VG005", error.message, error.hint)]
    if folder is None:
        return []
    return [
        Finding(
            (folder / template.name).as_posix(),
            1,
            "VG005",
            "the packaged template changed since this one was copied from it",
            f"`vlmgen templates copy {template.name} --to {folder}` merges the change into it",
            template.difference,
        )
        for template in overrides_of(folder)
        if template.state == "outdated" and template.name in manifest.overrides
    ]
