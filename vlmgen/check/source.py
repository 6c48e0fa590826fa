"""The source of a generated package, parsed; nothing is imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from vlmgen.check.finding import Finding
from vlmgen.errors import UsageError

REQUIRED = ("__init__.py", "config.py", "factory.py", "model.py")


@dataclass(frozen=True)
class Module:
    """One parsed file.

    Args:
        path: As findings name it.
        name: Path below the module directory without `.py`, with dots: `utils.mrope`; empty for
            the package's `__init__`.
        tree: The syntax tree.
        is_test: Whether it lies in the package's tests.
    """

    path: str
    name: str
    tree: ast.Module
    is_test: bool = False

    @property
    def classes(self) -> dict[str, ast.ClassDef]:
        """Top-level classes by name."""
        return {node.name: node for node in self.tree.body if isinstance(node, ast.ClassDef)}

    @property
    def functions(self) -> dict[str, ast.FunctionDef]:
        """Top-level functions by name."""
        return {node.name: node for node in self.tree.body if isinstance(node, ast.FunctionDef)}


@dataclass
class PackageSource:
    """A generated package as source.

    Args:
        root: Directory of the package.
        directory: The directory of its modules.
        modules: Parsed files by name, tests included under `tests.`.
        findings: What already failed while reading.
    """

    root: Path
    directory: Path
    modules: dict[str, Module] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    @property
    def import_name(self) -> str:
        """Name of the importable package, such as `vllm_neuron_<family>`."""
        return self.directory.name

    @property
    def own(self) -> Iterator[Module]:
        """The modules that a model runs, without tests."""
        return (module for module in self.modules.values() if not module.is_test)

    def path(self, *parts: str) -> str:
        """A file of the module directory as findings name it."""
        return self.directory.joinpath(*parts).as_posix()


def read_package(root: Path) -> PackageSource:
    """Parse every file of a package.

    Args:
        root: Directory of the package; it holds one directory with the modules.

    Returns:
        The package; files that do not parse are findings and are left out.

    Raises:
        UsageError: The directory is no generated package.
    """
    if not root.is_dir():
        raise UsageError(f"{root}: no such directory; a package is a directory of generated/")
    homes = sorted({p.parent for p in root.glob("*/factory.py")} | {p.parent for p in
                   root.glob("factory.py")})  # fmt: skip
    homes = [home for home in homes if all((home / name).is_file() for name in REQUIRED)]
    if len(homes) != 1:
        found = ", ".join(home.name for home in homes) or "none"
        raise UsageError(
            f"{root}: no generated package: exactly one directory with {', '.join(REQUIRED)} is "
            f"needed, found {found}"
        )
    source = PackageSource(root, homes[0])
    tests = root / "tests"
    files = [(p, p.relative_to(homes[0]), False) for p in sorted(homes[0].rglob("*.py"))]
    if homes[0] != root and tests.is_dir():
        files += [(p, p.relative_to(root), True) for p in sorted(tests.rglob("*.py"))]
    for path, relative, is_test in files:
        parts = list(relative.with_suffix("").parts)
        if parts[-1] == "__init__":
            parts.pop()
        try:
            tree = ast.parse(path.read_bytes(), filename=str(path))
        except (SyntaxError, ValueError) as error:
            line = getattr(error, "lineno", None) or 1
            source.findings.append(
                Finding(path.as_posix(), line, "VG002", f"does not parse: {error}",
                        "generate the package anew")  # fmt: skip
            )
            continue
        name = ".".join(parts)
        source.modules[name] = Module(path.as_posix(), name, tree, is_test)
    return source
