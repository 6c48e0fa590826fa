"""Process groups of the text model and the vision tower, over torch.distributed (gloo).

Groups are vLLM ``GroupCoordinator`` objects, the same that a vLLM engine makes. Text tensor
parallel groups are contiguous ranks. The vision tower has groups of its own: for 4 ranks with
vision TP 2 and DP 2 they are ``[0 1] [2 3]`` and the data parallel columns ``[0 2] [1 3]``.

The stand-in has no expert, attention, embedding, head, MLP, sampling, context or pipeline
parallel groups of their own; a size above 1 for one of them is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from vllm.distributed import parallel_state as vllm_parallel_state
from vllm.distributed.parallel_state import GroupCoordinator

__all__ = [
    "destroy_neuron_distributed_environment",
    "get_node_group",
    "get_neuron_attention_dp_group",
    "get_neuron_attention_dp_rank",
    "get_neuron_attention_dp_size",
    "get_neuron_attention_tp_group",
    "get_neuron_dcp_kv_group",
    "get_neuron_dcp_tp_group",
    "get_neuron_embedding_dp_group",
    "get_neuron_embedding_tp_group",
    "get_neuron_ep_degree",
    "get_neuron_ep_group",
    "get_neuron_ep_rank",
    "get_neuron_ep_tp_group",
    "get_neuron_inter_node_positional_peer_group",
    "get_neuron_internode_ep_group",
    "get_neuron_intranode_ep_group",
    "get_neuron_lm_head_dp_group",
    "get_neuron_lm_head_tp_group",
    "get_neuron_mlp_dp_group",
    "get_neuron_mlp_dp_rank",
    "get_neuron_mlp_dp_size",
    "get_neuron_mlp_tp_group",
    "get_neuron_sampling_all2all_group",
    "get_neuron_sampling_dp_degree",
    "get_neuron_sampling_gather_group",
    "get_neuron_vision_dp_group",
    "get_neuron_vision_tp_group",
    "get_wide_ep_group",
    "init_neuron_distributed_environment",
    "initialize_neuron_parallel_state",
    "is_initialized",
]

_initialized = False
_VISION_TP: GroupCoordinator | None = None
_VISION_DP: GroupCoordinator | None = None
_EP: GroupCoordinator | None = None
_EP_TP: GroupCoordinator | None = None


def is_initialized() -> bool:
    """Tell whether :func:`initialize_neuron_parallel_state` has run in this process."""
    return _initialized


def _require_one(**sizes: int) -> None:
    wrong = {name: size for name, size in sizes.items() if size != 1}
    if wrong:
        listing = ", ".join(f"{name}={size}" for name, size in wrong.items())
        raise NotImplementedError(
            f"the stand-in has no such groups: {listing}; legal is 1. Text TP, expert parallel "
            "ranks within it and vision TP x DP are supported."
        )


def init_neuron_distributed_environment(
    world_size: int,
    rank: int,
    local_rank: int,
    distributed_init_method: str,
    backend: str,
    tensor_parallel_size: int,
    pipeline_parallel_size: int = 1,
    decode_context_parallel_size: int = 1,
    ep_degree: int = 1,
    sampling_dp_degree: int = 1,
    attention_dp_size: int = 1,
    embedding_dp_size: int = 1,
    lm_head_dp_size: int = 1,
    mlp_dp_size: int = 1,
    vision_tp_size: int = 1,
    vision_dp_size: int = 1,
    nnodes: int = 1,
    timeout: timedelta | None = None,
) -> None:
    """Start torch.distributed and make every group this process belongs to.

    Every rank must call it. Groups that exist already, as in a vLLM worker, are kept.

    Args:
        world_size: number of ranks.
        rank: this process's rank.
        local_rank: its rank on this machine.
        distributed_init_method: where the ranks meet, ``file:///...`` or ``tcp://127.0.0.1:port``.
        backend: ``"gloo"``.
        tensor_parallel_size: text TP; it must divide the world size.
        pipeline_parallel_size: must be 1.
        decode_context_parallel_size: must be 1.
        ep_degree: see :func:`initialize_neuron_parallel_state`.
        sampling_dp_degree: must be 1.
        attention_dp_size: must be 1.
        embedding_dp_size: must be 1.
        lm_head_dp_size: must be 1.
        mlp_dp_size: must be 1.
        vision_tp_size: ranks that share one copy of the tower.
        vision_dp_size: copies of the tower. Both at 1 in a larger world: no vision groups.
        nnodes: must be 1.
        timeout: for the rendezvous and the collectives.

    Raises:
        ValueError: the sizes do not fit the world size.
        NotImplementedError: a size the stand-in has no groups for.
    """
    _require_one(
        pipeline_parallel_size=pipeline_parallel_size,
        decode_context_parallel_size=decode_context_parallel_size,
        nnodes=nnodes,
    )
    if tensor_parallel_size < 1 or world_size % tensor_parallel_size:
        divisors = [size for size in range(1, world_size + 1) if world_size % size == 0]
        raise ValueError(
            f"tensor_parallel_size {tensor_parallel_size} does not divide the world size "
            f"{world_size}; legal are {divisors}"
        )
    _check_vision_sizes(world_size, vision_tp_size, vision_dp_size)
    _check_ep_degree(ep_degree, tensor_parallel_size)
    if not torch.distributed.is_initialized():
        store = None
        if distributed_init_method.startswith("file://"):
            path = distributed_init_method.removeprefix("file://")
            store = torch.distributed.FileStore(path, world_size)
        torch.distributed.init_process_group(
            backend=backend,
            init_method=distributed_init_method if store is None else None,
            store=store,
            world_size=world_size,
            rank=rank,
            timeout=timeout,
        )
    _ensure_text_groups(local_rank, tensor_parallel_size, backend)
    initialize_neuron_parallel_state(
        ep_degree=ep_degree,
        sampling_dp_degree=sampling_dp_degree,
        attention_dp_size=attention_dp_size,
        embedding_dp_size=embedding_dp_size,
        lm_head_dp_size=lm_head_dp_size,
        mlp_dp_size=mlp_dp_size,
        vision_tp_size=vision_tp_size,
        vision_dp_size=vision_dp_size,
        nnodes=nnodes,
        local_rank=local_rank,
    )


def _ensure_text_groups(local_rank: int, tensor_parallel_size: int, backend: str) -> None:
    """Make vLLM's world, TP and DP groups, and groups of one for its other axes.

    vLLM's own initializer wants a complete engine configuration, whose import costs seconds in
    every process; with one in force it is used.
    """
    state = vllm_parallel_state
    if state._WORLD is None:
        ranks = list(range(torch.distributed.get_world_size()))
        state._WORLD = state.init_world_group(ranks, local_rank, backend)
    if state.model_parallel_is_initialized():
        if state.get_tp_group().world_size != tensor_parallel_size:
            raise ValueError(
                f"a text TP group of {state.get_tp_group().world_size} ranks exists already, "
                f"tensor_parallel_size is {tensor_parallel_size}"
            )
        return
    if _vllm_config_in_force():
        state.ensure_model_parallel_initialized(tensor_parallel_size, 1, backend=backend)
        return
    world_size = torch.distributed.get_world_size()
    # One group of one serves every axis of size one: making groups is what takes the time.
    alone = _group([[rank] for rank in range(world_size)], local_rank, backend, "single")
    rows, columns = _rows(world_size, tensor_parallel_size), _columns(
        world_size, tensor_parallel_size
    )
    state._TP = _group(rows, local_rank, backend, "tp")
    state._DP = alone if len(columns[0]) == 1 else _group(columns, local_rank, backend, "dp")
    state._PP = state._PCP = state._DCP = alone


def _vllm_config_in_force() -> bool:
    if "vllm.config" not in sys.modules:
        return False
    from vllm.config import get_current_vllm_config_or_none

    return get_current_vllm_config_or_none() is not None


def _rows(world_size: int, size: int) -> list[list[int]]:
    """Contiguous groups: 4 ranks by 2 -> [0 1] [2 3]."""
    return [list(range(start, start + size)) for start in range(0, world_size, size)]


def _columns(world_size: int, size: int) -> list[list[int]]:
    """Ranks at equal places of the contiguous groups: 4 ranks by 2 -> [0 2] [1 3]."""
    return [list(range(place, world_size, size)) for place in range(size)]


def _group(
    group_ranks: list[list[int]], local_rank: int, backend: str, name: str
) -> GroupCoordinator:
    return vllm_parallel_state.init_model_parallel_group(
        group_ranks, local_rank, backend, group_name=name
    )


def _check_vision_sizes(world_size: int, vision_tp_size: int, vision_dp_size: int) -> None:
    if vision_tp_size == 1 and vision_dp_size == 1:
        return  # text only, or a world of one
    if vision_tp_size * vision_dp_size != world_size:
        legal = [
            f"{size} x {world_size // size}"
            for size in range(1, world_size + 1)
            if world_size % size == 0
        ]
        raise ValueError(
            f"vision TP {vision_tp_size} x DP {vision_dp_size} = "
            f"{vision_tp_size * vision_dp_size} must be the world size {world_size}; legal are "
            f"{', '.join(legal)}"
        )


def _check_ep_degree(ep_degree: int, tp_size: int) -> None:
    if ep_degree < 1 or tp_size % ep_degree:
        legal = [size for size in range(1, tp_size + 1) if tp_size % size == 0]
        raise ValueError(
            f"ep_degree {ep_degree} does not divide the text TP size {tp_size}; legal are {legal}"
        )


def initialize_neuron_parallel_state(
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
    nnodes: int = 1,
    *,
    tp_global_ranks: Sequence[int] | None = None,
    local_rank: int | None = None,
) -> None:
    """Make the plugin's own groups beside vLLM's, which must exist.

    Args:
        ep_degree: parts into which the ranks of a text TP group share out the experts. The ranks
            of a part are contiguous and share each of its experts by width.
        sampling_dp_degree: must be 1.
        dp_size: size of the text data parallel group; only checked.
        attention_dp_size: must be 1.
        embedding_dp_size: must be 1.
        lm_head_dp_size: must be 1.
        mlp_dp_size: must be 1.
        vision_tp_size: see :func:`init_neuron_distributed_environment`.
        vision_dp_size: likewise.
        dcp_size: must be 1.
        nnodes: must be 1.
        tp_global_ranks: ranks of the text TP group; only checked.
        local_rank: rank on this machine, None for the global rank.

    Raises:
        RuntimeError: vLLM's groups do not exist, or this has run already.
        ValueError: the vision sizes do not fit the world size, or ``tp_global_ranks`` is not the
            text TP group.
        NotImplementedError: a size the stand-in has no groups for.
    """
    global _initialized, _VISION_TP, _VISION_DP, _EP, _EP_TP
    _require_one(
        sampling_dp_degree=sampling_dp_degree,
        attention_dp_size=attention_dp_size,
        embedding_dp_size=embedding_dp_size,
        lm_head_dp_size=lm_head_dp_size,
        mlp_dp_size=mlp_dp_size,
        dcp_size=dcp_size,
        nnodes=nnodes,
    )
    if _initialized:
        raise RuntimeError("the parallel state of this process is initialised already")
    if not vllm_parallel_state.model_parallel_is_initialized():
        raise RuntimeError(
            "vLLM's groups must exist first; call init_neuron_distributed_environment"
        )
    world_size = torch.distributed.get_world_size()
    _check_vision_sizes(world_size, vision_tp_size, vision_dp_size)
    text_tp = vllm_parallel_state.get_tp_group()
    _check_ep_degree(ep_degree, text_tp.world_size)
    if tp_global_ranks is not None and list(tp_global_ranks) != list(text_tp.ranks):
        raise ValueError(
            f"tp_global_ranks {list(tp_global_ranks)} is not the text TP group {text_tp.ranks}"
        )
    if dp_size not in (1, vllm_parallel_state.get_dp_group().world_size):
        raise ValueError(
            f"dp_size {dp_size} is not the size of the text data parallel group, "
            f"{vllm_parallel_state.get_dp_group().world_size}"
        )
    local_rank = torch.distributed.get_rank() if local_rank is None else local_rank
    backend = torch.distributed.get_backend(text_tp.device_group)
    separate = vision_tp_size * vision_dp_size == world_size
    if separate and vision_tp_size != text_tp.world_size:
        rows = _rows(world_size, vision_tp_size)
        _VISION_TP = _group(rows, local_rank, backend, "vision_tp")
    if separate and vision_dp_size > 1:
        columns = _columns(world_size, vision_tp_size)
        _VISION_DP = _group(columns, local_rank, backend, "vision_dp")
    _EP = vllm_parallel_state.get_pp_group()  # this rank alone, as pipeline size 1 is the rule
    _EP_TP = text_tp
    if ep_degree > 1:
        share = text_tp.world_size // ep_degree
        parts = _rows(world_size, text_tp.world_size)
        columns = [ranks[place::share] for ranks in parts for place in range(share)]
        _EP = _group(columns, local_rank, backend, "neuron_ep")
        _EP_TP = _group(_rows(world_size, share), local_rank, backend, "neuron_ep_tp")
    _initialized = True
    for name in __all__:
        # As in the plugin, models may import the getters from vLLM's module too.
        if name.startswith("get_") and name != "get_neuron_vision_dp_group":
            setattr(vllm_parallel_state, name, globals()[name])


def destroy_neuron_distributed_environment() -> None:
    """Undo :func:`init_neuron_distributed_environment`; for tests. Every rank must call it."""
    global _initialized, _VISION_TP, _VISION_DP, _EP, _EP_TP
    ep_groups = (_EP, _EP_TP) if _EP is not None and _EP.world_size > 1 else ()
    for group in (_VISION_TP, _VISION_DP, *ep_groups):
        if group is not None:
            group.destroy()
    _VISION_TP = _VISION_DP = _EP = _EP_TP = None
    _initialized = False
    for name in __all__:
        if name.startswith("get_") and hasattr(vllm_parallel_state, name):
            delattr(vllm_parallel_state, name)
    vllm_parallel_state.destroy_model_parallel()
    vllm_parallel_state.destroy_distributed_environment()


# --- vision ------------------------------------------------------------------------------------


def get_neuron_vision_tp_group() -> GroupCoordinator:
    """Return the ranks that share one copy of the vision tower.

    Returns:
        A group of contiguous ranks; vLLM's text TP group where no separate one was made.
    """
    return vllm_parallel_state.get_tp_group() if _VISION_TP is None else _VISION_TP


def get_neuron_vision_dp_group() -> GroupCoordinator | None:
    """Return the ranks at this rank's place of the other copies, or None with one copy."""
    return _VISION_DP


