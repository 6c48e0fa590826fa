"""Whether layers of one structure have one graph, which a device compiler then compiles once."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch

from vlmgen.compile.findings import Finding, Sources, frames_of
from vlmgen.compile.lower import Program

_STACK = re.compile(r"(?P<stack>.+)\.(?P<index>\d+)$")


def distinct_layers(program: Program) -> dict[str, int]:
    """For every stack of layers, how many different graphs its layers have."""
    return {
        stack: len({_graph_of(nodes) for nodes in layers.values()})
        for stack, layers in _layers(program).items()
    }


def specialised_layers(program: Program, sources: Sources) -> list[Finding]:
    """Layers of the same modules and sizes whose graphs differ, with the first line that does."""
    findings = []
    module = program.call.module
    for stack, layers in _layers(program).items():
        alike: dict[Any, list[tuple[int, tuple[Any, ...]]]] = defaultdict(list)
        for index, nodes in layers.items():
            layer = module.get_submodule(f"{stack}.{index}")
            alike[structure_of(layer)].append((index, _graph_of(nodes)))
        for members in alike.values():
            graphs = {graph: index for index, graph in reversed(members)}
            if len(graphs) < 2:
                continue
            (_, first), (_, second) = list(zip(graphs, graphs.values(), strict=True))[:2]
            node = _first_difference(layers[first], layers[second])
            trace = "" if node is None else node.meta.get("stack_trace") or ""
            findings.append(
                Finding(
                    "specialised-layer",
                    "error",
                    program.call.graph.name,
                    f"{len(members)} layers of {stack} have the same modules and sizes but "
                    f"{len(graphs)} different graphs",
                    "a Python value of each layer is in its graph, so that none can be reused",
                    "a tensor, or a value that all layers share",
                    sources.place(trace),
                    sources.inside(trace),
                )
            )
    return findings


def _layers(program: Program) -> dict[str, dict[int, list[torch.fx.Node]]]:
    """Nodes of every layer of every module list, outermost lists only."""
    found: dict[str, dict[int, list[torch.fx.Node]]] = defaultdict(lambda: defaultdict(list))
    lists = _stacks(program.call.module)
    for node in program.nodes:
        if node.op != "call_function" or _ignored(node):
            continue
        for path in _paths(node):
            match = _STACK.match(path)
            if match and match["stack"] in lists:
                if _runs_in(node, program.call.module.get_submodule(path)):
                    found[match["stack"]][int(match["index"])].append(node)
                break
    return {stack: dict(layers) for stack, layers in found.items() if len(layers) > 1}


def _runs_in(node: torch.fx.Node, layer: torch.nn.Module) -> bool:
    """Whether a node comes from a layer's forward; views of what went before are made late."""
    code = type(layer).forward.__code__
    lines = {line for _, _, line in code.co_lines() if line}
    frames = frames_of(node.meta.get("stack_trace") or "")
    return any(frame.path == code.co_filename and frame.line in lines for frame in frames)


def _stacks(module: torch.nn.Module) -> set[str]:
    return {name for name, m in module.named_modules() if isinstance(m, torch.nn.ModuleList)}


def _paths(node: torch.fx.Node) -> Iterator[str]:
    for value in (node.meta.get("nn_module_stack") or {}).values():
        path = value[0]
        # torch writes attribute access as Python: L['self'].layers[0] or layers.slice(...).
        yield re.sub(r"\['?(\w+)'?\]", r".\1", path).removeprefix("L.self.").removeprefix("L.")


def _ignored(node: torch.fx.Node) -> bool:
    return node.target is torch.ops.aten._assert_tensor_metadata.default


def structure_of(layer: torch.nn.Module) -> Any:
    """What two layers have in common that can have one graph: modules and sizes."""
    parameters = tuple((name, tuple(p.shape)) for name, p in layer.named_parameters())
    return parameters, tuple((name, type(m).__name__) for name, m in layer.named_modules())


def _graph_of(nodes: list[torch.fx.Node]) -> tuple[Any, ...]:
    return tuple(map(_signature, nodes))


def _signature(node: torch.fx.Node) -> Any:
    value = node.meta.get("val")
    shape = tuple(value.shape) if torch.is_tensor(value) else None
    arguments = torch.fx.map_arg((node.args, tuple(sorted(node.kwargs.items()))), lambda n: "node")
    return str(node.target), shape, repr(arguments)


def _first_difference(
    first: list[torch.fx.Node], second: list[torch.fx.Node]
) -> torch.fx.Node | None:
    for one, other in zip(first, second, strict=False):
        if _signature(one) != _signature(other):
            return other
    longer = first if len(first) > len(second) else second
    return longer[min(len(first), len(second))] if len(first) != len(second) else None
