"""Counts the operators of a StableHLO program and finds those that a device should not get."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from vlmgen.compile.findings import Finding, Place, Sources
from vlmgen.compile.lower import SCOPE, Program

DENIED = Path(__file__).with_name("denied.yaml")

_NODE = re.compile(rf"[/\"]{SCOPE}(\d+)[/\"]")
_SHAPE = re.compile(r"tensor<(?:(?P<sizes>[\d?x]+)x)?(?P<dtype>[a-z]\w*(?:<[^>]*>)?)>")
_WINDOW = re.compile(r"update_window_dims = \[([\d, ]*)\]")
_SKIPPED = frozenset(("func.func", "func.return", "func.call", "stablehlo.return"))
_WITH_ATTRIBUTES = frozenset(("stablehlo.gather", "stablehlo.scatter", "stablehlo.custom_call"))


@dataclass(frozen=True)
class Operator:
    """One operator of a program.

    Args:
        name: Without the dialect.
        types: Types of operands and results, as MLIR writes them.
        results: Types of the results.
        attributes: What is written about it.
        node: Number of the exported node it came from; None where that is not known.
    """

    name: str
    types: tuple[str, ...]
    results: tuple[str, ...]
    attributes: Mapping[str, str]
    node: int | None

    def has_dtype(self, dtypes: Sequence[str]) -> bool:
        """Whether an operand or result has one of the element types."""
        found = (match["dtype"] for t in self.types for match in _SHAPE.finditer(t))
        return any(dtype.startswith(tuple(dtypes)) for dtype in found)

    @property
    def rank(self) -> int:
        """Largest rank of a result."""
        sizes = [match["sizes"] for t in self.results for match in _SHAPE.finditer(t)]
        return max((len(s.split("x")) if s else 0 for s in sizes), default=0)

    @property
    def dynamic(self) -> bool:
        """Whether the size of a result is not known."""
        return any("?" in t for t in self.results)

    @property
    def slice_elements(self) -> int:
        """Elements that one index of a gather takes, or one of a scatter writes."""
        if self.name == "scatter":
            window = _WINDOW.search(self.attributes.get("scatter_dimension_numbers", ""))
            updates = _SHAPE.search(self.types[2])
            sizes = (updates["sizes"] or "").split("x") if updates else []
            dims = re.findall(r"\d+", window[1]) if window else []
            return math.prod(int(sizes[int(dim)]) for dim in dims)
        sizes = re.findall(r"\d+", self.attributes.get("slice_sizes", "").partition(":")[2])
        return math.prod(map(int, sizes))


@dataclass(frozen=True)
class Rule:
    """One entry of the deny-list; see `denied.yaml`."""

    rule: str
    severity: str
    in_plugin: str
    match: Mapping[str, Any]
    what: str
    why: str
    legal: str

    def matches(self, operator: Operator) -> bool:
        """Whether every condition holds."""
        conditions: dict[str, Callable[[Any], bool]] = {
            "operators": lambda names: operator.name in names,
            "dtypes": operator.has_dtype,
            "rank": lambda least: operator.rank >= least,
            "dynamic": lambda wanted: operator.dynamic == wanted,
            "max_slice": lambda most: operator.slice_elements <= most,
            "targets_not": lambda names: not any(
                name in operator.attributes.get("call_target_name", "") for name in names
            ),
        }
        return all(conditions[name](value) for name, value in self.match.items())


@cache
def rules() -> tuple[Rule, ...]:
    """The deny-list."""
    entries = yaml.safe_load(DENIED.read_text(encoding="utf-8"))
    return tuple(Rule(**entry) for entry in entries)


def operators_of(lowered: Any) -> list[Operator]:
    """Every operator of a lowered program, with the node it came from.

    JAX puts some operators into functions of their own; those belong to the first call.
    """
    module = lowered.compiler_ir("stablehlo")
    functions = list(module.body.operations)
    callers: dict[str, int] = {}
    found: list[tuple[str, Operator]] = []
    for function in functions:
        name = str(function.attributes["sym_name"]).strip('"')
        for operation in _walk(function):
            node = _node_of(operation)
            if operation.name == "func.call":
                callee = str(operation.attributes["callee"]).lstrip("@").strip('"')
                number = node if node is not None else callers.get(name)
                if number is not None:
                    callers.setdefault(callee, number)
            elif operation.name not in _SKIPPED:
                found.append((name, _operator(operation, node)))
    result = []
    for name, operator in found:
        node = operator.node if operator.node is not None else callers.get(name)
        result.append(
            Operator(operator.name, operator.types, operator.results, operator.attributes, node)
        )
    return result


def census(operators: Sequence[Operator]) -> dict[str, int]:
    """How often each operator occurs, most frequent first."""
    return dict(Counter(operator.name for operator in operators).most_common())


def denied(operators: Sequence[Operator], program: Program, sources: Sources) -> list[Finding]:
    """Findings of the deny-list, one per rule and line."""
    graph = program.call.graph.name
    counts: Counter[tuple[str, Place, str]] = Counter()
    for operator in operators:
        rule = next((rule for rule in rules() if rule.matches(operator)), None)
        if rule is not None:
            trace = "" if operator.node is None else program.trace_of(operator.node)
            counts[rule.rule, sources.place(trace), sources.inside(trace)] += 1
    by_name = {rule.rule: rule for rule in rules()}
    placed = {name for name, place, _ in counts if place.line}
    findings = []
    for (name, place, inside), count in counts.items():
        if not place.line and name in placed:
            continue  # a constant stands apart from the operator that it is for
        rule = by_name[name]
        severity = rule.in_plugin if inside else rule.severity
        findings.append(
            Finding(name, severity, graph, rule.what, rule.why, rule.legal, place, inside, count)
        )
    return findings


def _walk(operation: Any) -> Iterator[Any]:
    for region in operation.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield inner.operation
                yield from _walk(inner.operation)


def _node_of(operation: Any) -> int | None:
    match = _NODE.search(str(operation.location))
    return int(match[1]) if match else None


def _operator(operation: Any, node: int | None) -> Operator:
    results = tuple(str(result.type) for result in operation.results)
    operands = tuple(str(operand.type) for operand in operation.operands)
    attributes = {}
    if operation.name in _WITH_ATTRIBUTES:
        names = (str(name) for name in operation.attributes)
        attributes = {name: str(operation.attributes[name]) for name in names}
    name = operation.name.partition(".")[2]
    return Operator(name, (*operands, *results), results, attributes, node)
