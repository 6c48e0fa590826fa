"""What made an export fail, as findings with a line of the package."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from vlmgen.compile.findings import Finding, Sources
from vlmgen.compile.lower import NoLoweringError, Program

_NEVER = re.compile(r"(?!)")


@dataclass(frozen=True)
class _Cause:
    """What a failure means, and the text by which it is recognised."""

    rule: str
    message: str
    why: str
    legal: str
    pattern: re.Pattern[str] = _NEVER


_SCALAR = _Cause(
    "scalar-from-tensor",
    "a Python number is taken from a tensor",
    "the graph would wait for the device and be compiled for one value",
    "keep it a tensor",
    re.compile(r"\.item\(|\.tolist\(|\b(?:int|float|bool)\("),  # in the line itself
)
_BRANCH = _Cause(
    "value-dependent-branch",
    "a branch depends on the value of a tensor",
    "a graph is one fixed sequence of operators",
    "torch.where over both results",
    re.compile(r"[Dd]ata-dependent branching|[Dd]ynamic control flow|generic_jump"),
)
_SHAPE = _Cause(
    "value-dependent-shape",
    "a shape or a slice depends on the value of a tensor",
    "every value would need a graph of its own",
    "pad to a bucket and mask, or an index tensor of fixed size",
    re.compile(r"[Dd]ata.dependent|unbacked|dynamic shape|GuardOnDataDependent|nonzero|\bu\d+\b"),
)
_NO_LOWERING = _Cause(
    "no-lowering",
    "has no lowering to StableHLO",
    "it cannot become part of a graph",
    "write it with other operators",
)
_RANDOM = _Cause(
    "random",
    "random numbers",
    "a graph that is compiled once would draw the same ones every time",
    "hand them in as an input",
)
_REFUSED = _Cause(
    "export",
    "torch.export refuses it",
    "what cannot be exported strictly cannot be compiled without a graph break",
    "tensor operators of fixed shape",
)
_NUMBERS = frozenset((torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default))


def not_to_lower(program: Program, sources: Sources) -> Iterator[Finding]:
    """What the export let through and nobody can lower: Python numbers, and random ones.

    Whether torch lets a slice by a tensor through depends on what its size is used for; such a
    number is named after what the line does with it.
    """
    graph = program.call.graph.name
    for node in program.nodes:
        trace = node.meta.get("stack_trace") or ""
        if node.target in _NUMBERS:
            asked = _SCALAR.pattern.search(sources.place(trace).code)
            yield _found(_SCALAR if asked else _SHAPE, graph, sources, trace)
        elif torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            yield _found(_RANDOM, graph, sources, trace)


def explain(error: Exception, graph: str, sources: Sources) -> Finding:
    """The finding for what `torch.export` or the lowering raised.

    Args:
        error: The exception.
        graph: Name of the graph.
        sources: Tells the package's lines.
    """
    if isinstance(error, NoLoweringError):
        cause = replace(_NO_LOWERING, message=f"{error.operator} {_NO_LOWERING.message}")
        return _found(cause, graph, sources, error.trace)
    text = str(error)
    stack = getattr(error, "real_stack", None)
    trace = text + "\n" + ("".join(stack.format()) if stack else "")
    if _SCALAR.pattern.search(sources.place(trace).code):
        return _found(_SCALAR, graph, sources, trace)
    known = next((cause for cause in (_BRANCH, _SHAPE) if cause.pattern.search(text)), None)
    if known is not None:
        return _found(known, graph, sources, trace)
    said = (line.strip() for line in text.splitlines())
    first = next((line for line in said if line not in ("", "None")), type(error).__name__)
    refused = replace(_REFUSED, message=f"{_REFUSED.message}: {first[:300]}")
    return _found(refused, graph, sources, trace)


def _found(cause: _Cause, graph: str, sources: Sources, trace: str) -> Finding:
    return Finding(
        cause.rule,
        "error",
        graph,
        cause.message,
        cause.why,
        cause.legal,
        sources.place(trace),
        sources.inside(trace),
    )
