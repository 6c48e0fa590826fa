"""From a YAML file to a `Spec`, or to every problem of the file at once."""

from __future__ import annotations

import difflib
import re
import types
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from vlmgen.errors import Problem, SpecError
from vlmgen.spec.axes import AXES, LATER_KEYS, Axis, show
from vlmgen.spec.extends import resolve_extends
from vlmgen.spec.model import Spec
from vlmgen.spec.rules import Violation, check_rules
from vlmgen.spec.source import Document, Key, dotted, parse_document, read_document, short
from vlmgen.spec.types import PATTERN_RULES, SpecModel
from vlmgen.spec.versions import KEY, MISSING_HINT, refuse_other_versions

_KINDS = {
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "model_type": "a mapping",
    "tuple_type": "a list",
}
_BOUNDS = {
    "greater_than_equal": ("ge", "at least"),
    "greater_than": ("gt", "more than"),
    "less_than_equal": ("le", "at most"),
    "less_than": ("lt", "less than"),
}
ALIKE = 20
_YAML12_NUMBER = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+")
_QUOTED_NUMBER = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?([eE][-+]?[0-9]+)?")


def load_spec(path: str | Path) -> Spec:
    """Load and check a spec.

    Args:
        path: The YAML file.

    Returns:
        The spec; every rule holds.

    Raises:
        SpecError: The file cannot be read or has problems; all of them are listed.
    """
    return _to_spec(resolve_extends(read_document(path), Path(path)))


def check_specs(paths: Iterable[str | Path]) -> None:
    """Load specs, all of them, for their problems alone.

    Raises:
        SpecError: There are problems; those of every file are listed.
    """
    problems: list[Problem] = []
    for path in paths:
        try:
            load_spec(path)
        except SpecError as error:
            problems += error.problems
    if problems:
        raise SpecError(problems)


def load_spec_text(text: str, file: str = "<text>") -> Spec:
    """Load and check a spec from text; see `load_spec`. `extends` is relative to `file`."""
    return _to_spec(resolve_extends(parse_document(text, file), Path(file)))


def _to_spec(document: Document) -> Spec:
    problems = list(document.problems)
    bad = set(document.bad)
    spec: Spec | None = None
    if not isinstance(document.data, dict):
        problems.append(
            document.problem(
                document.span(()),
                f"the spec is {_describe(document.data)}",
                rule="a spec is a YAML mapping",
                legal=", ".join(Spec.model_fields),
                code="VG513",
            )
        )
        raise SpecError(problems)
    refuse_other_versions(document)
    try:
        spec = Spec.model_validate(document.data)
    except ValidationError as error:
        found, paths = _schema_problems(document, error)
        problems += found
        bad |= paths
    problems += _unclear_booleans(document, bad)
    for violation in check_rules(document.data, bad):
        problems.append(_rule_problem(document, violation))
    if problems or spec is None:
        files = [file for file, _ in document.sources]
        raise SpecError(sorted(problems, key=lambda problem: files.index(problem.file)))
    return spec


def _schema_problems(document: Document, error: ValidationError) -> tuple[list[Problem], set[Key]]:
    details = error.errors(include_url=False)
    missing = {tuple(d["loc"]) for d in details if d["type"] == "missing"}
    details, problems = _without_repetition(document, details)
    bad: set[Key] = set()
    explained: set[Key] = set()
    for detail in details:
        path = tuple(detail["loc"])
        bad.add(path)
        if detail["type"] == "extra_forbidden":
            problem, meant = _unknown_key(document, path, missing)
            problems.append(problem)
            if meant is not None:
                explained.add((*path[:-1], meant))
    absent: dict[Key, list[Key]] = {}
    for detail in details:
        path = tuple(detail["loc"])
        if detail["type"] == "extra_forbidden" or path in document.bad or path in explained:
            continue
        if detail["type"] == "missing":
            absent.setdefault(path[:-1], []).append(path)
        else:
            problems.append(_wrong_value(document, path, detail))
    problems += [_missing_keys(document, parent, paths) for parent, paths in absent.items()]
    return problems, bad


def _without_repetition(document: Document, details: list[Any]) -> tuple[list[Any], list[Problem]]:
    """The first faults of every kind in every mapping, and a problem for those left out."""
    kept = []
    left_out: dict[tuple[str, Key], ErrorDetails] = {}
    seen: Counter[tuple[str, Key]] = Counter()
    for detail in details:
        group = (detail["type"], tuple(detail["loc"])[:-1])
        seen[group] += 1
        if seen[group] <= ALIKE:
            kept.append(detail)
        else:
            left_out.setdefault(group, detail)
    problems = []
    for group, detail in left_out.items():
        path = tuple(detail["loc"])
        where = f" in {dotted(path[:-1])}" if path[:-1] else ""
        problems.append(
            document.problem(
                document.key_span(path),
                f"{seen[group] - ALIKE} more like the ones before{where}",
                rule=f"of faults alike, {ALIKE} are shown",
                path=dotted(path),
                code="VG511" if detail["type"] == "extra_forbidden" else "VG514",
            )
        )
    return kept, problems


