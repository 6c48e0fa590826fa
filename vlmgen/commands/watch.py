"""`vlmgen watch`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from vlmgen.options import ForceFlag, OutOption, SpecArgument, TemplatesOption

if TYPE_CHECKING:
    from vlmgen.render.generate import GenerationResult

NAME = "watch"
EXAMPLE = "Example: vlmgen watch specs/NAME.yaml"


def command(
    spec: SpecArgument,
    out: OutOption = None,
    force: ForceFlag = False,
    templates: TemplatesOption = None,
) -> None:
    """Regenerate a package whenever its spec, what it extends or a template changes.

    Hand edits are carried over as `vlmgen update` does; where one is in conflict, nothing changes.
    """
    from vlmgen.spec.source import read_text
    from vlmgen.watch import changes, watch, watched_files

    read_text(spec, str(spec))  # a name that is misspelt is no change to wait for
    try:
        watch(
            spec,
            lambda: _regenerate(spec, out, force, templates),
            changes(lambda: watched_files(spec, overrides=_overrides(spec, out, templates))),
        )
    except KeyboardInterrupt:
        print("stopped")


def _regenerate(
    spec: Path, out: Path | None, force: bool, templates: Path | None
) -> GenerationResult:
    from vlmgen.render.generate import GenerationResult, family_of, generate, target_of
    from vlmgen.render.manifest import read_manifest
    from vlmgen.render.update import conflict_error, report, update

    target = target_of(out, family_of(spec))
    if force or read_manifest(target) is None:
        return generate(spec, out=out, force=force, templates=templates)
    done = update(target, spec, on_conflict="fail", templates=templates)
    if done.conflicts:
        error = conflict_error([done], "fail")
        error.message = "\n".join([*report([done], [], False)][:-1] + [error.message])
        error.hint = f"settle them with `vlmgen update {target}`"
        raise error
    # What a hand changed and the update left alone is no change.
    left = ("edited", "deleted", "orphan")
    files = ((f.path, "unchanged" if f.status in left else f.status) for f in done.files)
    return GenerationResult(target, tuple(files), written=done.written)


def _overrides(spec: Path, out: Path | None, templates: Path | None) -> Path | None:
    """The folder of overrides that the package was generated with, asked anew at every look."""
    from vlmgen.errors import VlmgenError
    from vlmgen.render.generate import family_of, target_of
    from vlmgen.render.manifest import read_manifest
    from vlmgen.render.origin import templates_of

    try:
        target = target_of(out, family_of(spec))
        manifest = read_manifest(target)
        return templates or (templates_of(manifest, target) if manifest else None)
    except VlmgenError:  # the next run says it
        return templates
