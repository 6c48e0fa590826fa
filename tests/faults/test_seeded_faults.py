"""Every wrong variant of a package makes the test fail that is named for it."""

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from .catalogue import families, faults_of

ROOT = Path(__file__).resolve().parents[2]
FAULTS = [(family, fault) for family in families() for fault in faults_of(family)]

pytestmark = pytest.mark.slow


@functools.cache
def outcomes(family: str) -> dict[str, dict[str, str]]:
    """Fault -> test -> outcome; every family is run once."""
    environment = {**os.environ, "VLLM_NEURON_CPU_MODE": "1"}
    script = Path(__file__).with_name("seed.py")
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(script), str(ROOT / "generated" / family), folder]
        result = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900
        )
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout)


@pytest.mark.parametrize("family", families())
def test_the_faults_of_a_family_differ_and_are_enough(family):
    faults = faults_of(family)
    least = 20 if family == "qwen3_vl" else 5
    assert len({(fault.file, fault.old, fault.new) for fault in faults}) == len(faults) >= least


def test_every_family_has_faults():
    assert families() == sorted(path.stem for path in (ROOT / "specs").glob("*.yaml"))


@pytest.mark.proof("faults")
@pytest.mark.parametrize("family", families())
def test_the_package_as_it_is_passes_every_named_test(family):
    named = {fault.caught_by for fault in faults_of(family)}
    assert outcomes(family)[""] == dict.fromkeys(named, "passed")


@pytest.mark.proof("faults")
@pytest.mark.parametrize(("family", "fault"), FAULTS, ids=lambda v: getattr(v, "name", v))
def test_the_fault_is_noticed(family, fault):
    assert outcomes(family)[fault.name] == {fault.caught_by: "failed"}
