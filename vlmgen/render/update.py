"""`vlmgen update`: carry hand edits over into what the spec, the templates and vlmgen give today.

Every file is merged from three texts: as it was generated last (`.vlmgen/base`), as it is on the
disk, and as it is generated now. What both changed in one place is a conflict: it gets git's
markers, or is settled for one side, or stops everything, as asked for. Then the whole package is
published in one step, foreign files included, see `vlmgen.render.publish`; a run that is killed
leaves the old package or the new one.

What happens to a file, by what was done to it since it was generated:

    by hand      new version   result
    -----------  -----------   -------------------------------------------------------------
    nothing      same          unchanged
    nothing      other text    changed
    nothing      gone          removed
    edited       same          edited: stays
    edited       other text    merged, or conflict
    edited       gone          orphan: stays, is no longer vlmgen's
    deleted      same          deleted: stays away
    deleted      other text    conflict; stays away where an update or `adopt` took that over
    not there    new           new
    made         new           blocked, unless both texts are equal: foreign files stay as they are

A conflict is resolved when its markers are gone. Until then the file is reported by every run and
left alone, and a run that would have to merge it again changes nothing at all; its base is the
text that it conflicted with, so that what the resolution keeps is an edit like any other.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import vlmgen
from vlmgen.errors import ConflictError, OutputError, UsageError, VlmgenError
from vlmgen.processes import cores
from vlmgen.render import publish
from vlmgen.render.edits import Edits, read_edits
from vlmgen.render.generate import families_in, family_of, is_current, render_spec_file
from vlmgen.render.manifest import (
    ATTRIBUTES,
    ATTRIBUTES_PATH,
    EDITS_PATH,
    MANIFEST_PATH,
    Manifest,
    base_path,
    is_own,
    known_texts,
    read_manifest,
    sha256,
)
from vlmgen.render.merge import (
    Conflict,
    Merge,
    Region,
    find_conflicts,
    merge,
    settle,
    split_lines,
)
from vlmgen.render.origin import Origin, origin_of, spec_of, templates_of
from vlmgen.render.plan import LAYOUTS, Layout, layout_rows

OnConflict = Literal["markers", "ours", "theirs", "fail"]
ON_CONFLICT: tuple[OnConflict, ...] = ("markers", "ours", "theirs", "fail")
DELETED_LABEL = "deleted by hand"

Status = Literal[
    "unchanged", "new", "changed", "removed", "merged", "edited", "deleted", "orphan", "conflict",
    "blocked",
]  # fmt: skip


class PackagesError(VlmgenError):
    """Several packages that cannot be updated, each for a reason of its own.

    Args:
        errors: The reasons, by package.
    """

    code = "VG917"

    def __init__(self, errors: Sequence[VlmgenError]) -> None:
        super().__init__("\n\n".join(error.render() for error in errors))
        self.exit_code = errors[0].exit_code


@dataclass(frozen=True)
class FileChange:
    """What an update did to one file, or would do.

    Args:
        path: The file in the package.
        status: As in the table of this module.
        conflicts: Lines in conflict; of the file as it is now.
        settled: Conflicts that `--on-conflict` settled for one side.
        note: What a user must know besides; empty for nothing.
    """

    path: str
    status: Status
    conflicts: tuple[Conflict, ...] = ()
    settled: int = 0
    note: str = ""


@dataclass(frozen=True)
class PackageUpdate:
    """What an update did to a package, or would do.

    Args:
        target: The package's directory.
        spec: The spec it comes from.
        files: Its files, sorted by path, vlmgen's records left out.
        foreign: How many files are not vlmgen's.
        written: Whether the directory was changed.
    """

    target: Path
    spec: Path
    files: tuple[FileChange, ...]
    foreign: int = 0
    written: bool = False

    @property
    def conflicts(self) -> list[FileChange]:
        """Files in conflict or in the way."""
        return [file for file in self.files if file.status in ("conflict", "blocked")]

    def to_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "target": self.target.as_posix(),
            "spec": self.spec.as_posix(),
            "written": self.written,
            "foreign": self.foreign,
            "files": [
                {
                    "path": file.path,
                    "status": file.status,
                    "conflicts": [[c.start, c.end] for c in file.conflicts],
                    "settled": file.settled,
                    "note": file.note,
                }
                for file in self.files
            ],
        }


@dataclass(frozen=True)
class Job:
    """A package and what to update it from.

    Args:
        target: The package's directory.
        spec: The spec.
        layout: The package's layout.
        origin: Templates, and what the manifest will say.
        current: Whether the manifest records these inputs already.
    """

    target: Path
    spec: Path
    layout: Layout
    origin: Origin
    current: bool


def update(
    target: str | os.PathLike[str],
    spec: Path | None = None,
    *,
    on_conflict: OnConflict = "markers",
    templates: Path | None = None,
    no_templates: bool = False,
    restore: bool = False,
    dry_run: bool = False,
    search: Sequence[Path] | None = None,
) -> PackageUpdate:
    """Update one package.

    Args:
        target: The package's directory.
        spec: The spec; by default the one that the package's manifest names.
        on_conflict: What to do with conflicts: write `markers`, settle them for `ours` (the hand
            edit) or `theirs` (the new text), or `fail` and change nothing.
        templates: Folder of template overrides; by default the spec's, or the one that the
            package was generated with.
        no_templates: Forget a folder of overrides that the command line once named.
        restore: Bring back generated files that were deleted by hand.
        dry_run: Write nothing.
        search: Template directories; by default those that ship with vlmgen.

    Raises:
        SpecError: The spec is faulty.
        UsageError: The directory is no package, or its spec or folder of overrides is missing.
        OutputError: The directory cannot be written; nothing was.
    """
    (done,) = _run(
        [_job(Path(target), spec, templates, no_templates, search)], on_conflict, restore, dry_run
    )
    return done


def update_all(
    specs_dir: Path,
    generated_dir: Path,
    *,
    on_conflict: OnConflict = "markers",
    templates: Path | None = None,
    no_templates: bool = False,
    restore: bool = False,
    dry_run: bool = False,
    search: Sequence[Path] | None = None,
) -> tuple[list[PackageUpdate], list[Path]]:
    """Update the package of every spec.

    Args:
        specs_dir: Directory of the specs (`*.yaml`).
        generated_dir: Directory of the packages, one per family.
        on_conflict: As for `update`; `fail` changes no package if one has a conflict.
        templates: As for `update`.
        no_templates: As for `update`.
        restore: As for `update`.
        dry_run: As for `update`.
        search: As for `update`.

    Returns:
        One result per package, and the specs whose package was never generated.

    Raises:
        PackagesError: Some packages cannot be updated; none was.
        SpecError: The family of a spec cannot be told.
        OutputError: There are no specs, or two of them name one family.
    """
    jobs: list[Job] = []
    absent: list[Path] = []
    errors: list[VlmgenError] = []
    for family, spec in families_in(specs_dir, "update").items():
        target = generated_dir / family
        if not target.joinpath(MANIFEST_PATH).is_file():
            absent.append(spec)
            continue
        try:
            jobs.append(_job(target, spec, templates, no_templates, search))
        except VlmgenError as error:
            errors.append(error)
    if errors:
        raise PackagesError(errors)
    return _run(jobs, on_conflict, restore, dry_run), absent


def _job(
    target: Path,
    spec: Path | None,
    templates: Path | None,
    no_templates: bool,
    search: Sequence[Path] | None,
) -> Job:
    target = Path(os.path.normpath(target))
    if target.name in ("", ".."):
        target = Path(os.path.abspath(target))
    manifest = read_manifest(target)
    if manifest is None:
        raise UsageError(
            f"{target}: is not a package that vlmgen generated, {MANIFEST_PATH} is missing",
            hint="`vlmgen new SPEC` generates one, `vlmgen adopt DIR --spec SPEC` takes one over",
        )
    spec = spec or spec_of(manifest, target)
    if templates is None and not no_templates:
        templates = templates_of(manifest, target)
    layout = next((name for name in LAYOUTS if name == manifest.layout), LAYOUTS[0])
    origin = origin_of(spec, target, templates, search)
    family = family_of(spec)
    module = layout_rows(layout).module.format(family=family).replace(".", "/")
    if not any(path.startswith(f"{module}/") for path in manifest.files):
        raise UsageError(
            f"{spec}: describes the family {family!r}, and {target} holds no {module}/, so it is a "
            "package of another family",
            hint="`vlmgen new` generates the package of another family into its own directory",
        )
    return Job(target, spec, layout, origin, is_current(manifest, spec, family, layout, origin))


def _run(
    jobs: Sequence[Job], on_conflict: OnConflict, restore: bool, dry_run: bool
) -> list[PackageUpdate]:
    rendered = _render([job for job in jobs if not job.current])

    def each(write: bool) -> list[PackageUpdate]:
        return [_apply(job, rendered, on_conflict, restore, write) for job in jobs]

    if on_conflict == "fail" and not dry_run and len(jobs) > 1:
        preview = each(False)
        if any(package.conflicts for package in preview):
            return preview
    return each(not dry_run)


Rendered = dict[Path, dict[str, bytes]]


def _render(jobs: Sequence[Job]) -> Rendered:
    """New files of every package, in as many processes as there are cores for.

    Raises:
        VlmgenError: Of the only package.
        PackagesError: Of several.
    """
    count = min(len(jobs), cores())
    # A fork copies one thread only, so it is for a process that has no other.
    if count > 1 and threading.active_count() == 1 and "torch" not in sys.modules:
        import vlmgen.render.package  # noqa: F401  (before the fork, so that every process has it)
        import vlmgen.spec.load  # noqa: F401
        from vlmgen.render import format as formatting

        context = multiprocessing.get_context("fork")
        with context.Pool(count, formatting.stay_in_one_process) as pool:
            outcomes = pool.map(_render_job, jobs, chunksize=1)
    else:
        outcomes = [_render_job(job) for job in jobs]
    errors: list[VlmgenError] = []
    for job, files in zip(jobs, outcomes, strict=True):
        if files is None:
            try:  # whatever it was, it happens again here, with its message
                render_spec_file(job.spec, job.layout, job.origin)
            except VlmgenError as error:
                errors.append(error)
    if errors:
        raise errors[0] if len(errors) == 1 else PackagesError(errors)
    return {job.target: files for job, files in zip(jobs, outcomes, strict=True) if files}


def _render_job(job: Job) -> dict[str, bytes] | None:
    try:
        return render_spec_file(job.spec, job.layout, job.origin)[1]
    except VlmgenError:
        return None


def _apply(
    job: Job, rendered: Rendered, on_conflict: OnConflict, restore: bool, write: bool
) -> PackageUpdate:
    with publish.writing(job.target, foreign_links=True) as before:
        manifest = read_manifest(job.target)
        if manifest is None:
            raise OutputError(
                f"{job.target}: its manifest went away meanwhile; nothing was written"
            )
        bases = known_texts(manifest, before.contents)
        files = rendered.get(job.target)
        if files is None and set(bases) != set(manifest.files):
            # An older package, or somebody removed the texts: they are rendered again.
            files = render_spec_file(job.spec, job.layout, job.origin)[1]
        if files is None:
            files = {**bases, **_records(manifest, bases)}
        outcome = merge_package(job.target, manifest, before, files, on_conflict, restore)
        stopped = any(
            change.status == "blocked"
            or (change.status == "conflict" and (on_conflict == "fail" or change.note == AGAIN))
            for change in outcome.changes
        )
        written = False
        if write and not stopped:
            written = publish.replace(job.target, outcome.contents, outcome.before)
        changes = tuple(
            change for change in outcome.changes if not stopped or change in outcome.conflicts
        )
        return PackageUpdate(job.target, job.spec, changes, len(before.foreign), written)


def _records(manifest: Manifest, bases: Mapping[str, bytes]) -> dict[str, bytes]:
    return {
        **{base_path(manifest.files[path]): text for path, text in bases.items()},
        ATTRIBUTES_PATH: ATTRIBUTES,
        MANIFEST_PATH: manifest.to_bytes(),
    }


AGAIN = "holds a conflict that is not resolved, and the new version changes the file again"
_LABEL = f"vlmgen {vlmgen.__version__}"


@dataclass(frozen=True)
class Outcome:
    """A package, merged.

    Args:
        contents: Every file of vlmgen's, by path, records included.
        changes: What happens to each file.
        before: The inspection, with what was taken over into `contents`.
    """

    contents: Mapping[str, bytes]
    changes: tuple[FileChange, ...]
    before: publish.Inspection

    @property
    def conflicts(self) -> list[FileChange]:
        """Files that need the user."""
        return [change for change in self.changes if change.status in ("conflict", "blocked")]


def merge_package(
    target: Path,
    manifest: Manifest,
    before: publish.Inspection,
    files: Mapping[str, bytes],
    on_conflict: OnConflict = "markers",
    restore: bool = False,
) -> Outcome:
    """Merge a package in memory.

    Args:
        target: The package's directory; only foreign files in the way are read from it.
        manifest: Its manifest.
        before: What is there.
        files: The new version, records included.
        on_conflict: As for `update`.
        restore: As for `update`.
    """
    bases = known_texts(manifest, before.contents)
    generated = {path: text for path, text in files.items() if not is_own(path)}
    contents = {path: text for path, text in files.items() if is_own(path)}
    taken: dict[str, bytes] = {}
    changes: list[FileChange] = []
    edits: dict[str, str | None] = {}
    known = read_edits(before.contents.get(EDITS_PATH), f"{target}/{EDITS_PATH}")
    for path in sorted({*manifest.files, *generated}):
        here = before.contents.get(path)
        change: FileChange | None
        text: bytes | None
        if path not in manifest.files:
            obstacle = _obstacle(target, path, generated[path], before)
            if obstacle:
                changes.append(FileChange(path, "blocked", note=obstacle))
                continue
            if path in before.foreign:
                taken[path] = here = generated[path]
            status: Status = "new" if here is None else "unchanged"
            change, text = FileChange(path, status), generated[path]
        elif path not in generated:
            change, text = _dropped(path, here, manifest.files[path])
        else:
            base = bases.get(path)
            if base is None and sha256(generated[path]) == manifest.files[path]:
                base = generated[path]
            gone = path in known.edits and known.edits[path] is None
            change, text = _merged(path, base, here, generated[path], on_conflict, restore, gone)
        if change is not None:
            changes.append(change)
        if text is not None:
            contents[path] = text
        if path in generated and text != generated[path] and not (change and change.conflicts):
            edits[path] = None if text is None else sha256(text)
    own = tuple(path for path in known.own if path in before.foreign and path not in taken)
    record = Edits(edits, own).to_bytes()
    if record is not None:
        contents[EDITS_PATH] = record
    # A foreign file that equals the generated one becomes that one.
    after = replace(before, contents={**before.contents, **taken})
    return Outcome(contents, tuple(changes), after)


def _obstacle(target: Path, path: str, text: bytes, before: publish.Inspection) -> str:
    """Why a new file cannot be written where it belongs; empty where it can."""
    for foreign in before.foreign:
        if foreign == path:
            file = target / path
            if not file.is_symlink() and file.is_file() and file.read_bytes() == text:
                return ""
            return "the new version has a file of this name; move yours away"
        if path.startswith(f"{foreign}/") or foreign.startswith(f"{path}/"):
            return f"the new version has this file, and {foreign} is in its way; move it away"
    return ""


def _dropped(
    path: str, here: bytes | None, recorded: str
) -> tuple[FileChange | None, bytes | None]:
    """A file that the new version does not have."""
    if here is None:
        return None, None
    if sha256(here) == recorded:
        return FileChange(path, "removed"), None
    conflicts = tuple(find_conflicts(here))
    note = "edited by hand and no longer generated: it stays, as a file of yours"
    return FileChange(path, "orphan", conflicts, note=note), here


def _merged(
    path: str,
    base: bytes | None,
    here: bytes | None,
    new: bytes,
    on_conflict: OnConflict,
    restore: bool,
    gone: bool,
) -> tuple[FileChange, bytes | None]:
    """A file that was generated and is generated.

    Args:
        path: The file.
        base: Its text as it was generated last, None where that is not known.
        here: Its text on the disk, None where it is not there.
        new: Its text as it is generated now.
        on_conflict: As for `update`.
        restore: As for `update`.
        gone: Whether it is known that it was deleted.

    Returns:
        What happens, and the file's new text, None for no file.
    """
    if here is None:
        if restore:
            return FileChange(path, "new"), new
        if base == new or gone:
            return FileChange(path, "deleted"), None
        if on_conflict in ("ours", "theirs"):
            status: Status = "deleted" if on_conflict == "ours" else "new"
            return FileChange(path, status, settled=1), None if on_conflict == "ours" else new
        outcome = Merge((Region((), tuple(split_lines(new))),))
        text = outcome.marked(_LABEL, DELETED_LABEL)
        note = "deleted by hand, and changed in the new version"
        return FileChange(path, "conflict", _places(outcome, text, on_conflict), note=note), text
    base, new = _with_line_ends_of(here, base), _with_line_ends_of(here, new) or b""
    settled = 0
    if here not in (base, new) and find_conflicts(here):
        whole = settle(here, on_conflict) if on_conflict in ("ours", "theirs") else None
        if whole is None:
            note = "" if base == new else AGAIN
            return FileChange(path, "conflict", tuple(find_conflicts(here)), note=note), here
        settled, here = len(find_conflicts(here)), whole
    if here == new:
        status = "changed" if settled else "unchanged"
        return FileChange(path, status, settled=settled), new
    if base == new:
        return FileChange(path, "edited", settled=settled), here
    if here == base:
        return FileChange(path, "changed", settled=settled), new
    outcome = merge(base, here, new)
    if outcome.is_clean:
        return FileChange(path, "merged", settled=settled), outcome.take("ours")
    if on_conflict in ("ours", "theirs"):
        settled += len(outcome.conflicts_in_ours())
        text = outcome.take(on_conflict)
        return FileChange(path, "merged", settled=settled), text
    text = outcome.marked(_LABEL)
    note = "" if base is not None else "its generated text is not known"
    return FileChange(path, "conflict", _places(outcome, text, on_conflict), note=note), text


def _places(outcome: Merge, text: bytes, on_conflict: OnConflict) -> tuple[Conflict, ...]:
    """Lines in conflict: of the file as it is, where nothing will be written."""
    found = outcome.conflicts_in_ours() if on_conflict == "fail" else find_conflicts(text)
    return tuple(found)


def _with_line_ends_of(here: bytes, text: bytes | None) -> bytes | None:
    """A generated text with the line ends of the file on the disk."""
    if text is None or b"\r\n" not in here or here.count(b"\r\n") != here.count(b"\n"):
        return text
    return text.replace(b"\n", b"\r\n")


def report(
    packages: Sequence[PackageUpdate], absent: Sequence[Path], dry_run: bool
) -> Iterable[str]:
    """What an update did, line by line, for people.

    Args:
        packages: Its results.
        absent: Specs whose package was never generated.
        dry_run: Whether nothing was to be written.
    """
    for package in packages:
        for file in package.files:
            if file.status == "unchanged":
                continue
            where = package.target / file.path
            settled = f"{file.settled} conflict{'s' if file.settled > 1 else ''} settled"
            notes = [file.note, settled if file.settled else ""]
            note = "; ".join(filter(None, notes))
            places = [f":{c.start}-{c.end}" for c in file.conflicts] or [""]
            for place in places:
                yield f"{file.status:9} {where}{place}" + (f"  ({note})" if note else "")
        yield _summary(package, dry_run)
    if not _has_working_directory():
        yield "note: the working directory was replaced by its new version; `cd .` enters it"
    for spec in absent:
        yield f"absent    {spec}  (`vlmgen new {spec}` generates its package)"


def _has_working_directory() -> bool:
    """False in a directory of a package that was published anew."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


