"""The package plan: which file of a package comes from which template.

`OUT_OF_TREE` and `IN_TREE` are the whole of it. A row takes every template directly in a folder,
so a new template file needs no change here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

from vlmgen.errors import UsageError
from vlmgen.render import templates

if TYPE_CHECKING:
    from vlmgen.spec import Spec

Layout = Literal["out-of-tree", "in-tree"]
# For editors; the path is right for packages in generated/ of this repository.
SCHEMA_COMMENT = "# yaml-language-server: $schema=../../vlmgen/spec/schema.json\n"
LAYOUTS: tuple[Layout, ...] = ("out-of-tree", "in-tree")
SUFFIX = ".j2"


@dataclass(frozen=True)
class Row:
    """Templates of one folder and where their files go.

    Args:
        folder: Folder below `templates/`.
        suffix: End of the template names that the row takes.
        to: Directory in the package; `{family}` and `{module}` are filled in.
    """

    folder: str
    suffix: str
    to: str


@dataclass(frozen=True)
class Copied:
    """A module of vlmgen that goes into a package as it is.

    Args:
        source: Path below the `vlmgen` package; fields in braces are read from the spec, as in
            `blocks.BLOCKS`.
        to: Path in the package; `{family}` and `{module}` are filled in.
    """

    source: str
    to: str


@dataclass(frozen=True)
class LayoutRows:
    """One layout.

    Args:
        module: Import name of the package's modules.
        rows: Template folders.
        copied: Modules taken from vlmgen.
        spec: Where the resolved spec goes, or None.
    """

    module: str
    rows: tuple[Row, ...]
    spec: str | None = None
    copied: tuple[Copied, ...] = ()


OUT_OF_TREE = LayoutRows(
    module="vllm_neuron_{family}",
    spec="spec.yaml",
    rows=(
        Row("package", ".toml.j2", ""),
        Row("package", ".md.j2", ""),
        Row("package", ".py.j2", "vllm_neuron_{family}/"),
        Row("utils", ".py.j2", "vllm_neuron_{family}/utils/"),
        Row("tests", ".py.j2", "tests/"),
    ),
    copied=(
        Copied("validate/driver.py", "tests/driver.py"),
        Copied("validate/features_{tokens.video_prompt}.py", "tests/features.py"),
    ),
)

IN_TREE = LayoutRows(
    module="vllm_neuron.model.{family}",
    rows=(
        Row("package", ".py.j2", "vllm_neuron/model/{family}/"),
        Row("utils", ".py.j2", "vllm_neuron/model/{family}/utils/"),
        Row("tests", ".py.j2", "tests/model/{family}/"),
    ),
    copied=(
        Copied("validate/driver.py", "tests/model/{family}/driver.py"),
        Copied("validate/features_{tokens.video_prompt}.py", "tests/model/{family}/features.py"),
    ),
)


@dataclass(frozen=True)
class PlannedFile:
    """One file of a package; a template that renders to nothing gives no file.

    Args:
        path: Path in the package.
        template: Name of the template, or `Copied.source`; empty for the spec.
        mode: `render` a template, `copy` a module as it is, or write the resolved `spec`.
    """

    path: str
    template: str
    mode: Literal["render", "copy", "spec"] = "render"


@dataclass(frozen=True)
class PackagePlan:
    """The files of one package, sorted by path.

    Args:
        family: Name of the family.
        layout: `out-of-tree` or `in-tree`.
        module: Import name of the package's modules.
        files: What to render or copy.
    """

    family: str
    layout: Layout
    module: str
    files: tuple[PlannedFile, ...]


def layout_rows(layout: str) -> LayoutRows:
    """The rows of a layout.

    Raises:
        UsageError: There is no such layout.
    """
    if layout not in LAYOUTS:
        raise UsageError(f"layout {layout!r}: legal are {', '.join(LAYOUTS)}")
    return OUT_OF_TREE if layout == "out-of-tree" else IN_TREE


def plan_package(
    family: str, layout: Layout = "out-of-tree", search: Sequence[Path] | None = None
) -> PackagePlan:
    """Plan a package from the templates that there are.

    Args:
        family: Name of the family, an identifier.
        layout: `out-of-tree` for a package of its own, `in-tree` for a plugin checkout.
        search: Template directories; by default those that ship with vlmgen.

    Raises:
        UsageError: There is no such layout.
    """
    search = search or templates.directories()
    rows = layout_rows(layout)
    module = rows.module.format(family=family)
    files = [
        PlannedFile(_path(row, name, family, module), name)
        for row in rows.rows
        for name in templates.names(search, row.folder, row.suffix)
    ]
    files += [
        PlannedFile(copied.to.format(family=family, module=module), copied.source, "copy")
        for copied in rows.copied
    ]
    if rows.spec:
        files.append(PlannedFile(rows.spec, "", "spec"))
    return PackagePlan(family, layout, module, tuple(sorted(files, key=lambda file: file.path)))


def _path(row: Row, name: str, family: str, module: str) -> str:
    file_name = name.removeprefix(row.folder + "/").removesuffix(SUFFIX)
    return row.to.format(family=family, module=module) + file_name


def copied_source(source: str, spec: Spec) -> str:
    """`Copied.source` with the spec's values filled in."""
    from vlmgen.render.blocks import axis_fields

    return source.format_map(axis_fields(spec))


def source_bytes(name: str) -> bytes:
    """A file of vlmgen that a package copies or quotes, by its path below `vlmgen/`."""
    return (Path(__file__).resolve().parent.parent / name).read_bytes()


def quoted_sources(spec: Spec) -> list[str]:
    """Data files of vlmgen that templates quote: the tiny checkpoint and those it builds on."""
    names: list[str] = []
    name: str | None = spec.tiny
    while name:
        names.append(f"tiny/families/{name}.json")
        name = json.loads(source_bytes(names[-1])).get("extends")
    return names


def spec_text(spec: Spec) -> str:
    """The resolved spec as YAML; loading it gives an equal spec, but for the folder of overrides.

    That one is relative to the spec it was named in, and means nothing beside the package.
    """
    from vlmgen.render.escaping import to_yaml

    body = to_yaml(spec.model_dump(mode="json", exclude_none=True, exclude={"templates"}))
    return f"{SCHEMA_COMMENT}# The resolved spec this package was generated from.\n{body}"


def template_context(
    spec: Spec, plan: PackagePlan, results: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The names that templates may use.

    Args:
        spec: The spec.
        plan: The package's plan.
        results: Stored validation results, or None where nothing was run.
    """
    import vlmgen
    from vlmgen.render.blocks import chosen_blocks
    from vlmgen.render.words import words
    from vlmgen.spec.derive import derive
    from vlmgen.weights import weight_table

    return {
        "spec": spec,
        "text": spec.text,
        "vision": spec.vision,
        "derived": SimpleNamespace(**vars(derive(spec)), **words(spec)),
        "weights": weight_table(spec),
        "blocks": chosen_blocks(spec),
        "C": spec.class_prefix,
        "package": plan.module,
        "layout": plan.layout,
        "results": results,
        "version": vlmgen.__version__,
    }
