"""Values that someone wrote to do harm: every way in ends in one clear message, within 2 seconds.

What a value may do in a template is tested in tests/render/test_escaping.py; here no such value
gets that far, or it is harmless.
"""

from __future__ import annotations

import ast
import functools
import json
import os
import re
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from typer.testing import CliRunner

from vlmgen.cli import app
from vlmgen.errors import SpecError
from vlmgen.explain import pages
from vlmgen.render import package as packaging
from vlmgen.spec.load import load_spec, load_spec_text
from vlmgen.spec.migrate import migrate_text
from vlmgen.spec.model import Spec
from vlmgen.spec.rules import check_rules

from .conftest import SPEC_PATH

TEXT = SPEC_PATH.read_text(encoding="utf-8")
DATA = yaml.safe_load(TEXT)
LIMIT = 2.0
runner = CliRunner()

HARMFUL = [
    "'", '"', '"""', "'''", "\\", "`", "\n", "\r", "\r\nimport os", "\x00", "\x1b[2J", "\u202e",
    "\ufeff", "\ud7ff", "\u2028", "\U0001f600", "caf\u00e9", "e\u0301", "\u200b",
    "{{ 7 * 7 }}", "{% include '/etc/passwd' %}", "{# #}", "${HOME}", "$(touch x)", "%s%n", "a\tb",
    "../../../tmp/x", "/etc/passwd", "C:\\x", "con", "~", "-rf", "--help", "",
    "__import__('os').system('touch x')", "os", "class", "None", "x" * 100_000, "9" * 100_000,
    "# comment", "]]]", "- - - -", "=1+1", "<script>alert(1)</script>", "a: b", "*", "&x",
    "!!python",
]  # fmt: skip


def laugh(name: str) -> str:
    """A list of nine times the list before it."""
    return f"{name}: &{name} [{', '.join(['*' + chr(ord(name) - 1)] * 9)}]\n"


DOCUMENTS = {
    "tag that calls": "title: !!python/object/apply:os.system ['touch x']\n",
    "tag of a class": "title: !!python/name:os.system\n",
    "laughs": "a: &a [x, x]\n" + "".join(map(laugh, "bcdefghi")) + "title: *i\n",
    "anchor to itself": "a: &a {b: *a}\n",
    "deep lists": "title: " + "[" * 5_000 + "]" * 5_000 + "\n",
    "deep mappings": "title: " + "{a: " * 5_000 + "}" * 5_000 + "\n",
    "deep indentation": "".join(f"{' ' * n}a:\n" for n in range(400)),
    "many keys": "".join(f"key{n}: {n}\n" for n in range(4_000)),
    "more keys": "".join(f"key{n}: {n}\n" for n in range(12_000)),
    "keys that are no text": "".join(f"{n}: {n}\n" for n in range(4_000)),
    "one key again and again": "title: x\n" * 4_000,
    "a dense list": "title: [" + "1," * 60_000 + "]\n",
    "a list of wrong things": TEXT.replace("[2048, 8192]", f"[{'x,' * 3_000}]"),
    "checkpoints without end": TEXT + "  - {name: 1}\n" * 1_000,
    "one long line": "title: " + "a " * 100_000 + "\n",
    "many documents": "--- 1\n" * 5_000,
    "merge keys": "a: 1\n<<: {b: 2}\n<<: {c: 3}\n",
    "huge number": f"vlmgen: {'9' * 50_000}\n",
    "exponents": "vlmgen: 1e999999999\n",
    "sexagesimal": "vlmgen: " + ":".join(["59"] * 2_000) + "\n",
    "binary": "title: !!binary aGVsbG8=\n",
    "only comments": "# a\n" * 20_000,
    "unclosed": 'title: "' + "a\n" * 50_000,
    "quotes": "title: " + "'" * 20_001 + "\n",
    "question marks": "? " * 2_000 + "a\n",
    "directives": "%YAML 9.9\n%TAG ! tag:x,2000:\n---\ntitle: x\n",
    "control characters": "title: \x01\x02\x03\n",
    "too large": "# " + "x" * 300_000 + "\n",
}


def seconds(work: Callable[[], object]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


def refused(text: str, file: str = "x.yaml") -> SpecError:
    """The one message of a text that is no spec, shown on lines that drive no terminal."""
    with pytest.raises(SpecError) as caught:
        load_spec_text(text, file)
    shown = caught.value.render()
    assert len(shown) < 50_000
    assert re.search(r" problems? in the spec(; the first 50 are shown)?$", shown[-80:])
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f\x9b]", shown)
    assert all(problem.code in pages() for problem in caught.value.problems)
    return caught.value


def ends_with_problems(command: list[str]) -> None:
    """Run a command that has to refuse its spec."""
    result = runner.invoke(app, command)
    assert result.exit_code == 3 and "Traceback" not in result.output, command


