"""A package in memory: a pure function of spec, results, templates and vlmgen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import vlmgen
from vlmgen.render import plan as planning
from vlmgen.render.environment import environment
from vlmgen.render.format import format_modules, format_text
from vlmgen.render.manifest import MANIFEST_PATH, Manifest, generator_sha256, sha256, text_sha256
from vlmgen.render.paths import check_paths

if TYPE_CHECKING:
    from vlmgen.spec import Spec


@dataclass(frozen=True)
class RenderedPackage:
    """A package in memory.

    Args:
        plan: Which file comes from which template.
        texts: Text by path, without the manifest.
        templates: Hash of every template used, by name.
        sources: Hash of every file of vlmgen that is copied or quoted, by path.
        inputs: Path of a file -> names of the templates and sources that it was made from.
    """

    plan: planning.PackagePlan
    texts: Mapping[str, str]
    templates: Mapping[str, str]
    sources: Mapping[str, str]
    inputs: Mapping[str, frozenset[str]]


def render_package(
    spec: Spec,
    layout: planning.Layout = "out-of-tree",
    results: Mapping[str, Any] | None = None,
    search: Sequence[Path] | None = None,
) -> RenderedPackage:
    """Render a package in memory: a pure function of spec, results, templates and vlmgen.

    Args:
        spec: The spec.
        layout: `out-of-tree` or `in-tree`.
        results: Stored validation results for the README, or None.
        search: Template directories; by default those that ship with vlmgen.

    Raises:
        TemplateError: A template is faulty.
        UnsafeValueError: A spec value cannot stand where a template puts it.
        OutputError: Two files of the plan have one name.
    """
    package_plan = planning.plan_package(spec.family, layout, search)
    check_paths([*(file.path for file in package_plan.files), MANIFEST_PATH])
    jinja = environment(search)
    context = planning.template_context(spec, package_plan, results)
    texts: dict[str, str] = {}
    modules: dict[str, str] = {}
    inputs: dict[str, frozenset[str]] = {}
    sources = {
        name: text_sha256(planning.source_bytes(name)) for name in planning.quoted_sources(spec)
    }
    for file in package_plan.files:
        if file.mode == "copy":
            source = planning.copied_source(file.template, spec)
            content = planning.source_bytes(source)
            sources[source] = text_sha256(content)
            texts[file.path] = content.decode("utf-8")
            inputs[file.path] = frozenset((source,))
            continue
        if file.mode == "spec":
            texts[file.path] = planning.spec_text(spec)
            continue
        text = jinja.render_file(file.template, context)
        inputs[file.path] = frozenset(jinja.asked)
        if not text.strip():  # this family has no such file
            continue
        if file.path.endswith(".py"):
            modules[file.path] = text
        else:
            texts[file.path] = format_text(text)
    texts |= format_modules(modules)
    return RenderedPackage(package_plan, texts, jinja.used, sources, inputs)


def package_bytes(
    package: RenderedPackage, specs: Mapping[str, bytes], results_text: bytes | None
) -> dict[str, bytes]:
    """Every file of a package with its manifest, as published.

    Args:
        package: The rendered package.
        specs: Name -> text of the spec file and of those it extends, the spec first.
        results_text: The stored results file, or None.
    """
    files = {path: text.encode("utf-8") for path, text in package.texts.items()}
    (_, spec_hash), *base_hashes = ((name, text_sha256(text)) for name, text in specs.items())
    manifest = Manifest(
        vlmgen=vlmgen.__version__,
        generator=generator_sha256(),
        layout=package.plan.layout,
        spec=spec_hash,
        bases=dict(base_hashes),
        results=None if results_text is None else text_sha256(results_text),
        templates=package.templates,
        sources=package.sources,
        files={path: sha256(content) for path, content in files.items()},
    )
    return {**files, MANIFEST_PATH: manifest.to_bytes()}
