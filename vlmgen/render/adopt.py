"""`vlmgen adopt`: take an existing package folder over, as hand edits on what the spec gives.

Nothing of the folder is touched. Only `.vlmgen/` is added, in one step: the generated texts as the
base of later merges, and a record of how the folder differs from them. From then on the package is
one that vlmgen generated and somebody edited.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vlmgen.errors import OutputError, UsageError
from vlmgen.render import publish
from vlmgen.render.edits import Edits
from vlmgen.render.generate import render_spec_file, unified_diff
from vlmgen.render.manifest import EDITS_PATH, FOLDER, is_own, sha256
from vlmgen.render.merge import find_conflicts
from vlmgen.render.origin import origin_of
from vlmgen.render.paths import is_safe_path
from vlmgen.render.plan import Layout


@dataclass(frozen=True)
class AdoptedFile:
    """How a file differs from what the spec gives.

    Args:
        path: The file in the folder.
        status: `same`, `differs`, `absent` (the spec gives it, the folder has it not) or `own`
            (the other way round).
        added: Lines that the spec does not give.
        removed: Lines of the spec that are not there.
    """

    path: str
    status: Literal["same", "differs", "absent", "own"]
    added: int = 0
    removed: int = 0


@dataclass(frozen=True)
class Adoption:
    """What adopting a folder found.

    Args:
        target: The folder.
        files: Its files and those that the spec gives, sorted by path.
        diff: Unified diff from what the spec gives to the folder, without files of its own.
        written: Whether the folder was taken over.
    """

    target: Path
    files: tuple[AdoptedFile, ...]
    diff: str
    written: bool

    def lines(self) -> Iterator[str]:
        """The report for people."""
        for file in self.files:
            if file.status != "same":
                change = f"  +{file.added} -{file.removed}" if file.status == "differs" else ""
                yield f"{file.status:9} {file.path}{change}"
        counts = [
            f"{sum(file.status == status for file in self.files)} {words}"
            for status, words in (
                ("same", "as generated"),
                ("differs", "edited"),
                ("absent", "left out"),
                ("own", "of its own"),
            )
        ]
        yield f"{'adopted' if self.written else 'would adopt'} {self.target}: {', '.join(counts)}"

    def to_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "target": self.target.as_posix(),
            "written": self.written,
            "files": [vars(file) for file in self.files],
        }


def adopt(
    target: str | os.PathLike[str],
    spec: Path,
    layout: Layout = "out-of-tree",
    *,
    templates: Path | None = None,
    dry_run: bool = False,
    search: Sequence[Path] | None = None,
) -> Adoption:
    """Take a folder over.

    Args:
        target: The folder of the package.
        spec: The spec that describes it.
        layout: Where the modules lie in it.
        templates: Folder of template overrides; by default the one that the spec names.
        dry_run: Only report the differences.
        search: Template directories; by default those that ship with vlmgen.

    Raises:
        SpecError: The spec is faulty.
        UsageError: There is no such folder, it is a package of vlmgen already, or nothing in it is
            what the spec would give.
        OutputError: The folder cannot be written, or a file of it holds conflict markers.
    """
    target = Path(os.path.normpath(target))
    if not target.is_dir():
        raise UsageError(f"{target}: is not a folder; legal is the folder of an existing package")
    if os.path.lexists(target / FOLDER):
        raise UsageError(
            f"{target}: is a package of vlmgen already, it has {FOLDER}/",
            hint="`vlmgen update` carries its hand edits over",
        )
    origin = origin_of(spec, target, templates, search)
    family, files = render_spec_file(spec, layout, origin)
    generated = {path: text for path, text in files.items() if not is_own(path)}
    with publish.writing(target, foreign_links=True) as before:
        present = _present(target, before, generated)
        if not present:
            raise UsageError(
                f"{target}: holds none of the {len(generated)} files that {spec} gives, such as "
                f"{_first_module(generated, family)}",
                hint="another --layout may fit, or `vlmgen new` is what you want",
            )
        found = [_compare(path, present.get(path), generated[path]) for path in sorted(generated)]
        own = [path for path in before.foreign if path not in generated]
        found += [AdoptedFile(path, "own") for path in own]
        edits = {
            file.path: None if file.status == "absent" else sha256(present[file.path])
            for file in found
            if file.status in ("differs", "absent")
        }
        modules = tuple(path for path in own if path.endswith(".py") and is_safe_path(path))
        record = Edits(edits, modules).to_bytes()
        records = {path: text for path, text in files.items() if is_own(path)}
        if record is not None:
            records[EDITS_PATH] = record
        if not dry_run:
            publish.add(target, records, before)
    return Adoption(
        target,
        tuple(sorted(found, key=lambda file: file.path)),
        unified_diff({p: t for p, t in generated.items() if present.get(p) != t}, present),
        not dry_run,
    )


def _present(
    target: Path, before: publish.Inspection, generated: Mapping[str, bytes]
) -> dict[str, bytes]:
    """Contents of the generated files that are there."""
    present: dict[str, bytes] = {}
    for path in before.foreign:
        file = target / path
        in_the_way = [p for p in generated if p.startswith(f"{path}/")]
        if (path in generated and (file.is_symlink() or not file.is_file())) or in_the_way:
            raise OutputError(
                f"{file}: is no plain file, and {in_the_way[0] if in_the_way else path} belongs "
                "there; vlmgen follows no link"
            )
        if path not in generated:
            continue
        present[path] = file.read_bytes()
        conflicts = find_conflicts(present[path])
        if conflicts:
            raise OutputError(
                f"{file}:{conflicts[0].start}: holds conflict markers; nothing was written",
                hint="edit the file until none is left",
            )
    return present


def _compare(path: str, here: bytes | None, generated: bytes) -> AdoptedFile:
    if here is None:
        return AdoptedFile(path, "absent", removed=len(generated.splitlines()))
    if here == generated:
        return AdoptedFile(path, "same")
    matcher = difflib.SequenceMatcher(
        None, generated.splitlines(), here.splitlines(), autojunk=False
    )
    changes = [codes for codes in matcher.get_opcodes() if codes[0] != "equal"]
    added = sum(j2 - j1 for _, _, _, j1, j2 in changes)
    return AdoptedFile(path, "differs", added, sum(i2 - i1 for _, i1, i2, _, _ in changes))


def _first_module(generated: Mapping[str, bytes], family: str) -> str:
    modules = sorted(path for path in generated if family in path and path.endswith("config.py"))
    return modules[0] if modules else min(generated)
