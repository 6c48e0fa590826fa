"""Arg-max over a dim that may be sharded over the ranks of a group."""

import torch
import torch.distributed as dist

from ._collectives import all_gather, group_size

__all__ = ["argmax"]


def argmax(
    tensor: torch.Tensor,
    dim: int,
    gather_dim: int,
    keepdim: bool = False,
    process_group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Return where the largest value of ``dim`` sits, counted over all ranks.

    Args:
        tensor: this rank's shard, ``[..., n, ...]``, n equal on all ranks.
        dim: dim to reduce.
        gather_dim: dim that is sharded over the group.
        keepdim: keep the reduced dim with size 1.
        process_group: ranks that hold the shards; required.

    Returns:
        int64 indices; global ones when the reduced dim is the sharded one. A group of one works in
        the input dtype, a larger one in float32.

    Raises:
        ValueError: process_group is None.
    """
    if process_group is None:
        raise ValueError("argmax: process_group is required, None was given")
    ranks = group_size(process_group)
    if ranks == 1:
        return torch.argmax(tensor, dim=dim, keepdim=keepdim)
    dim = dim % tensor.dim()
    gather_dim = gather_dim % tensor.dim()
    if dim != gather_dim:
        # Every rank has whole rows: the results are what is sharded.
        local = torch.argmax(tensor.float(), dim=dim, keepdim=True)
        gathered = all_gather(local, gather_dim, process_group)
        return gathered if keepdim else gathered.squeeze(dim)
    values, local = tensor.float().max(dim=dim, keepdim=True)
    values = all_gather(values, dim, process_group)
    indices = all_gather(local, dim, process_group)
    best_rank = torch.argmax(values, dim=dim, keepdim=True)
    best = torch.gather(indices, dim, best_rank) + best_rank * tensor.shape[dim]
    return best if keepdim else best.squeeze(dim)
