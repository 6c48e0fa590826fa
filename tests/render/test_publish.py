"""Publication is whole or not at all, and touches nothing that is not vlmgen's."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from vlmgen.errors import OutputError
from vlmgen.render import publish
from vlmgen.render.manifest import MANIFEST_PATH, Manifest, sha256
from vlmgen.render.paths import is_safe_path

HASH = "0" * 64


def tree(label: str, names: tuple[str, ...] = ("a.py", "sub/b.py", "sub/deep/c.py")) -> dict:
    """A package with its manifest; every file says which tree it is of."""
    files = {name: f"{label} {name}\n".encode() * 500 for name in names}
    manifest = Manifest(
        vlmgen="0",
        generator=HASH,
        layout="out-of-tree",
        origin="",
        spec=HASH,
        bases={},
        results=None,
        templates={},
        sources={},
        files={name: sha256(content) for name, content in files.items()},
    )
    return {**files, MANIFEST_PATH: manifest.to_bytes()}


def read(target: Path) -> dict[str, bytes]:
    return {
        path.relative_to(target).as_posix(): path.read_bytes()
        for path in target.rglob("*")
        if path.is_file()
    }


def left_behind(target: Path) -> list[str]:
    return [name for name in os.listdir(target.parent) if name != target.name]


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "out" / "package"


@pytest.fixture(params=["exchange", "two renames"])
def each_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test with and without a file system that can exchange two names."""
    if request.param == "two renames":
        monkeypatch.setattr(publish, "_exchange", lambda first, second: False)


def test_new_changed_and_removed_files(target: Path, each_way: None) -> None:
    publish.publish(target, tree("one"))
    assert read(target) == tree("one")
    publish.publish(target, tree("two", ("a.py", "new/d.py")))
    assert read(target) == tree("two", ("a.py", "new/d.py"))
    assert not (target / "sub").exists()
    assert left_behind(target) == []


def test_unchanged_tree_is_left_alone(target: Path) -> None:
    publish.publish(target, tree("one"))
    before = target.stat().st_ino
    publish.publish(target, tree("one"))
    assert target.stat().st_ino == before


def test_unchanged_file_keeps_its_time(target: Path) -> None:
    publish.publish(target, tree("one"))
    os.utime(target / "a.py", ns=(1_000_000_000, 2_000_000_000))
    files = tree("one")
    files |= tree("two", ("a.py", "x.py"))
    files["a.py"] = tree("one")["a.py"]
    publish.publish(target, files)
    assert (target / "a.py").stat().st_mtime_ns == 2_000_000_000
    assert (target / "x.py").exists()


def test_caches_are_kept(target: Path, each_way: None) -> None:
    publish.publish(target, tree("one"))
    kept = ["sub/__pycache__/b.pyc", ".pytest_cache/v/x", "package.egg-info/PKG-INFO"]
    for name in kept:
        (target / name).parent.mkdir(parents=True)
        (target / name).write_text(name)
    publish.publish(target, tree("two"))
    assert {name: (target / name).read_text() for name in kept} == {name: name for name in kept}


def test_foreign_files_are_listed_and_nothing_is_written(target: Path) -> None:
    publish.publish(target, tree("one"))
    (target / "sub" / "mine.txt").write_text("mine")
    before = read(target)
    for force in (False, True):
        with pytest.raises(publish.ForeignFilesError, match=r"\n  sub/mine\.txt\n"):
            publish.publish(target, tree("two"), force=force)
    assert read(target) == before and left_behind(target) == []


def test_directory_without_manifest_is_foreign(target: Path) -> None:
    target.mkdir(parents=True)
    (target / "notes.txt").write_text("mine")
    with pytest.raises(publish.ForeignFilesError, match="notes.txt"):
        publish.publish(target, tree("one"), force=True)
    assert read(target) == {"notes.txt": b"mine"}


