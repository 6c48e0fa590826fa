"""Whether the committed packages are what the specs give today."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vlmgen.render import publish
from vlmgen.render.edits import without_edits
from vlmgen.render.generate import families_in, render_spec_file, unified_diff
from vlmgen.render.manifest import MANIFEST_PATH, Manifest, is_own, read_manifest
from vlmgen.render.origin import origin_of, templates_of


@dataclass(frozen=True)
class Difference:
    """One file or directory that is not what the specs give.

    Args:
        path: Path below the directory of generated packages.
        kind: `missing`, `extra` or `changed`.
        message: What is wrong and what to do.
        diff: Unified diff from the file to what it should be; empty for a directory.
    """

    path: str
    kind: Literal["missing", "extra", "changed"]
    message: str
    diff: str = ""


def drift(
    specs_dir: str | Path,
    generated_dir: str | Path,
    search: Sequence[Path] | None = None,
    templates: Path | None = None,
) -> list[Difference]:
    """Render every spec in memory and compare with the generated packages; writes nothing.

    Args:
        specs_dir: Directory of the specs (`*.yaml`).
        generated_dir: Directory of the packages, one per family.
        search: Template directories; by default those that ship with vlmgen.
        templates: Folder of template overrides; by default the one that a spec names or that its
            package was generated with.

    Returns:
        The differences, sorted by path; empty where all is as it should be.

    Raises:
        SpecError: A spec is faulty.
        OutputError: There are no specs, or two of them name one family.
    """
    specs_dir, generated_dir = Path(specs_dir), Path(generated_dir)
    found: list[Difference] = []
    families = families_in(specs_dir, "compare")
    for family, spec in families.items():
        target = generated_dir / family
        if target.is_dir():
            manifest = read_manifest(target)
            given = templates or (templates_of(manifest, target) if manifest else None)
            _, files = render_spec_file(spec, origin=origin_of(spec, target, given, search))
            found += _package_differences(target, family, files, spec)
        else:
            found.append(
                Difference(family, "missing", f"{target}: no package: run `vlmgen new {spec}`")
            )
    if generated_dir.is_dir():
        for entry in sorted(generated_dir.iterdir()):
            is_package = not entry.name.startswith(".") and entry.name != "__pycache__"
            if is_package and entry.name not in families:
                found.append(
                    Difference(
                        entry.name,
                        "extra",
                        f"{entry}: no spec in {specs_dir} generates it; remove it or add its spec",
                    )
                )
    return sorted(found, key=lambda difference: difference.path)


def _package_differences(
    target: Path, family: str, files: dict[str, bytes], spec: Path
) -> list[Difference]:
    # Without its manifest a package is compared all the same: then every file counts as foreign.
    before = publish.inspect(target)
    present = {**before.contents, **{p: (target / p).read_bytes() for p in before.foreign}}
    if MANIFEST_PATH in before.contents:
        recorded = Manifest.from_bytes(before.contents[MANIFEST_PATH], MANIFEST_PATH).files
        mend = f"run `vlmgen update {target}`"
    else:
        recorded, mend = {}, f"run `vlmgen adopt {target} --spec {spec}`"
    present = without_edits(present, files)
    found: list[Difference] = []
    same_inputs = present.get(MANIFEST_PATH) == files[MANIFEST_PATH]
    for path in sorted({*present, *files}):
        if present.get(path) == files.get(path):
            continue
        if is_own(path) and path != MANIFEST_PATH and not same_inputs:
            continue  # follows from the manifest
        kind: Literal["missing", "extra", "changed"] = "changed"
        message = f"{target}/{path}: is not what {spec} gives; {mend}"
        if path not in present:
            again = f"run `vlmgen update {target} --restore`" if path in recorded else mend
            kind, message = "missing", f"{target}/{path}: is missing; {again}"
        elif path not in files:
            kind, message = "extra", f"{target}/{path}: {spec} does not give this file; remove it"
        elif is_own(path) and path != MANIFEST_PATH:
            message = f"{target}/{path}: is damaged; {mend}"
        elif path == MANIFEST_PATH:
            message = f"{target}/{path}: records other inputs than those of today; {mend}"
        old = {path: present[path]} if path in present else {}
        new = {path: files[path]} if path in files else {}
        found.append(Difference(f"{family}/{path}", kind, message, unified_diff(old, new)))
    return found
