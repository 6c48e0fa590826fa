"""`.vlmgen/edits.json` of a package: which hand edits were taken over, and which files are its own.

`vlmgen update` and `vlmgen adopt` write it, and only where there is something to say. It is for
`vlmgen check`: an edit that is recorded is meant, any other may be an accident. Merging needs no
record, since an edit is what differs from the generated text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from vlmgen.errors import OutputError
from vlmgen.render.manifest import (
    EDITS_PATH,
    MANIFEST_PATH,
    Manifest,
    base_path,
    is_hash,
    is_own,
    sha256,
)
from vlmgen.render.paths import is_safe_path

FORMAT = 1


@dataclass(frozen=True)
class Edits:
    """Hand edits that were taken over.

    Args:
        edits: Hash of a generated file as it was edited, by path; None where it was deleted.
        own: Files that are not generated and belong to the package all the same.
    """

    edits: Mapping[str, str | None] = field(default_factory=dict)
    own: tuple[str, ...] = ()

    def to_bytes(self) -> bytes | None:
        """The record as JSON with sorted keys, None where there is nothing to say."""
        if not self.edits and not self.own:
            return None
        body = {"format": FORMAT, "edits": dict(self.edits), "own": sorted(self.own)}
        return (json.dumps(body, indent=2, sort_keys=True) + "\n").encode("ascii")


def read_edits(content: bytes | None, where: str = EDITS_PATH) -> Edits:
    """Read a record.

    Args:
        content: The file, None where there is none.
        where: Its path, for messages.

    Raises:
        OutputError: It is not such a record.
    """
    if content is None:
        return Edits()
    try:
        body = json.loads(content)
        if body["format"] != FORMAT:
            raise ValueError(f"its format is {body['format']!r}, legal is {FORMAT}")
        record = Edits(dict(body["edits"]), tuple(body["own"]))
        _check_paths((*record.edits, *record.own))
        for digest in record.edits.values():
            if digest is not None and not is_hash(digest):
                raise ValueError(f"{digest!r} is not a SHA-256")
    except (ValueError, TypeError, KeyError) as error:
        raise OutputError(
            f"{where}: not a record of hand edits ({error})",
            hint="remove the file; `vlmgen update` writes it anew",
        ) from error
    return record


def without_edits(present: Mapping[str, bytes], files: Mapping[str, bytes]) -> dict[str, bytes]:
    """A package as if the hand edits that were taken over were not.

    Args:
        present: Every file of its directory.
        files: Every file as the spec gives it.
    """
    record = read_edits(present.get(EDITS_PATH))
    generated = {path: content for path, content in present.items() if path != EDITS_PATH}
    manifest = present.get(MANIFEST_PATH)
    recorded = Manifest.from_bytes(manifest, MANIFEST_PATH).files if manifest else {}
    for path, digest in record.edits.items():
        base = present.get(base_path(recorded.get(path, "")))
        here = present.get(path)
        if base is not None and digest == (None if here is None else sha256(here)):
            generated[path] = base
    for path in record.own:
        if path not in files:
            generated.pop(path, None)
    return generated


def _check_paths(paths: Iterable[str]) -> None:
    for path in paths:
        if not is_safe_path(path) or is_own(path):
            raise ValueError(f"{path!r} is not a path within the package")
