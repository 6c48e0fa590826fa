"""What a graph is specialised on, so that a call that differs is an error and says how."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["CallSignatures", "RunnerContractError", "signature_of"]


class RunnerContractError(RuntimeError):
    """A call breaks a rule on which the plugin's runner fails late or in silence."""


def signature_of(value: Any) -> Any:
    """Kind, dtype, shape and stride of a tensor; contents of containers; other values themselves.

    Layers that share one metadata dictionary are described once.
    """
    if isinstance(value, torch.Tensor):
        return (value.dtype, value.shape, value.stride())
    if isinstance(value, Mapping):
        seen: dict[int, Any] = {}
        described = {}
        for key, item in value.items():
            if id(item) not in seen:
                seen[id(item)] = signature_of(item)
            described[key] = seen[id(item)]
        return described
    if isinstance(value, tuple | list):
        return tuple(signature_of(item) for item in value)
    return value


class CallSignatures:
    """Signatures of all graphs, taken in warm-up."""

    def __init__(self) -> None:
        self._known: dict[Any, dict[str, Any]] = {}

    def learn(self, graph: Any, kwargs: Mapping[str, Any]) -> None:
        """Keep the signature of a warm-up call."""
        self._known[graph] = {name: signature_of(value) for name, value in kwargs.items()}

    def check(self, graph: Any, kwargs: Mapping[str, Any]) -> None:
        """Compare a call with the warm-up call of its graph.

        Raises:
            RunnerContractError: an argument is missing, new or of another kind.
        """
        known = self._known.get(graph)
        if known is None:
            raise RunnerContractError(
                f"graph {graph} was not warmed up; known are {list(self._known)}"
            )
        given = {name: signature_of(value) for name, value in kwargs.items()}
        if given == known:
            return
        for name in sorted({*known, *given}):
            if known.get(name, "absent") != given.get(name, "absent"):
                raise RunnerContractError(
                    f"graph {graph}: argument {name!r} is {given.get(name, 'absent')}; when the "
                    f"graph was warmed up it was {known.get(name, 'absent')}"
                )
