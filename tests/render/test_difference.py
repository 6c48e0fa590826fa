"""`vlmgen diff`: what a regeneration would change, and the input that is the cause."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vlmgen import cli
from vlmgen.errors import OutputError, UsageError
from vlmgen.render import difference as differing
from vlmgen.render import generate as generation
from vlmgen.render import package as packaging
from vlmgen.render.difference import PackageDifference, differences
from vlmgen.render.generate import generate
from vlmgen.render.manifest import MANIFEST_PATH
from vlmgen.render.update import update

Search = tuple[Path]
MODULE = "vllm_neuron_qwen3_vl"
runner = CliRunner()


@pytest.fixture
def generated(spec_path: Path, tmp_path: Path, search: Search) -> Path:
    """Packages of the copied spec and of one that extends it."""
    base = tmp_path / "generated"
    own = spec_path.with_name("own.yaml")
    own.write_text("extends: qwen3_vl.yaml\nfamily: own\ntitle: Own\n")
    for spec, family in ((spec_path, "qwen3_vl"), (own, "own")):
        generate(spec, base / family, search=search)
    return base


@pytest.fixture
def compare(spec_path: Path, generated: Path, search: Search):
    """Package name -> what would change in it."""

    def compare() -> dict[str, PackageDifference]:
        found = differences(spec_path.parent, generated, search=search)
        return {difference.package.name: difference for difference in found}

    return compare


def causes(difference: PackageDifference) -> list[tuple[str, str, str]]:
    return [(cause.kind, cause.name, cause.how) for cause in difference.causes]


def of_files(difference: PackageDifference) -> dict[str, list[str]]:
    return {
        file.path: [cause.name or cause.kind for cause in file.causes] for file in difference.files
    }


def test_nothing_changes(compare, monkeypatch):
    monkeypatch.setattr(differing, "render_package", None)  # equal inputs need no rendering
    found = compare()
    assert {name: d.state for name, d in found.items()} == {"own": "same", "qwen3_vl": "same"}
    assert all(d.causes == () and d.files == () for d in found.values())


def test_template_is_named_at_the_files_that_use_it(compare, search):
    (search[0] / "blocks/greeting.py.j2").write_text("GREETING = 'hi'\n")
    for family, difference in compare().items():
        assert causes(difference) == [("template", "blocks/greeting.py.j2", "changed")]
        assert of_files(difference) == {
            f"vllm_neuron_{family}/config.py": ["blocks/greeting.py.j2"]
        }
        (file,) = difference.files
        assert (file.status, file.added, file.removed) == ("changed", 1, 1)
        assert '-GREETING = "hello"\n+GREETING = "hi"\n' in file.diff


def test_template_that_a_package_does_not_use_is_no_cause(compare, search):
    (search[0] / "blocks/other.py.j2").write_text("X = 1\n")
    assert {d.state for d in compare().values()} == {"same"}


def test_new_and_removed_templates(compare, search):
    (search[0] / "utils/extra.py.j2").write_text("X = 1\n")
    (search[0] / "utils/mrope.py.j2").unlink()
    difference = compare()["qwen3_vl"]
    assert causes(difference) == [
        ("template", "utils/extra.py.j2", "new"),
        ("template", "utils/mrope.py.j2", "gone"),
    ]
    files = {file.path: file for file in difference.files}
    assert files[f"{MODULE}/utils/extra.py"].status == "new"
    assert files[f"{MODULE}/utils/mrope.py"].status == "removed"
    assert of_files(difference) == {
        f"{MODULE}/utils/extra.py": ["utils/extra.py.j2"],
        f"{MODULE}/utils/mrope.py": ["utils/mrope.py.j2"],
    }


def test_own_spec_changes_its_own_package_only(compare, spec_path):
    own = spec_path.with_name("own.yaml")
    own.write_text(own.read_text().replace("title: Own", "title: Mine"))
    found = compare()
    assert found["qwen3_vl"].state == "same"
    assert causes(found["own"]) == [("spec", "own.yaml", "changed")]
    assert of_files(found["own"]) == {
        "README.md": ["own.yaml"],
        "spec.yaml": ["own.yaml"],
        "vllm_neuron_own/__init__.py": ["own.yaml"],
    }


def test_spec_that_is_extended_is_told_from_the_own_one(compare, spec_path):
    text = spec_path.read_text()
    spec_path.write_text(text.replace("vision_attention_block_size: 2048",
                                      "vision_attention_block_size: 1024"))  # fmt: skip
    found = compare()
    assert causes(found["qwen3_vl"]) == [("spec", "qwen3_vl.yaml", "changed")]
    assert causes(found["own"]) == [("base", "qwen3_vl.yaml", "changed")]
    assert of_files(found["own"]) == {"spec.yaml": ["qwen3_vl.yaml"]}


def test_comment_in_a_spec_changes_no_file(compare, spec_path):
    spec_path.write_text(spec_path.read_text() + "# a comment\n")
    difference = compare()["own"]
    assert (difference.state, difference.files) == ("changed", ())
    assert causes(difference) == [("base", "qwen3_vl.yaml", "changed")]


def test_another_spec_changes_no_package(compare, spec_path):
    spec_path.with_name("third.yaml").write_text("extends: own.yaml\nfamily: third\n")
    found = compare()
    assert (found["own"].state, found["qwen3_vl"].state) == ("same", "same")
    assert found["third"].state == "no package"


def test_stored_results(compare, spec_path):
    results = spec_path.parent / "results" / "qwen3_vl.json"
    results.parent.mkdir()
    results.write_text('{"state": "validated"}')
    found = compare()
    assert found["own"].state == "same"
    assert causes(found["qwen3_vl"]) == [("results", "", "new")]
    assert of_files(found["qwen3_vl"]) == {"README.md": ["results"]}


def test_generating_code(compare, monkeypatch):
    for module in (generation, packaging, differing):
        monkeypatch.setattr(module, "generator_sha256", lambda: "1" * 64)
    for difference in compare().values():
        assert causes(difference) == [("generator", "", "changed")]
        assert difference.files == ()


def test_edit_by_hand_is_told_from_a_changed_template(compare, generated, search):
    readme = generated / "qwen3_vl" / "README.md"
    readme.write_text("edited\n")
    (search[0] / "utils/mrope.py.j2").write_text("A = 2\n")
    difference = compare()["qwen3_vl"]
    assert causes(difference) == [
        ("template", "utils/mrope.py.j2", "changed"),
        ("hand", "README.md", "changed"),
    ]
    assert of_files(difference) == {
        "README.md": ["README.md"],
        f"{MODULE}/utils/mrope.py": ["utils/mrope.py.j2"],
    }


def test_file_that_was_edited_and_would_change_has_both_causes(compare, generated, search):
    module = generated / "qwen3_vl" / MODULE / "utils" / "mrope.py"
    module.write_text("B = 1\n")
    (search[0] / "utils/mrope.py.j2").write_text("A = 2\n")
    (file,) = compare()["qwen3_vl"].files
    assert [cause.kind for cause in file.causes] == ["hand", "template"]


def test_lost_and_foreign_files(compare, generated):
    (generated / "qwen3_vl" / "README.md").unlink()
    (generated / "qwen3_vl" / "notes.txt").write_text("mine\n")
    difference = compare()["qwen3_vl"]
    (file,) = difference.files  # what vlmgen did not write stays
    assert (file.path, file.status) == ("README.md", "new")
    assert [cause.kind for cause in file.causes] == ["hand"]


def test_package_without_a_spec(compare, spec_path):
    spec_path.with_name("own.yaml").unlink()
    assert compare()["own"].state == "no spec"


def test_manifest_of_another_format(compare, generated):
    path = generated / "qwen3_vl" / MANIFEST_PATH
    body = json.loads(path.read_text())
    del body["bases"]
    path.write_text(json.dumps(body))
    difference = compare()["qwen3_vl"]
    assert [cause.kind for cause in difference.causes] == ["version"]
    assert difference.files == ()


def test_package_by_its_folder(spec_path, generated, search):
    (found,) = differences(spec_path.parent, generated, [generated / "own"], search)
    assert (found.package, found.spec, found.state) == (
        generated / "own",
        spec_path.with_name("own.yaml"),
        "same",
    )
    with pytest.raises(UsageError, match="is not a package"):
        differences(spec_path.parent, generated, [spec_path.parent], search)


def test_package_in_the_plugins_tree(spec_path, tmp_path, search):
    target = tmp_path / "tree"
    generate(spec_path, target, layout="in-tree", search=search)
    (search[0] / "utils/mrope.py.j2").write_text("A = 2\n")
    (found,) = differences(spec_path.parent, tmp_path, [target], search)
    assert of_files(found) == {"vllm_neuron/model/qwen3_vl/utils/mrope.py": ["utils/mrope.py.j2"]}


def test_nothing_is_written(compare, generated, search):
    (search[0] / "utils/mrope.py.j2").write_text("A = 2\n")
    before = {path: path.read_bytes() for path in generated.rglob("*") if path.is_file()}
    compare()
    assert {path: path.read_bytes() for path in generated.rglob("*") if path.is_file()} == before


def test_directory_without_specs(tmp_path):
    with pytest.raises(OutputError, match="holds no specs"):
        differences(tmp_path, tmp_path)


# --- the command --------------------------------------------------------------------------------


@pytest.fixture
def command(spec_path, generated, search, monkeypatch):
    """`vlmgen diff` with the test's templates."""
    monkeypatch.setattr("vlmgen.render.templates.directories", lambda: search)

    def command(*options: str):
        where = ["--specs", str(spec_path.parent), "--generated", str(generated)]
        return runner.invoke(cli.app, ["diff", *where, *options])

    return command


