"""Process groups: who is in them, what their collectives give, and that they trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vlmgen import standin
from vlmgen.standin.ranks import RankError, one_rank, run_ranks

standin.activate()


def _groups(rank: int) -> dict[str, Any]:
    from vllm.distributed import parallel_state as vllm_state
    from vllm_neuron.parallel import neuron_parallel_state as state

    text, tp = vllm_state.get_tp_group(), state.get_neuron_vision_tp_group()
    dp = state.get_neuron_vision_dp_group()
    return {
        "text_tp": text.ranks,
        "text_dp": vllm_state.get_dp_group().ranks,
        "world": vllm_state.get_world_group().ranks,
        "vision_tp": tp.ranks,
        "vision_dp": None if dp is None else dp.ranks,
        "reused": tp is text,
        "rank_in_group": (tp.rank_in_group, None if dp is None else dp.rank_in_group),
        "patched": vllm_state.get_neuron_vision_tp_group is state.get_neuron_vision_tp_group,
        "dp_not_patched": not hasattr(vllm_state, "get_neuron_vision_dp_group"),
        "initialized": state.is_initialized(),
    }


@pytest.mark.parametrize(
    ("text_tp", "vision", "expected"),
    [
        (4, (2, 2), {"vision_tp": [[0, 1], [0, 1], [2, 3], [2, 3]], "vision_dp": [[0, 2], [1, 3]]}),
        (4, (4, 1), {"vision_tp": [[0, 1, 2, 3]] * 4, "vision_dp": None}),
        (4, (1, 4), {"vision_tp": [[0], [1], [2], [3]], "vision_dp": [[0, 1, 2, 3]] * 2}),
        (2, (2, 2), {"vision_tp": [[0, 1], [0, 1], [2, 3], [2, 3]], "vision_dp": [[0, 2], [1, 3]]}),
        (4, (1, 1), {"vision_tp": [[0, 1, 2, 3]] * 4, "vision_dp": None}),
    ],
    ids=["2x2", "4x1", "1x4", "2x2-text2", "text-only"],
)
def test_groups_of_four_ranks(
    text_tp: int, vision: tuple[int, int], expected: dict[str, Any]
) -> None:
    found = run_ranks(
        _groups,
        4,
        tensor_parallel_size=text_tp,
        vision_tp_size=vision[0],
        vision_dp_size=vision[1],
    )
    for rank, groups in enumerate(found):
        start = rank // text_tp * text_tp
        assert groups["text_tp"] == list(range(start, start + text_tp))
        assert groups["text_dp"] == list(range(rank % text_tp, 4, text_tp))
        assert groups["world"] == [0, 1, 2, 3]
        assert groups["vision_tp"] == expected["vision_tp"][rank]
        columns = expected["vision_dp"]
        assert groups["vision_dp"] == (None if columns is None else columns[rank % len(columns)])
        assert groups["reused"] == (groups["vision_tp"] == groups["text_tp"])
        assert groups["rank_in_group"][0] == groups["vision_tp"].index(rank)
        assert groups["patched"] and groups["dp_not_patched"] and groups["initialized"]


def _expert_groups(rank: int) -> tuple[Any, ...]:
    from vllm_neuron.parallel import neuron_parallel_state as state

    share, peers = state.get_neuron_ep_tp_group(), state.get_neuron_ep_group()
    degree, part = state.get_neuron_ep_degree(), state.get_neuron_ep_rank()
    return share.ranks, share.rank_in_group, peers.ranks, degree, part


@pytest.mark.parametrize(
    ("text_tp", "degree", "shares", "peers"),
    [
        (4, 1, [[0, 1, 2, 3]] * 4, [[0], [1], [2], [3]]),
        (4, 2, [[0, 1], [0, 1], [2, 3], [2, 3]], [[0, 2], [1, 3], [0, 2], [1, 3]]),
        (4, 4, [[0], [1], [2], [3]], [[0, 1, 2, 3]] * 4),
        (2, 2, [[0], [1], [2], [3]], [[0, 1], [0, 1], [2, 3], [2, 3]]),
    ],
)
def test_ranks_share_out_the_experts_first_and_then_their_width(
    text_tp: int, degree: int, shares: list[list[int]], peers: list[list[int]]
) -> None:
    found = run_ranks(_expert_groups, 4, tensor_parallel_size=text_tp, ep_degree=degree)
    for rank, result in enumerate(found):
        place, part = shares[rank].index(rank), peers[rank].index(rank)
        assert result == (shares[rank], place, peers[rank], degree, part)


def _input(rank: int) -> torch.Tensor:
    return torch.arange(8.0).reshape(4, 2) * (rank + 1)


def _collect(rank: int, backend: str | None) -> tuple[torch.Tensor, ...]:
    from vllm.distributed.parallel_state import get_tp_group
    from vllm_neuron.parallel.neuron_parallel_state import (
        get_neuron_vision_dp_group,
        get_neuron_vision_tp_group,
    )

    text, tp, dp = get_tp_group(), get_neuron_vision_tp_group(), get_neuron_vision_dp_group()

    def collect(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        summed = text.all_reduce(x + 0.0)
        gathered = text.all_gather(x, 0)
        scattered = text.reduce_scatter(x + 0.0, 0)
        columns = tp.all_gather(x, 1)
        rows = x if dp is None else dp.all_gather(x, 0)
        return summed, gathered, scattered, columns, rows

    if backend is not None:
        collect = torch.compile(collect, fullgraph=True, backend=backend)
    return collect(_input(rank))


@pytest.mark.parametrize("backend", [None, "eager"])
def test_collectives_of_four_ranks(backend: str | None) -> None:
    results = run_ranks(_collect, 4, backend, vision_tp_size=2, vision_dp_size=2)
    inputs = [_input(rank) for rank in range(4)]
    total = sum(inputs)
    for rank, (summed, gathered, scattered, columns, rows) in enumerate(results):
        first = rank // 2 * 2
        assert torch.equal(summed, total)
        assert torch.equal(gathered, torch.cat(inputs))
        assert torch.equal(scattered, total[rank : rank + 1])
        assert torch.equal(columns, torch.cat([inputs[first], inputs[first + 1]], dim=1))
        assert torch.equal(rows, torch.cat([inputs[rank % 2], inputs[rank % 2 + 2]]))


@pytest.mark.parametrize("backend", [None, "eager"])
def test_collectives_of_one_rank(backend: str | None) -> None:
    """A world of one works in this process, twice in a row, and traces."""
    x = _input(0)
    for _ in range(2):
        with one_rank():
            summed, gathered, scattered, columns, rows = _collect(0, backend)
            for result in (summed, gathered, scattered, columns, rows):
                assert torch.equal(result, x)
            groups = _groups(0)
        assert groups["vision_tp"] == [0] and groups["vision_dp"] is None and groups["reused"]


def test_everything_is_undone() -> None:
    from vllm.distributed import parallel_state as vllm_state
    from vllm_neuron.parallel import neuron_parallel_state as state

    with one_rank():
        assert state.is_initialized()
    assert not state.is_initialized()
    assert not torch.distributed.is_initialized()
    assert not hasattr(vllm_state, "get_neuron_vision_tp_group")
    with pytest.raises(AssertionError):
        vllm_state.get_tp_group()


def _init(**sizes: Any) -> None:
    from vllm_neuron.parallel.neuron_parallel_state import init_neuron_distributed_environment

    options = {
        "world_size": 4,
        "rank": 0,
        "local_rank": 0,
        "distributed_init_method": "file:///nowhere",
        "backend": "gloo",
        "tensor_parallel_size": 4,
    }
    init_neuron_distributed_environment(**(options | sizes))


@pytest.mark.parametrize(
    ("sizes", "numbers"),
    [
        ({"vision_tp_size": 2}, "vision TP 2 x DP 1 = 2 must be the world size 4"),
        ({"vision_tp_size": 3, "vision_dp_size": 2}, "1 x 4, 2 x 2, 4 x 1"),
        ({"vision_tp_size": 4, "vision_dp_size": 4}, "= 16 must be the world size 4"),
        (
            {"ep_degree": 3},
            r"ep_degree 3 does not divide the text TP size 4; legal are \[1, 2, 4\]",
        ),
        ({"tensor_parallel_size": 3}, r"3 does not divide the world size 4; legal are \[1, 2, 4\]"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_before_anything_starts(
    sizes: dict[str, int], numbers: str
) -> None:
    with pytest.raises(ValueError, match=numbers):
        _init(**sizes)
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    "name", ["pipeline_parallel_size", "decode_context_parallel_size", "nnodes"]
)
def test_axes_without_groups_are_refused(name: str) -> None:
    with pytest.raises(NotImplementedError, match=f"{name}=2; legal is 1"):
        _init(**{name: 2})
    assert not torch.distributed.is_initialized()


def _fail(rank: int) -> None:
    if rank == 1:
        raise ValueError("rank one has had enough")


def _die(rank: int) -> None:
    import os

    if rank == 1:
        os._exit(7)


def test_a_failing_rank_is_reported_with_its_traceback() -> None:
    with pytest.raises(RankError, match=r"(?s)rank 1 of 2 failed:.*rank one has had enough"):
        run_ranks(_fail, 2)


def test_a_dying_rank_is_reported() -> None:
    with pytest.raises(RankError, match="rank 1 died with exit code 7"):
        run_ranks(_die, 2)


def _sleep(rank: int) -> None:
    import time

    time.sleep(60)


def test_a_silent_rank_is_reported() -> None:
    with pytest.raises(RankError, match=r"ranks \[0\] did not answer within 0.5 s"):
        run_ranks(_sleep, 1, timeout=0.5)
