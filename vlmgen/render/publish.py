"""Atomic publication of a directory tree.

The new tree is written completely into a staging directory beside the target and then takes its
place in one step: the two names are exchanged (renameat2 with RENAME_EXCHANGE), so that at every
moment the target is either the whole old or the whole new tree. Where the file system cannot
exchange, the old tree is renamed aside and the new one in; an interruption between the two is
mended by the next run. One run at a time per parent directory, by a lock on the directory itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from vlmgen.errors import OutputError
from vlmgen.render.manifest import MANIFEST_PATH, read_manifest, sha256
from vlmgen.render.paths import check_paths

# What running tests or tools leaves in a package; none of it is vlmgen's, and it is kept.
CACHE_DIRECTORIES = frozenset(
    {"__pycache__", ".pytest_cache", ".ruff_cache", ".mypy_cache", ".hypothesis"}
)
CACHE_SUFFIX = ".egg-info"
_STAGING = ".vlmgen-staging-"
_OLD = ".vlmgen-old-"
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_LISTED = 20


class ForeignFilesError(OutputError):
    """The target holds files that vlmgen did not write."""

    code = "VG911"


class EditedFilesError(OutputError):
    """Generated files in the target were edited by hand."""

    code = "VG912"


class SymlinkError(OutputError):
    """A path that vlmgen would write is a symbolic link, or lies behind one."""

    code = "VG913"


@dataclass(frozen=True)
class Inspection:
    """What is in a target directory before anything is written.

    Args:
        contents: The bytes of every file of the old manifest that is there, and of the manifest.
        edited: Files whose bytes differ from the manifest.
        foreign: Files that are not in the manifest.
        caches: Cache directories to keep.
    """

    contents: Mapping[str, bytes]
    edited: tuple[str, ...]
    foreign: tuple[str, ...]
    caches: tuple[str, ...]


def inspect(target: Path) -> Inspection:
    """Look at a target directory, following no symbolic link.

    Raises:
        SymlinkError: The target or something in it is a symbolic link.
        OutputError: The target is not a directory, or its manifest is unreadable.
    """
    try:
        mode = target.lstat().st_mode
    except FileNotFoundError:
        return Inspection({}, (), (), ())
    if stat.S_ISLNK(mode):
        raise SymlinkError(
            f"{target}: is a symbolic link to {os.readlink(target)}; vlmgen writes through none",
            hint="name the directory itself with --out",
        )
    if not stat.S_ISDIR(mode):
        raise OutputError(f"{target}: is not a directory; legal is a new or a generated directory")
    manifest = read_manifest(target)
    known = dict(manifest.files) if manifest else {}
    contents: dict[str, bytes] = {}
    edited: list[str] = []
    foreign: list[str] = []
    caches: list[str] = []
    for path, entry in _walk(target, ""):
        if entry.is_symlink():
            raise SymlinkError(
                f"{target}/{path}: is a symbolic link; vlmgen writes through none and keeps none",
                hint="remove the link, or generate into another directory with --out",
            )
        if entry.is_dir(follow_symlinks=False):
            caches.append(path)
        elif entry.is_file() and (path in known or (manifest and path == MANIFEST_PATH)):
            contents[path] = Path(entry.path).read_bytes()
            if path in known and sha256(contents[path]) != known[path]:
                edited.append(path)
        else:
            foreign.append(path)
    return Inspection(contents, tuple(edited), tuple(foreign), tuple(caches))


def _walk(directory: Path, prefix: str) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Files and links below a directory, cache directories as one entry, in sorted order."""
    with os.scandir(directory) as entries:
        ordered = sorted(entries, key=lambda entry: entry.name)
    for entry in ordered:
        path = prefix + entry.name
        if entry.is_symlink() or not entry.is_dir(follow_symlinks=False):
            yield path, entry
        elif entry.name in CACHE_DIRECTORIES or entry.name.endswith(CACHE_SUFFIX):
            yield path, entry
        else:
            yield from _walk(Path(entry.path), path + "/")


def refuse_foreign(target: Path, inspection: Inspection) -> None:
    """Raise where the target holds files that a publication would lose.

    Raises:
        ForeignFilesError: Lists them.
    """
    if inspection.foreign:
        raise ForeignFilesError(
            f"{target}: holds files that vlmgen did not write; nothing was written:\n"
            f"{_listed(inspection.foreign)}\n"
            "legal is a directory that does not exist, is empty, or holds a generated package only",
            hint="move these files away, or generate into another directory with --out",
        )


