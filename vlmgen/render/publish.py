"""Atomic publication of a directory tree.

The new tree is written completely into a staging directory beside the target and then takes its
place in one step: the two names are exchanged (renameat2 with RENAME_EXCHANGE), so that at every
moment the target is either the whole old or the whole new tree. Where the file system cannot
exchange, the old tree is renamed aside and the new one in; an interruption between the two is
mended by the next run. One run at a time per parent directory, by a lock on the directory itself.

What is not vlmgen's goes over into the new tree as hard links, so that it is the same file before
and after, whatever it is; only directories are made anew, with the mode that they had.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from vlmgen.errors import OutputError
from vlmgen.render.manifest import FOLDER, is_own, read_manifest, sha256
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
        contents: The bytes of every file of the old manifest that is there, and of vlmgen's
            records.
        edited: Files whose bytes differ from the manifest.
        foreign: Files that are not in the manifest.
        stamps: What `stat` says of every file, to notice a change later.
    """

    contents: Mapping[str, bytes]
    edited: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()
    stamps: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


def inspect(target: Path, *, foreign_links: bool = False) -> Inspection:
    """Look at a target directory, following no symbolic link.

    Args:
        target: The directory.
        foreign_links: Take a symbolic link that is in no generated file's way for a foreign file.

    Raises:
        SymlinkError: The target or something in it is a symbolic link.
        OutputError: The target is not a directory, or its manifest is unreadable.
    """
    try:
        mode = target.lstat().st_mode
    except FileNotFoundError:
        return Inspection({})
    if stat.S_ISLNK(mode):
        raise SymlinkError(
            f"{target}: is a symbolic link to {os.readlink(target)}; vlmgen writes through none",
            hint="name the directory itself",
        )
    if not stat.S_ISDIR(mode):
        raise OutputError(f"{target}: is not a directory; legal is a new or a generated directory")
    manifest = read_manifest(target)
    known = dict(manifest.files) if manifest else {}
    contents: dict[str, bytes] = {}
    edited: list[str] = []
    foreign: list[str] = []
    stamps: dict[str, tuple[int, ...]] = {}
    for path, entry in _walk(target, ""):
        if entry.is_symlink() and not (foreign_links and _is_aside(path, known)):
            raise SymlinkError(
                f"{target}/{path}: is a symbolic link; vlmgen writes through none and keeps none",
                hint="remove the link, or generate into another directory with --out",
            )
        if entry.is_dir(follow_symlinks=False):
            continue
        status = entry.stat(follow_symlinks=False)
        stamps[path] = (status.st_ino, status.st_mtime_ns, status.st_size, status.st_mode)
        if stat.S_ISREG(status.st_mode) and (path in known or (manifest and is_own(path))):
            contents[path] = Path(entry.path).read_bytes()
            if path in known and sha256(contents[path]) != known[path]:
                edited.append(path)
        else:
            foreign.append(path)
    return Inspection(contents, tuple(edited), tuple(foreign), stamps)


def _is_aside(path: str, known: Collection[str]) -> bool:
    """Whether no generated file, and none of vlmgen's records, lies at a path or behind it."""
    return not f"{path}/".startswith(f"{FOLDER}/") and not any(
        name == path or name.startswith(f"{path}/") for name in known
    )


def _walk(directory: Path, prefix: str) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Files and links below a directory, cache directories as one entry, in sorted order."""
    with os.scandir(directory) as entries:
        ordered = sorted(entries, key=lambda entry: entry.name)
    for entry in ordered:
        path = prefix + entry.name
        if entry.is_symlink() or not entry.is_dir(follow_symlinks=False):
            yield path, entry
        elif _is_cache(entry.name):
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
            "legal is a package as it was generated",
            hint="`vlmgen update` carries the edits over; --diff shows what would change; --force "
            "overwrites the edits",
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
                _remove_tree(stale)


def _remove_tree(stale: Path) -> None:
    """Remove a tree, directories too that their owner may not write."""
    try:
        shutil.rmtree(stale)
    except PermissionError:
        for name, _, _ in os.walk(stale):
            os.chmod(name, stat.S_IRWXU)
        shutil.rmtree(stale)


def publish(target: Path, files: Mapping[str, bytes], *, force: bool = False) -> Inspection:
    """Make a directory hold exactly these files and caches, in one step.

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
    with writing(target) as before:
        refuse_foreign(target, before)
        if not force:
            refuse_edited(target, (p for p in before.edited if before.contents[p] != files.get(p)))
        replace(target, files, before)
    return before


