"""The environment lets nothing undefined, unfiltered or outside the sandbox into the output."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from jinja2 import nodes

from vlmgen.render import templates
from vlmgen.render.environment import TemplateError, environment
from vlmgen.render.escaping import UnsafeValueError


def render(directory: Path, text: str, **context: Any) -> str:
    (directory / "t.j2").write_text(text)
    return environment([directory]).render_file("t.j2", context)


def test_undefined_name_is_an_error_with_template_and_line(tmp_path: Path) -> None:
    with pytest.raises(TemplateError, match=r"template t\.j2:2: 'absent' is undefined"):
        render(tmp_path, "fine\n{{ absent }}\n")


def test_undefined_attribute_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TemplateError, match="no attribute 'absent'"):
        render(tmp_path, "{{ spec.absent | py }}", spec={})


def test_syntax_error_names_template_and_line(tmp_path: Path) -> None:
    with pytest.raises(TemplateError, match=r"template t\.j2:2:"):
        render(tmp_path, "fine\n{{ 1 + }}\n")


def test_missing_include_is_named(tmp_path: Path) -> None:
    with pytest.raises(TemplateError, match="there is no template blocks/absent"):
        render(tmp_path, "{% include 'blocks/absent' %}")


@pytest.mark.parametrize(
    "name", ["../secret", "/etc/hostname", "a/../../secret", "a//b", ".hidden"]
)
def test_template_names_stay_within_the_directory(tmp_path: Path, name: str) -> None:
    (tmp_path / "secret").write_text("secret")
    inner = tmp_path / "inner"
    inner.mkdir()
    with pytest.raises(TemplateError, match="there is no template"):
        render(inner, "{% include name %}", name=name)


@pytest.mark.parametrize(
    "text",
    [
        "{{ ''.__class__.__mro__ | py }}",
        "{{ f.__globals__ | py }}",
        "{{ items.append(1) | py }}",
        "{{ ''.join.__self__.__class__ | py }}",
    ],
)
def test_sandbox(tmp_path: Path, text: str) -> None:
    with pytest.raises(TemplateError):
        render(tmp_path, text, f=render, items=[])


@pytest.mark.parametrize("value", ["a b", 'a"', "a\nb", "a#b", "f(x)", "{x}", "a\u202eb", "a;b"])
def test_unfiltered_text_is_refused(tmp_path: Path, value: str) -> None:
    with pytest.raises(UnsafeValueError, match=r"template t\.j2:1: .*unfiltered"):
        render(tmp_path, "x = {{ value }}", value=value)


@pytest.mark.parametrize("value", [None, True, ["a"], [True], {"a": 1}])
def test_unfiltered_structures_are_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(UnsafeValueError, match="use the filter"):
        render(tmp_path, "{{ value }}", value=value)


def test_harmless_text_filtered_text_literals_and_macros_pass(tmp_path: Path) -> None:
    text = (
        "{% macro call(name, value) %}{{ name | ident }}({{ value | py }}){% endmacro %}\n"
        '{{ family }} {{ 3 }} {{ "(*) " if family else "" }}{{ call("f", "a b") }} '
        '{{ ["x y", 1] | map("py") | join(", ") }}'
    )
    assert render(tmp_path, text, family="qwen3_vl") == 'qwen3_vl 3 (*) f("a b") "x y", 1'


def test_join_refuses_unfiltered_items(tmp_path: Path) -> None:
    with pytest.raises(UnsafeValueError):
        render(tmp_path, '{{ ["a b"] | join(", ") }}')


def test_first_directory_wins(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "t.j2").write_text(name)
    (tmp_path / "second" / "only.j2").write_text("fallback")
    jinja = environment([tmp_path / "first", tmp_path / "second"])
    assert jinja.render_file("t.j2", {}) == "first"
    assert jinja.render_file("only.j2", {}) == "fallback"
    assert set(jinja.used) == {"t.j2", "only.j2"}


def test_packaged_templates_never_trust_a_value() -> None:
    """`verbatim` lets text through unchecked; it is for literals and captured blocks only."""
    (directory,) = templates.directories()
    jinja = environment([directory])
    paths = sorted(directory.rglob("*.j2"))
    assert paths
    for path in paths:
        source = path.read_text(encoding="utf-8")
        for node in jinja.parse(source).find_all(nodes.Filter):
            if node.name == "verbatim":
                assert isinstance(node.node, (nodes.Const, nodes.Name)), f"{path}:{node.lineno}"


def test_packaged_templates_hold_no_family_name() -> None:
    """A family is a spec: what is true of one family only belongs there."""
    (directory,) = templates.directories()
    for path in sorted(directory.rglob("*.j2")):
        code = re.sub(r"\{\{.*?\}\}", "", path.read_text(encoding="utf-8"))
        found = re.search(r"\{%-?\s*(?:el)?if[^%]*\bfamily\b[^%]*%\}", code)
        assert found is None, f"{path}: {found and found[0]}"
