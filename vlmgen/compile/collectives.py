"""Collectives between ranks: from operators of torch to those of XLA, and how many there are."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

AXIS = "ranks"
"""Name of the one axis of the device mesh."""

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "collective_permute", "all_to_all")
_RESULT = re.compile(r"tensor<(?P<sizes>[\dx]*?)x?(?P<dtype>[a-z]+(?P<bits>\d+))>$")


@dataclass(frozen=True)
class Groups:
    """Who talks to whom, and what differs from rank to rank.

    Args:
        world_size: Ranks.
        ranks: For every group name of the operators, the partition of all ranks into such groups.
        starts: Node number -> start of the slice that each rank takes there.
    """

    world_size: int
    ranks: Mapping[str, Sequence[Sequence[int]]]
    starts: Mapping[int, Sequence[int]] = field(default_factory=dict)

    def partition(self, name: str) -> list[list[int]] | None:
        """The partition, or None for the whole world."""
        found = [list(ranks) for ranks in self.ranks[name]]
        return None if len(found) == 1 else found


class CollectiveLowering:
    """Lowers the collectives of one graph, and the slices that differ from rank to rank.

    Args:
        groups: Who talks to whom.
    """

    def __init__(self, groups: Groups) -> None:
        self._groups = groups

    def lower(
        self, number: int, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[bool, Any]:
        """(whether the node was lowered here, its JAX value)."""
        import jax

        if number in self._groups.starts:
            return True, self._own_slice(number, args)
        space, _, name = target._schema.name.partition("::")
        if space != "_c10d_functional":
            return False, None
        names = [argument.name for argument in target._schema.arguments]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        value = args[0]
        if name == "wait_tensor":
            return True, value
        members = self._groups.partition(given["group_name"])
        if name == "all_reduce":
            return True, jax.lax.psum(value, AXIS, axis_index_groups=members)
        if name == "all_gather_into_tensor":
            return True, jax.lax.all_gather(value, AXIS, axis_index_groups=members, tiled=True)
        if name == "reduce_scatter_tensor":
            return True, jax.lax.psum_scatter(value, AXIS, axis_index_groups=members, tiled=True)
        return False, None

    def _own_slice(self, number: int, args: tuple[Any, ...]) -> Any:
        import jax
        import jax.numpy as jnp

        value, dim, start, end = args
        starts = jnp.array(self._groups.starts[number])
        own = starts[jax.lax.axis_index(AXIS)]
        return jax.lax.dynamic_slice_in_dim(value, own, end - start, dim)


@dataclass(frozen=True)
class Collectives:
    """Collectives of one kind and size in one program.

    Args:
        kind: Name of the operator.
        count: How many in one step.
        bytes: Of one result on one rank.
    """

    kind: str
    count: int
    bytes: int

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "bytes_per_step": self.count * self.bytes}


def counted(operators: Sequence[Any]) -> list[Collectives]:
    """The collectives of a program, by kind and size.

    Args:
        operators: From :func:`vlmgen.compile.census.operators_of`.
    """
    found = Counter(
        (operator.name, _bytes(operator.results[0]))
        for operator in operators
        if operator.name in KINDS
    )
    return [Collectives(kind, count, size) for (kind, size), count in sorted(found.items())]


def _bytes(result: str) -> int:
    match = _RESULT.match(result)
    if match is None:
        return 0
    sizes = [int(size) for size in match["sizes"].split("x") if size]
    return math.prod(sizes) * int(match["bits"]) // 8


def differing_slices(
    nodes: Sequence[torch.fx.Node], others: Sequence[Sequence[torch.fx.Node]]
) -> dict[int, list[int]]:
    """Slices whose place depends on the rank: node number -> start on the first and other ranks.

    Args:
        nodes: Nodes of the first rank's program.
        others: Nodes of the programs of other ranks.

    Raises:
        ValueError: The programs differ in something else.
    """
    starts: dict[int, list[int]] = {}
    for number, node in enumerate(nodes):
        same = [program[number] for program in others]
        if any(other.target != node.target for other in same):
            raise ValueError(f"node {number} is {node.target} on one rank and another elsewhere")
        if node.target is not torch.ops.aten.slice.Tensor:
            continue
        places: list[Any] = [one.args[2:4] for one in (node, *same)]
        if len(set(places)) > 1:
            if len({end - start for start, end in places}) > 1:
                raise ValueError(f"node {number} takes slices of different lengths: {places}")
            starts[number] = [start for start, _ in places]
    return starts