def _summary(package: PackageUpdate, dry_run: bool) -> str:
    counts: dict[str, int] = {}
    for file in package.files:
        kind = {"new": "changed", "removed": "changed"}.get(file.status, file.status)
        counts[kind] = counts.get(kind, 0) + 1
    counts.setdefault("unchanged", 0)
    order = ("conflict", "blocked", "merged", "changed", "orphan", "edited", "deleted", "unchanged")
    parts = [f"{counts[kind]} {kind}" for kind in order if kind in counts]
    if package.foreign:
        parts.append(f"{package.foreign} not vlmgen's")
    verb = "would update" if dry_run else "updated" if package.written else "left"
    return f"{verb} {package.target}: {', '.join(parts)}"


def conflict_error(packages: Sequence[PackageUpdate], on_conflict: OnConflict) -> ConflictError:
    """The message and exit code of packages with conflicts.

    Args:
        packages: Results of an update.
        on_conflict: As it was asked for.
    """
    files = [file for package in packages for file in package.conflicts]
    places = sum(max(1, len(file.conflicts)) for file in files)
    message = f"{places} conflict{'s' if places > 1 else ''} in {len(files)} file"
    message += "s" if len(files) > 1 else ""
    stopped = on_conflict == "fail" or any(
        file.status == "blocked" or file.note == AGAIN for file in files
    )
    if stopped:
        message += "; nothing was written"
        if any(package.written for package in packages):
            kept = [p.target.as_posix() for p in packages if p.conflicts and not p.written]
            message += f" to {', '.join(kept)}"
    if any(file.status == "blocked" for file in files):
        hint = "move the files that are in the way, and run it again"
    elif on_conflict == "fail":
        hint = "--on-conflict markers writes them into the files, ours or theirs settles them"
    else:
        hint = (
            "edit the files until no conflict marker is left, or settle all with --on-conflict "
            "ours (the hand edit) or theirs (the new text)"
        )
    return ConflictError(message, hint=hint)
