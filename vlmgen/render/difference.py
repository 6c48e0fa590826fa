"""What a regeneration would change in each package, and which of its inputs is the cause.

The manifest of a package holds the hash of everything that it was made from: the spec and its
bases, every template, the files of vlmgen that it copies or quotes, the generating code, and the
stored results. What differs from that today is a cause; a file whose bytes are not those of the
manifest was edited by hand. An edit that `vlmgen update` took over is no difference: it stays.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import vlmgen
from vlmgen.errors import OutputError, UsageError
from vlmgen.render import publish
from vlmgen.render.chain import spec_texts
from vlmgen.render.edits import without_edits
from vlmgen.render.generate import parse_results, read_results, unified_diff, up_to_date
from vlmgen.render.manifest import (
    MANIFEST_PATH,
    Manifest,
    generator_sha256,
    is_own,
    read_manifest,
    sha256,
)
from vlmgen.render.origin import origin_of, templates_of
from vlmgen.render.package import RenderedPackage, package_bytes, render_package

Kind = Literal["spec", "base", "template", "source", "generator", "version", "results", "hand"]
State = Literal["same", "changed", "no package", "no spec"]

_WORDS: dict[str, str] = {
    "spec": "the spec",
    "base": "a spec that it extends",
    "template": "a template",
    "source": "a file that it copies or quotes",
    "generator": "the generating code of vlmgen",
    "version": "the version of vlmgen",
    "results": "the stored results",
    "hand": "an edit by hand",
}


@dataclass(frozen=True)
class Cause:
    """Why a package would change.

    Args:
        kind: What kind of input.
        name: Which one, such as a template's name; empty where the kind says it.
        how: `changed`, `new` or `gone`.
    """

    kind: Kind
    name: str = ""
    how: str = "changed"

    def text(self) -> str:
        """For a person."""
        what = _WORDS[self.kind] + (f" {self.name}" if self.name else "")
        return what if self.kind == "hand" else f"{what} ({self.how})"


@dataclass(frozen=True)
class FileChange:
    """One file that a regeneration would change.

    Args:
        path: Path in the package.
        status: `new`, `changed` or `removed`.
        causes: What it can come from; the inputs that the file is made from, where they changed.
        added: Lines that would come.
        removed: Lines that would go.
        diff: Unified diff from the file to what it would be.
    """

    path: str
    status: str
    causes: tuple[Cause, ...]
    added: int
    removed: int
    diff: str


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
    causes: tuple[Cause, ...] = ()
    files: tuple[FileChange, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "package": str(self.package),
            "spec": None if self.spec is None else str(self.spec),
            "state": self.state,
            "causes": [asdict(cause) for cause in self.causes],
            "files": [
                {**asdict(file), "causes": [asdict(cause) for cause in file.causes]}
                for file in self.files
            ],
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
        packages: Folders of packages; empty for every spec and every package.
        search: Template directories; by default those that ship with vlmgen.
        templates: Folder of template overrides; by default the one that a spec names or that its
            package was generated with.

    Raises:
        SpecError: A spec is faulty.
        OutputError: There are no specs, or a package cannot be read.
        UsageError: A folder holds no package, or a folder of overrides is not there.
    """
    families = _families(specs_dir)
    if packages:
        return [_named(package, families, search, templates) for package in packages]
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


def _families(specs_dir: Path) -> dict[str, Path]:
    from vlmgen.spec.load import load_spec

    paths = sorted(specs_dir.glob("*.yaml"))
    if not paths:
        raise OutputError(f"{specs_dir}: holds no specs (*.yaml), so there is nothing to compare")
    families: dict[str, Path] = {}
    for path in paths:
        family = load_spec(path).family
        if family in families:
            raise OutputError(f"{families[family]} and {path} both name the family {family!r}")
        families[family] = path
    return families


