"""All checks together, the files of a package, and what works without torch."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from vlmgen.check.finding import RULES, Finding
from vlmgen.check.integrity import check_integrity
from vlmgen.check.run import run_checks
from vlmgen.check.source import read_package
from vlmgen.errors import UsageError

WITHOUT_TORCH = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers", "vllm"):
            raise ModuleNotFoundError(f"blocked {name}", name=name)
sys.meta_path.insert(0, Block())
import importlib.util
real = importlib.util.find_spec
def find_spec(name, package=None):
    return None if name in ("torch", "transformers", "vllm") else real(name, package)
importlib.util.find_spec = find_spec
from pathlib import Path
from vlmgen.check.run import run_checks
findings = run_checks([Path(sys.argv[1])])
for finding in findings:
    print(finding)
print(len(findings), "torch" in sys.modules)
"""


def without_torch(root: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT_TORCH, str(root)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)


def test_source_checks_run_without_torch_and_say_what_was_not_proven(package: Path) -> None:
    result = without_torch(package)
    assert result.stdout.splitlines()[-1] == "0 False", result.stdout
    assert "weight coverage was not proven" in result.stderr and "torch" in result.stderr


def test_faults_are_found_without_torch(edited) -> None:
    edited("model.py", "softmax_scale=", "softmax_scaling=")
    edited("model.py", "hidden = self.norm(hidden)", "hidden = self.norm(hidden.cuda())")
    root = edited("config.py", "heads // tp_size % 2", "heads // tp_size % 3")
    lines = without_torch(root).stdout.splitlines()[:-1]
    found = {match.group(1) for line in lines if (match := re.search(r": (VG\d+) ", line))}
    assert {"VG004", "VG103", "VG204", "VG402"} <= found
    assert all(re.match(r".+:\d+: VG\d{3} .+ \(.+\) -> .+", line) for line in lines)


def test_integrity_of_the_committed_package(package: Path) -> None:
    assert check_integrity(package) == []


def test_edits_losses_and_foreign_files_are_found(package: Path, tmp_path: Path) -> None:
    root = tmp_path / "copy"
    shutil.copytree(package, root)
    home = root / "vllm_neuron_qwen3_vl"
    (home / "model.py").write_text((home / "model.py").read_text() + "\n# by hand\n")
    (home / "factory.py").unlink()
    (home / "extra.py").write_text("")
    found = {Path(f.path).name: f.message for f in check_integrity(root) if f.code == "VG004"}
    assert "edited" in found["model.py"]
    assert "missing" in found["factory.py"]
    assert "not generated" in found["extra.py"]
    shutil.rmtree(root / ".vlmgen")
    assert [f.code for f in check_integrity(root)] == ["VG003"]


def test_a_file_that_does_not_parse(edited) -> None:
    root = edited("model.py", "class Qwen3VLTextMLP(", "class Qwen3VLTextMLP(")
    path = root / "vllm_neuron_qwen3_vl" / "model.py"
    path.write_text("def broken(:\n")
    findings = run_checks([root])
    assert {f.code for f in findings} == {"VG002", "VG004"}
    assert next(f for f in findings if f.code == "VG002").line == 1


def test_a_package_without_spec(package: Path, tmp_path: Path) -> None:
    root = tmp_path / "copy"
    shutil.copytree(package, root)
    (root / "spec.yaml").unlink()
    assert "VG001" in {f.code for f in run_checks([root])}


def test_what_is_no_package(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such directory"):
        read_package(tmp_path / "nowhere")
    with pytest.raises(UsageError, match=r"config\.py, factory\.py, model\.py is needed"):
        read_package(tmp_path)
    with pytest.raises(UsageError, match="legal: recorded, installed"):
        run_checks([tmp_path], plugin="latest")


def test_several_processes_find_what_one_finds(package: Path, tmp_path: Path) -> None:
    roots = [tmp_path / name for name in ("one", "two", "three")]
    for root in roots:  # what does not parse is known without torch
        shutil.copytree(package, root)
        (next(root.glob("vllm_neuron_*")) / "merge.py").write_text(f"{root.name} = (\n")
    said: list[str] = []
    found = run_checks(roots, progress=said.append, processes=2)
    assert found == run_checks(roots)
    assert [f.path for f in found if f.code == "VG002"] == [
        f"{root}/vllm_neuron_qwen3_vl/merge.py" for root in roots
    ]
    assert said[-1] == f"{roots[-1]} (3 of 3)"
    with pytest.raises(UsageError, match=f"^{tmp_path}: no generated package"):
        run_checks([*roots, tmp_path], processes=2)


def test_codes_are_unique_and_rules_are_one_sentence() -> None:
    assert all(re.fullmatch(r"VG\d{3}", code) for code in RULES)
    assert len(set(RULES.values())) == len(RULES)
    assert all("\n" not in rule and not rule.endswith(".") for rule in RULES.values())


def test_a_finding_prints_as_one_line() -> None:
    finding = Finding("a/b.py", 7, "VG103", "first\n  second", "do\nthis")
    assert str(finding) == f"a/b.py:7: VG103 first second ({RULES['VG103']}) -> do this"


def test_findings_serialise(edited) -> None:
    root = edited("model.py", "softmax_scale=", "softmax_scaling=")
    finding, *_ = [f for f in run_checks_of_source(root) if f.code == "VG103"]
    keys = ("code", "path", "line", "rule", "message", "fix")
    assert json.loads(json.dumps({key: getattr(finding, key) for key in keys}))["code"] == "VG103"


def run_checks_of_source(root: Path) -> list[Finding]:
    from vlmgen.check.api import recorded_api
    from vlmgen.check.contract import check_contract

    return check_contract(read_package(root), recorded_api())
