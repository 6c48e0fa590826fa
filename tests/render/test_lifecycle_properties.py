"""Random hand edits, kills at random moments, and the same bytes in every surrounding."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.render.conftest import TEMPLATES
from tests.spec.random_specs import spec_texts
from vlmgen.render import package as packaging
from vlmgen.render import publish
from vlmgen.render import update as updating
from vlmgen.render.generate import render_spec_file
from vlmgen.render.manifest import base_path, is_own, read_manifest
from vlmgen.render.merge import changed_ranges, find_conflicts, split_lines
from vlmgen.render.origin import Origin
from vlmgen.render.update import Job, OnConflict, PackageUpdate

Version = Mapping[str, bytes]


@pytest.fixture(scope="session")
def packages(
    repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[Version]]:
    """A few packages in a few versions each, records included, rendered once."""
    folder = tmp_path_factory.mktemp("versions")
    return {
        "small": list(small_versions(folder, repository / "specs" / "qwen3_vl.yaml")),
        "real": list(real_versions(folder, repository)),
    }


def small_versions(folder: Path, spec: Path) -> Iterator[Version]:
    """Three versions of a package of few short files; files come and go."""
    body = "".join(f"LINE_{number} = {number}\n" for number in range(12))
    texts = {**TEMPLATES, "utils/mrope.py.j2": body}
    alone = folder / "spec" / spec.name  # without stored results
    alone.parent.mkdir()
    shutil.copy(spec, alone)
    for number, changes in enumerate(
        (
            {},
            {
                "utils/mrope.py.j2": body.replace("= 3\n", "= 33\n").replace(
                    "= 9\n", "= 99\nN = 1\n"
                ),
                "utils/more.py.j2": body,
            },
            {
                "utils/mrope.py.j2": body.replace("LINE_5 = 5\n", "").replace("= 9\n", "= 98\n"),
                "tests/test_config.py.j2": None,
                "package/README.md.j2": "# {{ spec.title | md }}\n\nMore.\n",
            },
        )
    ):
        directory = folder / f"templates{number}"
        for name, text in {**texts, **changes}.items():
            if text is not None:
                (directory / name).parent.mkdir(parents=True, exist_ok=True)
                (directory / name).write_text(text)
        yield render_spec_file(alone, origin=Origin("", (directory,)))[1]


def real_versions(folder: Path, repository: Path) -> Iterator[Version]:
    """A real package as it is, and as it is after its spec changed."""
    specs = folder / "specs"
    shutil.copytree(repository / "specs", specs)
    path = specs / "qwen3_vl.yaml"
    yield render_spec_file(path)[1]
    text = path.read_text()
    for old, new in (("title: Qwen3-VL", "title: Qwen3 VL"), ("eps: 1.0e-6", "eps: 1.0e-5")):
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)
    yield render_spec_file(path)[1]


def apply(target: Path, version: Version, mode: OnConflict) -> PackageUpdate:
    """`update` to a version that is rendered already."""
    job = Job(target, Path("spec.yaml"), "out-of-tree", Origin("", ()), current=False)
    return updating._apply(job, {target: dict(version)}, mode, False, True)


def tree(target: Path) -> dict[str, bytes]:
    return {
        path.relative_to(target).as_posix(): path.read_bytes()
        for path in target.rglob("*")
        if path.is_file()
    }


numbers = itertools.count()


@st.composite
def hand_edits(draw: st.DrawFn) -> list[tuple[int, int, int, int]]:
    """Which file, from which line, how many lines go, how many come; all modulo what there is."""
    edit = st.tuples(st.integers(0, 40), st.integers(0, 1000), st.integers(0, 3), st.integers(0, 3))
    return draw(st.lists(edit, max_size=5))


steps = st.lists(
    st.tuples(
        hand_edits(),
        st.integers(0, 60),  # which file is deleted; beyond the last: none
        st.booleans(),  # whether a foreign file is made
        st.integers(0, 9),  # which version comes
        st.sampled_from(updating.ON_CONFLICT),
    ),
    min_size=1,
    max_size=4,
)


def places_that_change(versions: list[Version]) -> list[tuple[str, int]]:
    """Lines of the first version that are others in the second: where edits are in its way."""
    old, new = versions[:2]
    return [
        (path, start)
        for path in sorted(old.keys() & new.keys())
        if not is_own(path)
        for start, *_ in changed_ranges(split_lines(old[path]), split_lines(new[path]))
    ]


def edit_by_hand(
    target: Path, edits: list[tuple[int, int, int, int]], aims: list[tuple[str, int]]
) -> None:
    """Edit generated files, half of them where they will change; no two added lines are alike."""
    files = sorted(path for path in read_manifest(target).files if (target / path).is_file())
    for which, start, remove, add in edits:
        path = files[which % len(files)]
        if aims and which % 2:
            path, start = aims[start % len(aims)]
            if path not in files:
                continue
        lines = (target / path).read_bytes().split(b"\n")
        start %= len(lines)
        lines[start : start + remove] = [b"# hand %d" % next(numbers) for _ in range(add)]
        (target / path).write_bytes(b"\n".join(lines))


def hand_lines(content: bytes) -> set[bytes]:
    return set(re.findall(rb"# hand \d+", content))


@pytest.mark.parametrize(("name", "examples"), [("small", 80), ("real", 12)])
def test_random_edits(
    packages: dict[str, list[Version]],
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    examples: int,
) -> None:
    versions = packages[name]
    monkeypatch.setattr(publish.os, "fsync", lambda descriptor: None)  # for speed

    seen: set[str] = set()

    @settings(max_examples=examples, deadline=None)
    @given(steps)
    def check(script: list) -> None:
        play(tmp_path_factory.mktemp("p") / "package", versions, script, seen)

    check()
    every = {"unchanged", "changed", "edited", "merged", "deleted", "conflict"}
    every |= {"new", "removed", "orphan", "blocked"} if name == "small" else set()
    assert seen >= every, "the random scripts do not reach every case"


def test_random_specs(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Legal combinations of axes and parts that no family has, two of a family, and hand edits."""
    monkeypatch.setattr(publish.os, "fsync", lambda descriptor: None)  # for speed
    monkeypatch.setattr(packaging, "format_modules", parsed)  # black takes most of the time
    seen: set[str] = set()

    @settings(max_examples=12, deadline=None)
    @given(spec_texts(versions=2), steps)
    def check(texts: list[str], script: list) -> None:
        folder = tmp_path_factory.mktemp("r")
        versions = []
        for number, text in enumerate(texts):
            path = folder / f"specs{number}" / "mine.yaml"
            path.parent.mkdir()
            path.write_text(text)
            versions.append(render_spec_file(path)[1])
        play(folder / "generated" / "mine", versions, script, seen)

    check()
    assert seen >= {"unchanged", "edited", "merged", "conflict"}


