"""`vlmgen import`: what is printed and written, and the exit codes."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from vlmgen import cli
from vlmgen.spec.load import load_spec

runner = CliRunner()


def run(*arguments: object):
    return runner.invoke(cli.app, ["import", *map(str, arguments)])


@pytest.fixture
def known(tiny, folder):
    """A checkpoint that a known family serves."""
    return tiny("qwen3_vl").write(folder)


@pytest.fixture
def variant(tiny, folder):
    """A checkpoint without norms of queries and keys."""
    headers = tiny("qwen3_vl")
    headers.drop("self_attn.q_norm")
    headers.drop("self_attn.k_norm")
    return headers.write(folder)


def test_known_family_exits_0_and_names_its_spec(known, tmp_path):
    out = tmp_path / "mine.yaml"
    result = run(known, "-o", out)
    assert result.exit_code == 0, result.output
    assert "nothing to write" in result.stdout
    assert "specs/qwen3_vl.yaml serves it" in result.stdout
    assert not out.exists()


def test_evidence_on_request(known):
    assert "Agreement" not in run(known).stdout
    stdout = run(known, "--evidence").stdout
    assert "text_config.attention_bias is false" in stdout


def test_variant_is_written(variant, tmp_path):
    out = tmp_path / "specs" / "mine.yaml"
    result = run(variant, "--out", out)
    assert result.exit_code == 0, result.output
    assert f"wrote            {out}" in result.stdout
    assert "no norm of queries among model.language_model.layers.0." in result.stdout
    assert load_spec(out).text.attention.qk_norm == "none"
    again = run(variant, "--specs", out.parent)
    assert again.exit_code == 0
    assert f"{out} serves it" in again.stdout


def test_without_out_the_spec_is_printed(variant):
    result = run(variant)
    assert "extends: qwen3_vl.yaml\n" in result.stdout
    assert "qk_norm: none" in result.stdout


def test_existing_file_is_not_overwritten(variant, tmp_path):
    out = tmp_path / "specs" / "mine.yaml"
    out.parent.mkdir()
    assert run(variant, "-o", out, "--family", "one").exit_code == 0
    result = run(variant, "-o", out, "--family", "two")
    assert result.exit_code == 2
    assert f"{out} exists" in result.stderr
    assert load_spec(out).family == "one"
    assert run(variant, "-o", out, "--family", "two", "--force").exit_code == 0
    assert load_spec(out).family == "two"


def test_written_spec_of_its_own_directory_serves_the_next_time(variant, tmp_path):
    out = tmp_path / "specs" / "mine.yaml"
    assert run(variant, "-o", out).exit_code == 0
    result = run(variant, "-o", out)
    assert result.exit_code == 0
    assert "nothing to write" in result.stdout


def test_json(variant):
    data = json.loads(run(variant, "--json").stdout)
    assert data["nearest"]["family"] == "qwen3_vl" and not data["nearest"]["serves"]
    first, *_ = data["differences"]
    assert {d["path"] for d in data["differences"] if not d["read_at_load"]} == {
        "text.attention.qk_norm",
        "weights.text.q_norm",
        "weights.text.k_norm",
    }
    assert first["evidence"] and data["spec"].startswith("#")
    assert {gap["path"] for gap in data["undecided"]} >= {"text.rope.pairing", "tiny"}
    assert data["ranking"][0] == {"family": "qwen3_vl", "differences": 3}


def test_contradiction_exits_7_with_both_facts(tiny, folder):
    headers = tiny("qwen3_vl")
    headers.config["text_config"]["attention_bias"] = True
    headers.write(folder)
    result = run(folder)
    assert result.exit_code == 7
    assert "text_config.attention_bias is true" in result.stderr
    assert "more: vlmgen explain VG909" in result.stderr
    assert "q_proj.weight and no bias" in result.stderr
    (conflict,) = json.loads(run(folder, "--json").stdout)["contradictions"]
    assert conflict["path"] == "text.attention.qkv_bias"


def test_what_is_not_generated_exits_3(tiny, folder):
    headers = tiny("qwen3_vl")
    headers.config["text_config"]["sliding_window"] = 1024
    result = run(headers.write(folder))
    assert result.exit_code == 3
    assert "text.layer_types" in result.stdout
    assert "no spec can state today; nothing was written" in result.stderr


def test_unreadable_checkpoint_exits_3(tmp_path):
    result = run(tmp_path / "none")
    assert result.exit_code == 3
    assert "No such file" in result.stderr


def test_broken_spec_beside_it_is_named(known, tmp_path):
    specs = tmp_path / "specs"
    specs.mkdir()
    (specs / "broken.yaml").write_text("vlmgen: 1\n")
    result = run(known, "--specs", specs)
    assert result.exit_code == 2
    assert "broken.yaml: is no spec" in result.stderr


def test_import_needs_no_torch(tmp_path):
    import subprocess
    import sys

    code = (
        "import sys; from pathlib import Path; from vlmgen.importer import import_checkpoint\n"
        "print(sorted({'torch', 'transformers', 'safetensors'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"
