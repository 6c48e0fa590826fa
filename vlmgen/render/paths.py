"""Which paths a file of a package may have."""

from __future__ import annotations

import re
from collections.abc import Iterable

from vlmgen.errors import OutputError

_COMPONENT = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.-]*\Z")


def is_safe_path(path: str) -> bool:
    """Whether a path is relative, in normal form, of plain characters, and stays where it is."""
    parts = path.split("/")
    return all(_COMPONENT.match(part) and part not in (".", "..") for part in parts)


def check_paths(paths: Iterable[str]) -> None:
    """Refuse paths that leave the target, or that meet on a file system that ignores case.

    Raises:
        OutputError: Names the paths.
    """
    seen: dict[str, str] = {}
    files = sorted(paths)
    for path in files:
        if not is_safe_path(path):
            raise OutputError(
                f"{path!r}: not a path within the package; legal are names of letters, digits, "
                "'_', '.' and '-' joined by '/', none of them '.' or '..'"
            )
        parts = path.split("/")
        for depth in range(1, len(parts) + 1):
            name = "/".join(parts[:depth])
            kind = name + ("" if depth == len(parts) else "/")
            first = seen.setdefault(name.lower(), kind)
            if first != kind or (depth == len(parts) and files.count(path) > 1):
                raise OutputError(
                    f"{first!r} and {kind!r} are one name where case is ignored; "
                    "every file of a package needs a name of its own"
                )
