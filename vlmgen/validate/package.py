"""Import a generated package from its folder, under its own name and without changing sys.path."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from vlmgen.errors import UsageError

if TYPE_CHECKING:
    from vlmgen.spec import Spec

PREFIX = "vllm_neuron_"


def load_package_spec(folder: Path) -> Spec:
    """The spec that a package was generated from.

    Raises:
        UsageError: The folder holds no generated package.
        SpecError: Its spec is broken.
    """
    from vlmgen.spec.load import load_spec

    path = folder / "spec.yaml"
    if not path.is_file():
        raise UsageError(
            f"{folder} holds no generated package: spec.yaml is missing",
            hint="generate one with `vlmgen new SPEC`",
        )
    return load_spec(path)


def import_package(folder: Path) -> ModuleType:
    """The package's top module; an earlier import from another folder is replaced.

    Raises:
        UsageError: The folder holds no module of that name.
    """
    found = sorted(folder.glob(f"{PREFIX}*/__init__.py"))
    if len(found) != 1:
        raise UsageError(f"{folder} holds {len(found)} modules {PREFIX}*; exactly one is needed")
    (init,) = found
    name = init.parent.name
    loaded = sys.modules.get(name)
    if loaded is not None and Path(loaded.__file__ or "").resolve() == init.resolve():
        return loaded
    for stale in [m for m in sys.modules if m == name or m.startswith(f"{name}.")]:
        del sys.modules[stale]
    spec = importlib.util.spec_from_file_location(
        name, init, submodule_search_locations=[str(init.parent)]
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def load_factory(folder: Path) -> type:
    """The class that vLLM finds under the architecture name."""
    package = import_package(folder)
    factory = importlib.import_module(f"{package.__name__}.factory")
    return getattr(factory, package.ARCHITECTURE)