# --- experts -----------------------------------------------------------------------------------


def _made(group: GroupCoordinator | None) -> GroupCoordinator:
    if group is None:
        raise RuntimeError("the parallel state of this process is not initialised")
    return group


def get_neuron_ep_group() -> GroupCoordinator:
    """Return the ranks that hold the other experts at this rank's place of the width."""
    return _made(_EP)


def get_neuron_ep_tp_group() -> GroupCoordinator:
    """Return the ranks that share each of this rank's experts by width."""
    return _made(_EP_TP)


def get_neuron_ep_degree() -> int:
    """Return into how many parts the experts are shared out; 1 before there are groups."""
    return 1 if _EP is None else _EP.world_size


def get_neuron_ep_rank() -> int:
    """Return which part this rank holds; 0 before there are groups."""
    return 0 if _EP is None else _EP.rank_in_group


# --- axes the stand-in keeps at size one -------------------------------------------------------


def get_neuron_attention_tp_group() -> GroupCoordinator:
    """Return the ranks that share attention, here the text TP group."""
    return vllm_parallel_state.get_tp_group()


def get_neuron_attention_dp_group() -> GroupCoordinator | None:
    """Return the attention data parallel group, here None."""
    return None


def get_neuron_attention_dp_size() -> int:
    """Return the attention data parallel size, here 1."""
    return 1


