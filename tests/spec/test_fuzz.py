"""Random edits of the spec end in a spec or in problems, never in a traceback."""

from __future__ import annotations

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from vlmgen.errors import SpecError
from vlmgen.spec.load import load_spec_text
from vlmgen.spec.model import Spec

from .conftest import SPEC_PATH

TEXT = SPEC_PATH.read_text(encoding="utf-8")
DATA = yaml.safe_load(TEXT)

JUNK = st.sampled_from(
    ["", " ", "\n", "\t", ":", "- ", "{", "}", "[", "]", '"', "'", "#", "&a ", "*a", "!!x ", "~",
     "null", "true", "no", "0x1", "1e6", "-1", ".nan", "\ufeff", "\u2028", "\x85", "\\", "|", ">",
     "%", "@", "`", "? ", "<<: ", "---\n", "...\n", "\x00", "9" * 5000, "\U0001f600"]
)  # fmt: skip
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=8),
    st.lists(st.integers(-1, 200), max_size=4),
    st.dictionaries(st.text(max_size=4), st.integers(), max_size=2),
    st.dates(),
)


def load(text: str) -> None:
    try:
        assert isinstance(load_spec_text(text, "x.yaml"), Spec)
    except SpecError as error:
        assert error.problems
        lines = error.render()
        for problem in error.problems:
            assert problem.message
            assert problem.line >= 0
            assert problem.line == 0 or problem.column >= 1
            assert problem.message in lines


@settings(max_examples=120, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, len(TEXT)), st.integers(0, 12), JUNK), min_size=1, max_size=4)
)
def test_edited_text(edits):
    text = TEXT
    for start, length, junk in edits:
        text = text[:start] + junk + text[start + length :]
    load(text)


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=80))
def test_any_text(text):
    load(text)


def paths(node, prefix=()):
    yield prefix
    children = (
        node.items()
        if isinstance(node, dict)
        else enumerate(node) if isinstance(node, list) else ()
    )
    for key, child in children:
        yield from paths(child, (*prefix, key))


PATHS = [path for path in paths(DATA) if path]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(PATHS), SCALARS), min_size=1, max_size=3))
def test_edited_values(edits):
    import copy

    data = copy.deepcopy(DATA)
    for path, value in edits:
        node = data
        try:
            for key in path[:-1]:
                node = node[key]
            node[path[-1]] = copy.deepcopy(value)
        except (KeyError, IndexError, TypeError):
            continue  # an earlier edit took the place away
    # One value used twice must not become an anchor, which would end the reading at once.
    dumper = type("Plain", (yaml.SafeDumper,), {"ignore_aliases": lambda self, data: True})
    load(yaml.dump(data, Dumper=dumper, sort_keys=False, allow_unicode=True))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(PATHS), min_size=1, max_size=4))
def test_removed_keys(removed):
    import copy

    data = copy.deepcopy(DATA)
    for path in removed:
        node = data
        try:
            for key in path[:-1]:
                node = node[key]
            del node[path[-1]]
        except (KeyError, IndexError, TypeError):
            continue
    load(yaml.safe_dump(data, sort_keys=False))
