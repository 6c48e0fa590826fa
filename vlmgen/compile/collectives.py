"""Collectives between ranks, from the operators of torch to those of XLA."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

AXIS = "ranks"
"""Name of the one axis of the device mesh."""


@dataclass(frozen=True)
class Groups:
    """Process groups by the name that the operators carry.

    Args:
        world_size: Ranks.
        ranks: For every group name, the partition of all ranks into groups of that kind.
    """

    world_size: int
    ranks: Mapping[str, Sequence[Sequence[int]]]

    def partition(self, name: str) -> list[list[int]] | None:
        """The partition, or None for the whole world."""
        found = [list(ranks) for ranks in self.ranks[name]]
        return None if len(found) == 1 else found


class CollectiveLowering:
    """Lowers the collectives of one graph.

    Args:
        groups: Who talks to whom.
    """

    def __init__(self, groups: Groups) -> None:
        self._groups = groups

    def lower(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, Any]:
        """(whether the operator is a collective, its JAX value)."""
        import jax

        schema = target._schema if isinstance(target, torch._ops.OpOverload) else None
        if schema is None or schema.name.split("::")[0] not in ("_c10d_functional", "vllm"):
            return False, None
        names = [argument.name for argument in schema.arguments]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        name = schema.name.split("::")[1]
        value = args[0]
        if name == "wait_tensor":
            return True, value
        members = self._groups.partition(given["group_name"])
        if name == "all_reduce":
            return True, jax.lax.psum(value, AXIS, axis_index_groups=members)
        dim = given.get("dim", 0)
        if name in ("all_gather", "all_gather_into_tensor"):
            return True, jax.lax.all_gather(
                value, AXIS, axis_index_groups=members, axis=dim, tiled=True
            )
        if name in ("reduce_scatter", "reduce_scatter_tensor"):
            return True, jax.lax.psum_scatter(
                value, AXIS, axis_index_groups=members, scatter_dimension=dim, tiled=True
            )
        return False, None
