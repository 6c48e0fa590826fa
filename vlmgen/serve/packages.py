"""Packages that are served from their folder, without `pip install`."""

from __future__ import annotations

import os
from pathlib import Path

PACKAGES_VARIABLE = "VLMGEN_SERVE_PACKAGES"
"""Folders of generated packages, separated like PATH; set by `vlmgen serve`."""


def register_named_packages() -> list[str]:
    """Import and register every package that the environment names.

    vLLM calls this in every process: front end, engine, workers, model inspection.

    Returns:
        The architectures.

    Raises:
        UsageError: A folder holds no generated package.
    """
    from vlmgen.validate.package import import_package

    architectures = []
    for folder in filter(None, os.environ.get(PACKAGES_VARIABLE, "").split(os.pathsep)):
        package = import_package(Path(folder))
        package.register()
        architectures.append(package.ARCHITECTURE)
    return architectures
