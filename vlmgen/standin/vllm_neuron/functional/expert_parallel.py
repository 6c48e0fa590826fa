"""Arithmetic of expert parallelism: which rank holds which experts."""

import torch

__all__ = [
    "calculate_local_expert_indices",
    "get_local_expert_affinities",
    "validate_expert_parallelism_config",
]


def calculate_local_expert_indices(
    ep_rank: int | torch.Tensor,
    ep_degree: int,
    total_num_experts: int,
    device: torch.device | str,
) -> torch.Tensor:
    """Return the consecutive expert numbers of one rank.

    Args:
        ep_rank: expert-parallel rank, a number or a one-element tensor.
        ep_degree: expert-parallel degree.
        total_num_experts: experts in the model; a remainder is dropped.
        device: where the result lives.

    Returns:
        int64 ``[total_num_experts // ep_degree]``.
    """
    count = total_num_experts // ep_degree
    first = ep_rank.reshape(-1)[0].to(torch.int64) if torch.is_tensor(ep_rank) else ep_rank
    return torch.arange(count, dtype=torch.int64, device=device) + first * count


def validate_expert_parallelism_config(ep_degree: int, num_experts: int, world_size: int) -> None:
    """Refuse an expert-parallel degree that does not fit the model or the machine.

    Args:
        ep_degree: expert-parallel degree.
        num_experts: experts in the model.
        world_size: ranks.

    Raises:
        ValueError: a degree below 1, above the world size, or dividing neither it nor the experts.
    """
    if num_experts < 1:
        raise ValueError(f"expert parallelism needs experts, num_experts is {num_experts}")
    if ep_degree < 1:
        raise ValueError(f"ep_degree must be at least 1, not {ep_degree}")
    if ep_degree > world_size:
        raise ValueError(f"ep_degree {ep_degree} exceeds the world size {world_size}")
    if world_size % ep_degree:
        raise ValueError(f"ep_degree {ep_degree} does not divide the world size {world_size}")
    if num_experts % ep_degree:
        raise ValueError(f"ep_degree {ep_degree} does not divide the {num_experts} experts")


def get_local_expert_affinities(
    expert_affinities: torch.Tensor, local_expert_indices: torch.Tensor
) -> torch.Tensor:
    """Pick this rank's expert columns.

    Args:
        expert_affinities: ``[T, E]``.
        local_expert_indices: integer ``[E_local]``.

    Returns:
        ``[T, E_local]``.

    Raises:
        ValueError: affinities not 2-D, or no local experts.
    """
    if expert_affinities.dim() != 2:
        raise ValueError(f"expert_affinities must be [T, E], not {list(expert_affinities.shape)}")
    if local_expert_indices.numel() == 0:
        raise ValueError("local_expert_indices is empty: every rank needs at least one expert")
    return expert_affinities.index_select(1, local_expert_indices.reshape(-1).long())
