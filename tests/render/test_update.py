"""`vlmgen update`: hand edits survive or are marked, all files or none, and twice is once."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from vlmgen.errors import OutputError, SpecError, UsageError
from vlmgen.render import generate as generation
from vlmgen.render import manifest, publish
from vlmgen.render import update as updating
from vlmgen.render.drift import drift
from vlmgen.render.generate import generate
from vlmgen.render.publish import SymlinkError
from vlmgen.render.update import PackagesError, PackageUpdate, conflict_error, update, update_all

Search = tuple[Path]
CONFIG = "vllm_neuron_qwen3_vl/config.py"
MROPE = "vllm_neuron_qwen3_vl/utils/mrope.py"
MARKED = (
    "<<<<<<< edited by hand\nHIDDEN_SIZE = 4_097\n=======\nHIDDEN_SIZE = 8_192\n"
    f">>>>>>> {updating._LABEL}\n"
)


@pytest.fixture
def target(tmp_path: Path, spec_path: Path, search: Search) -> Path:
    """A generated package."""
    directory = tmp_path / "generated" / "qwen3_vl"
    # Apart, so that two changes of config.py do not meet.
    template(search, "package/config.py", "SECTIONS", "A = 1\nB = 2\nC = 3\nD = 4\nSECTIONS")
    generate(spec_path, directory, search=search)
    return directory


def template(search: Search, name: str, old: str, new: str) -> None:
    """Change a template."""
    path = search[0] / f"{name}.j2"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


def edit(target: Path, path: str, old: str, new: str) -> None:
    """Change a generated file by hand."""
    text = (target / path).read_text()
    assert old in text
    (target / path).write_text(text.replace(old, new))


def tree(target: Path) -> dict[str, bytes]:
    return {
        path.relative_to(target).as_posix(): path.read_bytes()
        for path in target.rglob("*")
        if path.is_file()
    }


def statuses(result: PackageUpdate) -> dict[str, str]:
    return {file.path: file.status for file in result.files if file.status != "unchanged"}


def twice(target: Path, search: Search, **keywords: object) -> PackageUpdate:
    """Update, and show that doing it again changes nothing and reports the same conflicts."""
    result = update(target, search=search, **keywords)
    after = tree(target)
    times = {path: (target / path).stat().st_mtime_ns for path in after}
    again = update(target, search=search, **keywords)
    assert not again.written and tree(target) == after
    assert {path: (target / path).stat().st_mtime_ns for path in after} == times
    if keywords.get("on_conflict") not in ("ours", "theirs"):
        assert [f.path for f in again.conflicts] == [f.path for f in result.conflicts]
    assert [name for name in os.listdir(target.parent) if name != target.name] == []
    return result


# --- what happens to a file --------------------------------------------------------------------


def test_without_edits_it_is_generation(
    target: Path, spec_path: Path, search: Search, tmp_path: Path
) -> None:
    template(search, "utils/mrope.py", "positions( )", "rows( )")
    template(search, "package/README.md", "# ", "# The ")
    result = twice(target, search)
    assert statuses(result) == {"README.md": "changed", MROPE: "changed"} and result.written
    other = tmp_path / "other" / "qwen3_vl"
    generate(spec_path, other, search=search)
    assert tree(target) == tree(other)


def test_clean_edit_survives(target: Path, search: Search) -> None:
    edit(target, CONFIG, "D = 4", "D = 5  # tuned")
    template(search, "package/config.py", "HIDDEN_SIZE", "WIDTH")
    result = twice(target, search)
    assert statuses(result) == {CONFIG: "merged"}
    text = (target / CONFIG).read_text()
    assert text.startswith("WIDTH = 4_096\n") and "D = 5  # tuned\n" in text
    base = json.loads((target / manifest.MANIFEST_PATH).read_text())["files"][CONFIG]
    assert b"tuned" not in (target / manifest.base_path(base)).read_bytes()


def test_edit_of_a_file_that_does_not_change_stays(target: Path, search: Search) -> None:
    edit(target, CONFIG, "D = 4", "D = 5")
    template(search, "utils/mrope.py", "positions", "rows")
    result = twice(target, search)
    assert statuses(result) == {CONFIG: "edited", MROPE: "changed"}
    assert "D = 5" in (target / CONFIG).read_text()


def test_edit_that_equals_the_new_text_is_no_edit(target: Path, search: Search) -> None:
    edit(target, CONFIG, "D = 4", "D = 5")
    template(search, "package/config.py", "D = 4", "D = 5")
    assert statuses(twice(target, search)) == {}
    assert not (target / manifest.EDITS_PATH).exists()


def test_conflict_is_marked_and_placed(target: Path, search: Search) -> None:
    edit(target, CONFIG, "HIDDEN_SIZE = 4_096", "HIDDEN_SIZE = 4_097")
    template(search, "package/config.py", "{{ text.hidden_size | num }}", "8_192")
    template(search, "utils/mrope.py", "positions", "rows")
    result = twice(target, search)
    assert statuses(result) == {CONFIG: "conflict", MROPE: "changed"}
    assert (target / CONFIG).read_text().startswith(MARKED)
    (file,) = result.conflicts
    assert [(place.start, place.end) for place in file.conflicts] == [(1, 5)]
    error = conflict_error([result], "markers")
    assert (error.exit_code, error.message) == (6, "1 conflict in 1 file")


@pytest.mark.parametrize(
    ("side", "line"), [("ours", "HIDDEN_SIZE = 4_097"), ("theirs", "HIDDEN_SIZE = 8_192")]
)
@pytest.mark.parametrize("first_mark", [False, True])
def test_conflict_is_settled_for_a_side(
    target: Path, search: Search, side: str, line: str, first_mark: bool
) -> None:
    edit(target, CONFIG, "HIDDEN_SIZE = 4_096", "HIDDEN_SIZE = 4_097")
    edit(target, CONFIG, "D = 4", "D = 5")
    template(search, "package/config.py", "{{ text.hidden_size | num }}", "8_192")
    if first_mark:
        assert update(target, search=search).conflicts
    result = twice(target, search, on_conflict=side)
    assert not result.conflicts
    assert [file.settled for file in result.files if file.path == CONFIG] == [1]
    text = (target / CONFIG).read_text()
    assert text.startswith(f"{line}\n") and "D = 5\n" in text and "<<<" not in text


def test_fail_changes_nothing(target: Path, search: Search) -> None:
    edit(target, CONFIG, "HIDDEN_SIZE = 4_096", "X = 1\nHIDDEN_SIZE = 4_097")
    template(search, "package/config.py", "{{ text.hidden_size | num }}", "8_192")
    template(search, "utils/mrope.py", "positions", "rows")
    before = tree(target)
    result = twice(target, search, on_conflict="fail")
    assert tree(target) == before and not result.written
    (file,) = result.files
    assert (file.path, file.conflicts[0].start, file.conflicts[0].end) == (CONFIG, 1, 2)
    assert "nothing was written" in conflict_error([result], "fail").message


def test_resolved_conflict_is_an_edit(target: Path, search: Search) -> None:
    edit(target, CONFIG, "HIDDEN_SIZE = 4_096", "HIDDEN_SIZE = 4_097")
    template(search, "package/config.py", "{{ text.hidden_size | num }}", "8_192")
    update(target, search=search)
    edit(target, CONFIG, MARKED, "HIDDEN_SIZE = 8_193\n")
    assert statuses(twice(target, search)) == {CONFIG: "edited"}
    template(search, "package/config.py", "D = 4", "D = 6")
    assert statuses(twice(target, search)) == {CONFIG: "merged"}
    text = (target / CONFIG).read_text()
    assert text.startswith("HIDDEN_SIZE = 8_193\n") and "D = 6\n" in text


def test_markers_are_never_nested(target: Path, search: Search) -> None:
    edit(target, CONFIG, "HIDDEN_SIZE = 4_096", "HIDDEN_SIZE = 4_097")
    template(search, "package/config.py", "{{ text.hidden_size | num }}", "8_192")
    update(target, search=search)
    before = tree(target)
    template(search, "package/config.py", "8_192", "9_000")
    template(search, "utils/mrope.py", "positions", "rows")
    result = twice(target, search)
    assert tree(target) == before and not result.written
    (file,) = result.files
    assert "not resolved" in file.note and (file.conflicts[0].start, file.conflicts[0].end) == (
        1,
        5,
    )
    edit(target, CONFIG, MARKED, "HIDDEN_SIZE = 8_192\n")
    assert statuses(twice(target, search)) == {CONFIG: "changed", MROPE: "changed"}
    assert (target / CONFIG).read_text().startswith("HIDDEN_SIZE = 9_000\n")


def test_file_that_is_no_longer_generated(target: Path, search: Search) -> None:
    edit(target, MROPE, "positions", "mine")
    (search[0] / "utils/mrope.py.j2").unlink()
    (search[0] / "tests/test_config.py.j2").unlink()
    result = update(target, search=search)
    assert statuses(result) == {"tests/test_config.py": "removed", MROPE: "orphan"}
    assert "mine" in (target / MROPE).read_text() and not (target / "tests/test_config.py").exists()
    assert "a file of yours" in next(file.note for file in result.files if file.path == MROPE)
    again = twice(target, search)
    assert again.foreign == 1 and statuses(again) == {}
    assert "mine" in (target / MROPE).read_text()


def test_deleted_file_stays_away_until_it_is_restored(target: Path, search: Search) -> None:
    (target / MROPE).unlink()
    assert statuses(twice(target, search)) == {MROPE: "deleted"}
    assert not (target / MROPE).exists()
    assert statuses(update(target, search=search, restore=True)) == {MROPE: "new"}
    assert "positions" in (target / MROPE).read_text()


@pytest.mark.parametrize(
    ("mode", "there"), [("markers", True), ("ours", False), ("theirs", True), ("fail", False)]
)
def test_deleted_file_that_changes_is_a_conflict(
    target: Path, search: Search, mode: str, there: bool
) -> None:
    (target / MROPE).unlink()
    template(search, "utils/mrope.py", "positions", "rows")
    result = twice(target, search, on_conflict=mode)
    assert bool(result.conflicts) == (mode in ("markers", "fail"))
    assert (target / MROPE).exists() == there
    if mode == "markers":
        text = (target / MROPE).read_text()
        assert text.startswith("<<<<<<< deleted by hand\n=======\ndef rows():")
        (target / MROPE).unlink()
        assert statuses(twice(target, search)) == {MROPE: "deleted"}


def test_deletion_that_was_taken_over_stays_one(target: Path, search: Search) -> None:
    (target / MROPE).unlink()
    update(target, search=search)
    template(search, "utils/mrope.py", "positions", "rows")
    for mode in updating.ON_CONFLICT:
        assert statuses(twice(target, search, on_conflict=mode)) == {MROPE: "deleted"}
    assert not (target / MROPE).exists()
    assert statuses(update(target, search=search, restore=True)) == {MROPE: "new"}
    assert "rows" in (target / MROPE).read_text()


def test_new_file(target: Path, search: Search) -> None:
    (search[0] / "utils/more.py.j2").write_text("A = 1\n")
    assert statuses(twice(target, search)) == {"vllm_neuron_qwen3_vl/utils/more.py": "new"}


@pytest.mark.parametrize(
    "made", ["utils/more.py", "utils/more.py/inside", "utils/more.py -> elsewhere"]
)
def test_new_file_where_a_foreign_one_is(
    target: Path, search: Search, tmp_path: Path, made: str
) -> None:
    (search[0] / "utils/more.py.j2").write_text("A = 1\n")
    template(search, "utils/mrope.py", "positions", "rows")
    name, _, link = made.partition(" -> ")
    path = target / "vllm_neuron_qwen3_vl" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(tmp_path / link) if link else path.write_text("mine\n")
    before = tree(target)
    for mode in updating.ON_CONFLICT:
        result = update(target, search=search, on_conflict=mode)
        assert statuses(result) == {"vllm_neuron_qwen3_vl/utils/more.py": "blocked"}
        assert tree(target) == before and not result.written
        error = conflict_error([result], mode)
        assert error.exit_code == 6 and "move the files" in error.hint


def test_new_file_that_equals_a_foreign_one_is_taken_over(target: Path, search: Search) -> None:
    (target / "vllm_neuron_qwen3_vl/utils/more.py").write_text("A = 1\n")
    (search[0] / "utils/more.py.j2").write_text("A = 1\n")
    result = twice(target, search)
    assert statuses(result) == {} and result.written
    assert "vllm_neuron_qwen3_vl/utils/more.py" in manifest.read_manifest(target).files


def test_carriage_returns_of_an_editor_stay(target: Path, search: Search) -> None:
    path = target / CONFIG
    path.write_bytes(path.read_bytes().replace(b"D = 4", b"D = 5").replace(b"\n", b"\r\n"))
    template(search, "package/config.py", "HIDDEN_SIZE", "WIDTH")
    assert statuses(twice(target, search)) == {CONFIG: "merged"}
    text = path.read_bytes()
    assert text.startswith(b"WIDTH") and b"D = 5\r\n" in text
    assert text.count(b"\n") == text.count(b"\r\n")


def test_bytes_that_are_no_text_are_merged_as_lines(target: Path, search: Search) -> None:
    path = target / CONFIG
    path.write_bytes(path.read_bytes() + b"# \xff\xfe\x00\n")
    template(search, "package/config.py", "HIDDEN_SIZE", "WIDTH")
    assert statuses(twice(target, search)) == {CONFIG: "merged"}
    assert path.read_bytes().endswith(b"# \xff\xfe\x00\n")


# --- files that are not vlmgen's ---------------------------------------------------------------


def test_foreign_files_are_the_same_files_afterwards(
    target: Path, search: Search, tmp_path: Path
) -> None:
    (target / "notes").mkdir()
    (target / "notes" / "todo with spaces.txt").write_text("mine")
    (target / "empty" / "deep").mkdir(parents=True)
    (target / "run.sh").write_text("#!/bin/sh\n")
    (target / "run.sh").chmod(0o755)
    (target / "link").symlink_to(tmp_path / "nowhere")
    (target / "vllm_neuron_qwen3_vl" / "extra.py").write_text("A = 1\n")
    os.mkfifo(target / "pipe")
    (target / "notes").chmod(0o700)
    before = {path: path.lstat() for path in target.rglob("*") if ".vlmgen" not in path.parts}
    template(search, "utils/mrope.py", "positions", "rows")
    assert twice(target, search).foreign == 5
    assert os.readlink(target / "link") == str(tmp_path / "nowhere")
    for path, status in before.items():
        now = path.lstat()
        assert now.st_mode == status.st_mode, path
        if path != target / MROPE and not path.is_dir():
            assert (now.st_ino, now.st_mtime_ns) == (status.st_ino, status.st_mtime_ns), path
    assert (target / "empty" / "deep").is_dir()


def test_mode_of_a_generated_file_stays(target: Path, search: Search) -> None:
    (target / MROPE).chmod(0o600)
    template(search, "utils/mrope.py", "positions", "rows")
    twice(target, search)
    assert (target / MROPE).stat().st_mode & 0o777 == 0o600


def test_directory_that_may_not_be_written_is_left_whole(target: Path, search: Search) -> None:
    kept = target / "kept"
    kept.mkdir()
    (kept / "file").write_text("mine")
    kept.chmod(0o555)
    template(search, "utils/mrope.py", "positions", "rows")
    try:
        twice(target, search)
        assert kept.stat().st_mode & 0o777 == 0o555 and (kept / "file").read_text() == "mine"
    finally:
        kept.chmod(0o755)


@pytest.mark.parametrize(
    "where", ["", "vllm_neuron_qwen3_vl", CONFIG, ".vlmgen", ".vlmgen/base", "tests"]
)
def test_links_in_the_way_are_refused(
    target: Path, search: Search, tmp_path: Path, where: str
) -> None:
    link, real = target / where, tmp_path / "elsewhere"
    link.rename(real)
    link.symlink_to(real)
    template(search, "utils/mrope.py", "positions", "rows")
    with pytest.raises((SymlinkError, OutputError), match="symbolic link"):
        update(target, search=search)
    assert link.is_symlink()


def test_write_of_somebody_else_meanwhile_is_noticed(
    target: Path, search: Search, monkeypatch: pytest.MonkeyPatch
) -> None:
    template(search, "utils/mrope.py", "positions", "rows")
    original = publish._write_tree

    def slow(*arguments: object) -> None:
        original(*arguments)
        (target / "README.md").write_text("just saved by an editor\n")

    monkeypatch.setattr(publish, "_write_tree", slow)
    with pytest.raises(OutputError, match=r"changed while vlmgen was at work(.|\n)*README\.md"):
        update(target, search=search)
    monkeypatch.undo()
    assert (target / "README.md").read_text() == "just saved by an editor\n"
    assert os.listdir(target.parent) == [target.name]


# --- where it comes from -----------------------------------------------------------------------


def test_nothing_to_do_renders_nothing(
    target: Path, search: Search, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit(target, CONFIG, "D = 4", "D = 5")
    update(target, search=search)
    monkeypatch.setattr(updating, "render_spec_file", lambda *a: pytest.fail("rendered"))
    assert not update(target, search=search).written


@pytest.mark.parametrize("gone", ["base", "one base", "edits"])
def test_lost_records_are_written_again(target: Path, search: Search, gone: str) -> None:
    edit(target, CONFIG, "D = 4", "D = 5")
    update(target, search=search)
    before = tree(target)
    for path in sorted((target / manifest.BASE_FOLDER).iterdir())[
        : 1 if gone == "one base" else 99
    ]:
        if gone != "edits":
            path.unlink()
    if gone == "edits":
        (target / manifest.EDITS_PATH).unlink()
    update(target, search=search)
    assert tree(target) == before


def test_damaged_base_is_not_believed(target: Path, search: Search) -> None:
    """Then there is no base, and every difference is marked."""
    edit(target, CONFIG, "D = 4", "D = 5")
    digest = manifest.read_manifest(target).files[CONFIG]
    (target / manifest.base_path(digest)).write_bytes((target / CONFIG).read_bytes())
    template(search, "package/config.py", "HIDDEN_SIZE", "WIDTH")
    result = update(target, search=search)
    (file,) = result.conflicts
    text = (target / CONFIG).read_text()
    assert file.note == "its generated text is not known"
    assert "D = 5" in text and "D = 4" in text and "HIDDEN_SIZE" in text and "WIDTH" in text


def test_package_of_an_older_version(target: Path, search: Search) -> None:
    """Before format 2 no base was kept: an untouched file is its own, an edited one has none."""
    path = target / manifest.MANIFEST_PATH
    body = json.loads(path.read_text())
    for key in ("origin", "templates_from", "overrides"):
        del body[key]
    path.write_text(json.dumps({**body, "format": 1}))
    for base in (target / manifest.BASE_FOLDER).iterdir():
        base.unlink()
    edit(target, CONFIG, "D = 4", "D = 5")
    template(search, "utils/mrope.py", "positions", "rows")
    assert statuses(twice(target, search)) == {CONFIG: "edited", MROPE: "changed"}


def test_spec_is_found_where_the_package_was_made(
    target: Path, spec_path: Path, search: Search, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = manifest.read_manifest(target).origin
    assert recorded == "../../specs/qwen3_vl.yaml"
    for directory, name in (
        (tmp_path, "generated/qwen3_vl"),
        (target, "."),
        (target.parent, "qwen3_vl"),
    ):
        monkeypatch.chdir(directory)
        assert not update(name, search=search).written
    moved = spec_path.with_name("renamed.yaml")
    spec_path.rename(moved)
    with pytest.raises(UsageError, match="not to be found") as error:
        update(target, search=search)
    assert "--spec" in error.value.hint
    assert update(target, moved, search=search).written
    assert manifest.read_manifest(target).origin == "../../specs/renamed.yaml"


def test_spec_elsewhere_is_recorded_by_its_name(
    spec_path: Path, search: Search, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    far = tmp_path / "a/b/c/d/e/package"
    (tmp_path / "a").mkdir()
    monkeypatch.chdir(tmp_path / "a")
    generate(spec_path, far, search=search)
    assert manifest.read_manifest(far).origin == "qwen3_vl.yaml"
    with pytest.raises(UsageError, match="not to be found"):
        update(far, search=search)
    monkeypatch.chdir(tmp_path)  # which has specs/qwen3_vl.yaml
    assert not update(far, search=search).written


def test_bad_spec_changes_nothing(target: Path, spec_path: Path, search: Search) -> None:
    before = tree(target)
    spec_path.write_text(spec_path.read_text().replace("num_layers: 36", "num_layers: many", 1))
    with pytest.raises(SpecError):
        update(target, search=search)
    assert tree(target) == before


def test_spec_of_another_family_is_refused(target: Path, spec_path: Path, search: Search) -> None:
    other = spec_path.with_name("other.yaml")
    other.write_text(re.sub("(?m)^family: .*", "family: other", spec_path.read_text()))
    with pytest.raises(UsageError, match="package of another family"):
        update(target, other, search=search)


@pytest.mark.parametrize("made", ["nothing", "folder", "file"])
def test_what_is_no_package_is_refused(tmp_path: Path, search: Search, made: str) -> None:
    path = tmp_path / "x"
    if made == "folder":
        path.mkdir()
    elif made == "file":
        path.write_text("")
    with pytest.raises(UsageError, match="not a package that vlmgen generated") as error:
        update(path, search=search)
    assert "vlmgen adopt" in error.value.hint


def test_dry_run_writes_nothing(target: Path, search: Search) -> None:
    edit(target, CONFIG, "HIDDEN_SIZE = 4_096", "HIDDEN_SIZE = 4_097")
    template(search, "package/config.py", "{{ text.hidden_size | num }}", "8_192")
    before = tree(target)
    result = update(target, search=search, dry_run=True)
    assert result.conflicts and not result.written and tree(target) == before


# --- the two halves agree: what update takes over, new and check know of -----------------------


def test_new_refuses_edits_and_names_update(target: Path, spec_path: Path, search: Search) -> None:
    edit(target, CONFIG, "D = 4", "D = 5")
    update(target, search=search)
    with pytest.raises(publish.EditedFilesError) as error:
        generate(spec_path, target, search=search)
    assert "vlmgen update" in error.value.hint
    generate(spec_path, target, search=search, force=True)
    assert "D = 4" in (target / CONFIG).read_text()
    assert not (target / manifest.EDITS_PATH).exists()
    assert generate(spec_path, target, search=search).is_unchanged


def test_taken_over_edit_is_no_drift(target: Path, spec_path: Path, search: Search) -> None:
    def drifted() -> set[str]:
        return {d.path for d in drift(spec_path.parent, target.parent, search)}

    edit(target, CONFIG, "D = 4", "D = 5")
    (target / MROPE).unlink()
    assert drifted() == {f"qwen3_vl/{CONFIG}", f"qwen3_vl/{MROPE}"}
    update(target, search=search)
    assert drifted() == set()
    edit(target, CONFIG, "D = 5", "D = 6")
    assert drifted() == {f"qwen3_vl/{CONFIG}"}
    update(target, search=search)
    template(search, "package/config.py", "HIDDEN_SIZE", "WIDTH")
    assert drifted() == {f"qwen3_vl/{CONFIG}", "qwen3_vl/.vlmgen/manifest.json"}


def test_damaged_record_of_edits_is_named(target: Path, search: Search) -> None:
    (target / manifest.EDITS_PATH).write_text('{"format": 1, "edits": {"../x": null}, "own": []}')
    with pytest.raises(OutputError, match=r"edits\.json: not a record of hand edits"):
        update(target, search=search)


# --- every package -----------------------------------------------------------------------------


@pytest.fixture
def three(target: Path, spec_path: Path, search: Search) -> list[Path]:
    """Three packages and a spec that was never generated."""
    targets = [target]
    for name in ("second", "third", "never"):
        spec = spec_path.with_name(f"{name}.yaml")
        spec.write_text(re.sub("(?m)^family: .*", f"family: {name}", spec_path.read_text()))
        if name != "never":
            targets.append(target.parent / name)
            generate(spec, targets[-1], search=search)
    return targets


def test_all(three: list[Path], spec_path: Path, search: Search) -> None:
    specs, generated = spec_path.parent, three[0].parent
    packages, absent = update_all(specs, generated, search=search)
    assert [p.target for p in packages] == three and absent == [specs / "never.yaml"]
    assert not any(p.written for p in packages)
    edit(three[1], "vllm_neuron_second/config.py", "D = 4", "D = 5")
    template(search, "package/config.py", "HIDDEN_SIZE", "WIDTH")
    packages, _ = update_all(specs, generated, search=search)
    assert [statuses(p) for p in packages] == [
        {CONFIG: "changed"},
        {"vllm_neuron_second/config.py": "merged"},
        {"vllm_neuron_third/config.py": "changed"},
    ]
    assert drift(specs, generated, search)[0].message.endswith(
        "run `vlmgen new " f"{specs}/never.yaml`"
    )


def test_all_in_several_processes_gives_the_same(
    three: list[Path], spec_path: Path, search: Search, monkeypatch: pytest.MonkeyPatch
) -> None:
    template(search, "package/config.py", "HIDDEN_SIZE", "WIDTH")
    monkeypatch.setattr(updating.threading, "active_count", lambda: 1)
    monkeypatch.setattr(updating.os, "sched_getaffinity", lambda pid: {0, 1, 2})
    monkeypatch.delitem(updating.sys.modules, "torch", raising=False)
    pools = []
    context = updating.multiprocessing.get_context("fork")
    original = type(context).Pool
    monkeypatch.setattr(
        type(context), "Pool", lambda *a: pools.append(a[1]) or original(*a), raising=False
    )
    update_all(spec_path.parent, three[0].parent, search=search)
    assert pools == [3]
    several = [tree(target) for target in three]
    for target, spec in zip(three, ("qwen3_vl", "second", "third"), strict=True):
        generate(spec_path.with_name(f"{spec}.yaml"), target, search=search, force=True)
    assert [tree(target) for target in three] == several


def test_all_with_fail_changes_no_package(
    three: list[Path], spec_path: Path, search: Search
) -> None:
    edit(three[2], "vllm_neuron_third/config.py", "HIDDEN_SIZE = 4_096", "HIDDEN_SIZE = 1")
    template(search, "package/config.py", "HIDDEN_SIZE", "WIDTH")
    before = [tree(target) for target in three]
    packages, _ = update_all(spec_path.parent, three[0].parent, search=search, on_conflict="fail")
    assert [tree(target) for target in three] == before
    assert [len(p.conflicts) for p in packages] == [0, 0, 1]


def test_all_names_every_faulty_spec_and_changes_nothing(
    three: list[Path], spec_path: Path, search: Search
) -> None:
    template(search, "package/config.py", "HIDDEN_SIZE", "WIDTH")
    before = [tree(target) for target in three]
    for name in ("second", "third"):
        spec = spec_path.with_name(f"{name}.yaml")
        spec.write_text(spec.read_text().replace("num_layers: 36", "num_layers: many", 1))
    with pytest.raises(PackagesError) as error:
        update_all(spec_path.parent, three[0].parent, search=search)
    assert error.value.exit_code == 3
    assert "second.yaml" in error.value.message and "third.yaml" in error.value.message
    assert [tree(target) for target in three] == before


def test_all_refuses_two_specs_of_one_family(target: Path, spec_path: Path, search: Search) -> None:
    spec_path.with_name("copy.yaml").write_bytes(spec_path.read_bytes())
    with pytest.raises(OutputError, match="both name the family"):
        update_all(spec_path.parent, target.parent, search=search)


def test_all_without_specs(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="no specs"):
        update_all(tmp_path, tmp_path)


def test_no_change_of_an_input_is_missed(target: Path, search: Search) -> None:
    """`is_current` decides whether anything is rendered, so it must see what `new` sees."""
    assert updating.is_current is generation.is_current
