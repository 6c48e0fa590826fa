"""Pytest plugin: makes the stand-in importable before any test module is collected.

Registered under the entry point group ``pytest11``. It does nothing unless
``VLLM_NEURON_CPU_MODE`` is on, and never hides an installed plugin.
"""

from vlmgen import standin

if standin.cpu_mode():
    standin.activate()


def pytest_report_header() -> str:
    """Say in the header of a test run what ``import vllm_neuron`` means."""
    return f"vllm_neuron: {standin.which()}"
