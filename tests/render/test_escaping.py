"""No value leaves the string, comment, name, docstring or cell that a template puts it in."""

from __future__ import annotations

import ast
import io
import json
import keyword
import math
import tokenize
import tomllib
from collections.abc import Callable
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from vlmgen.render import escaping
from vlmgen.render.escaping import UnsafeValueError

HOSTILE = [
    '"; import os; os.system("x") #',
    "'; raise SystemExit #",
    '"""\nraise SystemExit\n"""',
    'ends with a quote"',
    "ends with a backslash\\",
    '\\"""\\',
    "two\nlines",
    "carriage\rreturn",
    "vertical\x0btab and form\x0cfeed",
    "next\x85line separator\u2028and\u2029paragraph",
    "right\u202eto left and \u2066isolate",
    "zero\u200bwidth and \ufeffmark",
    "null\x00 and escape\x1b[31m",
    "no-break\xa0space",
    "{{ 7 * 7 }} {% raw %} ${x} {x}",
    "-*- coding: utf-7 -*-",
    "coding=utf-16",
    "|`<script>alert(1)</script>`| [x](javascript:y) **b** _i_ ~~s~~ $m$",
    "../../etc/passwd",
    "\U0001f600 emoji, \u4e2d\u6587, \u00e9",
    "[table]\nkey = 1",
    "- item: &anchor *alias !!python/object:os.system",
    "",
    " ",
]
anything = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
with_surrogates = st.text(max_size=40)
numbers = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
scalars = st.none() | st.booleans() | numbers | with_surrogates
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3)
    | st.tuples(inner, inner)
    | st.dictionaries(with_surrogates, inner, max_size=3),
    max_leaves=8,
)


def for_hostile(test: Callable[..., None]) -> Callable[..., None]:
    """Run a property also on every known attack."""
    for text in HOSTILE:
        test = example(text)(test)
    return test


@given(values)
def test_py_reads_back_as_the_value(value: Any) -> None:
    text = escaping.python_literal(value)
    assert "\n" not in text
    assert ast.literal_eval(text) == value


@for_hostile
@given(with_surrogates)
def test_py_is_one_string_token(value: str) -> None:
    source = f"x = {escaping.python_literal(value)}\n"
    kinds = [t.type for t in tokenize.generate_tokens(io.StringIO(source).readline)]
    assert kinds[:4] == [tokenize.NAME, tokenize.OP, tokenize.STRING, tokenize.NEWLINE]
    assert source.encode("utf-8")
    assert all(escaping.is_visible(c) for c in source[:-1])


@pytest.mark.parametrize("items", [set("hello"), frozenset({1, 2, 3}), set(), frozenset()])
def test_py_sorts_sets(items: set[Any]) -> None:
    text = escaping.python_literal(items)
    assert eval(text, {"__builtins__": {"set": set, "frozenset": frozenset}}) == items
    assert escaping.python_literal({"b", "a", "c"}) == '{"a", "b", "c"}'


def test_py_of_floats_that_have_no_literal() -> None:
    assert eval(escaping.python_literal(math.inf)) == math.inf
    assert eval(escaping.python_literal(-math.inf)) == -math.inf
    assert math.isnan(eval(escaping.python_literal(math.nan)))


def test_py_refuses_what_has_no_literal() -> None:
    with pytest.raises(UnsafeValueError, match="object has no Python literal"):
        escaping.python_literal(object())


@for_hostile
@given(with_surrogates)
def test_ident_passes_identifiers_only(value: str) -> None:
    try:
        text = escaping.identifier(value)
    except UnsafeValueError:
        assert not (value.isascii() and value.isidentifier()) or keyword.iskeyword(value)
    else:
        assert text == value and value.isidentifier() and not keyword.iskeyword(value)


@pytest.mark.parametrize("value", ["class", "None", "a b", "a-b", "1a", "", "\u00e9", "a\n", "a.b"])
def test_ident_refuses(value: str) -> None:
    with pytest.raises(UnsafeValueError, match="not a Python identifier"):
        escaping.identifier(value)


@for_hostile
@given(with_surrogates)
def test_comment_stays_on_its_line(value: str) -> None:
    source = f"# {escaping.comment(value)}\nx = 1\n"
    tokens = list(tokenize.tokenize(io.BytesIO(source.encode("utf-8")).readline))
    kinds = [token.type for token in tokens]
    assert kinds[:4] == [tokenize.ENCODING, tokenize.COMMENT, tokenize.NL, tokenize.NAME]
    assert tokens[0].string == "utf-8"
    assert ast.dump(ast.parse(source.encode())) == ast.dump(ast.parse("x = 1"))
    assert all(escaping.is_visible(c) for c in source.split("\n")[0])


