"""Sorting of tokens into blocks that belong to one expert each.

Shapes: T tokens, E experts on this rank, k experts per token, N blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from vllm.distributed.parallel_state import GroupCoordinator

__all__ = ["build_blockwise_mapping"]


def build_blockwise_mapping(
    expert_affinities: torch.Tensor,
    num_local_experts: int,
    num_experts_per_token: int,
    block_size: int,
    moe_group: GroupCoordinator | None,
    tp_degree: int = 1,
    padding_mask: torch.Tensor | None = None,
    rank: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Give every expert's tokens, in token order, whole blocks of positions.

    # 3 tokens, experts 0 1 0, block 2 -> positions 0 2 | 1 -1, block_to_expert 0 1

    Args:
        expert_affinities: ``[T, E]``; a token belongs to the experts of non-zero affinity.
        num_local_experts: E.
        num_experts_per_token: k, at least the number of non-zero affinities of any token.
        block_size: positions per block.
        moe_group: group coordinator of the ranks that share the counting; None with tp_degree 1.
        tp_degree: ranks in moe_group; each counts its share of the experts if they divide.
        padding_mask: bool ``[T]``, False rows are padding. Their affinities become zero in the
            first result only: they still take positions.
        rank: this rank's number as a tensor; None takes the coordinator's.

    Returns:
        (affinities ``[T*E, 1]``, token of each position int32 ``[N*block_size]`` with -1 for none,
        expert of each block int32 ``[N]``, int32 ``[N]`` 1 where a block has tokens). N is
        ``min(ceil((T*min(k,E) - (E-1)) / block_size) + E-1, T*min(k,E))``; surplus blocks belong to
        the last expert. With padding_mask the affinities are float32.

    Raises:
        IndexError: more non-zero affinities per token than k.
        ValueError: the counting is to be shared, and moe_group is None.
    """
    tokens = expert_affinities.shape[0]
    experts = num_local_experts
    rows = tokens * min(num_experts_per_token, experts)
    blocks = min(-(-(rows - (experts - 1)) // block_size) + experts - 1, rows)

    chosen = expert_affinities != 0  # [T, E]
    counted = _running_count(chosen, moe_group, tp_degree, rank)  # [T, E], this token included
    per_expert = counted[-1]
    blocks_per_expert = torch.div(per_expert + block_size - 1, block_size, rounding_mode="floor")
    last_block = torch.cumsum(blocks_per_expert, dim=0)  # one past each expert's blocks
    first_position = (last_block - blocks_per_expert) * block_size
    position = first_position + counted - 1  # [T, E], meaningful where chosen

    # Place 0 takes what has no position: a graph holds no shape that depends on values.
    token_of = torch.full((1 + blocks * block_size,), -1, dtype=torch.int32)
    token_numbers = torch.arange(tokens, dtype=torch.int32)[:, None].expand(tokens, experts)
    # The indexing itself refuses a position past the buffer.
    token_of[torch.where(chosen, position + 1, 0)] = token_numbers
    token_of = token_of[1:]

    block_numbers = torch.arange(blocks)
    # A block belongs to the expert before which that many experts have ended.
    block_to_expert = (last_block <= block_numbers[:, None]).sum(dim=1)
    block_to_expert = block_to_expert.clamp(max=experts - 1).to(torch.int32)
    conditions = (block_numbers < last_block[-1]).to(torch.int32)

    affinities = expert_affinities
    if padding_mask is not None:
        affinities = affinities.float() * padding_mask.reshape(-1, 1).float()
    return affinities.reshape(-1, 1), token_of, block_to_expert, conditions


def _running_count(
    chosen: torch.Tensor,
    moe_group: GroupCoordinator | None,
    tp_degree: int,
    rank: torch.Tensor | None,
) -> torch.Tensor:
    """Count each expert's tokens up to and including each row; ranks share the experts."""
    experts = chosen.shape[1]
    if tp_degree == 1 or experts % tp_degree:
        return torch.cumsum(chosen.to(torch.int64), dim=0)
    if moe_group is None:
        raise ValueError(f"build_blockwise_mapping: tp_degree {tp_degree} needs a moe_group")
    share = experts // tp_degree
    place = moe_group.rank_in_group if rank is None else rank.reshape(-1)[0].long()
    columns = torch.arange(share) + place * share
    local = torch.cumsum(chosen.index_select(1, columns).to(torch.int64), dim=0)
    return moe_group.all_gather(local, dim=1)
