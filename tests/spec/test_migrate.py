"""Formats of the spec: older ones are rewritten and nothing else is, newer ones are refused."""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import vlmgen
from vlmgen.cli import app
from vlmgen.errors import Problem, SpecError
from vlmgen.spec.compare import compare_specs
from vlmgen.spec.load import load_spec, load_spec_text
from vlmgen.spec.migrate import STEPS, migrate_file, migrate_text
from vlmgen.spec.versions import FORMAT

from .conftest import ROOT, SPEC_PATH

# The spec of Qwen3-VL as it was before reference.vllm_module, without a version.
OLD = Path(__file__).parent / "formats" / "qwen3_vl.0.yaml"
MODULE = "transformers.models.qwen3_vl.modeling_qwen3_vl"
ADDED = "vllm_module: vllm.model_executor.models.qwen3_vl"
runner = CliRunner()


def problems(text: str) -> list[Problem]:
    with pytest.raises(SpecError) as caught:
        load_spec_text(text, "x.yaml")
    return caught.value.problems


def test_the_format_is_the_minor_version_of_vlmgen() -> None:
    """So that a spec of format n can be answered with the version that reads it."""
    assert vlmgen.__version__.split(".")[:2] == ["0", str(FORMAT)]
    assert [step.version for step in STEPS] == list(range(FORMAT))


# --- older --------------------------------------------------------------------------------------


def test_an_old_spec_gains_two_lines_and_keeps_the_others() -> None:
    before = OLD.read_text("utf-8")
    migration = migrate_file(OLD)
    assert (migration.version, len(migration.notes)) == (0, 1)
    lines = list(difflib.ndiff(before.splitlines(), migration.text.splitlines()))
    assert [line for line in lines if not line.startswith("  ")] == [
        "+ vlmgen: 1",
        f"+   {ADDED}",
    ]
    assert compare_specs(load_spec_text(migration.text), load_spec(SPEC_PATH)).is_equal


def test_a_stated_version_is_replaced_where_it_stands() -> None:
    text = f"title: x\nvlmgen: 0      # the first\nreference: {{module: {MODULE}, a: 1}}   # keep\n"
    assert migrate_text(text).text == (
        "title: x\nvlmgen: 1      # the first\n"
        f"reference: {{module: {MODULE}, {ADDED}, a: 1}}   # keep\n"
    )


def test_migrating_again_changes_nothing() -> None:
    once = migrate_file(OLD).text
    again = migrate_text(once)
    assert (again.text, again.version, again.notes) == (once, FORMAT, ())
    current = SPEC_PATH.read_text("utf-8")
    assert migrate_text(current).text == current


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        # A last line without an end, line ends of another system, a byte order mark.
        (f"reference:\n  module: {MODULE}",
         f"vlmgen: 1\nreference:\n  module: {MODULE}\n  {ADDED}"),
        (
            f"a: 1\r\nreference:\r\n  module: {MODULE}\r\n",
            f"vlmgen: 1\r\na: 1\r\nreference:\r\n  module: {MODULE}\r\n  {ADDED}\r\n",
        ),
        (f"\ufeffreference: {{module: '{MODULE}'}}\n",
         f"\ufeffvlmgen: 1\nreference: {{module: '{MODULE}', {ADDED}}}\n"),
        # The whole spec in flow style, and after a document start.
        (f"---\n{{reference: {{module: {MODULE}}}}}\n",
         f"---\n{{vlmgen: 1, reference: {{module: {MODULE}, {ADDED}}}}}\n"),
        # A deeper indentation, a comment behind the value.
        (f"# mine\nreference:\n      module: {MODULE} # here\n      a: 1\n",
         f"# mine\nvlmgen: 1\nreference:\n      module: {MODULE} # here\n"
         f"      {ADDED}\n      a: 1\n"),
        # Nothing that the step is about.
        ("title: x\n", "vlmgen: 1\ntitle: x\n"),
        ("reference: {vllm_module: y}\n", "vlmgen: 1\nreference: {vllm_module: y}\n"),
        ("reference: {module: elsewhere}\n", "vlmgen: 1\nreference: {module: elsewhere}\n"),
    ],
)  # fmt: skip
def test_ways_to_write_it(text: str, wanted: str) -> None:
    assert migrate_text(text).text == wanted


@pytest.mark.parametrize(
    "text",
    [
        f"reference:\n  module: |\n    {MODULE}\n",
        f"reference:\n  module: >-\n    {MODULE}\n",
        "vlmgen: |\n  0\n",
    ],
)
def test_what_cannot_be_changed_is_refused(text: str) -> None:
    with pytest.raises(SpecError) as caught:
        migrate_text(text, "x.yaml")
    assert caught.value.problems[0].code in ("VG543", "VG513")


def test_a_spec_that_extends_another_has_the_version_of_that() -> None:
    text = "extends: base.yaml\ntitle: x\n"
    assert migrate_text(text).text == text


COMMENT = st.sampled_from(["", "# a comment\n", "\n", "  # indented: {not, data}\n", "#\n\n"])
TAIL = st.sampled_from(["", "   # why", " #x"])
VALUE = st.sampled_from(["1", "x", "[1, 2]", "{a: 1}", "'it''s'", '"\\u00e9"', "\u00e9\u00e9"])
NAME = st.sampled_from(["title", "family", "zeta", "'quoted key'"])