def _named(
    package: Path,
    families: Mapping[str, Path],
    search: Sequence[Path] | None,
    templates: Path | None,
) -> PackageDifference:
    modules = sorted(package.glob("vllm_neuron_*/__init__.py"))
    manifest = read_manifest(package) if package.is_dir() else None
    if manifest is None and not modules:
        raise UsageError(f"{package} holds no generated package")
    in_tree = sorted(package.glob("vllm_neuron/model/*/__init__.py"))
    names = [path.parent.name for path in (*modules, *in_tree)]
    family = names[0].removeprefix("vllm_neuron_") if len(names) == 1 else ""
    spec = families.get(family)
    if spec is None:
        return PackageDifference(package, None, "no spec")
    return _compare(package, spec, search, templates)


def _compare(
    target: Path, spec: Path, search: Sequence[Path] | None, templates: Path | None
) -> PackageDifference:
    from vlmgen.spec.load import load_spec

    loaded = load_spec(spec)
    manifest = read_manifest(target)
    layout: Any = manifest.layout if manifest and manifest.layout else "out-of-tree"
    templates = templates or (templates_of(manifest, target) if manifest else None)
    origin = origin_of(spec, target, templates, search)
    if manifest and up_to_date(spec, loaded.family, target, layout, origin):
        return PackageDifference(target, spec, "same")  # the same inputs give the same bytes
    results_text = read_results(spec, loaded.family)
    results = None if results_text is None else parse_results(results_text, spec)
    package = render_package(loaded, layout, results, origin.search)
    files = package_bytes(package, origin, spec_texts(spec), results_text)
    before = publish.inspect(target)
    there = {**before.contents, **{p: (target / p).read_bytes() for p in before.foreign}}
    present = without_edits(there, files)
    today = Manifest.from_bytes(files[MANIFEST_PATH], MANIFEST_PATH)
    inputs = tuple(_changed_inputs(manifest, today, spec)) if manifest else ()
    changes = []
    for path in sorted({*present, *files}):
        if is_own(path) or present.get(path) == files.get(path):
            continue
        old = {path: present[path]} if path in present else {}
        new = {path: files[path]} if path in files else {}
        diff = unified_diff(old, new)
        lines = diff.split("\n")[2:]
        changes.append(
            FileChange(
                path,
                "new" if not old else "removed" if not new else "changed",
                tuple(_causes(path, manifest, today, package, inputs, present)),
                sum(line.startswith("+") for line in lines),
                sum(line.startswith("-") for line in lines),
                diff,
            )
        )
    edited = {path for path in before.edited if present[path] == there[path]}
    touched = sorted({*edited, *_lost(manifest, present)})
    by_hand = tuple(Cause("hand", path) for path in touched)
    state: State = "changed" if changes or inputs or by_hand else "same"
    return PackageDifference(target, spec, state, (*inputs, *by_hand), tuple(changes))


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


def _causes(
    path: str,
    old: Manifest | None,
    new: Manifest,
    package: RenderedPackage,
    inputs: Sequence[Cause],
    present: Mapping[str, bytes],
) -> Iterator[Cause]:
    """What the change of one file can come from.

    Its own templates and sources are known; a changed spec, its bases and the generating code are
    named only where none of those changed, for they may reach any file.
    """
    if old is None:
        return
    recorded = old.files.get(path)
    if path in present and recorded is not None and sha256(present[path]) != recorded:
        yield Cause("hand", path)
    elif path in present and recorded is None:
        yield Cause("hand", path)
        return
    elif path not in present and recorded is not None and path in new.files:
        yield Cause("hand", path)
    if recorded == new.files.get(path):
        return
    own = package.inputs.get(path, frozenset())
    direct = [c for c in inputs if c.kind in ("template", "source") and c.name in own]
    if path not in new.files:
        direct = [c for c in inputs if c.kind == "template" and c.how == "gone"]
    yield from direct
    if path == "README.md":
        yield from (cause for cause in inputs if cause.kind == "results")
    if not direct or path == "spec.yaml":
        yield from (c for c in inputs if c.kind in ("spec", "base", "generator", "version"))
