"""`vlmgen families`: everything it says comes from specs and from stored runs."""

from __future__ import annotations

import datetime
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vlmgen import cli, proofs
from vlmgen.errors import OutputError
from vlmgen.families import families, not_generated, page
from vlmgen.spec.axes import AXES, LATER_KEYS

ROOT = Path(__file__).resolve().parents[1]
SPECS = ROOT / "specs"
runner = CliRunner()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Two specs, and a package of one of them."""
    (tmp_path / "specs").mkdir()
    for name in ("qwen2_vl", "qwen3_vl"):
        shutil.copy(SPECS / f"{name}.yaml", tmp_path / "specs")
    package = tmp_path / "generated" / "qwen3_vl"
    (package / "vllm_neuron_qwen3_vl").mkdir(parents=True)
    (package / "pyproject.toml").write_text("")
    (package / "vllm_neuron_qwen3_vl" / "model.py").write_text("A = 1\n")
    return tmp_path


def rows(checkout: Path):
    return families(checkout / "specs", checkout / "generated")


def record(checkout: Path, **results: bool) -> Path:
    found = {name.replace("_", " "): {"checks": 3, "passed": ok} for name, ok in results.items()}
    return proofs.record(checkout / "generated" / "qwen3_vl", "qwen3_vl", found)


def test_the_committed_page_is_what_the_command_writes():
    written = (ROOT / "docs" / "families.md").read_text(encoding="utf-8")
    assert written == page(
        families(SPECS, ROOT / "generated")
    ), "docs/families.md is stale; run `vlmgen families --out docs/families.md`"


def test_every_family_is_listed_with_its_checkpoints():
    found = families(SPECS, ROOT / "generated")
    assert [f.spec.family for f in found] == sorted(path.stem for path in SPECS.glob("*.yaml"))
    text = page(found)
    for family in found:
        assert all(name in text for name in family.spec.checkpoint_names)


def test_what_was_not_run_says_so(checkout):
    second = rows(checkout)[1]
    assert {cell.text() for cell in second.cells} == {"not run"}
    assert [cell.kind for cell in second.cells] == [kind.name for kind in proofs.KINDS]


def test_stored_run_has_its_day_and_figures(checkout):
    proofs.record(
        checkout / "generated" / "qwen3_vl",
        "qwen3_vl",
        {"positions": {"checks": 2, "passed": True, "worst": "0", "limit": "0"}},
    )
    cell = next(c for c in rows(checkout)[1].cells if c.kind == "positions")
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    assert (cell.state, cell.text()) == ("passed", f"ok, 2 checks, 0 of 0, {today}")
    assert today in page(rows(checkout))


def test_failed_run_is_a_failure(checkout):
    record(checkout, served=False)
    cell = next(c for c in rows(checkout)[1].cells if c.kind == "served")
    assert cell.state == "failed" and cell.text().startswith("FAILED, 3 checks")


def test_run_on_other_modules_is_told_from_one_of_today(checkout):
    record(checkout, contract=True)
    module = checkout / "generated/qwen3_vl/vllm_neuron_qwen3_vl/model.py"
    module.write_text("A = 2\n")
    cell = next(c for c in rows(checkout)[1].cells if c.kind == "contract")
    assert cell.state == "stale"
    assert cell.text_today().endswith("the package has changed since")
    # The page holds what was stored, whatever happened to the package.
    assert "changed since" not in cell.text()
    (checkout / "generated/qwen3_vl/README.md").write_text("quotes results\n")
    module.write_text("A = 1\r\n")
    assert next(c for c in rows(checkout)[1].cells if c.kind == "contract").state == "passed"


def test_new_run_replaces_its_own_kind_only(checkout):
    record(checkout, contract=True, served=True)
    record(checkout, contract=False)
    stored = proofs.load(checkout / "specs", "qwen3_vl")
    assert {name: proof.passed for name, proof in stored.items()} == {
        "contract": False,
        "served": True,
    }


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"served": {}}', '{"magic": {"date": "2026-01-01"}}', '{"served": 3}',
     '{"served": {"date": "today", "modules": "", "checks": 1, "passed": true}}',
     '{"served": {"date": "2026-01-01", "modules": "", "checks": "1", "passed": true}}'],
)  # fmt: skip
def test_record_that_is_none_is_refused(checkout, text):
    path = record(checkout, served=True)
    path.write_text(text)
    with pytest.raises(OutputError, match=r"qwen3_vl.json: (is no record of runs|cannot be read)"):
        rows(checkout)


def test_unknown_kinds_and_names_are_refused(checkout):
    with pytest.raises(ValueError, match="no such proof: magic"):
        record(checkout, magic=True)
    with pytest.raises(ValueError, match="no name of a family"):
        proofs.load(checkout / "specs", "../qwen3_vl")


def test_kinds_hold_every_group_of_the_validation():
    pytest.importorskip("torch")
    from vlmgen.validate.run import GROUPS

    assert set(GROUPS) <= proofs.NAMES


def test_every_later_value_is_listed():
    assert len(not_generated()) == sum(len(a.later) for a in AXES.values()) + len(LATER_KEYS)


# --- the command --------------------------------------------------------------------------------


def test_command_prints_towers_proofs_and_refusals(checkout):
    record(checkout, served=True)
    options = ["--specs", str(checkout / "specs"), "--generated", str(checkout / "generated")]
    result = runner.invoke(cli.app, ["families", *options])
    assert result.exit_code == 0, result.output
    for part in ("interleaved M-RoPE", "served by vLLM", "ok, 3 checks", "not run",
                 "no package: run `vlmgen new", "rms_zero_centered", "Qwen3-VL-2B-Thinking",
                 "every package refuses"):  # fmt: skip
        assert part in result.stdout
    data = json.loads(runner.invoke(cli.app, ["families", *options, "--json"]).stdout)
    first, second = data["families"]
    assert (first["family"], first["package"]) == ("qwen2_vl", False)
    assert second["proofs"]["served"]["state"] == "passed"
    assert second["proofs"]["positions"] == {"state": "not run"}
    assert second["checkpoints"]["Qwen3-VL-8B-Instruct"]["parameters"] > 8e9
    assert data["not_generated"][0]["axis"] == "text.norm.kind"


def test_command_writes_the_page(checkout, tmp_path):
    out = tmp_path / "families.md"
    options = ["--specs", str(checkout / "specs"), "--generated", str(checkout / "generated")]
    assert runner.invoke(cli.app, ["families", *options, "-o", str(out)]).exit_code == 0
    assert out.read_text() == page(rows(checkout))


def test_directory_without_specs(tmp_path):
    result = runner.invoke(cli.app, ["families", "--specs", str(tmp_path)])
    assert result.exit_code == 2
    assert "holds no specs" in result.stderr


# --- proofs that tests are ----------------------------------------------------------------------

TESTS = """
import pytest

