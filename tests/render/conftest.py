"""A small set of templates and a copy of a real spec, in the test's own directory."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from vlmgen.render import plan

TEMPLATES = {
    "package/__init__.py.j2": '"""{{ spec.title | doc }} for the plugin."""\n',
    "package/config.py.j2": (
        "HIDDEN_SIZE = {{ text.hidden_size | num }}\nSECTIONS = {{ text.rope.sections | tuple }}\n"
        "{% include 'blocks/greeting.py.j2' %}"
    ),
    "package/README.md.j2": "# {{ spec.title | md }}\n\n{{ results.state if results else 0 }}\n",
    "package/pyproject.toml.j2": '[project]\nname = {{ package | toml }}\nversion = "1"\n',
    "blocks/greeting.py.j2": "GREETING   =   'hello'\n",
    "utils/__init__.py.j2": '"""Parts."""\n',
    "utils/mrope.py.j2": "def positions( ):\n  return {{ spec.checkpoint_names | py }}\n",
    "tests/test_config.py.j2": "def test_true():\n    assert {{ true | py }}\n",
}
COPIED = [row.to.format(family="qwen3_vl") for row in plan.OUT_OF_TREE.copied]
PATHS = sorted(
    [
        *COPIED,
        ".vlmgen/manifest.json",
        "README.md",
        "pyproject.toml",
        "spec.yaml",
        "tests/test_config.py",
        "vllm_neuron_qwen3_vl/__init__.py",
        "vllm_neuron_qwen3_vl/config.py",
        "vllm_neuron_qwen3_vl/utils/__init__.py",
        "vllm_neuron_qwen3_vl/utils/mrope.py",
    ]
)


@pytest.fixture
def search(tmp_path: Path) -> tuple[Path]:
    """A template directory that a test may change."""
    directory = tmp_path / "templates"
    for name, text in TEMPLATES.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return (directory,)


@pytest.fixture
def spec_path(tmp_path: Path, qwen3_vl_spec: Path) -> Path:
    """A copy of the Qwen3-VL spec that a test may change."""
    path = tmp_path / "specs" / "qwen3_vl.yaml"
    path.parent.mkdir()
    shutil.copy(qwen3_vl_spec, path)
    return path
