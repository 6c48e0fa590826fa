"""`vlmgen watch`: what counts as a change, one line per run, errors shown and survived."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from vlmgen import watch as watching
from vlmgen.errors import OutputError, Problem, SpecError
from vlmgen.render.generate import GenerationResult
from vlmgen.watch import changes, watch, watched_files

ROOT = Path(__file__).resolve().parents[1]


def scripted(*steps: Callable[[], object]) -> tuple[Callable[[float], None], list[float]]:
    """A sleep that makes one edit per call, then ends the watch, and the naps that were taken."""
    script, naps = iter(steps), []

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        try:
            next(script)()
        except StopIteration:
            raise KeyboardInterrupt from None

    return sleep, naps


def nothing() -> None:
    pass


def seen(files: Callable[[], list[Path]], *steps: Callable[[], object]) -> list[list[str]]:
    """The names in every change that a script of edits gives."""
    sleep, _ = scripted(*steps)
    found: list[list[str]] = []
    with pytest.raises(KeyboardInterrupt):
        for changed in changes(files, sleep=sleep):
            found.append([path.name for path in changed])
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a", "b"):
        (tmp_path / name).write_text("0")
    return tmp_path


def files_of(folder: Path) -> Callable[[], list[Path]]:
    return lambda: sorted(folder.glob("[a-z]"))


def edit(path: Path, text: str) -> Callable[[], object]:
    # The size changes too, so that a coarse clock of the file system does not matter.
    return lambda: path.write_text(text)


# --- changes ------------------------------------------------------------------------------------


def test_quiet_files_give_no_change(folder: Path) -> None:
    assert seen(files_of(folder), *[nothing] * 5) == []


def test_edits_additions_and_removals(folder: Path) -> None:
    steps = [
        edit(folder / "a", "11"), nothing,
        nothing,
        edit(folder / "c", "1"), nothing,
        lambda: (folder / "b").unlink(), nothing,
        nothing,
    ]  # fmt: skip
    assert seen(files_of(folder), *steps) == [["a"], ["c"], ["b"]]


def test_a_file_that_is_replaced_by_another_of_the_same_size_and_time(folder: Path) -> None:
    """Editors write a new file and rename it."""

    def replace() -> None:
        status = (folder / "a").stat()
        (folder / "new").write_text("1")
        os.utime(folder / "new", ns=(status.st_atime_ns, status.st_mtime_ns))
        (folder / "new").replace(folder / "a")

    assert seen(files_of(folder), replace, nothing, nothing) == [["a"]]


def test_edits_in_a_row_are_one_change(folder: Path) -> None:
    steps = [edit(folder / name, "1" * size) for name, size in (("a", 2), ("b", 3), ("a", 4))]
    assert seen(files_of(folder), *steps, nothing, nothing) == [["a", "b"]]


def test_a_file_that_comes_and_goes_at_once_is_no_change(folder: Path) -> None:
    assert seen(files_of(folder), edit(folder / "c", "1"), (folder / "c").unlink, nothing) == []


def test_a_file_that_is_written_for_ever_is_not_waited_for(folder: Path) -> None:
    steps = [edit(folder / "a", "1" * size) for size in range(2, 50)]
    assert ["a"] in seen(files_of(folder), *steps)


def test_how_long_it_waits(folder: Path) -> None:
    sleep, naps = scripted(nothing, edit(folder / "a", "11"), nothing)
    with pytest.raises(KeyboardInterrupt):
        list(changes(files_of(folder), interval=2.0, settle=0.5, sleep=sleep))
    assert naps == [2.0, 2.0, 0.5, 2.0]


def test_what_happens_during_a_run_is_seen_after_it(folder: Path) -> None:
    sleep, _ = scripted(edit(folder / "a", "11"), *[nothing] * 4)
    found = []
    with pytest.raises(KeyboardInterrupt):
        for changed in changes(files_of(folder), sleep=sleep):
            found.append([path.name for path in changed])
            if len(found) == 1:
                (folder / "b").write_text("11")
    assert found == [["a"], ["b"]]


# --- what is watched ----------------------------------------------------------------------------


def test_the_spec_its_bases_and_the_templates_are_watched(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("title: x\n")
    spec = tmp_path / "own.yaml"
    spec.write_text("extends: base.yaml\n")
    found = watched_files(spec)
    assert found[:2] == [spec, tmp_path / "base.yaml"]
    assert ROOT / "templates" / "package" / "model.py.j2" in found
    mine = tmp_path / "mine"
    (mine / "package").mkdir(parents=True)
    (mine / "package" / "README.md.j2").write_text("")
    readme = mine / "package" / "README.md.j2"
    assert watched_files(spec, (mine,))[2:] == [readme]
    assert watched_files(spec, overrides=mine)[2] == readme
    spec.write_text("extends: base.yaml\ntemplates: mine\n")
    assert watched_files(spec)[2] == readme


def test_a_spec_that_comes_to_extend_another_is_followed(tmp_path: Path) -> None:
    spec, base = tmp_path / "own.yaml", tmp_path / "base.yaml"
    spec.write_text("title: x\n")
    base.write_text("title: y\n")
    none = (tmp_path / "none",)
    (tmp_path / "none").mkdir()
    steps = [edit(spec, "extends: base.yaml\n"), nothing, edit(base, "title: zz\n"), nothing]
    found = seen(lambda: watched_files(spec, none), *steps)
    assert found == [["base.yaml", "own.yaml"], ["base.yaml"]]


def test_a_look_is_cheap() -> None:
    spec = ROOT / "specs" / "qwen3_vl_moe.yaml"
    started = time.process_time()
    for _ in range(20):
        watching._snapshot(watched_files(spec))
    assert (time.process_time() - started) / 20 < 0.02  # of every 0.2 s


# --- runs ---------------------------------------------------------------------------------------


def runs(capsys, *outcomes) -> tuple[list[str], str]:
    """stdout lines and stderr of a watch whose regenerations end like this."""
    script = iter(outcomes)

    def regenerate() -> GenerationResult:
        outcome = next(script)
        if isinstance(outcome, BaseException):
            raise outcome
        return GenerationResult(Path("out"), outcome)

    ticks = [(Path("specs/x.yaml"),)] * (len(outcomes) - 1)
    watch(Path("specs/x.yaml"), regenerate, ticks, clock=lambda: "12:00:00")
    captured = capsys.readouterr()
    return captured.out.splitlines(), captured.err


CHANGED = (("a.py", "changed"), ("b.py", "unchanged"))


def test_one_line_per_run(capsys) -> None:
    out, err = runs(capsys, CHANGED, CHANGED[1:])
    assert [re.sub(r"\d\.\d s", "N s", line) for line in out] == [
        "12:00:00 specs/x.yaml -> out: 1 of 2 files changed (N s)",
        "12:00:00 specs/x.yaml -> out: unchanged (N s)",
    ]
    assert err == ""


def test_errors_are_shown_and_survived(capsys) -> None:
    problem = Problem("specs/x.yaml", 3, 1, "unknown key 'a'", code="VG511", source="a: 1")
    faults = [SpecError([problem]), OutputError("out: no", hint="other"), ZeroDivisionError("bug")]
    out, err = runs(capsys, *faults, CHANGED)
    assert out[:3] == ["12:00:00 specs/x.yaml: nothing written"] * 3
    assert out[3].startswith("12:00:00 specs/x.yaml -> out: 1 of 2 files changed")
    assert "specs/x.yaml:3:1: VG511 unknown key 'a'\n3 | a: 1\n" in err
    assert "out: no\nhint: other\n" in err
    assert "Traceback" in err and "ZeroDivisionError: bug" in err


def test_of_many_files_one_is_named(capsys) -> None:
    paths = tuple(Path(f"templates/{name}") for name in "abc")
    result = GenerationResult(Path("out"), CHANGED)
    watch(Path("x.yaml"), lambda: result, [paths], clock=lambda: "now")
    assert "now templates/a and 2 more -> out" in capsys.readouterr().out


def test_ctrl_c_ends_it(capsys) -> None:
    def ticks():
        raise KeyboardInterrupt
        yield

    with pytest.raises(KeyboardInterrupt):
        watch(Path("x.yaml"), lambda: GenerationResult(Path("out"), ()), ticks())


# --- the command --------------------------------------------------------------------------------


def lines_of(path: Path, count: int, seconds: float = 60) -> list[str]:
    """The first lines of a file that a process writes."""
    for _ in itertools.repeat(None, int(seconds / 0.1)):
        lines = path.read_text().splitlines()
        if len(lines) >= count:
            return lines
        time.sleep(0.1)
    raise AssertionError(f"{count} lines wanted: {path.read_text()}")


def test_the_command_regenerates_survives_an_error_and_stops(tmp_path: Path) -> None:
    text = (ROOT / "specs" / "qwen3_vl.yaml").read_text("utf-8")
    spec, log = tmp_path / "mine.yaml", tmp_path / "log"
    spec.write_text(text)
    command = [sys.executable, "-m", "vlmgen", "watch", "mine.yaml", "--out", "package"]
    overrides = tmp_path / "mine"
    overrides.mkdir()
    command += ["--templates", "mine"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with log.open("w") as out:
        process = subprocess.Popen(
            command,
            cwd=tmp_path,
            stdout=out,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            # A run in the background ignores Ctrl-C, and so would what it starts.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
    try:
        assert "mine.yaml -> package: " in lines_of(log, 1)[0]
        spec.write_text(text.replace("depth: 27", "dept: 27"))
        assert lines_of(log, 2)[1].endswith("mine.yaml: nothing written")
        config = tmp_path / "package" / "vllm_neuron_qwen3_vl" / "config.py"
        config.write_text(config.read_text() + "MINE = 1\n")
        spec.write_text(text.replace("theta: 5000000", "theta: 6000000"))
        assert "files changed" in lines_of(log, 3)[2]
        assert config.read_text().endswith("MINE = 1\n") and "6000000" in config.read_text()
        config.write_text(config.read_text().replace("theta: float = 6000000", "theta: float = 7"))
        edited = config.read_text()
        spec.write_text(text.replace("theta: 5000000", "theta: 8000000"))
        assert lines_of(log, 4)[3].endswith("mine.yaml: nothing written")
        assert config.read_text() == edited
        (overrides / "blocks/text").mkdir(parents=True)
        shutil.copy(ROOT / "templates/blocks/text/norm_rms.py.j2", overrides / "blocks/text")
        assert "norm_rms.py.j2" in lines_of(log, 5)[4]
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0
    assert log.read_text().splitlines()[5:] == ["stopped"]
    assert "did you mean 'depth'?" in errors and "Traceback" not in errors
    assert re.search(
        r"vllm_neuron_qwen3_vl/config\.py:\d+-\d+\n", errors
    ), "no place of the conflict"
    assert "theta: 6000000" in (tmp_path / "package" / "spec.yaml").read_text()


def test_a_spec_that_is_not_there_is_no_change_to_wait_for(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "vlmgen", "watch", "none.yaml"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, env=environment, timeout=60
    )
    assert result.returncode == 3 and "none.yaml: VG501 no such file" in result.stderr