@pytest.mark.proof("served")
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_vl"])
def test_served(family):
    assert family == "qwen3_vl"

@pytest.mark.proof("faults", family="qwen3_vl")
def test_fault():
    pass

@pytest.mark.proof("positions", family="qwen3_vl")
def test_skipped():
    pytest.skip("no reason")

def test_other():
    pass
"""


def run_tests(checkout: Path, *options: str) -> None:
    folder = checkout / "tests"
    folder.mkdir(exist_ok=True)
    shutil.copy(ROOT / "tests" / "conftest.py", folder)
    (folder / "test_proofs.py").write_text(TESTS)
    (checkout / "pytest.ini").write_text("[pytest]\nmarkers = proof\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)]
    subprocess.run([*command, *options], cwd=checkout, capture_output=True, check=False)


@pytest.mark.parametrize("options", [[], ["-n", "2"]], ids=["alone", "in workers"])
def test_marked_tests_are_counted_and_stored(checkout, options):
    run_tests(checkout, "--record-proofs", *options)
    stored = proofs.load(checkout / "specs", "qwen3_vl")
    assert {name: (p.checks, p.passed) for name, p in stored.items()} == {
        "served": (1, True),
        "faults": (1, True),
    }
    (failed,) = proofs.load(checkout / "specs", "qwen2_vl").values()
    assert (failed.checks, failed.passed) == (1, False)


@pytest.mark.parametrize("options", [[], ["--record-proofs", "-k", "served"]])
def test_nothing_is_stored_unasked_or_in_part(checkout, options):
    run_tests(checkout, *options)
    assert proofs.load(checkout / "specs", "qwen3_vl") == {}
