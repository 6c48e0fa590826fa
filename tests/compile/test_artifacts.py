"""The artifact cache: whole entries or none, whoever writes, is killed, or damages it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from vlmgen.compile.artifacts import ArtifactCache, default_folder, digest, digest_of_files
from vlmgen.errors import OutputError

KEY = digest("a program")
PAYLOAD = b"machine code \x00\n" * 100_000


def test_an_entry_comes_back_as_it_was(tmp_path: Path) -> None:
    cache = ArtifactCache(tmp_path)
    assert cache.get("programs", KEY) is None
    cache.put("programs", KEY, {"flops": 7.0}, PAYLOAD)
    assert cache.get("programs", KEY) == ({"flops": 7.0}, PAYLOAD)
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.parametrize("cut", [1, 10, 200, len(PAYLOAD)])
def test_a_torn_entry_is_as_good_as_none_and_is_written_anew(tmp_path: Path, cut: int) -> None:
    cache = ArtifactCache(tmp_path)
    cache.put("programs", KEY, {}, PAYLOAD)
    (path,) = (p for p in tmp_path.rglob("*") if p.is_file())
    path.write_bytes(path.read_bytes()[:-cut])
    assert cache.get("programs", KEY) is None
    assert cache.statistics.damaged == [str(path)]
    cache.put("programs", KEY, {}, PAYLOAD)
    assert cache.get("programs", KEY) == ({}, PAYLOAD)


def test_a_changed_byte_is_noticed(tmp_path: Path) -> None:
    cache = ArtifactCache(tmp_path)
    cache.put("programs", KEY, {}, PAYLOAD)
    (path,) = (p for p in tmp_path.rglob("*") if p.is_file())
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(bytes(data))
    assert cache.get("programs", KEY) is None


def test_what_only_the_shared_folder_has_is_taken_and_kept(tmp_path: Path) -> None:
    local, shared = tmp_path / "local", tmp_path / "shared"
    ArtifactCache(tmp_path / "other", shared).put("programs", KEY, {}, PAYLOAD)
    cache = ArtifactCache(local, shared)
    assert cache.get("programs", KEY) == ({}, PAYLOAD)
    assert cache.statistics.shared_hits == 1
    assert ArtifactCache(local).get("programs", KEY) == ({}, PAYLOAD)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("no folder", encoding="utf-8")
    with pytest.raises(OutputError, match="file"):
        ArtifactCache(blocked).put("programs", KEY, {}, PAYLOAD)
    # A shared folder that cannot be written costs nothing.
    ArtifactCache(tmp_path / "local", blocked).put("programs", KEY, {}, PAYLOAD)


def _write_for_ever(folder: Path) -> None:
    cache = ArtifactCache(folder)
    while True:
        cache.put("programs", KEY, {}, PAYLOAD)


def test_writers_that_are_killed_leave_nothing_half_written(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_write_for_ever, args=(tmp_path,)) for _ in range(3)]
    for writer in writers:
        writer.start()
    cache, seen = ArtifactCache(tmp_path), 0
    until = time.monotonic() + 60
    while seen < 50 and time.monotonic() < until:
        entry = cache.get("programs", KEY)
        assert entry in (None, ({}, PAYLOAD))
        seen += entry is not None
    for writer in writers:
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
    assert seen == 50 and cache.statistics.damaged == []
    assert cache.get("programs", KEY) == ({}, PAYLOAD)


def test_the_hash_of_sources_tells_names_and_contents_apart(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for folder, name, text in ((one, "a.py", "bc"), (other, "ab.py", "c")):
        folder.mkdir()
        (folder / name).write_text(text, encoding="utf-8")
    assert digest_of_files([one]) != digest_of_files([other])
    assert digest("ab", "c") != digest("a", "bc")


def test_the_folder_can_be_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VLMGEN_CACHE", str(tmp_path))
    assert default_folder() == tmp_path
    monkeypatch.delenv("VLMGEN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "vlmgen" / "compile"
