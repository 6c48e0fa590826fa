"""Runs a model in one process per rank; for tests of parallel models."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from vlmgen.standin.ranks import RankProcesses

__all__ = ["MPExecutor"]

START_METHOD = "spawn"
"""How the ranks are started; tests that start many take ``"forkserver"``."""


class MPExecutor:
    """``world_size`` processes with process groups (gloo), each holding a model.

    Results travel as numpy arrays, which do not have bfloat16: a model must cast such results,
    or :meth:`collect` fails with the rank's message.

    Args:
        world_size: number of ranks, all of them in the text TP group unless ``dp_size`` divides
            them.
        model_load: called once per rank with those of ``rank``, ``world_size`` and ``device`` it
            declares; returns the callable that answers. It must be importable by name.
        device: ``"neuron:0"``; in CPU mode the ranks use the CPU.
        nnodes: must be 1.
        node_rank: must be 0.
        ep_degree: parts into which the ranks share out the experts. The sizes that are not
            named here must be 1.
        sampling_dp_degree: must be 1.
        dp_size: text data parallel size.
        attention_dp_size: must be 1.
        embedding_dp_size: must be 1.
        lm_head_dp_size: must be 1.
        mlp_dp_size: must be 1.
        vision_tp_size: vision TP.
        vision_dp_size: vision DP.
        dcp_size: must be 1.

    Raises:
        ValueError: ``dp_size`` does not divide the world size.
        vlmgen.standin.ranks.RankError: a rank failed to start.
    """

    def __init__(
        self,
        world_size: int,
        model_load: Callable[..., Callable[..., Any]],
        device: str = "neuron:0",
        nnodes: int = 1,
        node_rank: int = 0,
        ep_degree: int = 1,
        sampling_dp_degree: int = 1,
        dp_size: int = 1,
        attention_dp_size: int = 1,
        embedding_dp_size: int = 1,
        lm_head_dp_size: int = 1,
        mlp_dp_size: int = 1,
        vision_tp_size: int = 1,
        vision_dp_size: int = 1,
        dcp_size: int = 1,
    ) -> None:
        if dp_size < 1 or world_size % dp_size:
            raise ValueError(f"dp_size {dp_size} does not divide the world size {world_size}")
        if node_rank:
            raise ValueError(f"node_rank must be 0 on one machine, got {node_rank}")
        self._ranks = RankProcesses(
            world_size,
            _start,
            (model_load, world_size, "cpu" if device.startswith("neuron") else device),
            tensor_parallel_size=world_size // dp_size,
            start_method=START_METHOD,
            nnodes=nnodes,
            ep_degree=ep_degree,
            sampling_dp_degree=sampling_dp_degree,
            attention_dp_size=attention_dp_size,
            embedding_dp_size=embedding_dp_size,
            lm_head_dp_size=lm_head_dp_size,
            mlp_dp_size=mlp_dp_size,
            vision_tp_size=vision_tp_size,
            vision_dp_size=vision_dp_size,
            decode_context_parallel_size=dcp_size,
        )

    def dispatch(self, *args: Any) -> None:
        """Call every rank's model with the same arguments; does not wait."""
        self._ranks.call([args] * self._ranks.world_size)

    def dispatch_per_rank(self, args_per_rank: Sequence[tuple[Any, ...]]) -> None:
        """Call every rank's model with arguments of its own; does not wait.

        Args:
            args_per_rank: one argument tuple per rank.
        """
        self._ranks.call(args_per_rank)

    def collect(self, timeout: float = 300.0) -> list[Any]:
        """Wait for the answers to the oldest call.

        Args:
            timeout: seconds.

        Returns:
            The results by rank, tensors on the CPU.

        Raises:
            vlmgen.standin.ranks.RankError: a rank raised, died or did not answer in time. The
                ranks are stopped.
        """
        return [_from_numpy(result) for result in self._ranks.collect(timeout)]

    def start_profile(self) -> None:
        """Has no effect: the stand-in has no device profiler."""

    def stop_profile(self) -> None:
        """Has no effect: the stand-in has no device profiler."""

    def shutdown(self) -> None:
        """Stop the ranks; may be called twice."""
        self._ranks.shutdown()


class _Array:
    """Marks what was a tensor, so that arrays a model returns stay arrays."""

    def __init__(self, tensor: torch.Tensor) -> None:
        if tensor.dtype == torch.bfloat16:
            raise TypeError(
                "results travel as numpy arrays, which have no bfloat16; cast to float32 in the "
                "model callable"
            )
        self.array = tensor.detach().cpu().numpy()


def _start(
    rank: int, model_load: Callable[..., Callable[..., Any]], world_size: int, device: str
) -> Callable[..., Any]:
    offered = {"rank": rank, "world_size": world_size, "device": torch.device(device)}
    declared = inspect.signature(model_load).parameters
    model = model_load(**{name: value for name, value in offered.items() if name in declared})
    return lambda *args: _to_numpy(model(*args))


def _to_numpy(value: Any) -> Any:
    return _map(value, torch.Tensor, _Array)


def _from_numpy(value: Any) -> Any:
    return _map(value, _Array, lambda marked: torch.from_numpy(marked.array.copy()))


def _map(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, dict):
        return {key: _map(item, kind, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_map(item, kind, change) for item in value)
    return value