def test_command_without_changes(command, generated):
    result = command("--all", "--check")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "")
    assert command("--all").stdout.splitlines() == [
        f"{generated}/own: nothing would change",
        f"{generated}/qwen3_vl: nothing would change",
    ]


def test_command_shows_causes_files_and_diff(command, generated, search):
    (search[0] / "utils/mrope.py.j2").write_text("A = 2\n")
    result = command(str(generated / "qwen3_vl"))
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[:3] == [
        f"{generated}/qwen3_vl: 1 file would change",
        "  because of a template utils/mrope.py.j2 (changed)",
        f"  changed  {MODULE}/utils/mrope.py  +1 -11  (utils/mrope.py.j2)",
    ]
    assert "+A = 2" in lines
    assert "+A = 2" not in command("--all", "--stat").stdout


def test_check_exits_4_and_names_the_packages(command, search):
    (search[0] / "utils/mrope.py.j2").write_text("A = 2\n")
    assert command("--all", "--stat").exit_code == 0
    result = command("--all", "--check")
    assert result.exit_code == 4
    assert f"  changed  {MODULE}/utils/mrope.py  +1 -11  (utils/mrope.py.j2)\n" in result.stdout
    first, hint = result.stderr.splitlines()
    assert first == "2 of 2 packages would change: own, qwen3_vl"
    mend = shlex.split(hint.split("`")[1])
    assert mend[:3] == ["vlmgen", "update", "--all"]
    assert runner.invoke(cli.app, mend[1:]).exit_code == 0
    assert command("--all", "--check").exit_code == 0