def test_empty_directory_is_taken(target: Path, each_way: None) -> None:
    (target / "empty").mkdir(parents=True)
    publish.publish(target, tree("one"))
    assert read(target) == tree("one")


def test_edited_files_are_listed_and_kept_without_force(target: Path) -> None:
    publish.publish(target, tree("one"))
    (target / "sub/b.py").write_text("edited\n")
    with pytest.raises(publish.EditedFilesError, match=r"\n  sub/b\.py\n") as error:
        publish.publish(target, tree("two"))
    assert "a.py" not in error.value.message
    assert "--force" in error.value.hint
    assert (target / "sub/b.py").read_text() == "edited\n"
    assert (target / "a.py").read_bytes() == tree("one")["a.py"]
    publish.publish(target, tree("two"), force=True)
    assert read(target) == tree("two")


def test_edit_that_equals_the_new_text_is_no_conflict(target: Path) -> None:
    publish.publish(target, tree("one"))
    (target / "a.py").write_bytes(tree("two")["a.py"])
    publish.publish(target, tree("two"))
    assert read(target) == tree("two")


def test_deleted_file_comes_back(target: Path) -> None:
    publish.publish(target, tree("one"))
    (target / "a.py").unlink()
    publish.publish(target, tree("one"))
    assert read(target) == tree("one")


@pytest.mark.parametrize("where", ["", "sub", "sub/b.py", ".vlmgen", MANIFEST_PATH, "__pycache__"])
def test_symbolic_links_are_refused(target: Path, tmp_path: Path, where: str) -> None:
    publish.publish(target, tree("one"))
    link = target / where
    real = tmp_path / "elsewhere"
    if link.exists():
        link.rename(real)
    else:
        real.mkdir()
    link.symlink_to(real)
    before = read(real) if real.is_dir() else real.read_bytes()
    for force in (False, True):
        with pytest.raises(OutputError, match="symbolic link"):
            publish.publish(target, tree("two"), force=force)
    assert link.is_symlink()
    assert (read(real) if real.is_dir() else real.read_bytes()) == before


def test_dangling_link_is_refused(target: Path, tmp_path: Path) -> None:
    target.parent.mkdir()
    target.symlink_to(tmp_path / "nowhere")
    with pytest.raises(publish.SymlinkError, match="nowhere"):
        publish.publish(target, tree("one"))
    assert not (tmp_path / "nowhere").exists()


def test_target_that_is_a_file_is_refused(target: Path) -> None:
    target.parent.mkdir()
    target.write_text("mine")
    with pytest.raises(OutputError, match="not a directory"):
        publish.publish(target, tree("one"))
    assert target.read_text() == "mine"


def test_parent_that_is_a_file_is_refused(target: Path) -> None:
    target.parent.write_text("mine")
    with pytest.raises(OutputError):
        publish.publish(target, tree("one"))
    assert target.parent.read_text() == "mine"


@pytest.mark.parametrize(
    "path", ["../x", "/x", "a/../../x", "a//x", "a/./x", "", ".", "a\\x", "a\nx", "a/", "\u00e9"]
)
def test_paths_outside_the_package_are_refused(target: Path, path: str) -> None:
    assert not is_safe_path(path)
    with pytest.raises(OutputError, match="not a path within the package"):
        publish.publish(target, {path: b""})
    assert not target.exists()


@pytest.mark.parametrize(
    "paths", [("a.py", "A.py"), ("sub/a", "Sub/b"), ("a", "a/b"), ("A", "a/b")]
)
def test_names_that_meet_where_case_is_ignored_are_refused(
    target: Path, paths: tuple[str, str]
) -> None:
    with pytest.raises(OutputError, match="case is ignored"):
        publish.publish(target, dict.fromkeys(paths, b""))
    assert not target.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{}",
        b'{"format": 1, "files": []}',
        b'{"format": 1, "files": {"a.py": "x"}}',
        tree("one")[MANIFEST_PATH].replace(b'"a.py"', b'"../a.py"'),
        tree("one")[MANIFEST_PATH].replace(b'"spec": "0', b'"spec": "x'),
    ],
)
def test_unreadable_manifest_is_refused(target: Path, content: bytes) -> None:
    publish.publish(target, tree("one"))
    (target / MANIFEST_PATH).write_bytes(content)
    before = read(target)
    with pytest.raises(OutputError, match="not a manifest"):
        publish.publish(target, tree("two"), force=True)
    assert read(target) == before


