"""Every wrong variant of the package makes the test fail that is named for it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .catalogue import FAULTS

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> dict[str, dict[str, str]]:
    command = [
        sys.executable,
        str(Path(__file__).with_name("seed.py")),
        str(ROOT / "generated" / "qwen3_vl"),
        str(tmp_path_factory.mktemp("faults")),
    ]
    environment = {**os.environ, "VLLM_NEURON_CPU_MODE": "1"}
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout)


def test_there_are_at_least_twenty_different_faults():
    assert len({(fault.file, fault.old, fault.new) for fault in FAULTS}) == len(FAULTS) >= 20


def test_the_package_as_it_is_passes_every_named_test(outcomes):
    named = {fault.caught_by for fault in FAULTS}
    assert outcomes[""] == dict.fromkeys(named, "passed")


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_fault_is_noticed(outcomes, fault):
    assert outcomes[fault.name] == {fault.caught_by: "failed"}
