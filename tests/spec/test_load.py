"""Loading: every problem at once, at the exact place, in words."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from vlmgen.errors import Problem, SpecError
from vlmgen.spec import load_spec
from vlmgen.spec.load import load_spec_text
from vlmgen.spec.source import MAX_BYTES, MAX_DEPTH


def fail(text: str) -> list[Problem]:
    with pytest.raises(SpecError) as caught:
        load_spec_text(text, "x.yaml")
    return caught.value.problems


def marked(problem: Problem) -> str:
    """The text that the caret line marks, read off the rendered problem."""
    _, shown, carets = problem.render().split("\n")[:3]
    start, end = carets.index("^"), carets.rindex("^") + 1
    return shown[start:end]


def test_the_spec_states_the_published_values(spec):
    assert spec.family == "qwen3_vl"
    assert spec.text.rope.sections == (24, 20, 20)
    assert spec.text.rope.theta == 5_000_000
    assert spec.vision.deepstack.indices == (8, 16, 24)
    assert [c.name for c in spec.checkpoints] == [
        f"Qwen3-VL-{size}-Instruct" for size in ("2B", "4B", "8B", "32B")
    ]


def test_a_spec_is_immutable_and_hashable(spec):
    with pytest.raises(ValueError, match="frozen"):
        spec.text.rope.theta = 1.0
    assert hash(spec) == hash(spec.model_copy(deep=True))


def test_unknown_key_near_miss_has_place_caret_and_suggestion(problems_of):
    (problem,) = problems_of(("  hidden_size: 4096\n", "  hiden_size: 4096\n"))
    assert problem.message == "unknown key 'hiden_size' in text; did you mean 'hidden_size'?"
    assert (problem.column, problem.path) == (3, "text.hiden_size")
    assert marked(problem) == "hiden_size"
    lines = problem.render().split("\n")
    assert lines[0].startswith(f"x.yaml:{problem.line}:3: VG511 unknown key")
    assert lines[1] == f"{problem.line} |   hiden_size: 4096"
    assert lines[2] == "   |   ^^^^^^^^^^"


def test_unknown_key_says_where_it_belongs(problems_of):
    (problem,) = problems_of(("family: qwen3_vl", "family: qwen3_vl\nalign_corners: true"))
    assert problem.message == "unknown key 'align_corners'"
    assert problem.hint == "'align_corners' belongs to vision.position"


@pytest.mark.parametrize(
    ("old", "new", "expected", "mark"),
    [
        ("sections: [24, 20, 20]", "sections: [24, 20, 24]", "68", "[24, 20, 24]"),
        ("bounds: frame ", "bounds: fram ", "did you mean 'frame'", "fram"),
        ("num_embeddings: 2304", "num_embeddings: 2300", "2300", "2300"),
        ("depth: 27", "depth: '27'", "which is text", "'27'"),
        ("depth: 27", "depth: 27.5", "a number with a fraction", "27.5"),
        ("depth: 27", "depth: true", "a boolean", "true"),
        ("depth: 27", "depth: 0", "vision.depth is 0", "0"),
        ("depth: 27", "depth:", "empty (null)", "depth"),
        ("depth: 27", "depth: [27]", "a list", "[27]"),
        ("sections: [24, 20, 20]", "sections: [24, 20]", "2 entries", "[24, 20]"),
        ("norm: {kind: layer, eps: 1.0e-6}", "norm: layer", "which is text", "layer"),
    ],
)
def test_caret_marks_the_value(problems_of, old, new, expected, mark):
    problem = problems_of((old, new))[0]
    assert expected in problem.message
    # An empty value has nothing to mark: its key, or the place after it, is shown.
    assert marked(problem).strip() in (mark, "")
    assert problem.source == problem.source.rstrip("\n")
    assert problem.source[problem.column - 1 :].startswith(mark) or mark == "depth"


def test_caret_stands_below_the_value_after_wide_characters():
    problem, *_ = fail('{"\u56fe\u56fe": 1}')
    lines = problem.render().split("\n")
    # Two ideographs are four cells wide, and so is what marks them (with the quotes, six).
    assert problem.message.startswith("missing keys") or problem.message.startswith("unknown key")
    unknown = next(p for p in fail('{"\u56fe\u56fe": 1}') if p.message.startswith("unknown"))
    assert unknown.render().split("\n")[2] == "  |  ^^^^^^"
    assert lines[1].startswith("1 | ")


def test_all_problems_are_reported_at_once_in_file_order(problems_of):
    problems = problems_of(
        ("topology: pre", "topology: middle"),
        ("sections: [24, 20, 20]", "sections: [24, 20, 24]"),
        ("indices: [8, 16, 24]", "indices: [8, 16, 27]"),
        ("num_heads: 16\n    qkv_layout", "num_headz: 16\n    qkv_layout"),
        ("id: 151653", "id: 999999"),
        ('layer: "layers.{layer}."', 'layer: "layers."'),
    )
    paths = [problem.path for problem in problems]
    assert paths == [
        "text.norm.topology",
        "text.rope.sections",
        "vision.attention.num_headz",
        "vision.deepstack.indices",
        "vision.deepstack.indices[2]",
        "tokens.vision_end.id",
        "weights.text.layer",
    ]
    rendered = SpecError(problems).render()
    assert rendered.endswith("7 problems in the spec")
    assert [problem.line for problem in problems] == sorted(problem.line for problem in problems)


def test_missing_keys_of_a_part_are_one_problem(problems_of):
    (problem,) = problems_of(
        ("  hidden_size: 4096\n  num_layers: 36\n  vocab_size: 151936\n", "  num_layers: 36\n")
    )
    assert problem.message == "missing keys 'hidden_size', 'vocab_size' in text"
    assert marked(problem) == "text"


def test_missing_key_says_what_it_is(problems_of):
    (problem,) = problems_of(("  depth: 27\n", ""))
    assert problem.message == "missing key 'depth' in vision"
    assert problem.rule == "Blocks of the tower."


def test_value_of_a_later_family_is_named_as_known(problems_of):
    (problem,) = problems_of(("cast: before_weight", "cast: after_weight"))
    assert problem.message == (
        "'after_weight' is a known value of text.norm.cast (needed by qwen3_5, qwen3_5_moe, "
        "gemma3) that this version of vlmgen does not generate"
    )
    assert problem.legal == "before_weight"


@pytest.mark.parametrize(
    ("old", "new", "family"),
    [
        ("kind: swiglu, activation: silu", "kind: geglu_tanh, activation: silu", "gemma3"),
        ("partial: 1.0", "partial: 0.25", "qwen3_5"),
        ("align_corners: true", "align_corners: false", "keye"),
        ("kind: axial_half", "kind: pixtral_split", "pixtral"),
        ("quantization: [none, bf16]", "quantization: [none, mxfp8]", "text tower only"),
    ],
)
def test_later_values_of_every_type_are_known(problems_of, old, new, family):
    known = [p.message for p in problems_of((old, new)) if "is a known value of" in p.message]
    assert len(known) == 1
    assert family in known[0]


def test_part_that_may_be_null_leaves_with_its_weights(spec_text):
    text = re.sub(r"  deepstack:\n    indices.*\n    merger.*\n    inject.*\n",
                  "  deepstack: null\n", spec_text)  # fmt: skip
    assert text != spec_text
    problem = next(p for p in fail(text) if p.path == "weights.vision.deepstack")
    assert problem.message == "weights.vision.deepstack is stated, but vision.deepstack is null"
    without = re.sub(r"    deepstack: \{prefix.*\n", "", text)
    sizes = fail(without)
    assert [p.path for p in sizes] == [f"checkpoints[{n}].vision.deepstack" for n in range(4)]
    assert load_spec_text(re.sub(r", deepstack: \[.*\]", "", without)).vision.num_levels == 0


def test_later_axis_is_known(problems_of):
    (problem,) = problems_of(("text:\n", "text:\n  embed_scale: 2\n"))
    assert problem.message.startswith("text.embed_scale is a known axis (needed by gemma3)")


def test_a_wrong_value_beside_it_does_not_end_a_pairing(problems_of):
    (problem,) = problems_of(("bounds: frame ", "bounds: fram "))
    assert problem.path == "vision.attention.bounds"


# --- YAML's traps -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "hint"),
    [
        ("theta: 5000000", "theta: 5e6", "write 5.0e+6 or 5000000"),
        ("eps: 1.0e-6, topology", "eps: 1e-6, topology", "write 1.0e-6"),
        ("theta: 5000000", 'theta: "5000000"', "remove the quotes"),
        ("qk_norm: none", "qk_norm: no", 'write "no" with quotes'),
        ("tie_word_embeddings: false", 'tie_word_embeddings: "false"', "remove the quotes"),
        ("title: Qwen3-VL", "title: 3", "quote it"),
    ],
)
def test_trap_has_a_hint(problems_of, old, new, hint):
    assert hint in problems_of((old, new))[0].hint


@pytest.mark.parametrize("number", ["0x1b", "027", "1_000", "1:30", "0b11", "9" * 30, "+.inf"])
def test_number_that_yaml_versions_read_differently_is_refused(problems_of, number):
    (problem,) = problems_of(("depth: 27", f"depth: {number}"))
    assert "is not written plainly" in problem.message


@pytest.mark.parametrize("number", [".nan", ".inf", "1.0e+999", "1_0.5"])
def test_float_that_is_no_plain_finite_number_is_refused(problems_of, number):
    (problem,) = problems_of(("theta: 5000000", f"theta: {number}"))
    assert "is not written plainly" in problem.message


@pytest.mark.parametrize("word", ["off", "no", "No", "OFF", "yes", "on"])
def test_boolean_is_written_as_true_or_false(problems_of, word):
    problems = problems_of(("tie_word_embeddings: false", f"tie_word_embeddings: {word}"))
    assert any(p.rule == "write booleans as true or false" for p in problems)


def test_integer_is_not_a_boolean(problems_of):
    (problem,) = problems_of(("    qkv_bias: true", "    qkv_bias: 1"))
    assert problem.message == "vision.attention.qkv_bias is 1, which is an integer"


def test_boolean_is_not_the_format_version(problems_of):
    (problem,) = problems_of(("vlmgen: 1\n", "vlmgen: true\n"))
    assert problem.path == "vlmgen"


def test_duplicate_key_is_refused(problems_of):
    (problem,) = problems_of(("  depth: 27\n", "  depth: 27\n  depth: 28\n"))
    assert problem.message == "key 'depth' is given twice"
    assert problem.hint == f"it is first given in line {problem.line - 1}"


@pytest.mark.parametrize("key", ["yes", "1", "1.5", "null", "~"])
def test_key_that_is_not_text_is_refused(problems_of, key):
    problem = problems_of(("family:", f"{key}: 1\nfamily:"))[0]
    assert problem.rule == "every key is text"
    assert marked(problem) == key


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: &x 1", "anchor &x is not allowed"),
        ("a: *x", "alias *x is not allowed"),
        ("a: !!python/object/apply:os.system [ls]", "is not allowed"),
        ("a: !custom 1", "tag !custom is not allowed"),
        ("!!map {a: 1}", "is not allowed"),
        ("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), "levels of nesting"),
        ("[" * 20000, "levels of nesting"),
        ("a: 1\n---\nb: 1\n", "single document"),
        ("a: [1,", "YAML syntax"),
        ("a: b: c", "YAML syntax"),
        ("a: 'b", "YAML syntax"),
        ("a: 1\n  b: 2", "YAML syntax"),
        ("\ta: 1", "YAML syntax"),
        ("a: \x07", "U+0007"),
        ("- 1", "the spec is a list"),
        ("qwen3_vl", "the spec is text"),
        ("", "the file is empty"),
        ("# only a comment\n", "the file is empty"),
        ("~", "the spec is empty"),
    ],
)
def test_yaml_that_a_spec_may_not_use(text, message):
    problems = fail(text)
    assert any(message in problem.message for problem in problems)


def test_merge_key_is_an_unknown_key():
    assert any("unknown key '<<'" in problem.message for problem in fail("<<: {a: 1}"))


def test_syntax_error_has_line_column_and_caret():
    (problem,) = fail("vlmgen: 1\nfamily: a: b\n")
    assert (problem.line, problem.column) == (2, 10)
    assert problem.render().split("\n")[1:3] == ["2 | family: a: b", "  |          ^"]
    assert problem.hint == "quote a text that contains ': '"


def test_syntax_error_at_the_end_shows_a_line_with_text():
    (problem,) = fail("vlmgen: 1\ntext: {a: 1,\n\n\n")
    assert problem.source == "text: {a: 1,"


def test_tab_indentation_has_a_hint():
    (problem,) = fail("text:\n\thidden_size: 1\n")
    assert problem.hint == "indent with spaces, not with tabs"


# --- files ------------------------------------------------------------------------------------


def test_byte_order_mark_and_crlf_are_read(tmp_path, spec, spec_text):
    path = tmp_path / "spec.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + spec_text.replace("\n", "\r\n").encode())
    assert load_spec(path) == spec


def test_places_are_right_with_byte_order_mark_and_crlf(tmp_path, spec_text):
    path = tmp_path / "spec.yaml"
    broken = "vlmgem: 1\n" + spec_text.replace("depth: 27", "depth: x", 1)
    path.write_bytes(b"\xef\xbb\xbf" + broken.replace("\n", "\r\n").encode())
    with pytest.raises(SpecError) as caught:
        load_spec(path)
    first, second = caught.value.problems
    assert (first.line, first.column, marked(first)) == (1, 1, "vlmgem")
    assert (second.source, second.column) == ("  depth: x", 10)


def test_missing_file(tmp_path):
    with pytest.raises(SpecError, match="no such file"):
        load_spec(tmp_path / "none.yaml")


def test_directory(tmp_path):
    with pytest.raises(SpecError, match="is a directory"):
        load_spec(tmp_path)


def test_special_file_is_not_read(tmp_path):
    pipe = tmp_path / "pipe.yaml"
    os.mkfifo(pipe)
    with pytest.raises(SpecError, match="not a regular file"):
        load_spec(pipe)


def test_path_with_a_null_byte():
    with pytest.raises(SpecError, match="cannot be read|no such file|regular"):
        load_spec("a\0b.yaml")


def test_huge_file_is_refused_unparsed(tmp_path):
    path = tmp_path / "spec.yaml"
    path.write_text("a: " + "x" * MAX_BYTES)
    with pytest.raises(SpecError, match="is larger than"):
        load_spec(path)


def test_latin1_is_refused_with_the_place(tmp_path):
    path = tmp_path / "spec.yaml"
    path.write_bytes(b"vlmgen: 1\ntitle: Qw\xe9n\n")
    with pytest.raises(SpecError) as caught:
        load_spec(path)
    (problem,) = caught.value.problems
    assert (problem.line, problem.column) == (2, 10)
    assert "byte 0xe9 is not UTF-8" in problem.message


def test_utf16_is_recognised(tmp_path, spec_text):
    path = tmp_path / "spec.yaml"
    path.write_text(spec_text, encoding="utf-16")
    with pytest.raises(SpecError, match="looks like UTF-16"):
        load_spec(path)


def test_messages_name_the_file_as_given(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("s.yaml").write_text("vlmgen: 1\nx: [\n")
    with pytest.raises(SpecError) as caught:
        load_spec("s.yaml")
    assert caught.value.problems[0].render().startswith("s.yaml:")


def test_terminal_escapes_in_a_file_do_not_reach_the_terminal():
    problems = fail('"\\e[31mred": 1\n')
    assert all("\x1b" not in problem.render() for problem in problems)
