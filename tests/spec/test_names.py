"""No value of a spec can leave the string, comment, identifier or path a template puts it in."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlmgen.errors import SpecError
from vlmgen.spec import types
from vlmgen.spec.load import load_spec_text

BREAKERS = [
    'x"',
    "x'",
    "x\\",
    "x`",
    "x\n",
    "x\r",
    "x\0",
    "x\x1b[2J",
    "x\u2028",
    "x{{ 1 }}",
    "x{% y %}",
    "../x",
    "/x",
    "x/../y",
    "x\u202e",
    '"""',
    "",
    " x",
    "x" * 500,
]

# Where a name stands in the spec: the text before the value, and the value.
PLACES = [
    ("family: ", "qwen3_vl"),
    ("title: ", "Qwen3-VL"),
    ("architecture: ", "Qwen3VLForConditionalGeneration"),
    ("\nmodel_type: ", "qwen3_vl"),
    ("class_prefix: ", "Qwen3VL"),
    ("  config_key: ", "text_config"),
    ("  - name: ", "Qwen3-VL-2B-Instruct"),
    ("    also: [", "Qwen3-VL-2B-Thinking"),
    ("image: {token: ", '"<|image_pad|>"'),
    ("image: {pixels: ", "pixel_values"),
    ("- {name: ", "nested"),
    (", text: ", "model.language_model."),
    ("    layer: ", '"layers.{layer}."'),
    ("    block: ", '"blocks.{block}."'),
    ("deepstack: {prefix: ", '"deepstack_merger_list.{level}."'),
    ("    q: ", "self_attn.q_proj"),
    ("  module: ", "transformers.models.qwen3_vl.modeling_qwen3_vl"),
    ("  config_class: ", "Qwen3VLConfig"),
    ("  text_path: ", "model.language_model"),
    ("tiny: ", "qwen3_vl"),
]


def quoted(value: str) -> str:
    """A YAML double-quoted scalar that holds exactly this text."""
    return '"' + "".join(f"\\U{ord(c):08x}" if not c.isalnum() else c for c in value) + '"'


@pytest.mark.parametrize("breaker", BREAKERS)
def test_breaking_text_is_refused_wherever_a_name_stands(spec_text, breaker):
    text = spec_text
    lines = set()
    for before, value in PLACES:
        if "/" in breaker and before.endswith("token: "):
            continue  # tokens such as </img> exist, and a token never names a file
        assert before + value in text
        text = text.replace(before + value, before + quoted(breaker), 1)
        lines.add(text[: text.index(before + quoted(breaker))].count("\n") + before.count("\n") + 1)
    with pytest.raises(SpecError) as caught:
        load_spec_text(text, "x.yaml")
    assert {problem.line for problem in caught.value.problems} == lines
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\x85]", caught.value.render())


@pytest.mark.parametrize("family", ["class", "import", "lambda", "Qwen", "3d", "qwen-vl", "a" * 42])
def test_family_is_a_lower_case_identifier_and_no_keyword(problems_of, family):
    problems = problems_of(("family: qwen3_vl", f"family: {family}"))
    assert [p.path for p in problems] == ["family"]


def test_keyword_in_a_path_is_refused(problems_of):
    (problem,) = problems_of(("text_path: model.language_model", "text_path: model.class"))
    assert problem.rule == "'class' is a Python keyword"


def test_reference_module_is_one_of_transformers(problems_of):
    (problem,) = problems_of(("module: transformers.", "module: os."))
    assert "a module of transformers" in problem.rule


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=30))
def test_no_pattern_admits_a_breaking_character(text):
    for pattern in types.PATTERN_RULES:
        if re.fullmatch(pattern, text) and not text.endswith("\n"):
            assert not re.search("[\x00-\x1f\x7f\"'\\\\`\u0080-\U0010ffff]", text)
            bare = text.replace("{layer}", "").replace("{block}", "").replace("{level}", "")
            assert "{" not in bare and "}" not in bare


def test_every_string_field_has_a_pattern():
    """A new text field without a pattern would be a way out."""
    import json

    from vlmgen.spec.schema import json_schema

    def strings(node):
        if isinstance(node, dict):
            if node.get("type") == "string":
                yield node
            for value in node.values():
                yield from strings(value)
        elif isinstance(node, list):
            for value in node:
                yield from strings(value)

    found = list(strings(json_schema()))
    assert found
    for node in found:
        assert "pattern" in node or "const" in node or "enum" in node, json.dumps(node)
