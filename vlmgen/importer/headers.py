"""What a checkpoint directory says: its config.json, and names and shapes of its tensors.

Only headers are read, never weights. A directory from elsewhere may hold anything, so every file
is of a bounded size, regular, and parsed in a bounded time.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vlmgen.errors import CheckpointError

MAX_JSON = 4 << 20  # config.json and tokenizer_config.json
MAX_HEADER = 8 << 20  # of one safetensors file; a tensor takes about 130 bytes
MAX_HEADERS = 32 << 20  # of all files together, and of the index
MAX_FILES = 2048
MAX_RANK = 8

_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,199}")
_DTYPES = frozenset(
    "BOOL U8 I8 F8_E5M2 F8_E4M3 F8_E8M0 F4 F6_E2M3 F6_E3M2 I16 U16 F16 BF16 I32 U32 F32 C64 F64 "
    "I64 U64".split()
)

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as far as it was read.

    Args:
        name: Name of the directory.
        config: config.json.
        shapes: Tensor name -> shape, None where the file with it is not there; None as a whole
            where there are no safetensors files.
        source: What the tensor names come from, for messages.
        notes: What was left aside.
        token_texts: Token id -> text, where tokenizer_config.json states them.
    """

    name: str
    config: Mapping[str, Any]
    shapes: Mapping[str, Shape | None] | None
    source: str = ""
    notes: tuple[str, ...] = ()
    token_texts: Mapping[int, str] = field(default_factory=dict)


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint directory, or a config.json alone.

    Raises:
        CheckpointError: Something cannot be read or is not what its name says.
    """
    try:
        if path.is_dir():
            folder: Path | None = path
            config_file = path / "config.json"
        else:
            folder, config_file = None, path
        name = (folder or config_file.absolute().parent).resolve().name
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{_shown(path)}: cannot be read: {_reason(error)}") from None
    config = read_json(config_file)
    if folder is None:
        return Checkpoint(name, config, None)
    shapes, source, notes = _tensors(folder)
    return Checkpoint(name, config, shapes, source, notes, _token_texts(folder))


def read_json(path: Path, limit: int = MAX_JSON) -> dict[str, Any]:
    """A JSON object of a bounded size.

    Raises:
        CheckpointError: There is none.
    """
    content = _read(path, limit + 1)
    if len(content) > limit:
        raise CheckpointError(f"{_shown(path)}: is larger than {limit} bytes")
    return _parse(content, path)


def _parse(content: bytes, path: Path) -> dict[str, Any]:
    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} is no JSON")

    try:
        value = json.loads(content.decode("utf-8"), parse_constant=refuse)
    except RecursionError:
        raise CheckpointError(f"{_shown(path)}: is nested too deeply") from None
    except ValueError as error:
        raise CheckpointError(f"{_shown(path)}: is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{_shown(path)}: is no JSON object")
    return value


def _read(path: Path, count: int) -> bytes:
    """At most this many bytes from the start of a regular file."""
    with _open(path) as stream:
        return stream.read(count)


def _open(path: Path) -> Any:
    """A regular file, opened without waiting for a pipe's other end."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{_shown(path)}: cannot be read: {_reason(error)}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{_shown(path)}: is not a regular file")
    return os.fdopen(descriptor, "rb")


def _tensors(folder: Path) -> tuple[dict[str, Shape | None] | None, str, tuple[str, ...]]:
    index_file = folder / "model.safetensors.index.json"
    try:
        names = sorted(e.name for e in os.scandir(folder) if e.name.endswith(".safetensors"))
        others = sorted(e.name for e in os.scandir(folder) if e.name.endswith((".bin", ".pth")))
    except OSError as error:
        raise CheckpointError(f"{_shown(folder)}: cannot be read: {_reason(error)}") from None
    notes: list[str] = []
    indexed: dict[str, str] | None = None
    if os.path.lexists(index_file):
        indexed = _index(index_file)
        names = sorted(set(indexed.values()))
    elif (folder / "model.safetensors").is_file() and len(names) > 1:
        notes.append(f"read model.safetensors alone, not {', '.join(names[:3])}")
        names = ["model.safetensors"]
    else:
        _check_shards(folder, names)
    if len(names) > MAX_FILES:
        raise CheckpointError(f"{_shown(folder)}: more than {MAX_FILES} safetensors files")
    if not names:
        if others:
            notes.append(f"{others[0]} holds no safetensors; its tensors were not read")
        return None, "", tuple(notes)
    shapes: dict[str, Shape | None] = dict.fromkeys(indexed or ())
    total, absent = 0, []
    for name in names:
        path = folder / name
        if indexed is not None and not os.path.lexists(path):
            absent.append(name)
            continue
        found, size = _header(path)
        total += size
        if total > MAX_HEADERS:
            raise CheckpointError(f"{_shown(folder)}: headers of more than {MAX_HEADERS} bytes")
        for tensor, shape in found.items():
            if indexed is not None and indexed.get(tensor) != name:
                raise CheckpointError(
                    f"{_shown(path)}: holds {printable(tensor)!r}, which the index does not say"
                )
            if indexed is None and tensor in shapes:
                raise CheckpointError(f"{_shown(path)}: {printable(tensor)!r} is in two files")
            shapes[tensor] = shape
        lost = [t for t, file in (indexed or {}).items() if file == name and t not in found]
        if lost:
            raise CheckpointError(
                f"{_shown(path)}: lacks {printable(lost[0])!r}, which the index says it holds"
            )
    if absent:
        notes.append(
            f"{len(absent)} of {len(names)} files are not here; their tensors have no shape"
        )
    source = index_file.name if indexed is not None else names[0]
    return shapes, source if len(names) == 1 or indexed else f"{names[0]} and others", tuple(notes)