def parsed(modules: Mapping[str, str]) -> Mapping[str, str]:
    """Modules as they were rendered, which have to be Python."""
    for text in modules.values():
        compile(text, "module", "exec", dont_inherit=True)
    return modules


def play(target: Path, versions: list[Version], script: list, seen: set[str]) -> None:
    """Edit a package and update it, step by step, and check every step."""
    publish.publish(target, versions[0])
    foreign: dict[str, bytes] = {}
    aims = places_that_change(versions)
    for edits, delete, make, number, mode in script:
        edit_by_hand(target, edits, aims)
        files = sorted(read_manifest(target).files)
        if delete < len(files):
            (target / files[delete]).unlink(missing_ok=True)
        if make:
            path = f"notes/{next(numbers)}"
            (target / "notes").mkdir(exist_ok=True)
            (target / path).write_text(path)
            foreign[path] = path.encode()
        carried(target, versions[number % len(versions)], mode, foreign, seen)
    shutil.rmtree(target.parent)


def carried(
    target: Path, new: Version, mode: OnConflict, foreign: dict[str, bytes], seen: set[str]
) -> None:
    """Update, and check everything that must hold whatever was edited."""
    before, recorded = tree(target), dict(read_manifest(target).files)
    bases = {path: before.get(base_path(digest), b"") for path, digest in recorded.items()}
    untouched = {
        path
        for path, digest in recorded.items()
        if updating.sha256(before.get(path, b"\0gone")) == digest
    }
    pending = {p for p in recorded if find_conflicts(before.get(p, b""))}
    result = apply(target, new, mode)
    after = tree(target)
    changes = {change.path: change for change in result.files}
    seen.update(change.status for change in result.files)

    # Foreign files, and files that became foreign, are as they were.
    assert {path: after.get(path) for path in foreign} == foreign
    for path, content in before.items():
        if path not in recorded and not is_own(path) and path not in new:
            assert after[path] == content, path

    stopped = not result.written and bool(result.conflicts)
    if stopped:
        marks_only = mode in ("markers", "fail") or pending
        assert marks_only or any(c.status == "blocked" for c in result.conflicts)
        stands_as_it_was = after == before
        assert stands_as_it_was
    for path in recorded.keys() | {p for p in new if not is_own(p)}:
        here, there = after.get(path), before.get(path)
        change = changes.get(path)
        if there is not None and hand_lines(there) - hand_lines(here or b""):
            # A line that a hand wrote is gone: only where the new text was asked for.
            assert mode == "theirs" and change is not None and change.settled, path
        if stopped:
            continue
        if path in new and here is not None and not (mode == "ours" and change and change.settled):
            came = set(new[path].split(b"\n")) - set(bases.get(path, b"").split(b"\n"))
            assert came <= set(here.split(b"\n")), f"{path}: the new version is lost"
        if path in untouched and path in new:
            assert here == new[path], f"{path} was not edited and is not as generated"
        if path in untouched and path not in new:
            assert here is None
        if there is None and path in recorded and here is not None:
            # A deletion is not undone silently.
            assert change is not None and (change.status == "conflict" or mode == "theirs"), path
        if here is not None and path in new:
            assert bool(find_conflicts(here)) == (
                change is not None and change.status == "conflict"
            )
    if not stopped:
        assert dict(read_manifest(target).files) == {
            path: updating.sha256(text) for path, text in new.items() if not is_own(path)
        }
        if untouched == set(recorded) and not foreign:
            assert {path: after[path] for path in new} == dict(new), "is not plain generation"

    # Once more changes nothing, and tells of the same conflicts.
    again = apply(target, new, mode)
    assert not again.written and tree(target) == after
    if mode in ("markers", "fail"):
        assert [c.path for c in again.conflicts] == [c.path for c in result.conflicts]