def test_failed_write_keeps_the_old_tree(
    target: Path, monkeypatch: pytest.MonkeyPatch, each_way: None
) -> None:
    publish.publish(target, tree("one"))
    calls = iter(range(100))

    def full(descriptor: int) -> None:
        if next(calls) == 2:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(publish.os, "fsync", full)
    with pytest.raises(OutputError, match="No space left on device"):
        publish.publish(target, tree("two"))
    monkeypatch.undo()
    assert read(target) == tree("one") and left_behind(target) == []


# Ends the process at the n-th call of any function that changes the file system, for every n.
CRASHES = """
import os, shutil, sys
from pathlib import Path
from tests.render.test_publish import publish, read, tree

target, exchange = Path(sys.argv[1]), sys.argv[2] == "exchange"
if not exchange:
    publish._exchange = lambda first, second: False
publish.publish(target, tree("one"))

def crash_at(n):
    count = 0
    def ending(function):
        def call(*arguments, **keywords):
            nonlocal count
            count += 1
            if count == n:
                os._exit(77)
            return function(*arguments, **keywords)
        return call
    for module, name in [(os, "fsync"), (os, "rename"), (os, "unlink"), (os, "rmdir"),
                         (publish, "_exchange"), (shutil, "rmtree"), (Path, "rename")]:
        setattr(module, name, ending(getattr(module, name)))
    publish.publish(target, tree("two"))
    os._exit(0)

n = 0
while True:
    n += 1
    child = os.fork()
    if child == 0:
        crash_at(n)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if exchange:
        assert read(target) in (tree("one"), tree("two")), f"torn at step {n}"
    publish.publish(target, tree("one"))
    assert read(target) == tree("one"), f"not mended at step {n}"
    assert os.listdir(target.parent) == [target.name], f"left over at step {n}"
    if status == 0:
        break
    assert status == 77, status
print(n)
"""


@pytest.mark.parametrize("way", ["exchange", "two renames"])
def test_a_crash_at_any_step_leaves_a_whole_tree(target: Path, repository: Path, way: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", CRASHES, str(target), way],
        cwd=repository,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) > 10


ALTERNATE = """
import sys
from pathlib import Path
from tests.render.test_publish import publish, tree
print("ready", flush=True)
while True:
    for label in ("one", "two"):
        publish.publish(Path(sys.argv[1]), tree(label))
"""


def test_sigkill_at_random_moments(target: Path, repository: Path) -> None:
    seed = random.Random(20)
    publish.publish(target, tree("one"))
    for _ in range(12):
        with subprocess.Popen(
            [sys.executable, "-c", ALTERNATE, str(target)],
            cwd=repository,
            stdout=subprocess.PIPE,
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            time.sleep(seed.uniform(0.0, 0.08))
            process.send_signal(signal.SIGKILL)
        assert read(target) in (tree("one"), tree("two"))
    publish.publish(target, tree("three"))
    assert read(target) == tree("three") and left_behind(target) == []


def test_concurrent_runs_do_not_mix(target: Path, repository: Path) -> None:
    script = ALTERNATE.replace("while True:", "for _ in range(8):")
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(target)], cwd=repository, stdout=subprocess.DEVNULL
        )
        for _ in range(3)
    ]
    trees: list[Mapping[str, bytes]] = [tree("one"), tree("two")]
    assert [process.wait(timeout=120) for process in processes] == [0, 0, 0]
    assert read(target) in trees and left_behind(target) == []
