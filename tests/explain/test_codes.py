"""Every code that vlmgen can give has a page, and every page has a code that is given."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vlmgen.check.finding import RULES
from vlmgen.cli import app
from vlmgen.errors import UsageError
from vlmgen.explain import GROUPS, groups, page, pages

CODE = re.compile(r"VG\d{3}")
runner = CliRunner()


def sources(repository: Path) -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted((repository / "vlmgen").rglob("*.py")):
        yield path, ast.parse(path.read_text(encoding="utf-8"))


def raised(repository: Path) -> dict[str, set[str]]:
    """Code -> files that hold it as a text of its own; the table of rules is not one of them."""
    found: dict[str, set[str]] = {}
    for path, tree in sources(repository):
        if path.name == "finding.py":
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                for code in CODE.findall(node.value):
                    found.setdefault(code, set()).add(path.name)
    return found


def error_classes(repository: Path) -> dict[str, ast.ClassDef]:
    """Every class below VlmgenError by name."""
    classes = {
        node.name: node
        for _, tree in sources(repository)
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    found = {"VlmgenError"}
    while True:
        more = {
            name
            for name, node in classes.items()
            if any(isinstance(base, ast.Name) and base.id in found for base in node.bases)
        } - found
        if not more:
            return {name: classes[name] for name in found - {"VlmgenError"}}
        found |= more


def test_every_code_that_is_given_has_a_page(repository: Path) -> None:
    missing = {code: files for code, files in raised(repository).items() if code not in pages()}
    assert not missing, "write a page in vlmgen/explain/pages"


def test_every_page_has_a_code_that_is_given(repository: Path) -> None:
    assert set(pages()) == set(raised(repository))


def test_every_rule_of_a_finding_has_a_page_and_no_title_beside_it() -> None:
    assert {code for code in pages() if code[2] in "01234"} == set(RULES)
    assert all(pages()[code].title == rule for code, rule in RULES.items())


def test_every_error_has_a_code_of_its_own(repository: Path) -> None:
    codes: dict[str, str] = {}
    for name, node in error_classes(repository).items():
        own = [
            statement.value.value
            for statement in node.body
            if isinstance(statement, ast.Assign)
            and ast.unparse(statement.targets[0]) == "code"
            and isinstance(statement.value, ast.Constant)
        ]
        assert len(own) == 1, f"{name} has no line `code = ...`"
        assert own[0] not in codes, f"{name} and {codes.get(own[0])} share {own[0]}"
        codes[own[0]] = name
    assert set(codes) == {code for code in pages() if code[2] == "9"}


def test_every_problem_of_a_spec_has_a_code(repository: Path) -> None:
    """Problems are made by `Problem(...)` and `document.problem(...)`; each call names its code."""
    calls = 0
    for path, tree in sources(repository):
        if path.parts[-2] != "spec":
            continue
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func)
            if name == "Problem" or name.endswith("document.problem"):
                keywords = {keyword.arg for keyword in node.keywords}
                assert keywords & {"code", None}, f"{path.name}:{node.lineno}: no code"
                calls += 1
    assert calls > 20


@pytest.mark.parametrize("code", sorted(pages()))
def test_a_page_is_complete_and_short(code: str) -> None:
    p = pages()[code]
    assert p.title and p.means and p.mend and p.says and p.how
    assert p.means.endswith(".") and p.mend.endswith((".", "`"))
    assert len(p.text()) < 2500
    assert all(len(line) <= 100 for line in (p.wrong + "\n" + p.right).splitlines())


def test_groups_hold_every_page_once() -> None:
    listed = [p.code for _, group in groups() for p in group]
    assert listed == sorted(pages()) and len({digit for digit, _, _ in GROUPS}) == len(GROUPS)


# --- the command --------------------------------------------------------------------------------


def test_explain_prints_the_page_in_any_case() -> None:
    result = runner.invoke(app, ["explain", "vg103"])
    assert result.exit_code == 0
    assert result.stdout.startswith("VG103  calls use keywords that the signature has\n")
    assert "causal_msk=True" in result.stdout and "How to mend it" in result.stdout


def test_explain_without_a_code_lists_all() -> None:
    result = runner.invoke(app, ["explain"])
    assert result.exit_code == 0
    assert all(f"  {code}  {p.title}\n" in result.stdout for code, p in pages().items())


def test_an_unknown_code_names_near_ones() -> None:
    result = runner.invoke(app, ["explain", "VG1030"])
    assert result.exit_code == 2
    assert "there is no code 'VG1030'" in result.stderr and "VG103" in result.stderr
    with pytest.raises(UsageError) as caught:
        page("nonsense\n" * 100)
    assert len(caught.value.render()) < 200


def test_an_error_names_its_page() -> None:
    result = runner.invoke(app, ["check"])
    assert result.stderr.endswith("more: vlmgen explain VG901\n")