@given(
    st.lists(st.tuples(COMMENT, NAME, VALUE, TAIL), max_size=4, unique_by=lambda row: row[1]),
    st.lists(st.tuples(COMMENT, st.sampled_from(["a", "b"]), VALUE, TAIL), max_size=2,
             unique_by=lambda row: row[1]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["\n", "\r\n"]),
    COMMENT,
)  # fmt: skip
def test_every_line_stays_and_the_data_gains_what_it_should(
    outer, inner, flow, stated, first, end, last
) -> None:
    top = [f"{comment}{name}: {value}{tail}\n" for comment, name, value, tail in outer]
    own = [(name, value) for _, name, value, _ in inner]
    if flow:
        pairs = [("module", MODULE), *own] if first else [*own, ("module", MODULE)]
        reference = "reference: {" + ", ".join(f"{k}: {v}" for k, v in pairs) + "}  # in flow\n"
    else:
        rows = [f"{c}  {name}: {value}{tail}\n" for c, name, value, tail in inner]
        rows.insert(0 if first else len(rows), f"  module: {MODULE}\n")
        reference = "reference:\n" + "".join(rows)
    parts = [*top, reference, *(["vlmgen: 0 # old\n"] if stated else []), last]
    text = "".join(parts).replace("\n", end)
    before = yaml.safe_load(text)
    migrated = migrate_text(text).text
    wanted = {**before, "vlmgen": 1}
    wanted["reference"] = {
        **before["reference"], "vllm_module": "vllm.model_executor.models.qwen3_vl"
    }  # fmt: skip
    assert yaml.safe_load(migrated) == wanted
    kept = [line for line in text.split(end) if "reference: {" not in line and "vlmgen" not in line]
    remaining = migrated.split(end)
    for line in kept:  # in the order in which they stood
        assert line in remaining
        remaining = remaining[remaining.index(line) + 1 :]
    assert migrated.count(end) == migrated.count("\n") if end == "\r\n" else True


# --- what loading says --------------------------------------------------------------------------


def test_an_older_spec_says_to_migrate_and_nothing_else() -> None:
    text = OLD.read_text("utf-8").replace("family: qwen3_vl", "vlmgen: 0\nfamili: qwen3_vl")
    (problem,) = problems(text)
    assert (problem.code, problem.message) == ("VG541", "the spec is of format 0")
    assert problem.hint == "run `vlmgen migrate x.yaml`"


def test_a_spec_without_a_version_says_how_to_state_it_or_to_migrate() -> None:
    first, second = problems(OLD.read_text("utf-8"))
    assert first.message == "missing key 'vlmgen'" and "vlmgen migrate" in first.hint
    assert second.message == "missing key 'vllm_module' in reference"


@pytest.mark.parametrize("version", [2, 3, 17, 10**17])
def test_a_newer_spec_is_refused_with_the_version_that_reads_it(spec_text, version) -> None:
    text = spec_text.replace("vlmgen: 1", f"vlmgen: {version}\nnew_axis: {{of: the, future: 1}}")
    (problem,) = problems(text)
    assert (problem.code, problem.message) == ("VG542", f"the spec is of format {version}")
    assert problem.rule == f"vlmgen {vlmgen.__version__} reads format 1"
    assert problem.hint.startswith(f"vlmgen 0.{version} reads it")
    with pytest.raises(SpecError) as caught:
        migrate_text(text, "x.yaml")
    assert [p.code for p in caught.value.problems] == ["VG542"]


def test_an_older_base_is_named(tmp_path: Path, spec_text: str) -> None:
    (tmp_path / "base.yaml").write_text(spec_text.replace("vlmgen: 1", "vlmgen: 0"))
    own = tmp_path / "own.yaml"
    own.write_text("vlmgen: 1\nextends: base.yaml\n")
    with pytest.raises(SpecError) as caught:
        load_spec(own)
    (problem,) = caught.value.problems
    assert problem.file == str(tmp_path / "base.yaml")
    assert problem.hint == f"run `vlmgen migrate {tmp_path / 'base.yaml'}`"


@pytest.mark.parametrize("value", ["-1", "1.0", "true", "one", "null", "[1]", "'1'"])
def test_what_is_no_version_is_a_wrong_value(spec_text: str, value: str) -> None:
    found = problems(spec_text.replace("vlmgen: 1", f"vlmgen: {value}"))
    assert {problem.path for problem in found} == {"vlmgen"}
    with pytest.raises(SpecError):
        migrate_text(f"vlmgen: {value}\n")


# --- the command --------------------------------------------------------------------------------


def test_the_command_writes_in_place_and_keeps_the_mode(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(OLD.read_bytes())
    path.chmod(0o640)
    result = runner.invoke(app, ["migrate", str(path)])
    assert (result.exit_code, result.stdout.splitlines()[0]) == (0, f"{path}: format 0 -> 1")
    assert ADDED.replace(": ", ": ") in path.read_text("utf-8")
    assert path.stat().st_mode & 0o777 == 0o640
    assert list(tmp_path.iterdir()) == [path]
    again = runner.invoke(app, ["migrate", str(path)])
    assert again.stdout == f"{path}: format 1, nothing to do\n"


def test_diff_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(OLD.read_bytes())
    result = runner.invoke(app, ["migrate", str(path), "--diff"])
    assert "+vlmgen: 1\n" in result.stdout and f"+  {ADDED}\n" in result.stdout
    assert path.read_bytes() == OLD.read_bytes()


def test_one_bad_spec_of_several_leaves_all_as_they_are(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_bytes(OLD.read_bytes())
    bad.write_text("vlmgen: 2\n")
    result = runner.invoke(app, ["migrate", str(good), str(bad)])
    assert result.exit_code == 3
    assert good.read_bytes() == OLD.read_bytes()


def test_a_byte_order_mark_stays(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + OLD.read_bytes())
    assert runner.invoke(app, ["migrate", str(path)]).exit_code == 0
    assert path.read_bytes().startswith(b"\xef\xbb\xbf#")


def test_the_specs_of_this_repository_are_current() -> None:
    for path in sorted((ROOT / "specs").glob("*.yaml")):
        assert migrate_file(path).version == FORMAT
