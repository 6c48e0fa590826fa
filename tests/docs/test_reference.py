"""The generated pages are current, and links between pages lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from vlmgen import cli
from vlmgen.reference import commands, reference_pages
from vlmgen.spec.load import _all_paths
from vlmgen.spec.model import Spec

from .pages import documented

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("page", sorted(reference_pages()))
def test_generated_pages_are_current(page: str) -> None:
    text = (ROOT / "docs" / page).read_text("utf-8")
    assert text == reference_pages()[page], "run `make docs`"


def test_the_reference_lists_every_command_and_option() -> None:
    text = reference_pages()["reference/cli.md"]
    for name in commands(cli.app):
        assert f"## vlmgen {name}\n" in text
    shown = ("--format text\\|github", "--world-size N", "`--out PATH`, `-o PATH`", "required")
    for option in shown:
        assert option in text


def test_the_reference_describes_every_key() -> None:
    text = reference_pages()["reference/spec.md"].replace("[]", "")
    for path in _all_paths(Spec, ()):
        assert f"| `{'.'.join(path)}` |" in text
    for line in text.splitlines():
        if line.startswith("| `"):
            assert len(re.split(r"(?<!\\)\|", line)) in (5, 6), line


@pytest.mark.parametrize("page", sorted(documented(ROOT)))
def test_links_and_named_files_exist(page: str) -> None:
    text = documented(ROOT)[page]
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / page).parent / path if path else ROOT / page
        assert file.exists(), f"{page} links to {target}"
        if anchor:
            heads = re.findall(r"^#+ (.*)$", file.read_text("utf-8"), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in heads}
    for path in re.findall(r"`((?:docs|tests|vlmgen|templates|benchmarks|\.ci)/[\w./-]+)`", text):
        assert (ROOT / path).exists(), f"{page} names {path}"
