"""From a spec file to a published package."""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import vlmgen
from vlmgen.errors import OutputError, Problem, SpecError, UsageError
from vlmgen.render import plan as planning
from vlmgen.render import publish
from vlmgen.render import templates as template_files
from vlmgen.render.chain import spec_texts
from vlmgen.render.manifest import (
    ATTRIBUTES_PATH,
    FOLDER,
    MANIFEST_PATH,
    Manifest,
    base_path,
    generator_sha256,
    is_own,
    read_manifest,
    sha256,
    text_sha256,
)
from vlmgen.render.origin import Origin, origin_of

_FAMILY_LINE = re.compile(rb"^family:[ \t]*([a-z][a-z0-9_]{0,40})[ \t]*(?:#.*)?$", re.MULTILINE)


@dataclass(frozen=True)
class GenerationResult:
    """What a generation did, or would do.

    Args:
        target: The package's directory.
        files: (path, status) sorted by path; the status is `new`, `changed`, `edited` (by hand),
            `unchanged` or `removed`.
        diff: Unified diff from the directory to the new package, where asked for.
        written: Whether the directory was changed.
    """

    target: Path
    files: tuple[tuple[str, str], ...]
    diff: str = ""
    written: bool = False

    @property
    def is_unchanged(self) -> bool:
        """Whether the directory held the package already."""
        return all(status == "unchanged" for _, status in self.files)


def render_spec_file(
    spec_path: Path, layout: planning.Layout = "out-of-tree", origin: Origin | None = None
) -> tuple[str, dict[str, bytes]]:
    """Family and every file of the package that a spec file describes, manifest included.

    Args:
        spec_path: The spec file.
        layout: `out-of-tree` or `in-tree`.
        origin: Templates and what the manifest says of them; by default those that ship with
            vlmgen and those that the spec names, for a package that has no directory yet.

    Raises:
        SpecError: The spec is faulty.
        OutputError: The stored results are unreadable, or as `render_package`.
        UsageError: The folder of template overrides is not there, or the spec names it where it
            is not found without parsing.
    """
    from vlmgen.render.package import package_bytes, render_package
    from vlmgen.spec.load import load_spec

    spec = load_spec(spec_path)
    origin = origin or origin_of(spec_path)
    if spec.templates and origin.overrides is None:
        raise UsageError(
            f"{spec_path}: templates is {spec.templates!r}, not on a line of its own; "
            "legal is `templates: DIR` at the beginning of a line"
        )
    results_text = read_results(spec_path, spec.family)
    results = None if results_text is None else parse_results(results_text, spec_path)
    package = render_package(spec, layout, results, origin.search)
    return spec.family, package_bytes(package, origin, spec_texts(spec_path), results_text)


def generate(
    spec_path: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    layout: planning.Layout = "out-of-tree",
    *,
    dry_run: bool = False,
    diff: bool = False,
    force: bool = False,
    templates: Path | None = None,
    search: Sequence[Path] | None = None,
) -> GenerationResult:
    """Generate the package of a spec into a directory.

    Args:
        spec_path: The spec file.
        out: The package's directory; by default `generated/<family>` below the working directory,
            `build/in-tree/<family>` for the in-tree layout.
        layout: `out-of-tree` or `in-tree`.
        dry_run: Write nothing, report what would be written.
        diff: As `dry_run`, with a unified diff.
        force: Overwrite files that were edited by hand.
        templates: Folder of template overrides; by default the one that the spec names.
        search: Template directories below it; by default those that ship with vlmgen.

    Raises:
        SpecError: The spec is faulty.
        OutputError: The directory may not be written; nothing was.
        UsageError: There is no such layout, or no such folder of overrides.
    """
    spec_path = Path(spec_path)
    planning.layout_rows(layout)
    preview = dry_run or diff
    family = family_of(spec_path)
    target = target_of(out, family, layout)
    origin = origin_of(spec_path, target, templates, search)
    manifest = None if force else up_to_date(spec_path, family, target, layout, origin)
    if manifest:
        paths = sorted([*manifest.files, MANIFEST_PATH])
        return GenerationResult(target, tuple((path, "unchanged") for path in paths))
    _, files = render_spec_file(spec_path, layout, origin)
    if preview:
        before = publish.inspect(target)
        publish.refuse_foreign(target, before)
    else:
        before = publish.publish(target, files, force=force)
    statuses = _statuses(before, files)
    return GenerationResult(
        target,
        statuses,
        diff=unified_diff(before.contents, files) if diff else "",
        written=not preview and any(status != "unchanged" for _, status in statuses),
    )


