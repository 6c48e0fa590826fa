"""Collectives over a torch process group that also trace under ``torch.compile``.

A group of one never communicates. ``None`` stands for no group at all.
"""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

# torch 2.13 renamed both; the plugin's torch 2.11 has the old names.
_gather = getattr(funcol, "all_gather_single", None) or funcol.all_gather_tensor
_scatter = getattr(funcol, "reduce_scatter_single", None) or funcol.reduce_scatter_tensor

__all__ = ["all_gather", "all_reduce_sum", "group_rank", "group_size", "reduce_scatter_sum"]


def group_size(group: dist.ProcessGroup | None) -> int:
    """Return the number of ranks of a group; None counts as one."""
    return 1 if group is None else dist.get_world_size(group)


def group_rank(group: dist.ProcessGroup | None) -> int:
    """Return this process's rank in a group; None counts as rank 0."""
    return 0 if group is None else dist.get_rank(group)


def all_gather(tensor: torch.Tensor, dim: int, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Concatenate every rank's tensor along ``dim``, in rank order.

    Args:
        tensor: same shape and dtype on every rank.
        dim: dimension to concatenate on; negative counts from the end.
        group: process group.

    Returns:
        The input with ``dim`` as many times longer as the group has ranks.
    """
    if group is None or group_size(group) == 1:
        return tensor
    # The functional collective gathers dim 0 fastest, so the wanted dim goes there and back.
    rows = tensor.movedim(dim, 0).contiguous()
    gathered = funcol.wait_tensor(_gather(rows, 0, group))
    return gathered.movedim(0, dim)


def all_reduce_sum(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Sum a tensor over the group; the input is left as it was."""
    if group is None or group_size(group) == 1:
        return tensor
    return funcol.wait_tensor(funcol.all_reduce(tensor.contiguous(), "sum", group))


def reduce_scatter_sum(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Sum over the group and keep this rank's equal share of dim 0.

    Args:
        tensor: ``[T, ...]``, T divisible by the group's size.
        group: process group.

    Returns:
        ``[T / size, ...]``: rank r has rows r*T/size to (r+1)*T/size - 1 of the sum.
    """
    if group is None or group_size(group) == 1:
        return tensor
    scattered = _scatter(tensor.contiguous(), "sum", 0, group)
    return funcol.wait_tensor(scattered)
