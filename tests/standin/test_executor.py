"""MPExecutor: a model in one process per rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from vlmgen import standin
from vlmgen.standin.ranks import RankError

standin.activate()

from vllm_neuron.utils import executor as executor_module  # noqa: E402
from vllm_neuron.utils.executor import MPExecutor  # noqa: E402


def load_model(rank: int, device: torch.device) -> Callable[..., Any]:
    """A model that keeps a count, multiplies, and reduces over the ranks."""
    from vllm.distributed.parallel_state import get_tp_group

    calls = []

    def model(x: torch.Tensor, mode: str = "sum") -> Any:
        calls.append(rank)
        if mode == "bf16":
            return x.bfloat16()
        if mode == "fail":
            raise ValueError(f"no such mode on rank {rank}")
        return {"sum": get_tp_group().all_reduce(x * (rank + 1)), "calls": len(calls)}, str(device)

    return model


@pytest.fixture(scope="module")
def executor() -> Iterator[MPExecutor]:
    """Two ranks shared by the tests, forked to save the imports."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor_module, "START_METHOD", "forkserver")
        executor = MPExecutor(2, load_model)
    yield executor
    executor.shutdown()
    executor.shutdown()


def test_dispatch_reaches_every_rank(executor: MPExecutor) -> None:
    x = torch.tensor([1.0, 2.0])
    executor.dispatch(x)
    executor.dispatch(10 * x)
    for factor, calls in ((1, 1), (10, 2)):
        for result, device in executor.collect(timeout=60):
            assert torch.equal(result["sum"], 3 * factor * x)
            assert result["calls"] == calls
            assert device == "cpu"


def test_dispatch_per_rank(executor: MPExecutor) -> None:
    executor.dispatch_per_rank([(torch.tensor([1.0]),), (torch.tensor([5.0]),)])
    sums = [result["sum"].item() for result, _ in executor.collect(timeout=60)]
    assert sums == [11.0, 11.0]
    with pytest.raises(ValueError, match="1 argument lists for 2 ranks"):
        executor.dispatch_per_rank([()])


def test_bfloat16_results_are_refused_with_advice(executor: MPExecutor) -> None:
    executor.dispatch(torch.ones(1), "bf16")
    with pytest.raises(RankError, match="cast to float32"):
        executor.collect(timeout=60)
    with pytest.raises(RankError, match="shut down"):
        executor.dispatch(torch.ones(1))


def test_sizes_are_checked_before_processes_start() -> None:
    with pytest.raises(ValueError, match="dp_size 3 does not divide the world size 4"):
        MPExecutor(4, load_model, dp_size=3)
    with pytest.raises(ValueError, match="node_rank must be 0"):
        MPExecutor(2, load_model, node_rank=1)


def test_ranks_are_spawned_and_sizes_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """That a spawned rank has the stand-in is tested in test_activation."""
    seen: dict[str, Any] = {}

    def record(world_size: int, start: Any, arguments: Any, **options: Any) -> None:
        seen.update(options, world_size=world_size, arguments=arguments)

    monkeypatch.setattr(executor_module, "RankProcesses", record)
    MPExecutor(4, load_model, dp_size=2, vision_tp_size=2, vision_dp_size=2, dcp_size=3)
    assert seen["start_method"] == "spawn"
    assert seen["tensor_parallel_size"] == 2
    assert (seen["vision_tp_size"], seen["vision_dp_size"]) == (2, 2)
    assert seen["decode_context_parallel_size"] == 3
    assert seen["arguments"] == (load_model, 4, "cpu")