def _unknown_key(document: Document, path: Key, missing: set[Key]) -> tuple[Problem, str | None]:
    key = str(path[-1])
    parent = path[:-1]
    fields = _fields_at(parent)
    family_users = LATER_KEYS.get(_axis_path(path))
    span = document.key_span(path)
    where = f" in {dotted(parent)}" if parent else ""
    if family_users:
        problem = document.problem(
            span,
            f"{_axis_path(path)} is a known axis ({_families(family_users)}) that this version of "
            "vlmgen does not generate",
            legal=", ".join(fields),
            path=dotted(path),
            code="VG515",
        )
        return problem, None
    absent = [name for name in fields if (*parent, name) in missing]
    close = difflib.get_close_matches(key, absent, 1, 0.6) or difflib.get_close_matches(
        key, fields, 1, 0.6
    )
    elsewhere = "" if close else _elsewhere(key)
    message = f"unknown key {short(key)!r}{where}"
    if close:
        message += f"; did you mean {close[0]!r}?"
    problem = document.problem(
        span,
        message,
        rule="unknown keys are refused",
        legal=", ".join(fields),
        hint=f"{key!r} belongs to {elsewhere}" if elsewhere else "",
        path=dotted(path),
        code="VG511",
    )
    meant = close[0] if close and close[0] in absent else None
    return problem, meant


def _missing_keys(document: Document, parent: Key, paths: list[Key]) -> Problem:
    where = f" in {dotted(parent)}" if parent else ""
    fields = _fields_at(parent)
    names = sorted((str(path[-1]) for path in paths), key=fields.index)
    model = _model_at(parent)
    rule = (model.model_fields[names[0]].description or "") if model and len(names) == 1 else ""
    return document.problem(
        document.key_span(parent),
        f"missing key{'s' if len(names) > 1 else ''} {', '.join(map(repr, names))}{where}",
        rule=rule,
        hint=MISSING_HINT if (KEY,) in paths else "",
        path=dotted(paths[0] if len(paths) == 1 else parent),
        code="VG512",
    )


def _wrong_value(document: Document, path: Key, detail: Mapping[str, Any]) -> Problem:
    kind = detail["type"]
    value = detail["input"]
    context = detail.get("ctx", {})
    name = dotted(path)
    shown = _shown(document, path, value)
    axis = AXES.get(_axis_path(path))
    span = document.span(path)
    if axis is not None:
        users = _later(axis, value)
        if users:
            legal = ", ".join(show(v) for v in axis.implemented) or "a mapping"
            return document.problem(
                span,
                f"{shown} is a known value of {_axis_path(path)} ({_families(users)}) that this "
                "version of vlmgen does not generate",
                legal=legal,
                path=name,
                code="VG515",
            )
    if kind == "literal_error":
        legal_values = [show(v) for v in axis.implemented] if axis else []
        legal = ", ".join(legal_values) or str(context.get("expected", ""))
        message = f"{name} is {shown}"
        if isinstance(value, str):
            known = legal_values + ([show(v) for v in axis.later] if axis else [])
            close = difflib.get_close_matches(value, known, 1, 0.6)
            if close:
                message += f"; did you mean {close[0]!r}?"
        return document.problem(
            span,
            message,
            legal=legal,
            hint=_hint(document, path, value, "text"),
            path=name,
            code="VG514",
        )
    if kind in _KINDS or kind == "model_attributes_type":
        expected = _KINDS.get(kind, "a mapping")
        return document.problem(
            span,
            f"{name} is {shown}, which is {_describe(value)}",
            rule=f"{name} is {expected}",
            hint=_hint(document, path, value, expected),
            path=name,
            code="VG513",
        )
    if kind == "string_pattern_mismatch":
        pattern = context["pattern"]
        return document.problem(
            span, f"{name} is {shown}", rule=PATTERN_RULES.get(pattern, f"matches {pattern}"),
            path=name, code="VG514",
        )  # fmt: skip
    if kind == "string_too_long":
        return document.problem(
            span,
            f"{name} is {shown}",
            rule=f"at most {context['max_length']} characters",
            path=name,
            code="VG514",
        )
    if kind in _BOUNDS:
        key, words = _BOUNDS[kind]
        return document.problem(
            span, f"{name} is {shown}", rule=f"{words} {context[key]}", path=name, code="VG514"
        )
    if kind in ("too_short", "too_long"):
        limit, words = (
            (context["min_length"], "at least")
            if kind == "too_short"
            else (context["max_length"], "at most")
        )
        return document.problem(
            span,
            f"{name} has {context['actual_length']} entries",
            rule=f"{words} {limit} entries",
            path=name,
            code="VG514",
        )
    return document.problem(
        span, f"{name} is {shown}", rule=str(detail["msg"]), path=name, code="VG514"
    )