def unified_diff(old: Mapping[str, bytes], new: Mapping[str, bytes]) -> str:
    """Unified diff between two trees, files in sorted order, vlmgen's records left out."""
    lines: list[str] = []
    for path in sorted({*old, *new}):
        if not path.startswith(f"{FOLDER}/") and old.get(path) != new.get(path):
            lines += difflib.unified_diff(
                diff_lines(old.get(path)),
                diff_lines(new.get(path)),
                f"a/{path}" if path in old else "/dev/null",
                f"b/{path}" if path in new else "/dev/null",
            )
    return "".join(line if line.endswith("\n") else line + "\n" for line in lines)


def diff_lines(content: bytes | None) -> list[str]:
    """Lines of a file as a diff shows them; none of a file that is not there."""
    text = (content or b"").decode("utf-8", "backslashreplace")
    return [line + "\n" for line in text.split("\n")[:-1]] + [text.rsplit("\n", 1)[-1]] * bool(
        text and not text.endswith("\n")
    )


def _statuses(
    before: publish.Inspection, files: Mapping[str, bytes]
) -> tuple[tuple[str, str], ...]:
    def status(path: str) -> str:
        if path not in before.contents:
            return "new"
        if path not in files:
            return "removed"
        if before.contents[path] == files[path]:
            return "unchanged"
        return "edited" if path in before.edited else "changed"

    paths = sorted({*before.contents, *files})
    return tuple(
        (path, status(path)) for path in paths if path == MANIFEST_PATH or not is_own(path)
    )


def target_of(
    out: str | os.PathLike[str] | None, family: str, layout: planning.Layout = "out-of-tree"
) -> Path:
    """The directory of a package, with `.` and `..` resolved and symbolic links not.

    Args:
        out: As it was asked for; None for `generated/<family>`, or `build/in-tree/<family>`.
        family: Name of the family.
        layout: The package's layout.
    """
    if out is None:
        out = Path("generated" if layout == "out-of-tree" else "build/in-tree") / family
    target = Path(os.path.normpath(out))
    return target if target.name else Path(os.path.abspath(target))


def family_of(spec_path: Path) -> str:
    """The family of a spec, without parsing it where the family stands on a line of its own.

    Raises:
        SpecError: The spec is faulty, and that is all there is to say of it.
    """
    family = _stated_family(spec_path)
    if family is None:
        from vlmgen.spec.load import load_spec

        family = load_spec(spec_path).family
    return family


def families_in(specs_dir: Path, wanted: str) -> dict[str, Path]:
    """The spec of every family in a folder of specs, in the order of the file names.

    Args:
        specs_dir: The folder (`*.yaml`).
        wanted: What they are wanted for, for the message where there are none: `compare`.

    Raises:
        SpecError: The family of a spec cannot be told.
        OutputError: There are no specs, or two of them name one family.
    """
    paths = sorted(specs_dir.glob("*.yaml"))
    if not paths:
        raise OutputError(f"{specs_dir}: holds no specs (*.yaml), so there is nothing to {wanted}")
    families: dict[str, Path] = {}
    problems: list[Problem] = []
    for path in paths:
        try:
            family = family_of(path)
        except SpecError as error:
            problems += error.problems
            continue
        if family in families:
            raise OutputError(
                f"{families[family]} and {path} both name the family {family!r}; "
                "every spec needs a family of its own"
            )
        families[family] = path
    if problems:
        raise SpecError(problems)
    return families


