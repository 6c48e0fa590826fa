"""Every hunk of `vlmgen diff` says what caused it: a value of a spec, a template, a hand edit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from vlmgen import cli
from vlmgen.render import attribution
from vlmgen.render.attribution import Cause, hunks_of, value_causes
from vlmgen.render.difference import PackageDifference, differences
from vlmgen.render.generate import generate
from vlmgen.spec.load import load_spec

CONFIG = "package/config.py.j2"
# Values of both towers, far enough apart for a hunk each.
BODY = (
    "A = {{ text.rope.theta | num }}\n"
    + "".join(f"B{n} = {n}\n" for n in range(9))
    + "C = {{ vision.hidden_size | num }}\n"
    + "".join(f"D{n} = {n}\n" for n in range(9))
    + "E = {{ text.rope.sections | tuple }}\n"
    + "".join(f"F{n} = {n}\n" for n in range(9))
)
THETA = "text.rope.theta"
ONE, TWO, THREE = ((Cause("template", name),) for name in ("one", "two", "three"))


# --- lines --------------------------------------------------------------------------------------


def numbered(*changed: tuple[int, str]) -> bytes:
    lines = {n: f"{n}\n" for n in range(40)} | dict(changed)
    return "".join(lines[n] for n in sorted(lines)).encode()


def named(hunks) -> list[tuple[int, list[str]]]:
    return [(hunk.old_start, [cause.name for cause in hunk.causes]) for hunk in hunks]


def test_a_hunk_has_the_step_that_changed_it() -> None:
    texts = [
        numbered(),
        numbered((5, "five\n")),
        numbered((5, "five\n"), (20, "")),
        numbered((5, "five\n"), (20, ""), (35, "35\nmore\n")),
    ]
    assert named(hunks_of(texts, (ONE, TWO, THREE))) == [
        (3, ["one"]),
        (18, ["two"]),
        (34, ["three"]),
    ]


def test_a_line_that_two_steps_change_has_both() -> None:
    texts = [numbered(), numbered((5, "five\n")), numbered((5, "V\n"))]
    assert named(hunks_of(texts, (ONE, TWO))) == [(3, ["one", "two"])]


def test_what_a_step_undoes_is_no_change() -> None:
    texts = [numbered(), numbered((5, "five\n"), (9, "x\n")), numbered((9, "x\n"))]
    assert named(hunks_of(texts, (ONE, TWO))) == [(7, ["one"])]


@pytest.mark.parametrize(("first", "last"), [(None, b"a\nb\n"), (b"a\nb\n", None), (b"a", b"b")])
def test_files_that_come_and_go(first: bytes | None, last: bytes | None) -> None:
    (hunk,) = hunks_of([first, first, last], (ONE, TWO))
    assert [cause.name for cause in hunk.causes] == ["two"]
    assert all(line.endswith("\n") for line in hunk.lines)


def test_bytes_that_are_no_text() -> None:
    (hunk,) = hunks_of([b"a\n\xff\n", b"a\n\xfe\n"], (ONE,))
    assert hunk.text() == "@@ -1,2 +1,2 @@ one\n a\n-\\xff\n+\\xfe\n"


def test_causes_that_lie_close_are_hunks_of_their_own() -> None:
    old = numbered()
    once = numbered((5, "five\n"), (9, "nine\n"))
    hunks = hunks_of([old, once, numbered((5, "five\n"), (7, ""), (9, "nine\n"))], (ONE, TWO))
    assert named(hunks) == [(3, ["one"]), (7, ["two"]), (9, ["one"])]
    assert [hunk.text().splitlines()[0] for hunk in hunks] == [
        "@@ -3,4 +3,4 @@ one",
        "@@ -7,2 +7 @@ two",
        "@@ -9,5 +8,5 @@ one",
    ]


@given(
    st.lists(st.lists(st.sampled_from(["a\n", "b\n", "c\n"]), max_size=8), min_size=2, max_size=4)
)
def test_hunks_are_a_diff(versions: list[list[str]]) -> None:
    """Applied to the old text they give the new one, and every changed line has a cause."""
    texts = ["".join(lines).encode() for lines in versions]
    hunks = hunks_of(texts, (ONE, TWO, THREE)[: len(texts) - 1])
    result, done = [], 0
    for hunk in hunks:
        start = hunk.old_start - (hunk.old_lines > 0)
        assert start >= done and hunk.causes
        kept = [line[1:] for line in hunk.lines if line[0] in " -"]
        assert kept == versions[0][start : start + hunk.old_lines]
        result += versions[0][done:start]
        assert len(result) + (hunk.new_lines > 0) == hunk.new_start
        result += [line[1:] for line in hunk.lines if line[0] in " +"]
        done = start + hunk.old_lines
    assert result + versions[0][done:] == versions[-1]


# --- packages -----------------------------------------------------------------------------------


@pytest.fixture
def search(search: tuple[Path]) -> tuple[Path]:
    (search[0] / CONFIG).write_text(BODY)
    return search


@pytest.fixture
def package(spec_path: Path, tmp_path: Path, search: tuple[Path]) -> Path:
    target = tmp_path / "generated" / "qwen3_vl"
    generate(spec_path, target, search=search)
    return target


@pytest.fixture
def change(spec_path: Path) -> Callable[..., int]:
    """Change the spec, and say on which line."""

    def change(old: str, new: str) -> int:
        text = spec_path.read_text("utf-8")
        assert text.count(old) == 1
        spec_path.write_text(text.replace(old, new), "utf-8")
        return text[: text.index(old)].count("\n") + 1

    return change


@pytest.fixture
def compared(
    spec_path: Path, package: Path, search: tuple[Path]
) -> Callable[[], PackageDifference]:
    def compared() -> PackageDifference:
        (found,) = differences(spec_path.parent, package.parent, search=search)
        return found

    return compared


def config_hunks(difference: PackageDifference) -> list[list[tuple[str, str]]]:
    (file,) = [file for file in difference.files if file.path.endswith("config.py")]
    return [[(cause.kind, cause.path or cause.name) for cause in h.causes] for h in file.hunks]


def test_one_value(compared, change, spec_path, monkeypatch) -> None:
    line = change("theta: 5000000", "theta: 1000000")
    monkeypatch.setattr(attribution, "render_package", None)  # one cause needs no rendering
    found = compared()
    assert config_hunks(found) == [[("spec", THETA)]]
    (cause,) = found.causes
    assert cause.text() == f"{spec_path}:{line}: {THETA} 5000000.0 -> 1000000.0"
    (file,) = [file for file in found.files if file.path.endswith("config.py")]
    assert f"@@ -1,4 +1,4 @@ {cause.text()}\n-A = 5_000_000.0\n+A = 1_000_000.0\n" in file.diff


def test_two_values_and_one_by_hand(compared, change, package) -> None:
    change("theta: 5000000", "theta: 1000000")
    change("sections: [24, 20, 20]", "sections: [24, 21, 19]")
    path = package / "vllm_neuron_qwen3_vl/config.py"
    path.write_text(path.read_text().replace("B8 = 8\nC", "B8 = 80\nC"))
    assert config_hunks(compared()) == [
        [("spec", THETA)],
        [("hand", "vllm_neuron_qwen3_vl/config.py")],
        [("spec", "text.rope.sections")],
    ]


def test_a_template_and_a_value(compared, change, search) -> None:
    change("theta: 5000000", "theta: 1000000")
    template = search[0] / CONFIG
    template.write_text(template.read_text().replace("F8 = 8", "F8 = 88").replace("A =", "AA ="))
    assert config_hunks(compared()) == [
        [("template", CONFIG), ("spec", THETA)],
        [("template", CONFIG)],
    ]


def test_values_that_are_legal_together_only(compared, change) -> None:
    """Each alone breaks the rule that the sections fill half of the rotated head."""
    change("sections: [24, 20, 20]", "sections: [12, 10, 10]")
    change("partial: 1.0", "partial: 0.5")
    change("theta: 5000000", "theta: 1000000")
    paths = [[path for _, path in causes] for causes in config_hunks(compared())]
    assert paths[0] == [THETA]
    assert "text.rope.sections" in paths[1] and THETA not in paths[1]


def test_a_value_that_asks_for_other_templates(
    compared, change, search, spec_path, package
) -> None:
    template = search[0] / CONFIG
    block = "{% if text.rope.theta < 2000000 %}{% include 'blocks/greeting.py.j2' %}{% endif %}"
    template.write_text(template.read_text() + block)
    generate(spec_path, package, search=search)
    change("theta: 5000000", "theta: 1000000")
    found = compared()
    assert [(cause.kind, cause.path) for cause in found.causes] == [("spec", THETA)]
    assert config_hunks(found) == [[("spec", THETA)], [("spec", THETA)]]


def test_a_template_that_does_not_fit_the_old_spec(compared, change, search) -> None:
    change("theta: 5000000", "theta: 1000000")
    change("sections: [24, 20, 20]", "sections: [24, 21, 19]")
    template = search[0] / CONFIG
    guard = "{% if text.rope.theta > 1000000 %}{{ nothing.there }}{% endif %}"
    template.write_text(template.read_text() + guard)
    either = [("template", CONFIG), ("spec", "text.rope.sections"), ("spec", THETA)]
    assert config_hunks(compared()) == [either, either]


def test_a_value_of_a_base_has_the_line_of_the_base(compared, change, spec_path, search) -> None:
    own = spec_path.with_name("own.yaml")
    own.write_text("extends: qwen3_vl.yaml\nfamily: own\n")
    target = spec_path.parents[1] / "generated" / "own"
    generate(own, target, search=search)
    line = change("theta: 5000000", "theta: 1000000")
    (found,) = differences(spec_path.parent, target.parent, [target], search)
    (cause,) = found.causes
    assert (cause.kind, cause.place) == ("base", f"{spec_path}:{line}")
    own.write_text(f"{own.read_text()}text: {{rope: {{theta: 5000000}}}}\n")
    (found,) = differences(spec_path.parent, target.parent, [target], search)
    assert found.files == ()


def test_entries_of_lists_are_named(spec_path: Path, tmp_path: Path) -> None:
    old = load_spec(spec_path)
    text = spec_path.read_text("utf-8")
    name = old.checkpoints[1].name
    line = next(n for n, each in enumerate(text.split("\n"), 1) if f"name: {name}" in each)
    changed = text.replace("max_position_embeddings: 262144", "max_position_embeddings: 262145")
    other = tmp_path / spec_path.name
    other.write_text(changed, "utf-8")
    assert value_causes(old, load_spec(other), other)
    other.write_text(text.replace(f"name: {name}", f"name: {name}-X"), "utf-8")
    causes = {c.path: c for c in value_causes(old, load_spec(other), other)}
    assert causes[f"checkpoints[{name}-X]"].place == f"{other}:{line}"
    assert causes[f"checkpoints[{name}]"].new == "-"


def test_a_real_package(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two values of the committed spec, as the command prints them."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(repository / "specs", tmp_path / "specs")
    shutil.copytree(
        repository / "generated/qwen3_vl", tmp_path / "generated/qwen3_vl", ignore=ignored
    )
    monkeypatch.chdir(tmp_path)
    spec = Path("specs/qwen3_vl.yaml")
    text = spec.read_text("utf-8").replace("theta: 5000000", "theta: 1000000")
    spec.write_text(text.replace("eps: 1.0e-6, topology", "eps: 1.0e-5, topology"), "utf-8")
    data = json.loads(CliRunner().invoke(cli.app, ["diff", "generated/qwen3_vl", "--json"]).stdout)
    (package,) = data
    config = next(file for file in package["files"] if file["path"].endswith("/config.py"))
    paths = [[cause["path"] for cause in hunk["causes"]] for hunk in config["hunks"]]
    eps = "text.norm.eps"
    assert paths == [[eps, THETA], [THETA], [eps]]  # two lines, one below the other, are one hunk
    cause = next(c for c in package["causes"] if c["path"] == THETA)
    assert (cause["old"], cause["new"]) == ("5000000.0", "1000000.0")
    assert text.split("\n")[int(cause["place"].split(":")[1]) - 1].count("theta: 1000000") == 1
