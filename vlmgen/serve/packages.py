"""Packages that are served from their folder, and those that pip installed."""

from __future__ import annotations

import ast
import importlib.util
import os
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

PACKAGES_VARIABLE = "VLMGEN_SERVE_PACKAGES"
"""Folders of generated packages, separated like PATH; set by `vlmgen serve`."""
PLUGINS_VARIABLE = "VLLM_PLUGINS"
"""Names of the plugins that vLLM loads, separated by commas; all of them where it is not set."""
GENERAL_PLUGINS = "vllm.general_plugins"
PREFIX = "vllm_neuron_"


@dataclass(frozen=True)
class InstalledPackage:
    """A generated package that pip installed.

    Args:
        plugin: Name of its entry point.
        module: Its module.
        architecture: The name under which it registers, or empty if its module does not say.
    """

    plugin: str
    module: str
    architecture: str


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


def installed_packages() -> list[InstalledPackage]:
    """Generated packages among the installed plugins; none of their code is run."""
    found = []
    for entry in metadata.entry_points(group=GENERAL_PLUGINS):
        module = entry.value.partition(":")[0]
        if module.startswith(PREFIX):
            found.append(InstalledPackage(entry.name, module, _architecture(module)))
    return sorted(found, key=lambda package: package.plugin)


def shared_architectures(packages: Iterable[InstalledPackage]) -> dict[str, list[str]]:
    """Architecture -> plugins, where more than one package registers under it."""
    plugins: dict[str, list[str]] = {}
    for package in packages:
        if package.architecture:
            plugins.setdefault(package.architecture, []).append(package.plugin)
    return {name: found for name, found in sorted(plugins.items()) if len(found) > 1}


def plugins_without_rivals(architecture: str, allowed: str | None) -> str | None:
    """What `VLLM_PLUGINS` must be so that no installed package takes an architecture.

    vLLM keeps the class that was registered last, and plugins have no order.

    Args:
        architecture: That of the package which is served from its folder.
        allowed: The variable's present value.

    Returns:
        The value, or None where it can stay as it is.
    """
    rivals = {p.plugin for p in installed_packages() if p.architecture == architecture}
    entries = [
        entry
        for group in metadata.entry_points().groups
        if group.startswith("vllm.")
        for entry in metadata.entry_points(group=group)
    ]
    own = {entry.name for entry in entries if entry.value.startswith("vlmgen.")}
    if allowed is None:
        names = {entry.name for entry in entries}
        if not rivals & names:
            return None
    else:
        names = {name for name in allowed.split(",") if name}
        if not rivals & names and own <= names:
            return None
    return ",".join(sorted((names | own) - rivals))


def _architecture(module: str) -> str:
    """The constant `ARCHITECTURE` of a package's top module, read and not run."""
    try:
        spec = importlib.util.find_spec(module)
        tree = ast.parse(Path(spec.origin).read_text("utf-8")) if spec and spec.origin else None
    except (ImportError, OSError, SyntaxError, ValueError):
        return ""
    for node in tree.body if tree else ():
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            if "ARCHITECTURE" in names and isinstance(node.value.value, str):
                return node.value.value
    return ""