# --- kills -------------------------------------------------------------------------------------

KILLS = """
import os, random, signal, sys, time
from pathlib import Path
from tests.render.test_lifecycle_properties import apply, small_versions, tree
from vlmgen.render import package as packaging
from vlmgen.render import publish

folder, kills, way = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
versions = list(small_versions(folder, Path("specs/qwen3_vl.yaml")))[:2]
target = folder / "generated" / "package"
publish.publish(target, versions[0])
mrope = target / "vllm_neuron_qwen3_vl/utils/mrope.py"
mrope.write_bytes(mrope.read_bytes().replace(b"LINE_6 = 6", b"LINE_6 = 66  # by hand"))
(target / "README.md").unlink()
(target / "notes" / "empty").mkdir(parents=True)
(target / "notes" / "mine").write_text("mine")
(target / "notes" / "link").symlink_to("mine")
if way == "two renames":
    publish._exchange = lambda first, second: False

def state():
    return tree(target), sorted(p.relative_to(target).as_posix() for p in target.rglob("*"))

whole = []
for version in (1, 0):
    assert not apply(target, versions[version], "markers").conflicts
    whole.append(state())
for _, names in whole:
    assert {"notes/empty", "notes/link", "notes/mine"} <= set(names) and "README.md" not in names
assert all(b"# by hand" in files["vllm_neuron_qwen3_vl/utils/mrope.py"] for files, _ in whole)

start = time.perf_counter()
apply(target, versions[1], "markers")
apply(target, versions[0], "markers")
longest = min(0.25, time.perf_counter() - start)
seed, parent = random.Random(5), os.getpid()
amid = torn = 0
for _ in range(kills):
    child = os.fork()
    if child == 0:
        while os.getppid() == parent:
            apply(target, versions[1], "markers")
            apply(target, versions[0], "markers")
        os._exit(0)  # the test itself was ended
    time.sleep(seed.uniform(0.0, longest))
    os.kill(child, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    amid += len(os.listdir(target.parent)) > 1
    now = state() if target.exists() else None
    if now not in whole:
        torn += 1
        with publish.writing(target, foreign_links=True):
            pass
        assert state() in whole, "not mended by the next run"
apply(target, versions[0], "markers")
assert state() == whole[1] and os.listdir(target.parent) == ["package"]
print(kills, amid, torn)
"""


