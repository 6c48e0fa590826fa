"""Template overrides: found first, recorded, and told apart from an original that moved on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vlmgen.check.integrity import check_integrity, check_overrides
from vlmgen.errors import OutputError, SpecError, UsageError
from vlmgen.render import chain, manifest, templates
from vlmgen.render.drift import drift
from vlmgen.render.environment import TemplateError
from vlmgen.render.generate import generate
from vlmgen.render.overrides import copy, every_template, overrides_of, show
from vlmgen.render.update import update

Search = tuple[Path]
BLOCK = "blocks/greeting.py.j2"
CONFIG = "vllm_neuron_qwen3_vl/config.py"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "generated" / "qwen3_vl"


@pytest.fixture
def packaged(search: Search, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The test's templates in the place of those that ship with vlmgen."""
    monkeypatch.setattr(templates, "directories", lambda: search)
    return search[0]


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A folder of overrides with one block."""
    folder = tmp_path / "mine"
    (folder / "blocks").mkdir(parents=True)
    (folder / BLOCK).write_text("GREETING = 'hello from here'\n")
    return folder


def name_in(spec_path: Path, folder: str) -> None:
    spec_path.write_text(f"templates: {folder}\n{spec_path.read_text()}")


# --- which template is taken -------------------------------------------------------------------


def test_command_line_names_the_folder(
    spec_path: Path, target: Path, packaged: Path, mine: Path
) -> None:
    generate(spec_path, target, templates=mine)
    assert 'GREETING = "hello from here"\n' in (target / CONFIG).read_text()
    recorded = manifest.read_manifest(target)
    assert (recorded.templates_from, list(recorded.overrides)) == ("../../mine", [BLOCK])
    assert recorded.templates[BLOCK] == manifest.sha256((mine / BLOCK).read_bytes())
    assert generate(spec_path, target, templates=mine).is_unchanged


def test_spec_names_the_folder(spec_path: Path, target: Path, packaged: Path, mine: Path) -> None:
    name_in(spec_path, "../mine  # ours")
    generate(spec_path, target)
    assert "hello from here" in (target / CONFIG).read_text()
    recorded = manifest.read_manifest(target)
    assert (recorded.templates_from, list(recorded.overrides)) == (None, [BLOCK])
    assert "mine" not in (target / "spec.yaml").read_text()
    assert generate(spec_path, target).is_unchanged and drift(spec_path.parent, target.parent) == []


def test_folder_is_inherited_from_the_spec_that_names_it(
    spec_path: Path, tmp_path: Path, packaged: Path, mine: Path
) -> None:
    name_in(spec_path, "../mine")
    deeper = spec_path.parent / "deeper"
    deeper.mkdir()
    inheriting = deeper / "second.yaml"
    inheriting.write_text("extends: ../qwen3_vl.yaml\nfamily: second\n")
    out = tmp_path / "generated" / "second"
    generate(inheriting, out)
    assert "hello from here" in (out / "vllm_neuron_second/config.py").read_text()
    inheriting.write_text("extends: ../qwen3_vl.yaml\nfamily: second\ntemplates: null\n")
    update(out)
    assert "hello from here" not in (out / "vllm_neuron_second/config.py").read_text()


def test_command_line_wins_over_the_spec(
    spec_path: Path, target: Path, tmp_path: Path, packaged: Path, mine: Path
) -> None:
    name_in(spec_path, "../mine")
    other = tmp_path / "other"
    (other / "blocks").mkdir(parents=True)
    (other / BLOCK).write_text("GREETING = 'other'\n")
    generate(spec_path, target, templates=other)
    assert '"other"' in (target / CONFIG).read_text()


def test_whole_files_are_overridden_and_added(
    spec_path: Path, target: Path, packaged: Path, mine: Path
) -> None:
    (mine / "utils").mkdir()
    (mine / "utils/mrope.py.j2").write_text("A = 1\n")
    (mine / "utils/more.py.j2").write_text("B = {{ text.hidden_size | num }}\n")
    generate(spec_path, target, templates=mine)
    assert (target / "vllm_neuron_qwen3_vl/utils/mrope.py").read_text() == "A = 1\n"
    assert (target / "vllm_neuron_qwen3_vl/utils/more.py").read_text() == "B = 4_096\n"


def test_override_stays_in_the_sandbox(
    spec_path: Path, target: Path, packaged: Path, mine: Path
) -> None:
    for text in (
        "{{ ''.__class__.__mro__ | py }}",
        "{% include '../secret' %}",
        "{% include '/etc/hostname' %}",
        "{{ absent }}",
    ):
        (mine / BLOCK).write_text(text)
        with pytest.raises(TemplateError):
            generate(spec_path, target, templates=mine)
    (mine / BLOCK).write_text("A = {{ spec.reference.note_with_blanks or spec.title }}\n")
    with pytest.raises(OutputError):
        generate(spec_path, target, templates=mine)
    assert not target.exists()


@pytest.mark.parametrize("how", ["edited", "added", "removed"])
def test_change_of_an_override_is_noticed(
    spec_path: Path, target: Path, packaged: Path, mine: Path, how: str
) -> None:
    generate(spec_path, target, templates=mine)
    if how == "edited":
        (mine / BLOCK).write_text("GREETING = 'edited'\n")
    elif how == "added":
        (mine / "utils").mkdir()
        (mine / "utils/mrope.py.j2").write_bytes((packaged / "utils/mrope.py.j2").read_bytes())
    else:
        (mine / BLOCK).unlink()
    assert drift(spec_path.parent, target.parent)
    assert update(target).written
    assert not update(target).written and drift(spec_path.parent, target.parent) == []


def test_update_remembers_the_folder_and_forgets_it(
    spec_path: Path, target: Path, packaged: Path, mine: Path
) -> None:
    generate(spec_path, target, templates=mine)
    (packaged / "utils/mrope.py.j2").write_text("A = 1\n")
    update(target)
    assert "hello from here" in (target / CONFIG).read_text()
    mine.rename(mine.with_name("moved"))
    with pytest.raises(UsageError, match="template overrides in '../../mine'") as error:
        update(target)
    assert "--templates DIR" in error.value.hint and "--no-templates" in error.value.hint
    update(target, templates=mine.with_name("moved"))
    assert manifest.read_manifest(target).templates_from == "../../moved"
    update(target, no_templates=True)
    assert manifest.read_manifest(target).templates_from is None
    assert 'GREETING = "hello"\n' in (target / CONFIG).read_text()


@pytest.mark.parametrize("named", ["spec", "command line"])
def test_missing_folder_is_named(
    spec_path: Path, target: Path, packaged: Path, tmp_path: Path, named: str
) -> None:
    if named == "spec":
        name_in(spec_path, "../absent")
    with pytest.raises(UsageError, match="absent is not a folder"):
        generate(spec_path, target, templates=None if named == "spec" else tmp_path / "absent")


@pytest.mark.parametrize(
    "value",
    ["/etc", "../../../../../../../../../../etc", "a b", "a//b", "a/./b", "'a\\b'", "3", "[a]"],
)
def test_folders_that_a_spec_may_not_name(
    spec_path: Path, target: Path, packaged: Path, value: str
) -> None:
    name_in(spec_path, value)
    # `watch` looks into it five times a second, before a parser sees that 3 is a number.
    assert chain.stated_templates(spec_path) in (None, spec_path.with_name("3"))
    with pytest.raises((SpecError, UsageError)):
        generate(spec_path, target)
    assert not target.exists()


def test_folder_that_only_a_parser_sees_is_refused(
    spec_path: Path, target: Path, packaged: Path, mine: Path
) -> None:
    spec_path.write_text(f'"templates": ../mine\n{spec_path.read_text()}')
    with pytest.raises(UsageError, match="on a line of its own"):
        generate(spec_path, target)


# --- copies and their originals ----------------------------------------------------------------


def test_copy_keeps_the_original(packaged: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    copied = copy(BLOCK, folder)
    assert (copied.path, copied.status) == (folder / BLOCK, "new")
    assert (folder / BLOCK).read_bytes() == (packaged / BLOCK).read_bytes()
    (template,) = overrides_of(folder)
    assert (template.name, template.state) == (BLOCK, "overridden")
    assert copy(BLOCK, folder).status == "unchanged"


def test_original_that_changed_is_told_with_the_difference(packaged: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    copy(BLOCK, folder)
    (folder / BLOCK).write_text("GREETING = 'mine'\n")
    assert overrides_of(folder)[0].state == "overridden"
    (packaged / BLOCK).write_text("GREETING   =   'good day'\n")
    (template,) = overrides_of(folder)
    assert template.state == "outdated"
    assert "-GREETING   =   'hello'\n+GREETING   =   'good day'\n" in template.difference
    assert "mine" not in template.difference


def test_copying_again_merges_what_changed(packaged: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    name = "utils/mrope.py.j2"
    (packaged / name).write_text("A = 1\nB = 2\nC = 3\nD = 4\nE = 5\n")
    copy(name, folder)
    (folder / name).write_text("A = 1\nB = 20\nC = 3\nD = 4\nE = 5\n")
    (packaged / name).write_text("A = 1\nB = 2\nC = 3\nD = 40\nE = 5\n")
    assert copy(name, folder).status == "merged"
    assert (folder / name).read_text() == "A = 1\nB = 20\nC = 3\nD = 40\nE = 5\n"
    assert overrides_of(folder)[0].state == "overridden"
    (packaged / name).write_text("A = 1\nB = 22\nC = 3\nD = 40\nE = 5\n")
    copied = copy(name, folder)
    assert (copied.status, copied.conflicts) == ("conflict", ("2-6",))
    with pytest.raises(OutputError, match="not resolved"):
        copy(name, folder)


def test_override_without_a_known_original_is_not_touched(packaged: Path, mine: Path) -> None:
    assert overrides_of(mine)[0].state == "unrecorded"
    with pytest.raises(OutputError, match="what it was copied from is not known"):
        copy(BLOCK, mine)
    assert "hello from here" in (mine / BLOCK).read_text()


def test_list_of_a_folder_that_is_not_there(packaged: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a folder"):
        every_template(tmp_path / "absent")


def test_list_and_show(packaged: Path, mine: Path) -> None:
    (mine / "utils").mkdir()
    (mine / "utils/more.py.j2").write_text("A = 1\n")
    copy("utils/mrope.py.j2", mine)
    states = {template.name: template.state for template in every_template(mine)}
    assert states[BLOCK] == "unrecorded" and states["utils/more.py.j2"] == "added"
    assert states["utils/mrope.py.j2"] == "overridden"
    assert states["package/config.py.j2"] == "packaged"
    assert {template.state for template in every_template()} == {"packaged"}
    assert show(BLOCK) == "GREETING   =   'hello'\n"
    assert show(BLOCK, mine) == "GREETING = 'hello from here'\n"
    for name in ("blocks/greting.py.j2", "../secret", "/etc/hostname"):
        with pytest.raises(UsageError, match="there is no template"):
            show(name)
    with pytest.raises(UsageError, match="did you mean blocks/greeting"):
        show("blocks/greting.py.j2")


# --- what check says ---------------------------------------------------------------------------


def test_check_reports_an_override_whose_original_changed(
    spec_path: Path, target: Path, packaged: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "mine"
    copy(BLOCK, folder)
    copy("tests/test_config.py.j2", folder)
    generate(spec_path, target, templates=folder)
    assert check_overrides(target) == []
    (packaged / BLOCK).write_text("GREETING = 'good day'\n")
    (finding,) = check_overrides(target)
    assert (finding.code, finding.path) == ("VG005", (folder / BLOCK).as_posix())
    assert "+GREETING = 'good day'" in finding.detail
    assert f"vlmgen templates copy {BLOCK} --to {folder}" in finding.fix
    assert check_overrides(target, folder) == [finding]
    copy(BLOCK, folder)
    assert check_overrides(target) == []


def test_check_says_when_the_folder_is_gone(
    spec_path: Path, target: Path, packaged: Path, mine: Path
) -> None:
    generate(spec_path, target, templates=mine)
    mine.rename(mine.with_name("moved"))
    (finding,) = check_overrides(target)
    assert finding.code == "VG005" and "which is not there" in finding.message
    assert check_overrides(target, mine.with_name("moved")) == []


def test_check_knows_edits_that_were_taken_over(
    spec_path: Path, target: Path, packaged: Path
) -> None:
    generate(spec_path, target)
    path = target / CONFIG
    path.write_text(path.read_text() + "MINE = 1\n")
    (target / "README.md").unlink()
    assert [finding.message for finding in check_integrity(target)] == [
        "is missing",
        "was edited after it was generated",
    ]
    update(target)
    assert check_integrity(target) == []
    path.write_text(path.read_text() + "MORE = 1\n")
    (finding,) = check_integrity(target)
    assert finding.code == "VG004" and "`vlmgen update` takes the edit over" in finding.fix


def test_check_finds_conflict_markers(spec_path: Path, target: Path, packaged: Path) -> None:
    generate(spec_path, target)
    path = target / CONFIG
    path.write_text(path.read_text().replace("4_096", "1"))
    template = packaged / "package/config.py.j2"
    template.write_text(template.read_text().replace("HIDDEN_SIZE", "WIDTH"))
    assert update(target).conflicts
    (finding,) = check_integrity(target)
    assert (finding.code, finding.line) == ("VG006", 1)
    assert "lines 1 to 5" in finding.message


def test_manifest_of_a_folder_outside_is_refused(
    spec_path: Path, target: Path, packaged: Path
) -> None:
    """What a manifest says is not trusted further than a few steps up."""
    generate(spec_path, target)
    path = target / manifest.MANIFEST_PATH
    for stated in ("/etc", "../../../../../../etc"):
        body = json.loads(path.read_text())
        path.write_text(json.dumps({**body, "templates_from": stated}))
        with pytest.raises(UsageError, match="which is not there"):
            update(target)
