"""Specs and the specs that vlmgen writes name their schema for editors."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from vlmgen.render.plan import spec_text
from vlmgen.spec.load import load_spec, load_spec_text

from .conftest import ROOT

SPECS = sorted((ROOT / "specs").glob("*.yaml"))
SCHEMA = ROOT / "vlmgen" / "spec" / "schema.json"


def named(text: str, folder: Path) -> Path:
    """The file that the first line names, for a spec in a folder."""
    found = re.match(r"# yaml-language-server: \$schema=(\S+)\n", text)
    assert found, text[:80]
    return (folder / found[1]).resolve()


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_a_spec_and_that_of_its_package_name_the_schema(path: Path) -> None:
    assert named(path.read_text("utf-8"), path.parent) == SCHEMA
    spec = load_spec(path)
    emitted = spec_text(spec)
    assert named(emitted, ROOT / "generated" / spec.family) == SCHEMA
    assert load_spec_text(emitted) == spec
