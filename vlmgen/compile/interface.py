"""What a program takes and gives: enough to call it without exporting it again."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Argument:
    """One tensor that a program takes.

    Args:
        name: Of the parameter or buffer, or the path of the input.
        kind: `weight`, `cache` or `input`.
        shape: Sizes.
        dtype: Name of the element type, as in torch.
        leaf: Place among the leaves of the call's keywords; None for parameters and buffers.
        changed: Changed in place: the program's result takes its memory.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    leaf: int | None = None
    changed: bool = False

    @property
    def torch_dtype(self) -> torch.dtype:
        """The element type."""
        return getattr(torch, self.dtype)

    @property
    def bytes(self) -> int:
        """Memory it takes."""
        return math.prod(self.shape) * self.torch_dtype.itemsize


@dataclass(frozen=True)
class Interface:
    """Arguments and results of one program.

    Args:
        arguments: In order.
        keywords: Keywords of the call, in the order in which the program takes them.
        changed_outputs: For every result, the argument it is written to, or None.
        kept_outputs: Results that are no repetition of an earlier one: a tower returns the cache
            that it has written.
    """

    arguments: tuple[Argument, ...]
    keywords: tuple[str, ...]
    changed_outputs: tuple[int | None, ...]
    kept_outputs: tuple[int, ...]

    @property
    def donated(self) -> list[int]:
        """Places of the arguments that are changed in place."""
        return [index for index, argument in enumerate(self.arguments) if argument.changed]

    def bytes_of(self, kind: str) -> int:
        """Memory of all arguments of a kind."""
        return sum(argument.bytes for argument in self.arguments if argument.kind == kind)

    def values(self, module: torch.nn.Module, kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        """Tensors for the arguments: weights and KV caches as they are now, inputs from a call."""
        leaves = torch.utils._pytree.tree_leaves({name: kwargs[name] for name in self.keywords})
        state = {
            **dict(module.named_parameters(remove_duplicate=False)),
            **dict(module.named_buffers(remove_duplicate=False)),
        }
        return [
            state[argument.name].data if argument.leaf is None else leaves[argument.leaf]
            for argument in self.arguments
        ]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Interface:
        """Back from JSON."""
        arguments = (
            Argument(**{**argument, "shape": tuple(argument["shape"])})
            for argument in data["arguments"]
        )
        lists: dict[str, Sequence[Any]] = {
            name: tuple(data[name]) for name in ("keywords", "changed_outputs", "kept_outputs")
        }
        return cls(tuple(arguments), **lists)  # type: ignore[arg-type]