def refuse_edited(target: Path, edited: Iterable[str]) -> None:
    """Raise where files were edited by hand.

    Raises:
        EditedFilesError: Lists them.
    """
    paths = tuple(edited)
    if paths:
        raise EditedFilesError(
            f"{target}: generated files were edited by hand; nothing was written:\n"
            f"{_listed(paths)}\n"
            "legal is a package as it was generated; changes belong in the spec or the templates",
            hint="--diff shows what would change; --force overwrites the edits",
        )


def _listed(paths: tuple[str, ...]) -> str:
    lines = [f"  {path.encode('unicode_escape').decode()}" for path in paths[:_LISTED]]
    if len(paths) > _LISTED:
        lines.append(f"  ... and {len(paths) - _LISTED} more")
    return "\n".join(lines)


@contextlib.contextmanager
def locked(parent: Path) -> Iterator[None]:
    """Hold the lock of a parent directory; another run waits. A killed run holds none."""
    descriptor = os.open(parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def recover(target: Path) -> None:
    """Finish or undo what an interrupted run left; call with the lock held."""
    left = sorted(target.parent / name for name in os.listdir(target.parent))
    for old in left:
        if old.name.startswith(f".{target.name}{_OLD}") and not os.path.lexists(target):
            old.rename(target)
    for stale in left:
        if stale.name.startswith((f".{target.name}{_STAGING}", f".{target.name}{_OLD}")):
            if stale.is_dir() and not stale.is_symlink():
                shutil.rmtree(stale)


def publish(target: Path, files: Mapping[str, bytes], *, force: bool = False) -> Inspection:
    """Make a directory hold exactly these files, in one step.

    Args:
        target: The directory; made if it does not exist, its parents too.
        files: Content by path relative to the target, the manifest included.
        force: Overwrite files that were edited by hand.

    Returns:
        What was there before.

    Raises:
        ForeignFilesError: The target holds files that vlmgen did not write.
        EditedFilesError: Generated files were edited and `force` is off.
        SymlinkError: The target or something in it is a symbolic link.
        OutputError: A path leaves the target or collides, or the system refused to write.
    """
    check_paths(files)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with locked(target.parent):
            recover(target)
            before = inspect(target)
            refuse_foreign(target, before)
            if not force:
                refuse_edited(
                    target, (p for p in before.edited if before.contents[p] != files.get(p))
                )
            if dict(before.contents) != dict(files):
                _replace(target, files, before)
    except OSError as error:
        raise OutputError(
            f"{error.filename or target}: {error.strerror}; the old tree was kept",
            hint="the parent directory must be writable",
        ) from error
    return before


def _replace(target: Path, files: Mapping[str, bytes], before: Inspection) -> None:
    staging = target.parent / f".{target.name}{_STAGING}{os.getpid()}"
    try:
        _write_tree(staging, files, before, target)
        if not target.exists():
            os.rename(staging, target)
        elif not _exchange(staging, target):
            old = target.parent / f".{target.name}{_OLD}{os.getpid()}"
            os.rename(target, old)
            os.rename(staging, target)
        _sync_directory(target.parent)
    finally:
        recover(target)


def _write_tree(
    staging: Path, files: Mapping[str, bytes], before: Inspection, target: Path
) -> None:
    staging.mkdir()
    directories = {staging}
    for path in sorted(files):
        destination = staging / path
        if destination.parent not in directories:
            destination.parent.mkdir(parents=True, exist_ok=True)
            directories.update(p for p in destination.parents if staging in (p, *p.parents))
        with open(destination, "xb") as stream:
            stream.write(files[path])
            stream.flush()
            os.fsync(stream.fileno())
        if before.contents.get(path) == files[path]:
            old = (target / path).lstat()
            os.utime(destination, ns=(old.st_atime_ns, old.st_mtime_ns))
    for cache in before.caches:
        if (staging / cache).parent.is_dir():
            shutil.copytree(
                target / cache, staging / cache, symlinks=True, copy_function=_link_or_copy
            )
    for directory in sorted(directories, reverse=True):
        _sync_directory(directory)


def _link_or_copy(source: str, destination: str) -> None:
    try:
        os.link(source, destination, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, destination, follow_symlinks=False)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two names in one step; False where the system or file system cannot."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    arguments = (_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE)
    if renameat2(*arguments) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM):
        return False
    raise OSError(code, os.strerror(code), str(second))