def test_check_of_one_package_names_the_command_that_mends_it(command, generated, search):
    (generated / "own" / "README.md").unlink()
    result = command("--all", "--check")
    assert result.exit_code == 4
    assert result.stderr.splitlines()[1] == f"hint: run `vlmgen update {generated}/own`"


def test_command_as_json(command, search):
    (search[0] / "utils/mrope.py.j2").write_text("A = 2\n")
    data = json.loads(command("--json").stdout)
    assert [entry["state"] for entry in data] == ["changed", "changed"]
    (file,) = data[1]["files"]
    cause = {"kind": "template", "name": "utils/mrope.py.j2", "how": "changed"}
    assert file["causes"] == [cause]
    assert file["hunks"] == [{"old": [1, 11], "new": [1, 1], "causes": [cause]}]
    assert "+A = 2" in file["diff"]


def test_spec_without_a_package_is_named(command, spec_path):
    third = spec_path.with_name("third.yaml")
    third.write_text("extends: own.yaml\nfamily: third\n")
    result = command("--check")
    assert result.exit_code == 4
    assert f"third: no package: run `vlmgen new {third}`" in result.stdout


def test_all_and_packages_exclude_each_other(command, generated):
    assert command("--all", str(generated / "own")).exit_code == 2


def test_edits_that_were_taken_over_are_no_difference(
    spec_path: Path, tmp_path: Path, search: tuple[Path]
) -> None:
    target = tmp_path / "generated" / "qwen3_vl"
    generate(spec_path, target, search=search)
    path = target / "vllm_neuron_qwen3_vl/config.py"
    path.write_text(path.read_text() + "MINE = 1\n")
    (found,) = differences(spec_path.parent, target.parent, search=search)
    assert found.state == "changed"
    update(target, search=search)
    (found,) = differences(spec_path.parent, target.parent, search=search)
    assert (found.state, found.causes, found.files) == ("same", (), ())
    (search[0] / "blocks/greeting.py.j2").write_text("GREETING = 'hi'\n")
    (found,) = differences(spec_path.parent, target.parent, search=search)
    (file,) = found.files
    assert "MINE" not in file.diff and [cause.kind for cause in file.causes] == ["template"]


def test_overrides_are_searched(spec_path: Path, tmp_path: Path, search: tuple[Path]) -> None:
    target = tmp_path / "generated" / "qwen3_vl"
    mine = tmp_path / "mine" / "blocks"
    mine.mkdir(parents=True)
    (mine / "greeting.py.j2").write_text("GREETING = 'mine'\n")
    generate(spec_path, target, search=search)
    (found,) = differences(spec_path.parent, target.parent, search=search, templates=mine.parent)
    assert [cause.name for cause in found.causes] == ["blocks/greeting.py.j2"]
    update(target, search=search, templates=mine.parent)
    (found,) = differences(spec_path.parent, target.parent, search=search)
    assert found.state == "same"