def get_neuron_attention_dp_rank() -> int:
    """Return the attention data parallel rank, here 0."""
    return 0


def get_neuron_embedding_tp_group() -> GroupCoordinator:
    """Return the ranks that share the embedding, here the text TP group."""
    return vllm_parallel_state.get_tp_group()


def get_neuron_embedding_dp_group() -> GroupCoordinator | None:
    """Return the embedding's data parallel group, here None."""
    return None


def get_neuron_lm_head_tp_group() -> GroupCoordinator:
    """Return the ranks that share the head, here the text TP group."""
    return vllm_parallel_state.get_tp_group()


def get_neuron_lm_head_dp_group() -> GroupCoordinator | None:
    """Return the head's data parallel group, here None."""
    return None


def get_neuron_mlp_tp_group() -> GroupCoordinator:
    """Return the ranks that share the MLP, here the text TP group."""
    return vllm_parallel_state.get_tp_group()


def get_neuron_mlp_dp_group() -> GroupCoordinator | None:
    """Return the MLP's data parallel group, here None."""
    return None


def get_neuron_mlp_dp_size() -> int:
    """Return the MLP's data parallel size, here 1."""
    return 1


def get_neuron_mlp_dp_rank() -> int:
    """Return the MLP's data parallel rank, here 0."""
    return 0


def get_neuron_sampling_all2all_group() -> Any:
    """Return the sampling exchange group, here None."""
    return None


def get_neuron_sampling_gather_group() -> Any:
    """Return the sampling gather group, here None."""
    return None


def get_neuron_sampling_dp_degree() -> int:
    """Return the sampling data parallel degree, here 1."""
    return 1


def get_neuron_dcp_kv_group() -> Any:
    """Return the decode context parallel KV group, here None."""
    return None


def get_neuron_dcp_tp_group() -> Any:
    """Return the decode context parallel TP group, here None."""
    return None


def get_wide_ep_group() -> Any:
    """Return the expert parallel group across machines, here None."""
    return None


def get_neuron_intranode_ep_group() -> Any:
    """Return the expert parallel group inside this machine, here None."""
    return None


def get_neuron_internode_ep_group() -> Any:
    """Return the expert parallel group between machines, here None."""
    return None


def get_neuron_inter_node_positional_peer_group() -> Any:
    """Return the peers at this rank's place of other machines, here None."""
    return None


def get_node_group() -> Any:
    """Return the ranks of this machine as a group, here None."""
    return None
