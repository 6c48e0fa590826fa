"""Whether the files of a package are the ones that vlmgen wrote."""

from __future__ import annotations

from pathlib import Path

from vlmgen.check.finding import Finding
from vlmgen.render.manifest import MANIFEST_PATH, read_manifest, sha256

IGNORED_DIRECTORIES = {"__pycache__", ".pytest_cache", ".ruff_cache", ".mypy_cache"}


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
    findings = []
    for name, digest in sorted(manifest.files.items()):
        path = root / name
        if not path.is_file():
            message, fix = "is missing", "generate the package anew"
        elif sha256(path.read_bytes()) != digest:
            message = "was edited after it was generated"
            fix = "carry the change into the template or the spec, then `vlmgen new --force`"
        else:
            continue
        findings.append(Finding(path.as_posix(), 1, "VG004", message, fix))
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root)
        if IGNORED_DIRECTORIES & set(inside.parts) or inside.as_posix() in manifest.files:
            continue
        findings.append(
            Finding(path.as_posix(), 1, "VG004", "was not generated", "move it out of the package")
        )
    return findings