@pytest.mark.parametrize(("way", "kills"), [("exchange", 220), ("two renames", 60)])
def test_kills_at_random_moments(tmp_path: Path, repository: Path, way: str, kills: int) -> None:
    """Hand edits, a deletion and foreign files come through; the tree is never torn."""
    run = subprocess.run(
        [sys.executable, "-c", KILLS, str(tmp_path), str(kills), way],
        cwd=repository,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    killed, amid, torn = map(int, run.stdout.split())
    assert killed == kills
    assert amid > kills / 4, "the kills came between the updates, not amid them"
    # Without the exchange of two names there is a moment without the package; the next run
    # mends it, before it does anything else.
    assert torn == 0 if way == "exchange" else torn < kills / 4


STEPS = """
import os, shutil, sys
from pathlib import Path
from tests.render.test_lifecycle_properties import apply, small_versions, tree
from vlmgen.render import package as packaging
from vlmgen.render import publish

folder = Path(sys.argv[1])
versions = list(small_versions(folder, Path("specs/qwen3_vl.yaml")))[:2]
target = folder / "generated" / "package"
publish.publish(target, versions[0])
(target / "notes").mkdir()
(target / "notes" / "mine").write_text("mine")

def end_at(n):
    count = 0
    def ending(function):
        def call(*arguments, **keywords):
            nonlocal count
            count += 1
            if count == n:
                os._exit(77)
            return function(*arguments, **keywords)
        return call
    for module, name in [(os, "fsync"), (os, "rename"), (os, "unlink"), (os, "rmdir"), (os, "link"),
                         (os, "mkdir"), (os, "chmod"), (publish, "_exchange"), (shutil, "rmtree"),
                         (Path, "rename")]:
        setattr(module, name, ending(getattr(module, name)))
    apply(target, versions[1], "markers")
    os._exit(0)

whole = [tree(target)]
apply(target, versions[1], "markers")
whole.append(tree(target))
apply(target, versions[0], "markers")
n, status = 0, 77
while status == 77:
    n += 1
    child = os.fork()
    if child == 0:
        end_at(n)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert tree(target) in whole, f"torn at step {n}"
    apply(target, versions[0], "markers")
    assert tree(target) == whole[0] and os.listdir(target.parent) == ["package"], f"step {n}"
assert status == 0, status
print(n)
"""


def test_an_end_at_every_step(tmp_path: Path, repository: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", STEPS, str(tmp_path)],
        cwd=repository,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) > 30


# --- surroundings ------------------------------------------------------------------------------

SURROUNDINGS = """
import hashlib, sys
from pathlib import Path
from vlmgen.render import package as packaging
from vlmgen.render.generate import generate, render_spec_file
from vlmgen.render.update import update
spec, old, new, target = map(Path, sys.argv[1:])
# A real package too; that black gives the same in every process is tested in test_generate.py.
packaging.format_modules = lambda modules: modules
for name, content in sorted(render_spec_file(spec)[1].items()):
    print(hashlib.sha256(content).hexdigest(), name)
generate(spec, target, search=(old,))
path = target / "vllm_neuron_qwen3_vl/utils/mrope.py"
path.write_bytes(path.read_bytes().replace(b"LINE_9 = 9", b"LINE_9 = 10"))
path = target / "vllm_neuron_qwen3_vl/config.py"
path.write_bytes(path.read_bytes() + b"MINE = 1\\n")
result = update(target, search=(new,))
assert [file.path for file in result.conflicts] == ["vllm_neuron_qwen3_vl/utils/mrope.py"]
for path in sorted(path for path in target.rglob("*") if path.is_file()):
    print(hashlib.sha256(path.read_bytes()).hexdigest(), path.relative_to(target).as_posix())
"""


@pytest.mark.slow
def test_same_bytes_in_every_surrounding(
    tmp_path: Path, repository: Path, qwen3_vl_spec: Path
) -> None:
    """20 runs: other hash seeds, locales, time zones, working directories, umasks; one result."""
    list(small_versions(tmp_path, qwen3_vl_spec))
    spec = tmp_path / "specs" / "qwen3_vl.yaml"
    spec.parent.mkdir()
    shutil.copy(qwen3_vl_spec, spec)
    locales = ("C", "C.UTF-8", "tr_TR.UTF-8", "de_DE.ISO-8859-1", "POSIX")
    zones = ("UTC", "Pacific/Kiritimati", "America/St_Johns", "Asia/Kathmandu")
    outputs = set()
    for number in range(20):
        project = tmp_path / f"project{number}"
        (project / "specs").mkdir(parents=True)
        shutil.copy(spec, project / "specs")
        environment = {
            **os.environ,
            "PYTHONPATH": str(repository),
            "PYTHONHASHSEED": str(number * 7919),
            "LC_ALL": locales[number % len(locales)],
            "LANG": locales[number % len(locales)],
            "TZ": zones[number % len(zones)],
            "PYTHONUTF8": str(number % 2),
        }
        run = subprocess.run(
            [sys.executable, "-c", SURROUNDINGS, str(project / "specs" / "qwen3_vl.yaml")]
            + [str(tmp_path / f"templates{n}") for n in (0, 1)]
            + [str(project / "generated" / "qwen3_vl")],
            cwd=(tmp_path, project, repository, Path("/"))[number % 4],
            env=environment,
            capture_output=True,
            text=True,
            umask=(0o022, 0o077, 0o002)[number % 3],
        )
        assert run.returncode == 0, run.stderr
        outputs.add(run.stdout)
    assert len(outputs) == 1
    (output,) = outputs
    assert ".vlmgen/edits.json" in output and "vllm_neuron_qwen3_vl/vision_encoder.py" in output


def test_jobs_are_values() -> None:
    """They go to other processes."""
    assert dataclasses.is_dataclass(Job) and Job.__dataclass_params__.frozen