@for_hostile
@given(anything)
def test_docstring_holds_the_text(value: str) -> None:
    source = f'"""{escaping.docstring(value)}"""\nx = 1\n'
    module = ast.parse(source)
    assert len(module.body) == 2
    assert ast.literal_eval(module.body[0].value) == value.replace("\r\n", "\n").replace("\r", "\n")  # type: ignore[attr-defined]
    assert all(c == "\n" or escaping.is_visible(c) for c in source)


@for_hostile
@given(with_surrogates)
def test_docstring_is_one_token_also_between_other_words(value: str) -> None:
    source = f'"""First: {escaping.docstring(value)} and {escaping.docstring(value)}."""\nx = 1\n'
    assert len(ast.parse(source.encode("utf-8")).body) == 2


@for_hostile
@given(anything | numbers | st.booleans() | st.lists(anything | st.integers(), max_size=4))
def test_toml_reads_back_as_the_value(value: Any) -> None:
    if isinstance(value, int) and abs(value) >= 2**63:
        return  # beyond what TOML promises to carry
    text = escaping.toml(value)
    assert tomllib.loads(f"x = {text}\ny = 1\n") == {"x": value, "y": 1}


@for_hostile
@given(anything)
def test_yaml_scalar_reads_back_as_the_value(value: str) -> None:
    assert yaml.safe_load(f"x: {escaping.to_yaml(value)}\ny: 1\n") == {"x": value, "y": 1}


@given(st.dictionaries(anything, st.recursive(anything | st.integers(), st.lists, max_leaves=5)))
def test_yaml_block_reads_back_as_the_value(value: dict[str, Any]) -> None:
    assert yaml.safe_load(escaping.to_yaml(value)) == value


@for_hostile
@given(anything)
def test_json_reads_back_as_the_value(value: str) -> None:
    text = escaping.json_text([value])
    assert json.loads(text) == [value] and text.isascii() and "\n" not in text


@pytest.mark.parametrize("write", [escaping.toml, escaping.to_yaml])
def test_lone_surrogate_is_refused(write: Callable[[str], str]) -> None:
    with pytest.raises(UnsafeValueError, match=r"U\+D800"):
        write("a\ud800")


MARKDOWN = MarkdownIt("commonmark").enable("table").enable("strikethrough")


@for_hostile
@given(anything)
def test_markdown_cell_is_text_only(value: str) -> None:
    cell = escaping.markdown(value)
    tokens = MARKDOWN.parse(f"| a | b |\n| - | - |\n| x{cell}x | last |\n")
    inline = [token for token in tokens if token.type == "inline"]
    assert len(inline) == 4
    assert inline[3].content == "last"
    kinds = {child.type for child in inline[2].children or ()}
    assert kinds <= {"text", "text_special"}
    assert all(escaping.is_visible(c) for c in cell)


@for_hostile
@given(anything)
def test_markdown_code_span_shows_the_text(value: str) -> None:
    span = escaping.markdown_code(value)
    shown = escaping.escape_invisible(" ".join(value.split()))
    if not shown:
        assert span == ""
        return
    tokens = MARKDOWN.parse(f"| a | b |\n| - | - |\n| {span} | last |\n")
    inline = [token for token in tokens if token.type == "inline"]
    children = inline[2].children or ()
    assert [child.type for child in children] == ["code_inline"]
    assert children[0].content.strip() == shown.strip()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (5_000_000, "5_000_000"),
        (128, "128"),
        (5e6, "5_000_000.0"),
        (1e-6, "1e-06"),
        (-1500, "-1_500"),
    ],
)
def test_num(value: float, text: str) -> None:
    assert escaping.number(value) == text
    assert ast.literal_eval(text) == value


def test_num_refuses_text_and_booleans() -> None:
    for value in ("1", True, None):
        with pytest.raises(UnsafeValueError, match="not a number"):
            escaping.number(value)


def test_what_is_visible_does_not_depend_on_the_python_version() -> None:
    # U+2EBF0 became a letter in Unicode 15.1, which Python 3.13 has and Python 3.11 has not.
    assert escaping.python_literal("\U0002ebf0") == '"\\U0002ebf0"'
