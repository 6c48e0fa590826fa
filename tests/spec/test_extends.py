"""`extends`: what is inherited, what is replaced, and where an inherited fault is shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from vlmgen.errors import Problem, SpecError
from vlmgen.render.chain import MAX_CHAIN, spec_chain, spec_texts
from vlmgen.spec import load_spec
from vlmgen.spec.dump import spec_yaml
from vlmgen.spec.extends import resolve_extends
from vlmgen.spec.load import load_spec_text
from vlmgen.spec.source import read_document

from .conftest import ROOT

SPECS = ROOT / "specs"


@pytest.fixture
def write(tmp_path: Path):
    """Write a file of the test's directory and return its path."""

    def write(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    return write


def data(path: Path) -> dict:
    return resolve_extends(read_document(path), path).data


def problems(path: Path) -> list[Problem]:
    with pytest.raises(SpecError) as caught:
        load_spec(path)
    return caught.value.problems


def marked(problem: Problem) -> str:
    """The text that the caret line marks."""
    _, shown, carets = problem.render().split("\n")[:3]
    return shown[carets.index("^") : carets.rindex("^") + 1]


# --- merging ------------------------------------------------------------------------------------


def test_mappings_merge_at_every_depth(write):
    write("base.yaml", "a: {b: {c: 1, d: 2}, e: 3}\nf: 4\n")
    own = write("own.yaml", "extends: base.yaml\na: {b: {d: 5}}\ng: 6\n")
    assert data(own) == {"a": {"b": {"c": 1, "d": 5}, "e": 3}, "f": 4, "g": 6}


def test_lists_are_replaced_whole(write):
    write("base.yaml", "a: [{x: 1, y: 2}, {x: 3}]\n")
    own = write("own.yaml", "extends: base.yaml\na: [{x: 9}]\n")
    assert data(own) == {"a": ({"x": 9},)}


def test_null_takes_an_inherited_value_away(write):
    write("base.yaml", "a: {b: {c: 1}, d: 2}\n")
    own = write("own.yaml", "extends: base.yaml\na: {b: null}\n")
    assert data(own) == {"a": {"b": None, "d": 2}}


@pytest.mark.parametrize(
    ("base", "own", "merged"),
    [
        ("a: {b: 1}", "a: 2", {"a": 2}),
        ("a: 1", "a: {b: 2}", {"a": {"b": 2}}),
        ("a: null", "a: {b: 2}", {"a": {"b": 2}}),
        ("a: {b: 1}", "a: {}", {"a": {"b": 1}}),
        ("a: {b: 1}", "a: [1]", {"a": (1,)}),
    ],
)
def test_a_value_of_another_shape_takes_the_place(write, base, own, merged):
    write("base.yaml", f"{base}\n")
    assert data(write("own.yaml", f"extends: base.yaml\n{own}\n")) == merged


def test_chain_of_three_the_nearest_wins(write):
    write("a.yaml", "x: 1\ny: 1\nz: 1\n")
    write("b.yaml", "extends: a.yaml\ny: 2\nz: 2\n")
    own = write("c.yaml", "extends: b.yaml\nz: 3\n")
    assert data(own) == {"x": 1, "y": 2, "z": 3}
    assert [file.name for file in spec_chain(own)] == ["c.yaml", "b.yaml", "a.yaml"]


def test_base_is_relative_to_the_file_that_names_it(write):
    write("bases/a.yaml", "x: 1\n")
    write("bases/b.yaml", "extends: a.yaml\ny: 2\n")
    own = write("own/c.yaml", "extends: ../bases/b.yaml\n")
    assert data(own) == {"x": 1, "y": 2}


def test_base_is_found_among_the_specs_that_ship(write, spec):
    own = write("own.yaml", "extends: qwen3_vl.yaml\nfamily: fine_tuned\n")
    assert load_spec(own) == spec.model_copy(update={"family": "fine_tuned"})
    write("qwen3_vl.yaml", "vlmgen: 1\n")  # a file beside it goes before
    assert any("missing keys" in problem.message for problem in problems(own))


def test_every_shipped_spec_equals_its_resolved_form():
    for path in sorted(SPECS.glob("*.yaml")):
        spec = load_spec(path)
        assert load_spec_text(spec_yaml(spec), "alone.yaml") == spec


def test_an_inherited_axis_changes_the_spec_and_nothing_else(write):
    own = write("own.yaml", "extends: qwen2_vl.yaml\ntext: {rope: {theta: 500000}}\n")
    base = load_spec(SPECS / "qwen2_vl.yaml")
    rope = base.text.rope.model_copy(update={"theta": 500000.0})
    assert load_spec(own) == base.model_copy(
        update={"text": base.text.model_copy(update={"rope": rope})}
    )


# --- places -------------------------------------------------------------------------------------


def test_inherited_fault_points_at_the_base(write, spec_text):
    base = write("base.yaml", spec_text.replace("depth: 27", "depth: none", 1))
    own = write("own.yaml", "extends: base.yaml\nfamily: x\n")
    (problem,) = problems(own)
    line = spec_text[: spec_text.index("depth: 27")].count("\n") + 1
    assert (problem.file, problem.line, problem.column) == (str(base), line, 10)
    assert problem.source == "  depth: none"
    assert marked(problem) == "none"
    assert problem.render().startswith(f"{base}:{line}:10: VG513 vision.depth is 'none'")


def test_own_fault_points_at_the_own_file(write):
    own = write("own.yaml", "extends: qwen2_vl.yaml\nvision:\n  depth: none\n")
    (problem,) = problems(own)
    assert (problem.file, problem.line, problem.column) == (str(own), 3, 10)
    assert marked(problem) == "none"


def test_fault_two_bases_away(write, spec_text):
    deep = write("a.yaml", spec_text.replace("theta: 5000000", "theta: none"))
    write("b.yaml", "extends: a.yaml\nfamily: b\n")
    own = write("c.yaml", "extends: b.yaml\nfamily: c\n")
    (problem,) = problems(own)
    assert problem.file == str(deep)
    assert marked(problem) == "none"


def test_rule_between_an_own_and_an_inherited_value_points_at_the_one_it_names(write):
    own = write("own.yaml", "extends: qwen2_vl.yaml\ntext: {attention: {head_dim: 64}}\n")
    (problem,) = problems(own)
    assert problem.path == "text.rope.sections"
    assert problem.file.endswith("specs/qwen2_vl.yaml")
    assert marked(problem) == "[16, 24, 24]"
    assert "half of the rotated head is 32" in problem.message


def test_problems_of_the_own_file_come_first(write, spec_text):
    base = write("base.yaml", spec_text.replace("head_dim: 128", "head_dim: 0"))
    own = write(
        "own.yaml", "extends: base.yaml\n\n\n\n\n\n\nvision: {depth: none, hiden_size: 1}\n"
    )
    found = problems(own)
    assert [problem.file for problem in found] == [str(own), str(own), str(base)]
    assert found[0].column < found[1].column


def test_key_that_the_own_file_replaced_is_not_shown_in_the_base(write, spec_text):
    write("base.yaml", spec_text)
    own = write("own.yaml", "extends: base.yaml\nvision: {merger: {opp: window}}\n")
    (problem,) = problems(own)
    assert (problem.file, problem.line) == (str(own), 2)
    assert "did you mean 'op'?" in problem.message


def test_duplicate_key_in_the_base_is_reported(write, spec_text):
    base = write("base.yaml", spec_text.replace("  depth: 27\n", "  depth: 27\n  depth: 28\n"))
    (problem,) = problems(write("own.yaml", "extends: base.yaml\n"))
    assert (problem.file, problem.message) == (str(base), "key 'depth' is given twice")


# --- faults of `extends` itself -----------------------------------------------------------------


def test_missing_base(write):
    own = write("own.yaml", "family: x\nextends: nowhere.yaml\n")
    (problem,) = problems(own)
    assert problem.message == "extends 'nowhere.yaml': no such file"
    assert (problem.file, problem.line, problem.column) == (str(own), 2, 10)
    assert marked(problem) == "nowhere.yaml"


def test_missing_base_of_a_base_names_the_line_in_the_base(write):
    base = write("base.yaml", "extends: nowhere.yaml\n")
    (problem,) = problems(write("own.yaml", "extends: base.yaml\n"))
    assert (problem.file, problem.line) == (str(base), 1)


def test_circle(write):
    write("a.yaml", "extends: b.yaml\n")
    write("b.yaml", "extends: c.yaml\n")
    c = write("c.yaml", "extends: a.yaml\n")
    (problem,) = problems(c.with_name("a.yaml"))
    assert problem.message == "extends goes in a circle: a.yaml -> b.yaml -> c.yaml -> a.yaml"
    assert problem.file == str(c)


def test_spec_that_extends_itself(write):
    (problem,) = problems(write("a.yaml", "extends: a.yaml\n"))
    assert problem.message == "extends goes in a circle: a.yaml -> a.yaml"


def test_chain_that_is_too_long(write):
    write("s0.yaml", "x: 1\n")
    for n in range(1, MAX_CHAIN + 1):
        write(f"s{n}.yaml", f"extends: s{n - 1}.yaml\n")
    last = write("last.yaml", f"extends: s{MAX_CHAIN - 2}.yaml\n")
    assert data(last) == {"x": 1}
    (problem,) = problems(last.with_name(f"s{MAX_CHAIN}.yaml"))
    assert problem.message == f"more than {MAX_CHAIN} specs in a chain"
    assert Path(problem.file).name == "s1.yaml"


@pytest.mark.parametrize(
    "name",
    ["/etc/passwd", "3", "null", "[a.yaml]", "{a: b}", "a.txt", "'a b.yaml'", "../../x.yaml "],
)
def test_extends_is_the_path_of_a_yaml_file(write, name):
    (problem,) = problems(write("own.yaml", f"extends: {name}\nfamily: x\n"))
    assert problem.path == "extends"
    assert problem.rule == "extends is the path of a YAML file, relative to this one"


@pytest.mark.parametrize(
    "text",
    ["{extends: base.yaml, family: x}\n", "'extends': base.yaml\n", "extends:\n  base.yaml\n"],
)
def test_extends_is_a_line_of_its_own(write, text):
    """A package's inputs are hashed without parsing YAML: what that misses may not be used."""
    write("base.yaml", "x: 1\n")
    (problem,) = problems(write("own.yaml", text))
    assert problem.message == "extends does not stand on a line of its own"
    assert problem.legal == "extends: base.yaml"


def test_base_that_is_no_mapping(write):
    write("base.yaml", "- 1\n")
    (problem,) = problems(write("own.yaml", "extends: base.yaml\nfamily: x\n"))
    assert problem.message == "extends 'base.yaml', which is no mapping"


# --- hashing ------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(SPECS.glob("*.yaml")), ids=lambda path: path.stem)
def test_hashed_files_are_those_that_are_read(path):
    document = resolve_extends(read_document(path), path)
    read = [Path(file).resolve() for file, _ in document.sources]
    assert [file.resolve() for file in spec_chain(path)] == read


def test_hashed_text_holds_every_base(write):
    write("a.yaml", "x: 1\n")
    write("b.yaml", "\ufeffextends: a.yaml # the base\r\ny: 2\r\n")
    own = write("c.yaml", 'z: 3\nextends: "b.yaml"\n')
    assert list(spec_texts(own)) == ["c.yaml", "b.yaml", "a.yaml"]
    assert spec_texts(own)["a.yaml"] == b"x: 1\n"
