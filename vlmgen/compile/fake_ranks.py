"""One process as one rank of a world that is not there, to build and export that rank's program.

torch's own fake process group answers every collective without a partner; vLLM's and the plugin's
groups are made on it as in a real world.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch.distributed as dist


@dataclass(frozen=True)
class Layout:
    """Text TP over all ranks, vision TP x DP over the same ranks, experts shared out before TP."""

    world_size: int
    vision_tp: int = 1
    vision_dp: int = 1
    ep_degree: int = 1

    @property
    def name(self) -> str:
        """`tp 4, vision tp 2 x dp 2`."""
        experts = f" ep {self.ep_degree}" if self.ep_degree > 1 else ""
        return f"tp {self.world_size}{experts}, vision tp {self.vision_tp} x dp {self.vision_dp}"

    def part(self, kind: str) -> str:
        """What a graph of a kind depends on."""
        if kind == "vision":
            return f"vision tp {self.vision_tp} x dp {self.vision_dp}"
        return f"tp {self.world_size} ep {self.ep_degree}"


@contextmanager
def fake_rank(layout: Layout, rank: int) -> Iterator[dict[str, Any]]:
    """Be one rank of a layout within the block.

    Yields:
        Process groups of this rank by role.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.distributed.parallel_state import get_tp_group
    from vllm_neuron.parallel import neuron_parallel_state as state

    make_group = dist.new_group

    def fake_group(*arguments: Any, **keywords: Any) -> Any:
        return make_group(*arguments, **{**keywords, "backend": "fake"})

    grouped = mock.patch.object(dist, "new_group", fake_group)
    # Where vLLM's C library is loaded, its groups meet in shared memory, where nobody would come.
    apart = mock.patch.object(
        CpuCommunicator, "_all_group_ranks_share_shm_group_name", lambda self: False
    )
    dist.init_process_group("fake", rank=rank, world_size=layout.world_size, store=FakeStore())
    try:
        with grouped, apart:
            state.init_neuron_distributed_environment(
                world_size=layout.world_size,
                rank=rank,
                local_rank=rank,
                distributed_init_method="",
                backend="fake",
                tensor_parallel_size=layout.world_size,
                ep_degree=layout.ep_degree,
                vision_tp_size=layout.vision_tp,
                vision_dp_size=layout.vision_dp,
            )
        coordinators = {
            "tp": get_tp_group(),
            "vision_tp": state.get_neuron_vision_tp_group(),
            "vision_dp": state.get_neuron_vision_dp_group(),
            "ep": state.get_neuron_ep_group(),
            "ep_tp": state.get_neuron_ep_tp_group(),
        }
        yield {role: group for role, group in coordinators.items() if group is not None}
    finally:
        state.destroy_neuron_distributed_environment()
        if dist.is_initialized():
            dist.destroy_process_group()


def members(groups: Mapping[str, Any]) -> dict[str, tuple[str, list[int]]]:
    """Name of every process group -> its role and ranks; the text group goes before its aliases."""
    found: dict[str, tuple[str, list[int]]] = {}
    for role, group in groups.items():
        found.setdefault(group.device_group.group_name, (role, list(group.ranks)))
    return found