def _rule_problem(document: Document, violation: Violation) -> Problem:
    return document.problem(
        document.span(violation.path),
        violation.message,
        rule=violation.rule,
        legal=violation.legal,
        path=dotted(violation.path),
        code="VG521",
    )


def _unclear_booleans(document: Document, bad: set[Key]) -> list[Problem]:
    """`yes` and `off` where a boolean is right: YAML 1.1 and 1.2 read them differently."""
    problems = []
    for path, raw in document.raw.items():
        unclear = raw.lower() in ("yes", "no", "on", "off")
        if unclear and path not in bad and not any(path[:n] in bad for n in range(len(path))):
            problems.append(
                document.problem(
                    document.span(path),
                    f"{dotted(path)} is {raw}",
                    rule="write booleans as true or false",
                    path=dotted(path),
                    code="VG507",
                )
            )
    return problems


def _hint(document: Document, path: Key, value: Any, expected: str) -> str:
    raw = document.raw.get(path)
    if isinstance(value, bool) and raw and raw.lower() in ("yes", "no", "on", "off"):
        return f'YAML 1.1 reads {raw} as a boolean; write "{raw}" with quotes if text is meant'
    if isinstance(value, str) and expected in ("an integer", "a number"):
        if raw and len(raw) <= 40 and _YAML12_NUMBER.fullmatch(raw):
            number = float(raw)
            plain = f"{number:.0f}" if abs(number) < 1e15 and number == int(number) else ""
            other = f" or {plain}" if plain else ""
            return (
                f"YAML 1.1 reads {raw} as text, a number with an exponent needs a dot and a sign; "
                f"write {_with_dot(raw)}{other}"
            )
        if raw is None and _QUOTED_NUMBER.fullmatch(value):
            return "remove the quotes"
    if isinstance(value, str) and raw is None and value.lower() in ("true", "false"):
        return "remove the quotes"
    if expected == "text" and raw is not None and isinstance(value, (int, float)):
        return "quote it if text is meant"
    return ""


def _with_dot(raw: str) -> str:
    mantissa, exponent = re.split("[eE]", raw)
    sign = "" if exponent[0] in "+-" else "+"
    return f"{mantissa if '.' in mantissa else mantissa + '.0'}e{sign}{exponent}"


def _shown(document: Document, path: Key, value: Any) -> str:
    if isinstance(value, str):
        return repr(short(value))
    if isinstance(value, bool) or value is None:
        return document.raw.get(path) or show(value)
    if isinstance(value, (int, float)):
        return document.raw.get(path, str(value))
    return _describe(value)


def _describe(value: Any) -> str:
    if value is None:
        return "empty (null)"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, str):
        return "text"
    if isinstance(value, int):
        return "an integer"
    if isinstance(value, float):
        return "a number with a fraction"
    return "a list" if isinstance(value, tuple) else "a mapping"


def _later(axis: Axis, value: Any) -> tuple[str, ...]:
    for known, users in axis.later.items():
        if known == value and isinstance(known, bool) == isinstance(value, bool):
            return users
    return ()


def _families(users: tuple[str, ...]) -> str:
    return "needed by " + ", ".join(dict.fromkeys(users))


def _axis_path(path: Key) -> str:
    return ".".join(part for part in path if isinstance(part, str))


def _model_at(path: Key) -> type[SpecModel] | None:
    """The model of a mapping in the spec, or None where there is none."""
    model: type[SpecModel] | None = Spec
    for part in path:
        if isinstance(part, int):
            continue
        if model is None or part not in model.model_fields:
            return None
        model = _inner_model(model.model_fields[part].annotation)
    return model


def _inner_model(annotation: Any) -> type[SpecModel] | None:
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        return annotation if issubclass(annotation, SpecModel) else None
    for argument in get_args(annotation):
        model = _inner_model(argument)
        if model is not None:
            return model
    return None


def _fields_at(path: Key) -> list[str]:
    model = _model_at(path)
    return list(model.model_fields) if model else []


def _elsewhere(key: str) -> str:
    """Where a key is legal, if at exactly one place of the schema."""
    found = [path for path in _all_paths(Spec, ()) if path[-1] == key]
    return ".".join(found[0][:-1]) if len(found) == 1 and len(found[0]) > 1 else ""


@cache
def _all_paths(model: type[SpecModel], prefix: tuple[str, ...]) -> list[tuple[str, ...]]:
    paths: list[tuple[str, ...]] = []
    for name, info in model.model_fields.items():
        paths.append((*prefix, name))
        inner = _inner_model(info.annotation)
        if inner is not None:
            paths += _all_paths(inner, (*prefix, name))
    return paths