@pytest.mark.parametrize("name", DOCUMENTS)
def test_harmful_documents(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = DOCUMENTS[name]
    assert seconds(lambda: refused(text)) < LIMIT
    path = tmp_path / "x.yaml"
    path.write_text(text, encoding="utf-8", newline="")
    for command in (["new"], ["show", "--origin"], ["compare", "x.yaml"], ["check"]):
        work = functools.partial(ends_with_problems, [*command, "x.yaml"])
        assert seconds(work) < LIMIT, command
    assert seconds(lambda: runner.invoke(app, ["migrate", "x.yaml"])) < LIMIT
    assert [p.name for p in tmp_path.iterdir()] == ["x.yaml"]  # no file, and above all no `x`


def leaves(node: object, path: tuple = ()) -> list[tuple]:
    if isinstance(node, dict):
        return [leaf for key, child in node.items() for leaf in leaves(child, (*path, key))]
    if isinstance(node, list):
        return [leaf for n, child in enumerate(node) for leaf in leaves(child, (*path, n))]
    return [path]


LEAVES = leaves(DATA)
KEYS = [path for path in LEAVES if isinstance(path[-1], str)]


def with_data(path: tuple, value: object, data: dict = DATA) -> dict:
    data = json.loads(json.dumps(data))
    node = data
    for part in path[:-1]:
        node = node[part]
    node[path[-1]] = value
    return data


def with_value(path: tuple, value: object) -> str:
    return yaml.safe_dump(with_data(path, value), sort_keys=False, allow_unicode=True)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(LEAVES),
    st.one_of(
        st.sampled_from(HARMFUL),
        st.lists(st.sampled_from(HARMFUL), min_size=1, max_size=3).map("".join),
        st.text(max_size=40),
    ),
)
def test_harmful_values_at_every_place(path: tuple, value: str) -> None:
    text = with_value(path, value)

    def load() -> None:
        try:
            spec = load_spec_text(text, "x.yaml")
        except SpecError as error:
            assert error.problems and all(p.code in pages() for p in error.problems)
            assert len(error.render()) < 20_000
            return
        # What is taken holds nothing that could leave a string, a comment or a path.
        assert isinstance(spec, Spec)
        assert not set(value) & set("'\"\\`{}") and value.isprintable()

    assert seconds(load) < LIMIT


def accepted() -> list[tuple[tuple, str]]:
    """Harmful values that a spec may hold all the same, and where."""
    found = []
    for path in LEAVES:
        for value in HARMFUL:
            data = with_data(path, value)
            try:
                Spec.model_validate(data)
            except ValidationError:
                continue
            if not list(check_rules(data, set())):
                found.append((path, value))
    return found


def test_harmful_values_that_are_legal_stay_values(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever may be in a spec: all that is generated parses, and nothing else is written."""
    monkeypatch.setattr(packaging, "format_modules", lambda modules: modules)  # for speed
    known = accepted()
    assert len(known) > 150

    @settings(max_examples=12, deadline=None)
    @given(st.lists(st.sampled_from(known), min_size=1, max_size=8))
    def check(chosen: list[tuple[tuple, str]]) -> None:
        folder = tmp_path_factory.mktemp("h")
        monkeypatch.chdir(folder)
        data = DATA
        for path, value in chosen:
            data = with_data(path, value, data)
        Path("x.yaml").write_text(yaml.safe_dump(data, sort_keys=False), "utf-8")
        result = runner.invoke(app, ["new", "x.yaml", "--out", "out"])
        assert sorted(p.name for p in folder.iterdir()) == ["out", "x.yaml"][result.exit_code > 0 :]
        if result.exit_code:  # together they break a rule
            assert result.exit_code in (2, 3) and "Traceback" not in result.output
            assert "problem in the spec" in result.output or "more: vlmgen" in result.output
            return
        for file in Path("out").rglob("*.*"):
            if file.is_dir() or ".vlmgen/base" in file.as_posix():
                continue
            text = file.read_text("utf-8")
            reader = {".py": ast.parse, ".toml": tomllib.loads, ".json": json.loads,
                      ".yaml": yaml.safe_load}.get(file.suffix)  # fmt: skip
            if reader:
                reader(text)
        again = load_spec(Path("out/spec.yaml"))
        assert again == load_spec(Path("x.yaml"))

    check()


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(KEYS), st.sampled_from(HARMFUL))
def test_harmful_keys(path: tuple, key: str) -> None:
    text = with_value((*path[:-1], key), 1)
    assert seconds(lambda: refused(text)) < LIMIT


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(HARMFUL), st.sampled_from(HARMFUL))
def test_harmful_texts_are_migrated_or_refused(first: str, second: str) -> None:
    text = f"{first}\nreference: {{module: {second}}}\nvlmgen: 0\n"

    def migrate() -> None:
        try:
            migrated = migrate_text(text, "x.yaml")
        except SpecError as error:
            assert error.problems
        else:
            assert "vlmgen: 1" in migrated.text

    assert seconds(migrate) < LIMIT


@pytest.mark.parametrize(
    "name",
    ["../../../../etc/passwd", "/etc/passwd", "/dev/zero", "/dev/stdin", "~/x.yaml", "x.yaml/..",
     ".", "..", "http://example.org/x.yaml", "a\nb.yaml", "{{ x }}.yaml", "$(id).yaml",
     "a" * 9_999],
)  # fmt: skip
def test_paths_in_extends(name: str, tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(f"extends: {json.dumps(name)}\n", encoding="utf-8")

    def load() -> None:
        with pytest.raises(SpecError) as caught:
            load_spec(path)
        (problem,) = caught.value.problems
        assert problem.code == "VG531" and problem.line == 1

    assert seconds(load) < LIMIT


def test_a_chain_that_grows_and_files_that_are_none(tmp_path: Path) -> None:
    for n in range(200):
        (tmp_path / f"s{n}.yaml").write_text(f"extends: s{n + 1}.yaml\n")
    with pytest.raises(SpecError) as caught:
        load_spec(tmp_path / "s0.yaml")
    assert "specs in a chain" in caught.value.problems[0].message
    os.mkfifo(tmp_path / "pipe.yaml")
    for name in ("pipe.yaml", "."):
        with pytest.raises(SpecError) as caught:
            load_spec(tmp_path / name)
        assert caught.value.problems[0].code == "VG501"
