"""What a regeneration would change in each package, and which of its inputs is the cause.

The manifest of a package holds the hash of everything that it was made from: the spec and its
bases, every template, the files of vlmgen that it copies or quotes, the generating code, and the
stored results. What differs from that today is a cause; a file whose bytes are not those of the
manifest was edited by hand. An edit that `vlmgen update` took over is no difference: it stays, and
so do files that vlmgen did not write. What caused which lines is in `attribution.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import vlmgen
from vlmgen.errors import SpecError, UsageError
from vlmgen.render import publish
from vlmgen.render.attribution import (
    Cause,
    Causes,
    Hunk,
    Kind,
    hunks_of,
    rendered,
    steps,
    value_causes,
)
from vlmgen.render.chain import spec_texts
from vlmgen.render.edits import without_edits
from vlmgen.render.generate import families_in, family_of, parse_results, read_results, up_to_date
from vlmgen.render.manifest import (
    MANIFEST_PATH,
    Manifest,
    generator_sha256,
    is_own,
    known_texts,
    read_manifest,
)
from vlmgen.render.origin import origin_of, spec_of, templates_of
from vlmgen.render.package import RenderedPackage, package_bytes, render_package
from vlmgen.render.plan import PackagePlan

if TYPE_CHECKING:
    from vlmgen.spec import Spec

State = Literal["same", "changed", "no package", "no spec"]


@dataclass(frozen=True)
class FileChange:
    """One file that a regeneration would change.

    Args:
        path: Path in the package.
        status: `new`, `changed` or `removed`.
        causes: What its hunks come from.
        hunks: Lines that would change, with their causes.
    """

    path: str
    status: Literal["new", "changed", "removed"]
    causes: Causes
    hunks: tuple[Hunk, ...]

    @property
    def added(self) -> int:
        """Lines that would come."""
        return self._count("+")

    @property
    def removed(self) -> int:
        """Lines that would go."""
        return self._count("-")

    @property
    def diff(self) -> str:
        """Unified diff from the file to what it would be, causes beside the line numbers."""
        old = "/dev/null" if self.status == "new" else f"a/{self.path}"
        new = "/dev/null" if self.status == "removed" else f"b/{self.path}"
        return f"--- {old}\n+++ {new}\n" + "".join(hunk.text() for hunk in self.hunks)

    def _count(self, sign: str) -> int:
        return sum(line.startswith(sign) for hunk in self.hunks for line in hunk.lines)

    def to_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "path": self.path,
            "status": self.status,
            "causes": [cause.to_dict() for cause in self.causes],
            "added": self.added,
            "removed": self.removed,
            "hunks": [hunk.to_dict() for hunk in self.hunks],
            "diff": self.diff,
        }


@dataclass(frozen=True)
class PackageDifference:
    """One package.

    Args:
        package: Its folder.
        spec: The file of its spec, or None.
        state: Whether it is what its spec gives.
        causes: Inputs that differ from those it was made from, and edits.
        files: Files that would change, the manifest left out.
    """

    package: Path
    spec: Path | None
    state: State
    causes: Causes = ()
    files: tuple[FileChange, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "package": str(self.package),
            "spec": None if self.spec is None else str(self.spec),
            "state": self.state,
            "causes": [cause.to_dict() for cause in self.causes],
            "files": [file.to_dict() for file in self.files],
        }


def differences(
    specs_dir: Path,
    generated_dir: Path,
    packages: Sequence[Path] = (),
    search: Sequence[Path] | None = None,
    templates: Path | None = None,
) -> list[PackageDifference]:
    """Render in memory what the specs give today and compare; writes nothing.

    Args:
        specs_dir: Directory of the specs.
        generated_dir: Directory of the packages.
        packages: Folders of packages, each compared with the spec that its manifest names; empty
            for every spec and every package.
        search: Template directories; by default those that ship with vlmgen.
        templates: Folder of template overrides; by default the one that a spec names or that its
            package was generated with.

    Raises:
        SpecError: A spec is faulty.
        OutputError: There are no specs, or a package cannot be read.
        UsageError: A folder holds no package, or a folder of overrides is not there.
    """
    if packages:
        return [_named(package, search, templates) for package in packages]
    families = families_in(specs_dir, "compare")
    found = []
    for family, spec in families.items():
        target = generated_dir / family
        if target.is_dir():
            found.append(_compare(target, spec, search, templates))
        else:
            found.append(PackageDifference(target, spec, "no package"))
    if generated_dir.is_dir():
        for entry in sorted(generated_dir.iterdir()):
            if (entry / MANIFEST_PATH).is_file() and entry.name not in families:
                found.append(PackageDifference(entry, None, "no spec"))
    return sorted(found, key=lambda difference: difference.package)


def _named(
    package: Path, search: Sequence[Path] | None, templates: Path | None
) -> PackageDifference:
    manifest = read_manifest(package) if package.is_dir() else None
    if manifest is None:
        raise UsageError(
            f"{package}: is not a package that vlmgen generated, {MANIFEST_PATH} is missing"
        )
    try:
        spec = spec_of(manifest, package)
    except UsageError:
        return PackageDifference(package, None, "no spec")
    return _compare(package, spec, search, templates)


def _compare(
    target: Path, spec: Path, search: Sequence[Path] | None, templates: Path | None
) -> PackageDifference:
    from vlmgen.spec.load import load_spec

    manifest = read_manifest(target)
    layout: Any = manifest.layout if manifest and manifest.layout else "out-of-tree"
    templates = templates or (templates_of(manifest, target) if manifest else None)
    origin = origin_of(spec, target, templates, search)
    family = family_of(spec)
    if manifest and up_to_date(spec, family, target, layout, origin):
        return PackageDifference(target, spec, "same")  # the same inputs give the same bytes
    loaded = load_spec(spec)
    results_text = read_results(spec, family)
    results = None if results_text is None else parse_results(results_text, spec)
    package = render_package(loaded, layout, results, origin.search)
    files = package_bytes(package, origin, spec_texts(spec), results_text)
    before = publish.inspect(target, foreign_links=True)
    there = {**before.contents, **_in_the_way(target, before, files)}
    present = without_edits(there, files)
    today = Manifest.from_bytes(files[MANIFEST_PATH], MANIFEST_PATH)
    inputs = tuple(_changed_inputs(manifest, today, spec)) if manifest else ()
    bases = known_texts(manifest, before.contents) if manifest else {}
    old = _old_spec(package.plan, bases) if _is_of_specs(inputs) else None
    values = value_causes(old, loaded, spec) if old else []
    made = package
    chain: list[tuple[Causes, Mapping[str, bytes]]] = []
    if old and values and manifest:
        only_specs = all(cause.kind in ("spec", "base") for cause in inputs)
        then = None if only_specs else rendered(old, layout, results, origin.search)
        if then:
            # Another value may ask for other templates: that is no change of a template.
            today = replace(today, templates=then.templates, sources=then.sources)
            inputs = tuple(_changed_inputs(manifest, today, spec))
            made = then
        if then or only_specs:  # else nothing lies between that could be rendered
            chain += steps(old, loaded, values, then, layout, results, origin.search)
    inputs = _with_values(inputs, values)
    changes = []
    for path in sorted({*present, *files}):
        here, new = present.get(path), files.get(path)
        if is_own(path) or here == new:
            continue
        known = _known_causes(path, manifest, today, made, inputs)
        hunks = _hunks(path, here, bases.get(path), chain, new, known, values)
        named = dict.fromkeys(cause for hunk in hunks for cause in hunk.causes)
        status: Any = "new" if here is None else "removed" if new is None else "changed"
        changes.append(FileChange(path, status, tuple(named), hunks))
    edited = {path for path in before.edited if present[path] == there[path]}
    touched = sorted({*edited, *_lost(manifest, present)})
    by_hand = tuple(Cause("hand", path) for path in touched)
    state: State = "changed" if changes or inputs or by_hand else "same"
    return PackageDifference(target, spec, state, (*inputs, *by_hand), tuple(changes))


def _is_of_specs(inputs: Causes) -> bool:
    """Whether a spec is among the inputs that changed."""
    return any(cause.kind in ("spec", "base") for cause in inputs)


def _in_the_way(
    target: Path, before: publish.Inspection, files: Mapping[str, bytes]
) -> dict[str, bytes]:
    """Files that vlmgen did not write where the new version has one; others are left alone."""
    paths = [path for path in before.foreign if path in files and (target / path).is_file()]
    return {path: (target / path).read_bytes() for path in paths}


def _old_spec(plan: PackagePlan, bases: Mapping[str, bytes]) -> Spec | None:
    """The spec that a package was generated from; None where the layout does not keep it."""
    from vlmgen.spec.load import load_spec_text

    path = next((file.path for file in plan.files if file.mode == "spec"), "")
    try:
        return load_spec_text(bases[path].decode("utf-8")) if path in bases else None
    except SpecError:
        return None  # it was legal for another vlmgen


def _with_values(inputs: Causes, values: Sequence[Cause]) -> Causes:
    """The inputs, with the values that changed in a spec instead of its name."""
    told = {(value.kind, value.name) for value in values}
    rest = [cause for cause in inputs if (cause.kind, cause.name) not in told]
    return (*values, *rest)


def _hunks(
    path: str,
    here: bytes | None,
    base: bytes | None,
    chain: Sequence[tuple[Causes, Mapping[str, bytes]]],
    new: bytes | None,
    known: Causes,
    values: Sequence[Cause],
) -> tuple[Hunk, ...]:
    """The hunks of one file.

    Args:
        path: The file.
        here: Its text on the disk.
        base: Its text as it was generated last, None where it was not or is not known.
        chain: The package between then and now.
        new: Its text as it would be.
        known: What its change can come from, the values of the spec left out.
        values: Values of the spec that changed.
    """
    texts, causes = [here], []
    for step, package in chain:
        causes.append(step or known)
        texts.append(package.get(path))
    left = [value for value in values if all(value not in step for step, _ in chain)]
    causes.append((*known, *left) if not chain else tuple(left))
    texts.append(new)
    if here != base:
        causes.insert(0, (Cause("hand", path),))
        texts.insert(1, base)
    return hunks_of(texts, causes)


def _lost(manifest: Manifest | None, present: Mapping[str, bytes]) -> set[str]:
    """Files that were generated and are not there."""
    return set() if manifest is None else set(manifest.files) - set(present)


def _changed_inputs(old: Manifest, new: Manifest, spec: Path) -> Iterator[Cause]:
    if not old.vlmgen:
        yield Cause("version", "(its manifest is of another format)")
        return
    if old.vlmgen != vlmgen.__version__:
        yield Cause("version", f"{old.vlmgen} to {vlmgen.__version__}")
    if old.spec != new.spec:
        yield Cause("spec", spec.name)
    yield from _changed("base", old.bases, new.bases)
    yield from _changed("template", old.templates, new.templates)
    yield from _changed("source", old.sources, new.sources)
    if old.generator != generator_sha256():
        yield Cause("generator")
    if old.results != new.results:
        how = "new" if old.results is None else "gone" if new.results is None else "changed"
        yield Cause("results", how=how)


def _changed(kind: Kind, old: Mapping[str, str], new: Mapping[str, str]) -> Iterator[Cause]:
    for name in sorted({*old, *new}):
        if old.get(name) != new.get(name):
            how = "new" if name not in old else "gone" if name not in new else "changed"
            yield Cause(kind, name, how)


def _known_causes(
    path: str, old: Manifest | None, new: Manifest, package: RenderedPackage, inputs: Causes
) -> Causes:
    """What the change of one file can come from, values of the spec left out.

    Its own templates and sources are known; the generating code, and a spec whose changed values
    are not known, are named only where none of those changed, for they may reach any file.
    """
    if old is None or old.files.get(path) == new.files.get(path):
        return ()
    own = package.inputs.get(path, frozenset())
    found = [c for c in inputs if c.kind in ("template", "source") and c.name in own]
    if path not in new.files:
        found = [c for c in inputs if c.kind == "template" and c.how == "gone"]
    anywhere = [
        c for c in inputs if c.kind in ("spec", "base", "generator", "version") and not c.path
    ]
    if path == "README.md":
        found += [cause for cause in inputs if cause.kind == "results"]
    return tuple(found or anywhere)
