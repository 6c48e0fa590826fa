"""vlmgen and its templates know axes, not families."""

import re
from pathlib import Path

import pytest

from vlmgen.spec import load_spec

ROOT = Path(__file__).resolve().parents[1]
# Data about families: tiny checkpoints, published tensors, names read from vLLM's releases.
DATA = ("vlmgen/tiny/families/", "vlmgen/weights/published/", "vlmgen/contract/")
SPECS = sorted((ROOT / "specs").glob("*.yaml"))


def sources() -> list[Path]:
    files = [*ROOT.glob("vlmgen/**/*.py"), *ROOT.glob("templates/**/*.j2")]
    return [f for f in files if not f.relative_to(ROOT).as_posix().startswith(DATA)]


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    return {f.relative_to(ROOT).as_posix(): f.read_text(encoding="utf-8") for f in sources()}


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_no_source_names_the_family(texts, path):
    spec = load_spec(path)
    names = {spec.family, spec.architecture, spec.class_prefix, spec.title, *spec.checkpoint_names}
    pattern = re.compile(
        "|".join(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])" for name in names), re.I
    )
    found = [
        f"{file}:{number}: {line.strip()}"
        for file, text in texts.items()
        for number, line in enumerate(text.splitlines(), 1)
        if pattern.search(line)
    ]
    assert found == []


def test_the_search_would_find_a_name(texts):
    assert len(texts) > 150
    assert any(re.search(r"(?<![A-Za-z0-9])extends(?![A-Za-z0-9])", t) for t in texts.values())
