"""A `torch.compile` back end that keeps a record of the graphs it is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Graph", "GraphRecorder"]


@dataclass(frozen=True)
class Graph:
    """One compiled graph.

    Attributes:
        name: tower and bucket.
        operators: calls in the graph.
        seconds: tracing and the first run.
    """

    name: str
    operators: int
    seconds: float


class GraphRecorder:
    """Hands graphs on to another back end and counts them.

    Args:
        backend: name that `torch.compile` knows.
    """

    def __init__(self, backend: str) -> None:
        self._compile = torch._dynamo.lookup_backend(backend)
        self.traced: list[int] = []
        self.graphs: list[Graph] = []

    def __call__(self, module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """Called by `torch.compile` once per graph."""
        calls = ("call_function", "call_method", "call_module")
        self.traced.append(sum(node.op in calls for node in module.graph.nodes))
        return self._compile(module, inputs)

    def record(self, name: str, seconds: float) -> Graph | None:
        """Take note of a warm-up call.

        Returns:
            The graph that the call compiled; None when it met one that was there already.

        Raises:
            RuntimeError: the call compiled several graphs, so it is not one whole graph.
        """
        if not self.traced:
            return None
        if len(self.traced) > 1:
            raise RuntimeError(f"{name}: {len(self.traced)} graphs instead of one whole graph")
        graph = Graph(name, self.traced.pop(), seconds)
        self.graphs.append(graph)
        return graph
