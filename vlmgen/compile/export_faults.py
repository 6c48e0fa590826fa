"""What made an export fail, as findings with a line of the package."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from vlmgen.compile.findings import Finding, Sources
from vlmgen.compile.lower import NoLoweringError, Program


@dataclass(frozen=True)
class _Cause:
    """How a failure is recognised and what it means; the first by its line, others by the text."""

    rule: str
    pattern: re.Pattern[str]
    message: str
    why: str
    legal: str


_CAUSES = (
    _Cause(
        "scalar-from-tensor",
        re.compile(r"\.item\(|\.tolist\(|\b(?:int|float|bool)\("),
        "a Python number is taken from a tensor",
        "the graph would wait for the device and be compiled for one value",
        "keep it a tensor",
    ),
    _Cause(
        "value-dependent-branch",
        re.compile(r"[Dd]ata-dependent branching|[Dd]ynamic control flow|generic_jump"),
        "a branch depends on the value of a tensor",
        "a graph is one fixed sequence of operators",
        "torch.where over both results",
    ),
    _Cause(
        "value-dependent-shape",
        re.compile(
            r"[Dd]ata.dependent|unbacked|dynamic shape|GuardOnDataDependent|nonzero|\bu\d+\b"
        ),
        "a shape or a slice depends on the value of a tensor",
        "every value would need a graph of its own",
        "pad to a bucket and mask, or an index tensor of fixed size",
    ),
)


_SCALARS = frozenset((torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default))


def scalars(program: Program, sources: Sources) -> Iterator[Finding]:
    """Python numbers taken from tensors that the export let through as symbols."""
    cause = _CAUSES[0]
    for node in program.nodes:
        if node.target in _SCALARS:
            trace = node.meta.get("stack_trace") or ""
            yield Finding(
                cause.rule,
                "error",
                program.call.graph.name,
                cause.message,
                cause.why,
                cause.legal,
                sources.place(trace),
                sources.inside(trace),
            )


def explain(error: Exception, graph: str, sources: Sources) -> Finding:
    """The finding for what `torch.export` or the lowering raised.

    Args:
        error: The exception.
        graph: Name of the graph.
        sources: Tells the package's lines.
    """
    if isinstance(error, NoLoweringError):
        return Finding(
            "no-lowering",
            "error",
            graph,
            f"{error.operator} has no lowering to StableHLO",
            "it cannot become part of a graph",
            "write it with other operators",
            sources.place(error.trace),
            sources.inside(error.trace),
        )
    text = str(error)
    stack = getattr(error, "real_stack", None)
    trace = text + "\n" + ("".join(stack.format()) if stack else "")
    place = sources.place(trace)
    scalar, *others = _CAUSES
    cause = scalar if scalar.pattern.search(place.code) else None
    cause = cause or next((cause for cause in others if cause.pattern.search(text)), None)
    if cause is None:
        first = next((line for line in text.splitlines() if line.strip()), type(error).__name__)
        return Finding(
            "export",
            "error",
            graph,
            f"torch.export refuses it: {first.strip()[:300]}",
            "what cannot be exported strictly cannot be compiled without a graph break",
            "tensor operators of fixed shape",
            place,
            sources.inside(trace),
        )
    return Finding(
        cause.rule,
        "error",
        graph,
        cause.message,
        cause.why,
        cause.legal,
        place,
        sources.inside(trace),
    )