def _check_shards(folder: Path, names: list[str]) -> None:
    """Numbered files without an index must be all there: a missing tensor would be evidence."""
    for name in names:
        shard = _SHARD.fullmatch(name)
        if shard is None:
            continue
        count = int(shard[3])
        here = sum(1 for other in names if other.startswith(f"{shard[1]}-"))
        if here != count:
            raise CheckpointError(
                f"{_shown(folder)}: {here} of {count} safetensors files and no index, so it cannot "
                "be told which tensors there are",
                hint="add model.safetensors.index.json or the other files",
            )


def _index(path: Path) -> dict[str, str]:
    content = _read(path, MAX_HEADERS + 1)
    if len(content) > MAX_HEADERS:
        raise CheckpointError(f"{_shown(path)}: is larger than {MAX_HEADERS} bytes")
    files = _parse(content, path).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise CheckpointError(f"{_shown(path)}: holds no weight_map")
    for tensor, name in files.items():
        if not isinstance(name, str) or not _PLAIN.fullmatch(name):
            raise CheckpointError(
                f"{_shown(path)}: {printable(tensor)!r} is said to be in {printable(str(name))!r}, "
                "which is no file name"
            )
    return files


def _header(path: Path) -> tuple[dict[str, Shape], int]:
    """Names and shapes of a safetensors file, and the header's size.

    Source: the file begins with the header's length, 8 bytes, little-endian, then JSON.
    """
    with _open(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        start = stream.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8:
            raise CheckpointError(f"{_shown(path)}: {size} bytes are no safetensors file")
        if length > size - 8:
            raise CheckpointError(
                f"{_shown(path)}: a header of {length} bytes in a file of {size}; it is truncated "
                "or no safetensors file"
            )
        if length > MAX_HEADER:
            raise CheckpointError(f"{_shown(path)}: a header of more than {MAX_HEADER} bytes")
        content = stream.read(length)
    entries = _parse(content, path)
    entries.pop("__metadata__", None)
    return {
        name: _shape(entry, name, path, size - 8 - length) for name, entry in entries.items()
    }, length


def _shape(entry: Any, name: str, path: Path, room: int) -> Shape:
    try:
        shape, (begin, end) = entry["shape"], entry["data_offsets"]
        numbers = (*shape, begin, end)
        whole = set(map(type, numbers)) == {int} and min(numbers) >= 0 and max(numbers) < 1 << 48
        right = whole and len(shape) <= MAX_RANK and begin <= end and entry["dtype"] in _DTYPES
    except (TypeError, KeyError, ValueError):
        right = False
    if not right:
        raise CheckpointError(
            f"{_shown(path)}: the header's entry {printable(name)!r} is malformed"
        )
    if end > room:
        raise CheckpointError(
            f"{_shown(path)}: {printable(name)!r} ends at byte {end} of {room}; the file is cut off"
        )
    return tuple(shape)


def _token_texts(folder: Path) -> dict[int, str]:
    """Special tokens by id, where the tokenizer's own config lists them."""
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return {}
    listed = read_json(path).get("added_tokens_decoder")
    if not isinstance(listed, dict):
        return {}
    return {
        int(number): entry["content"]
        for number, entry in listed.items()
        if number.isascii() and number.isdigit() and len(number) < 10
        and isinstance(entry, dict) and isinstance(entry.get("content"), str)
    }  # fmt: skip


def printable(text: str, limit: int = 120) -> str:
    """Text of a file, short and without control characters, for a message."""
    shown = "".join(c if c.isprintable() else "\ufffd" for c in text[:limit])
    return shown if len(text) <= limit else shown + "..."


def _shown(path: Path) -> str:
    return printable(str(path))


def _reason(error: BaseException) -> str:
    return getattr(error, "strerror", None) or str(error)
