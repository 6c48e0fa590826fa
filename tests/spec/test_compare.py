"""`vlmgen compare`: meaning, not lines; and what a difference does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from vlmgen.cli import app
from vlmgen.spec.checkpoints import CheckpointText, CheckpointVision
from vlmgen.spec.compare import _sizes, compare_specs
from vlmgen.spec.derive import derive
from vlmgen.spec.dump import spec_yaml
from vlmgen.spec.load import load_spec, load_spec_text
from vlmgen.spec.model import Spec

from .conftest import ROOT

SPECS = sorted((ROOT / "specs").glob("*.yaml"))
runner = CliRunner()


def edited(text: str, *edits: tuple[str, str]) -> Spec:
    for old, new in edits:
        assert old in text, old
        text = text.replace(old, new)
    return load_spec_text(text, "x.yaml")


def changes(left: Spec, right: Spec) -> dict[str, tuple[object, object]]:
    return {c.path: (c.left, c.right) for c in compare_specs(left, right).changes}


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_a_spec_says_the_same_as_its_resolved_form(path: Path) -> None:
    spec = load_spec(path)
    found = compare_specs(spec, load_spec_text(spec_yaml(spec)))
    assert found.is_equal and not found.weights and not any(pair.differs for pair in found.pairs)


def test_comments_order_and_style_make_no_difference(spec: Spec, spec_text: str) -> None:
    lines = [line for line in spec_text.splitlines() if not line.strip().startswith("#")]
    text = "\n".join(lines).replace("{kind: layer, eps: 1.0e-6}", "{eps: 0.000001, kind: layer}")
    assert compare_specs(spec, load_spec_text(text)).is_equal


def test_a_size_that_a_checkpoint_need_not_state_makes_no_difference(spec, spec_text) -> None:
    other = edited(spec_text, ("text: {hidden_size: 4096, num_layers: 36, ", "text: {"))
    assert compare_specs(spec, other).is_equal


def test_one_axis_is_one_change_with_its_meaning(spec: Spec, spec_text: str) -> None:
    other = edited(spec_text, ("activation: gelu_tanh", "activation: gelu"))
    (change,) = compare_specs(spec, other).changes
    assert (change.path, change.kind) == ("vision.mlp.activation", "axis")
    assert (change.left, change.right) == ("gelu_tanh", "gelu")
    assert change.meaning.startswith("gelu_tanh: GELU in the tanh form")


def test_kinds(spec: Spec, spec_text: str) -> None:
    other = edited(
        spec_text,
        ("num_embeddings: 2304", "num_embeddings: 2500"),
        ("q: self_attn.q_proj", "q: self_attn.query"),
        ("flat, text: model.", "flat, text: m."),
    )
    found = {change.path: change.kind for change in compare_specs(spec, other).changes}
    assert found == {
        "vision.position.num_embeddings": "size",
        "weights.layouts[flat].text": "name",
        "weights.text.q": "name",
    }


def test_structure_that_one_spec_lacks_is_told_value_by_value(spec: Spec, spec_text: str) -> None:
    moe = load_spec(ROOT / "specs" / "qwen3_vl_moe.yaml")
    found = changes(spec, moe)
    assert repr(found["text.moe.router"]) == "(-, 'softmax')"
    assert "text.moe.routed_scale" not in found  # it has its default
    assert repr(changes(moe, spec)["text.moe.router"]) == "('softmax', -)"


def test_checkpoints_are_matched_by_name_and_by_the_sizes_that_they_have(spec, spec_text) -> None:
    start = spec_text.index("  - name: Qwen3-VL-2B")
    end = spec_text.index("  - name: Qwen3-VL-4B")
    without = edited(spec_text, (spec_text[start:end], ""))
    assert list(changes(spec, without)) == ["checkpoints[Qwen3-VL-2B-Instruct]"]
    deeper = edited(spec_text, ("num_layers: 28", "num_layers: 30"))
    assert changes(spec, deeper) == {"checkpoints[Qwen3-VL-2B-Instruct].text.num_layers": (28, 30)}
    also = edited(spec_text, ("also: [Qwen3-VL-2B-Thinking]", "also: []"))
    assert list(changes(spec, also)) == ["checkpoints[Qwen3-VL-2B-Instruct].also"]


def test_every_size_of_a_checkpoint_is_compared(spec: Spec) -> None:
    stated = {f"text.{name}" for name in CheckpointText.model_fields}
    stated |= {f"vision.{name}" for name in CheckpointVision.model_fields}
    assert set(_sizes(spec.checkpoint("Qwen3-VL-2B-Instruct"))) == stated


def test_what_a_change_does_to_weights(spec: Spec, spec_text: str) -> None:
    other = edited(spec_text, ("qkv_bias: false", "qkv_bias: true"))
    (row,) = compare_specs(spec, other).weights
    assert row.parameter == "layers.{layer}.self_attn.qkv_proj_bias"
    assert row.left is None and row.right is not None and row.right[0] == "fuse_qkv"


def test_what_a_change_does_to_splits_caches_and_memory(spec: Spec, spec_text: str) -> None:
    other = edited(spec_text, ("intermediate_size: 4304", "intermediate_size: 4308"))
    pair = next(p for p in compare_specs(spec, other).pairs if p.left == "Qwen3-VL-8B-Instruct")
    effects = {effect.name: effect for effect in pair.effects if effect.differs}
    assert effects["legal vision TP"].left == (1, 2, 4, 8, 16)
    assert effects["legal vision TP"].right == (1, 2, 4)
    assert effects["vision parameters"].right - effects["vision parameters"].left == (
        27 * 4 * (2 * 1152 + 1)
    )
    assert "bytes of weights per rank, TP 8" in effects
    assert "encoder cache: width of a row" not in effects
    wider = edited(spec_text, ("block_size: 2048", "block_size: 4096"), ("[2048, 8192]", "[4096]"))
    (pair, *_) = compare_specs(spec, wider).pairs
    assert {e.name: (e.left, e.right) for e in pair.effects if e.differs} == {
        "encoder cache: rows of a block": (512, 1024),
        "encoder cache: bytes of a block": (512 * 8192 * 2, 1024 * 8192 * 2),
    }


def test_specs_without_a_common_checkpoint_compare_their_defaults(spec: Spec) -> None:
    other = load_spec(ROOT / "specs" / "qwen2_5_vl.yaml")
    (pair,) = compare_specs(spec, other).pairs
    assert (pair.left, pair.right) == (spec.defaults_from, other.defaults_from)
    facts = {effect.name: (effect.left, effect.right) for effect in pair.effects}
    assert facts["parameters"] == (derive(spec).parameters, derive(other).parameters)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(SPECS), st.sampled_from(SPECS))
def test_any_two_specs_compare_and_the_other_way_round_mirrors(left: Path, right: Path) -> None:
    a, b = load_spec(left), load_spec(right)
    found, mirrored = compare_specs(a, b), compare_specs(b, a)
    assert json.loads(json.dumps(found.to_dict()))["left"] == a.title
    assert sorted((c.path, repr(c.left), repr(c.right)) for c in found.changes) == sorted(
        (c.path, repr(c.right), repr(c.left)) for c in mirrored.changes
    )
    assert found.is_equal == (a == b)


# --- the command --------------------------------------------------------------------------------


def test_tables() -> None:
    moe = str(ROOT / "specs" / "qwen3_vl_moe.yaml")
    result = runner.invoke(app, ["compare", str(ROOT / "specs" / "qwen3_vl.yaml"), moe])
    assert result.exit_code == 0
    text = " ".join(result.stdout.split())
    for part in (
        "│ text.moe.num_experts │ - │ 128 │",
        "│ layers.{layer}.mlp.router_weight │ - │ transpose: layers.{layer}.mlp.gate.weight │",
        "│ encoder cache: width of a row │ 16,384 │ 8,192 │",
    ):
        assert part in text


def test_equal_specs_and_json(tmp_path: Path) -> None:
    path = str(ROOT / "specs" / "qwen3_vl.yaml")
    assert runner.invoke(app, ["compare", path, path]).stdout == (
        "Qwen3-VL and Qwen3-VL say the same\n"
    )
    data = json.loads(runner.invoke(app, ["compare", path, path, "--json"]).stdout)
    assert data["changes"] == [] and len(data["checkpoints"]) == 4


def test_two_states_of_one_spec_have_different_headings(tmp_path: Path, spec_text: str) -> None:
    changed = tmp_path / "changed.yaml"
    changed.write_text(spec_text.replace("theta: 5000000", "theta: 6000000"))
    result = runner.invoke(app, ["compare", str(ROOT / "specs/qwen3_vl.yaml"), str(changed)])
    assert "Qwen3-VL (first)" in result.stdout and "Qwen3-VL (second)" in result.stdout
    assert "5000000.0" in result.stdout
    assert "the same parameters, splits, cache widths and memory:" in result.stdout