def _stated_family(spec_path: Path) -> str | None:
    """The family that a spec file states on a line of its own, read without parsing the file."""
    try:
        found = _FAMILY_LINE.findall(spec_path.read_bytes().replace(b"\r\n", b"\n"))
    except OSError:
        return None
    return found[0].decode() if len(found) == 1 else None


def spec_hashes(spec_path: Path) -> tuple[str, dict[str, str]]:
    """As a manifest has them: the spec's own hash, and file name -> hash of every base."""
    (_, own), *bases = ((name, text_sha256(text)) for name, text in spec_texts(spec_path).items())
    return own, dict(bases)


def read_results(spec_path: Path, family: str) -> bytes | None:
    """The stored results beside a spec, as bytes, or None where there are none."""
    try:
        return (spec_path.parent / "results" / f"{family}.json").read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None


def parse_results(content: bytes, spec_path: Path) -> dict[str, Any]:
    """Stored results as templates use them.

    Raises:
        OutputError: They are not JSON.
    """
    try:
        results = json.loads(content)
        if isinstance(results, dict):
            return results
        raise ValueError("not an object")
    except ValueError as error:
        raise OutputError(
            f"the validation results stored for {spec_path} are not JSON: {error}",
            hint="run `vlmgen validate` anew, or remove the file",
        ) from error


def is_current(
    manifest: Manifest, spec_path: Path, family: str, layout: planning.Layout, origin: Origin
) -> bool:
    """Whether every input of a package hashes to what its manifest records.

    Then rendering would give what it gave before. Anything unusual gives False; the full way then
    finds the words for it.
    """
    recorded = (manifest.vlmgen, manifest.layout, manifest.origin, manifest.templates_from)
    try:
        if (
            recorded != (vlmgen.__version__, layout, origin.spec, origin.templates_from)
            or (manifest.spec, dict(manifest.bases)) != spec_hashes(spec_path)
            or manifest.generator != generator_sha256()
        ):
            return False
        results = read_results(spec_path, family)
        if manifest.results != (None if results is None else text_sha256(results)):
            return False
        package_plan = planning.plan_package(family, layout, origin.search)
        planned = {file.path: file.template for file in package_plan.files}
        absent = planned.keys() - manifest.files.keys()  # rendered to nothing, or never
        if manifest.files.keys() - planned.keys():
            return False
        if any(planned[path] not in manifest.templates for path in absent):
            return False
        for name, digest in manifest.templates.items():
            if sha256(template_files.read(origin.search, name)) != digest:
                return False
        folder = origin.overrides
        overrides = [n for n in manifest.templates if folder and (folder / n).is_file()]
        if sorted(overrides) != list(manifest.overrides):
            return False
        return all(
            text_sha256(planning.source_bytes(name)) == digest
            for name, digest in manifest.sources.items()
        )
    except (OSError, OutputError):
        return False
    except Exception as error:
        if template_files.is_not_found(error):
            return False
        raise


def up_to_date(
    spec_path: Path, family: str, target: Path, layout: planning.Layout, origin: Origin
) -> Manifest | None:
    """The target's manifest if every input and every file hashes to what it records."""
    try:
        manifest = read_manifest(target)
        if manifest is None or not is_current(manifest, spec_path, family, layout, origin):
            return None
        with publish.locked(target.parent):
            before = publish.inspect(target)
    except (OSError, OutputError):
        return None
    clean = not (before.edited or before.foreign)
    records = {MANIFEST_PATH, ATTRIBUTES_PATH, *map(base_path, manifest.files.values())}
    present = set(before.contents) == {*manifest.files, *records}
    same = before.contents.get(MANIFEST_PATH) == manifest.to_bytes()
    return manifest if clean and present and same else None
