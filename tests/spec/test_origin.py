"""`vlmgen show --origin`: the place of every value."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from vlmgen.cli import app
from vlmgen.spec.load import load_spec
from vlmgen.spec.origin import Origin, spec_origins

from .conftest import ROOT

SPECS = sorted((ROOT / "specs").glob("*.yaml"))
runner = CliRunner()


def by_path(path: Path) -> dict[str, Origin]:
    return {origin.path: origin for origin in spec_origins(path)}


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_every_value_stands_where_it_is_said_to_stand(path: Path) -> None:
    """The line named, read by itself, states the value under the last key of the path."""
    for origin in spec_origins(path):
        if not origin.file:
            continue
        line = Path(origin.file).read_text("utf-8").splitlines()[origin.line - 1]
        text = line[origin.column - 1 :]
        key = origin.path.rpartition(".")[2]
        assert text.startswith(f"{key}:"), (origin, line)
        value = list(origin.value) if isinstance(origin.value, tuple) else origin.value
        # In flow style the rest of the line belongs to the mapping: cut at every end and see.
        ends = [n for n, character in enumerate(text) if character in ",}#"] + [len(text)]
        readings = []
        for end in ends:
            try:
                readings.append(yaml.safe_load(text[:end]))
            except yaml.YAMLError:
                continue
        assert {key: value} in readings, (origin, line)


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_every_value_of_the_spec_is_there_once(path: Path) -> None:
    origins = spec_origins(path)
    assert len({origin.path for origin in origins}) == len(origins)
    found = {origin.path: origin.value for origin in origins}
    spec = load_spec(path)
    assert found["text.hidden_size"] == spec.text.hidden_size
    assert found["checkpoints[0].name"] == spec.checkpoints[0].name
    assert found["vision.merger.inner"] == spec.vision.merger.inner


def test_own_inherited_and_default_values() -> None:
    found = by_path(ROOT / "specs" / "qwen3_vl_moe.yaml")
    own, base = str(ROOT / "specs/qwen3_vl_moe.yaml"), str(ROOT / "specs/qwen3_vl.yaml")
    assert found["text.attention.num_heads"].file == own  # a flow mapping merged into a block
    assert found["text.attention.head_dim"].file == base
    assert found["text.moe.shared"].file == own and found["text.moe.shared"].value is None
    assert found["text.moe.routed_scale"].place == "default"
    assert found["weights.text.gate"].file == own  # taken away there


def test_three_files_deep(tmp_path: Path) -> None:
    text = (ROOT / "specs" / "qwen3_vl.yaml").read_text("utf-8")
    (tmp_path / "a.yaml").write_text(text)
    (tmp_path / "b.yaml").write_text("extends: a.yaml\n\ntext: {rope: {theta: 1000}}\n")
    (tmp_path / "c.yaml").write_text("extends: b.yaml\ntitle: Mine\n")
    found = by_path(tmp_path / "c.yaml")
    assert found["title"].place == f"{tmp_path}/c.yaml:2"
    assert found["text.rope.theta"].place == f"{tmp_path}/b.yaml:3"
    line = text.splitlines().index("    kind: mrope") + 1
    assert found["text.rope.kind"].place == f"{tmp_path}/a.yaml:{line}"


def test_the_command() -> None:
    path = str(ROOT / "specs" / "qwen3_vl_moe.yaml")
    result = runner.invoke(app, ["show", path, "--origin"])
    assert result.exit_code == 0
    assert f"{path}:" in result.stdout and "default" in result.stdout
    rows = json.loads(runner.invoke(app, ["show", path, "--origin", "--json"]).stdout)
    sections = next(row for row in rows if row["path"] == "text.rope.sections")
    assert sections["value"] == [24, 20, 20] and sections["origin"].endswith(
        f"qwen3_vl.yaml:{sections['line']}"
    )
    assert {"path": "vision.layer_scale", "value": False, "origin": "default"} in rows
