"""The generated Qwen3-VL package, imported from this checkout."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "generated" / "qwen3_vl"


def package_module(name: str) -> ModuleType:
    """A module of the package, such as `utils.preprocessing`.

    Where the plugin is not installed, the stand-in answers the package's imports.
    """
    os.environ.setdefault("VLLM_NEURON_CPU_MODE", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from vlmgen import standin
    from vlmgen.validate.package import import_package

    standin.require()
    return importlib.import_module(f"{import_package(PACKAGE).__name__}.{name}")