@contextlib.contextmanager
def writing(target: Path, *, foreign_links: bool = False) -> Iterator[Inspection]:
    """Hold the lock of a target, with what an interrupted run left mended.

    Args:
        target: The directory; its parents are made.
        foreign_links: As for `inspect`.

    Raises:
        OutputError: The system refused to write, or as `inspect`.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with locked(target.parent):
            recover(target)
            yield inspect(target, foreign_links=foreign_links)
    except OSError as error:
        raise OutputError(
            f"{error.filename or target}: {error.strerror or error}; the old tree was kept",
            hint="the parent directory must be writable",
        ) from error


def replace(target: Path, files: Mapping[str, bytes], before: Inspection) -> bool:
    """Make the files of vlmgen in a directory these, in one step; call with the lock held.

    Args:
        target: The directory; files that are not in `before.contents` stay as they are.
        files: Content by path, vlmgen's records included.
        before: What `inspect` found.

    Returns:
        Whether anything was to do.

    Raises:
        OutputError: A path collides with a foreign file, or something changed since the inspection.
    """
    if dict(before.contents) == dict(files):
        return False
    check_paths(files)
    staging = target.parent / f".{target.name}{_STAGING}{os.getpid()}"
    try:
        _write_tree(staging, files, before, target)
        if not target.exists():
            os.rename(staging, target)
        else:
            _refuse_changed(target, before)
            if not _exchange(staging, target):
                old = target.parent / f".{target.name}{_OLD}{os.getpid()}"
                os.rename(target, old)
                os.rename(staging, target)
        _sync_directory(target.parent)
    finally:
        recover(target)
    return True


def add(target: Path, records: Mapping[str, bytes], before: Inspection) -> None:
    """Put vlmgen's records beside files that are there, in one step; call with the lock held.

    Args:
        target: A directory without records.
        records: Content by path, all of them in `.vlmgen/`.
        before: What `inspect` found.

    Raises:
        OutputError: Something changed since the inspection.
    """
    check_paths(records)
    staging = target.parent / f".{target.name}{_STAGING}{os.getpid()}"
    try:
        _write_tree(staging, records, Inspection({}), staging)
        _refuse_changed(target, before)
        os.rename(staging / FOLDER, target / FOLDER)
        _sync_directory(target)
    finally:
        recover(target)


def _refuse_changed(target: Path, before: Inspection) -> None:
    """Raise where somebody wrote into the target since it was inspected: that would be lost."""
    now = inspect(target, foreign_links=True).stamps
    changed = sorted(p for p in {*now, *before.stamps} if now.get(p) != before.stamps.get(p))
    if changed:
        raise OutputError(
            f"{target}: files changed while vlmgen was at work; nothing was written:\n"
            f"{_listed(tuple(changed))}",
            hint="run it again",
        )


def _write_tree(
    staging: Path, files: Mapping[str, bytes], before: Inspection, target: Path
) -> None:
    caches: list[str] = []
    is_new = not target.exists()
    staging.mkdir()
    if not is_new:
        _carry(target, staging, "", before.contents.keys(), caches)
    for path in sorted(files):
        destination = staging / path
        destination.parent.mkdir(parents=True, exist_ok=True)
        if before.contents.get(path) == files[path]:
            _link_or_copy(target / path, destination)
            continue
        with open(destination, "xb") as stream:
            stream.write(files[path])
            stream.flush()
            os.fsync(stream.fileno())
        if path in before.contents:
            shutil.copymode(target / path, destination)
    for path in caches:
        if (staging / path).parent.is_dir():
            shutil.copytree(
                target / path, staging / path, symlinks=True, copy_function=_link_or_copy
            )
    for name, directories, _ in os.walk(staging, topdown=True):
        directories[:] = [each for each in directories if not _is_cache(each)]
        directory = Path(name)
        old = target / directory.relative_to(staging)
        if old.is_dir():
            shutil.copymode(old, directory)
        _sync_directory(directory)


def _carry(old: Path, new: Path, prefix: str, known: Collection[str], caches: list[str]) -> bool:
    """Link everything that is not vlmgen's from one tree into another.

    Args:
        old: A directory of the old tree.
        new: The same directory of the new tree; made where something goes into it.
        prefix: Its path in the tree, with a slash at the end.
        known: Paths that are vlmgen's.
        caches: Cache directories that were passed over are added here.

    Returns:
        Whether the directory is in the new tree now.
    """
    with os.scandir(old) as found:
        entries = sorted(found, key=lambda entry: entry.name)
    if old.lstat().st_dev != old.parent.lstat().st_dev and prefix:
        raise OSError(errno.EXDEV, "is a mounted file system within the package", str(old))
    kept = not entries  # an empty directory is somebody's too
    for entry in entries:
        path = prefix + entry.name
        if _is_cache(entry.name) and entry.is_dir(follow_symlinks=False):
            caches.append(path)
        elif entry.is_dir(follow_symlinks=False):
            kept |= _carry(Path(entry.path), new / entry.name, path + "/", known, caches)
        elif path not in known:
            new.mkdir(parents=True, exist_ok=True)
            _link_or_copy(Path(entry.path), new / entry.name)
            kept = True
    if kept:
        new.mkdir(parents=True, exist_ok=True)
    return kept


def _is_cache(name: str) -> bool:
    return name in CACHE_DIRECTORIES or name.endswith(CACHE_SUFFIX)


def _link_or_copy(source: str | Path, destination: str | Path) -> None:
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
