"""Whether caches are written in place: donated, and changed by writing rows into them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from vlmgen.compile.findings import Finding, Sources
from vlmgen.compile.lower import Program
from vlmgen.compile.xla_cpu import aliased_arguments

_WRITES = frozenset(
    (
        torch.ops.aten.index_put.default,
        torch.ops.aten.index_copy.default,
        torch.ops.aten.scatter.src,
        torch.ops.aten.scatter.value,
        torch.ops.aten.slice_scatter.default,
        torch.ops.aten.select_scatter.default,
    )
)
_HLO_TYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
_WHY = "a copy takes the memory and the time of a whole cache in every step"
_LEGAL = "index_put_ on the cache itself, and nothing else"


@dataclass(frozen=True)
class CacheUse:
    """What a program does with one cache.

    Args:
        name: Of the cache.
        bytes: Its size.
        donated: The program may take its memory.
        aliased: XLA gives a result that memory.
        copies: Copies of the whole cache in XLA's program.
    """

    name: str
    bytes: int
    donated: bool
    aliased: bool
    copies: int

    @property
    def in_place(self) -> bool:
        """Written without a copy."""
        return self.donated and self.aliased and not self.copies

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "in_place": self.in_place}


def copied_caches(program: Program, caches: Sequence[str], sources: Sources) -> list[Finding]:
    """Caches that are not written in place, seen in the exported graph.

    Args:
        program: The graph.
        caches: Names of the arguments that must be written: the KV caches, or the encoder cache.
        sources: Tells the package's lines.
    """
    interface, graph = program.interface, program.call.graph.name
    results: Any = next(node for node in program.nodes if node.op == "output").args[0]
    names = {index: argument.name for index, argument in enumerate(interface.arguments)}
    written: dict[str, torch.fx.Node] = {}
    for target, node in zip(interface.changed_outputs, results, strict=True):
        if target is not None:
            written[names[target]] = node
    findings = []
    for name in caches:
        node = written.get(name)
        if node is None:
            copy = _copy_of(program, name)
            trace = "" if copy is None else copy.meta.get("stack_trace") or ""
            message = f"{name} is not written: the graph changes a copy of it, or nothing"
        else:
            while node.op == "call_function" and node.target in _WRITES:
                node = node.args[0]
            if node.op == "placeholder":
                continue
            trace = node.meta.get("stack_trace") or ""
            message = f"{name} is written by copy"
        findings.append(
            Finding(
                "cache-by-copy", "error", graph, message, _WHY, _LEGAL, sources.place(trace),
                sources.inside(trace),
            )  # fmt: skip
        )
    return _merged(findings)


def _copy_of(program: Program, name: str) -> torch.fx.Node | None:
    """The first node that makes a tensor of a cache's shape out of the cache."""
    specs = program.exported.graph_signature.input_specs
    inputs = [node for node in program.nodes if node.op == "placeholder"]
    pairs = zip(inputs, specs, strict=True)
    wanted = next((node.name for node, spec in pairs if name in (spec.target, node.name)), name)
    reached: set[torch.fx.Node] = set()
    shape: torch.Size | None = None
    for node in program.raw_nodes:
        value = node.meta.get("val")
        if node.op == "placeholder" and node.name == wanted:
            reached.add(node)
            shape = None if value is None else value.shape
        elif node.op == "call_function" and reached & set(node.all_input_nodes):
            if torch.is_tensor(value) and value.shape == shape:
                return node
            reached.add(node)
    return None


def _merged(findings: list[Finding]) -> list[Finding]:
    """One finding per line: every layer has the same fault."""
    first: dict[tuple[Any, str], list[Finding]] = {}
    for finding in findings:
        first.setdefault((finding.place, finding.inside), []).append(finding)
    return [
        Finding(**{**vars(same[0]), "count": len(same)}) for same in first.values()
    ]  # fmt: skip


def cache_uses(program: Program, hlo: str) -> list[CacheUse]:
    """What XLA's program does with each changed argument.

    Args:
        program: The graph.
        hlo: Text of the optimised module.
    """
    aliased = aliased_arguments(hlo)
    uses = []
    for index, argument in enumerate(program.interface.arguments):
        if not argument.changed:
            continue
        dtype = _HLO_TYPES.get(argument.dtype, argument.dtype)
        sizes = ",".join(map(str, argument.shape))
        copies = len(re.findall(rf"= {dtype}\[{sizes}\]\S* copy\(", hlo))
        uses.append(
            CacheUse(argument.name, argument.bytes, argument.changed, index in aliased, copies)
        )
    return uses
