"""How JAX is set up, whoever used it first in a process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.needs_jax


IMPORTS = "from vlmgen.compile import torchax_import\nfrom vlmgen.errors import UsageError"


def said(code: str, **environment: str) -> str:
    """What a process of its own prints, for JAX is set up once in a process."""
    code = f"{IMPORTS}\n{code}"
    environment = {**os.environ, **environment}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env=environment
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


ASK = """
print(len(torchax_import.devices(1)))
try:
    print(len(torchax_import.devices(4)))
except UsageError as error:
    print(error, error.hint)
"""


def test_a_process_has_devices_for_as_many_ranks_as_a_program_has() -> None:
    assert said(ASK).split() == ["1", "4"]


def test_fewer_devices_than_ranks_are_said_with_the_variable() -> None:
    one, text = said(ASK, VLMGEN_COMPILE_DEVICES="2").splitlines()
    assert one == "1" and "needs 4 virtual devices, and JAX has 2" in text
    assert "VLMGEN_COMPILE_DEVICES=4" in text


def test_one_rank_compiles_where_jax_was_used_before_and_more_are_refused() -> None:
    one, text = said("import jax\njax.numpy.zeros(2)\n" + ASK).splitlines()
    assert one == "1" and "JAX has 1" in text and "used in this process before" in text


def test_a_number_of_devices_that_is_none_is_refused() -> None:
    code = "try: torchax_import.load()\nexcept UsageError as error: print(error)"
    assert "must be a positive integer, got 'many'" in said(code, VLMGEN_COMPILE_DEVICES="many")
