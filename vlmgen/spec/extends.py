"""`extends`: a spec that states only what differs from another.

Mappings are merged at every depth; a scalar or a list takes the place of the inherited one, and
`null` takes an inherited value away. `extends` names a file, relative to the one it stands in;
a file that is not there is looked for among the specs that ship with vlmgen.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from vlmgen.errors import SpecError
from vlmgen.render.chain import MAX_CHAIN, base_path, spec_chain
from vlmgen.spec.source import Document, Key, Span, read_document

_NAME = re.compile(r"(?:(?:\.\.|[A-Za-z0-9_][A-Za-z0-9_.-]*)/)*[A-Za-z0-9_][A-Za-z0-9_.-]*\.ya?ml")
_RULE = "extends is the path of a YAML file, relative to this one"


def resolve_extends(document: Document, path: Path) -> Document:
    """The document with everything it inherits.

    Args:
        document: A parsed spec.
        path: Its file.

    Raises:
        SpecError: The base cannot be read, or the chain of bases is a circle or too long.
    """
    return _resolve(document, path, [path.resolve()])


def _resolve(document: Document, path: Path, seen: list[Path]) -> Document:
    if not isinstance(document.data, dict) or "extends" not in document.data:
        return document
    name = document.data.pop("extends")
    span = document.span(("extends",))
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        shown = repr(name) if isinstance(name, (str, int, float, bool)) else "no file name"
        raise SpecError(
            [
                document.problem(
                    span,
                    f"extends is {shown}",
                    rule=_RULE,
                    legal="such as base.yaml",
                    path="extends",
                    code="VG531",
                )
            ]
        )
    base = base_path(name, path)
    if base.resolve() in seen:
        circle = " -> ".join([*(file.name for file in seen), base.name])
        problem = document.problem(
            span,
            f"extends goes in a circle: {circle}",
            rule="no spec extends itself",
            path="extends",
            code="VG531",
        )
        raise SpecError([problem])
    if path.is_file() and base not in spec_chain(path)[1:2]:
        # What a package is made from is hashed without a YAML parser, which must find the base.
        problem = document.problem(
            span,
            "extends does not stand on a line of its own",
            rule="extends is a line of its own at the left margin",
            legal=f"extends: {name}",
            path="extends",
            code="VG531",
        )
        raise SpecError([problem])
    if len(seen) >= MAX_CHAIN:
        problem = document.problem(
            span,
            f"more than {MAX_CHAIN} specs in a chain",
            rule="a chain is short",
            path="extends",
            code="VG531",
        )
        raise SpecError([problem])
    try:
        inherited = read_document(base)
    except SpecError as error:
        first = error.problems[0]
        problem = document.problem(
            span,
            f"extends {name!r}: {first.message}",
            rule=_RULE,
            hint=first.hint,
            path="extends",
            code="VG531",
        )
        if first.line:
            raise
        raise SpecError([problem]) from None
    inherited = _resolve(inherited, base, [*seen, base.resolve()])
    if not isinstance(inherited.data, dict):
        problem = document.problem(
            span, f"extends {name!r}, which is no mapping", rule="a spec is a YAML mapping",
            path="extends", code="VG531",
        )  # fmt: skip
        raise SpecError([problem])
    return _merge(document, inherited)


def _merge(document: Document, base: Document) -> Document:
    offset = 1
    merged = Document(
        document.file,
        document.lines,
        problems=[*document.problems, *base.problems],
        bases=base.sources,
    )
    merged.data = _merge_values(document.data, base.data)
    replaced = _replaced(document.data, base.data, ())

    def inherited(path: Key) -> bool:
        return not any(path[:n] in replaced for n in range(1, len(path) + 1))

    for name in ("keys", "values", "raw"):
        own, theirs = getattr(document, name), getattr(base, name)
        kept = {path: value for path, value in theirs.items() if path and inherited(path)}
        if name != "raw":
            kept = {path: _moved(span, offset) for path, span in kept.items()}
        setattr(merged, name, {**kept, **own})
    merged.bad = {path for path in base.bad if inherited(path)} | document.bad
    return merged


def _moved(span: Span, offset: int) -> Span:
    return replace(span, source=span.source + offset)


def _merge_values(own: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in own.items():
        inherited = merged.get(key)
        if isinstance(value, dict) and isinstance(inherited, dict):
            merged[key] = _merge_values(value, inherited)
        else:
            merged[key] = value
    return merged


def _replaced(own: dict[str, Any], base: dict[str, Any], path: Key) -> set[Key]:
    """Paths whose inherited value and everything below it is gone."""
    gone: set[Key] = set()
    for key, value in own.items():
        inherited = base.get(key)
        if isinstance(value, dict) and isinstance(inherited, dict):
            gone |= _replaced(value, inherited, (*path, key))
        elif key in base:
            gone.add((*path, key))
    return gone
