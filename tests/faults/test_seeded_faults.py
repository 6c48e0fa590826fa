"""Every wrong variant of a package makes the test fail that is named for it."""

import functools
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import pytest

from .catalogue import LEAST, Fault, families, faults_of, short_lists

ROOT = Path(__file__).resolve().parents[2]
SHORT = short_lists()
FAULTS = [
    pytest.param(family, fault, marks=() if fault in SHORT[family] else pytest.mark.matrix)
    for family in families()
    for fault in faults_of(family)
]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def outcomes(request):
    """Family -> fault -> test -> outcome; a family is run once, with the faults that are asked."""
    asked = defaultdict(set)
    for item in request.session.items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        if isinstance(parameters.get("fault"), Fault):
            asked[parameters["family"]].add(parameters["fault"].name)

    @functools.cache
    def run(family: str) -> dict[str, dict[str, str]] | str:
        environment = {**os.environ, "VLLM_NEURON_CPU_MODE": "1"}
        script = Path(__file__).with_name("seed.py")
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, str(script), str(ROOT / "generated" / family), folder]
            result = subprocess.run(
                [*command, *sorted(asked[family])],
                cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900,
            )  # fmt: skip
        return result.stderr[-3000:] if result.returncode else json.loads(result.stdout)

    def found(family: str) -> dict[str, dict[str, str]]:
        result = run(family)
        assert not isinstance(result, str), result
        return result

    return found


@pytest.mark.parametrize("family", families())
def test_the_faults_of_a_family_differ_and_are_enough(family):
    faults = faults_of(family)
    least = 20 if family == "qwen3_vl" else LEAST
    assert len({(fault.file, fault.old, fault.new) for fault in faults}) == len(faults) >= least


def test_every_family_has_faults():
    assert families() == sorted(path.stem for path in (ROOT / "specs").glob("*.yaml"))


@pytest.mark.proof("faults")
@pytest.mark.parametrize("family", families())
def test_the_package_as_it_is_passes_every_named_test(outcomes, family):
    assert set(outcomes(family)[""].values()) == {"passed"}
    named = {fault.caught_by for fault in SHORT[family]}
    assert named <= set(outcomes(family)[""])


@pytest.mark.proof("faults")
@pytest.mark.parametrize(("family", "fault"), FAULTS, ids=lambda v: getattr(v, "name", v))
def test_the_fault_is_noticed(outcomes, family, fault):
    assert outcomes(family)[fault.name] == {fault.caught_by: "failed"}
