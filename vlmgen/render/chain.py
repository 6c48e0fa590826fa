"""The files that a spec consists of: itself and what it `extends`, found without parsing YAML.

Whether a package is up to date is asked often and must not load a YAML parser.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from vlmgen.render.templates import shipped_specs

MAX_CHAIN = 8
_LINE = re.compile(
    rb"^(?:\xef\xbb\xbf)?extends:[ \t]*[\"']?([^\s\"'#]+)[\"']?[ \t]*(?:#.*)?\r?$", re.MULTILINE
)
_TEMPLATES = re.compile(
    rb"^(?:\xef\xbb\xbf)?templates:[ \t]*(?:[\"']?([^\s\"'#]+)[\"']?)?[ \t]*(?:#.*)?\r?$",
    re.MULTILINE,
)
_NONE = ("null", "Null", "NULL", "~", "")
TEMPLATES_FOLDER = r"^(\.\./){0,8}[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)*$"


def spec_chain(path: Path) -> list[Path]:
    """A spec file and the files it extends, nearest first, found without parsing them.

    The chain ends where a file cannot be read; loading the spec says why.
    """
    chain = [path]
    while len(chain) <= MAX_CHAIN:
        try:
            found = _LINE.search(chain[-1].read_bytes())
        except OSError:
            break
        if found is None:
            break
        base = base_path(found.group(1).decode("utf-8", "replace"), chain[-1])
        if base in chain:
            break
        chain.append(base)
    return chain


def spec_texts(path: Path) -> dict[str, bytes]:
    """File name -> text of a spec file and of every file it extends, the spec first, for hashing.

    Files of one name in several folders are told apart by their place in the chain.

    Raises:
        OSError: One of them cannot be read.
    """
    texts: dict[str, bytes] = {}
    for place, file in enumerate(spec_chain(path)):
        name = file.name if file.name not in texts else f"{place}/{file.name}"
        texts[name] = file.read_bytes()
    return texts


def stated_templates(path: Path) -> Path | None:
    """The folder of template overrides that a spec names, itself or by what it extends.

    A folder is relative to the file that names it. `templates: null` takes an inherited one away.
    What no spec may name is none: loading the spec says so, before any folder was looked into.
    """
    for file in spec_chain(path):
        try:
            found = _TEMPLATES.search(file.read_bytes())
        except OSError:
            break
        if found is not None:
            name = (found.group(1) or b"").decode("utf-8", "replace")
            legal = name not in _NONE and re.match(TEMPLATES_FOLDER, name)
            return Path(os.path.normpath(file.parent / name)) if legal else None
    return None


def base_path(name: str, path: Path) -> Path:
    """The file that `extends: name` in `path` means."""
    beside = path.parent / name
    shipped = shipped_specs() / Path(name).name
    return shipped if not beside.is_file() and shipped.is_file() else beside
