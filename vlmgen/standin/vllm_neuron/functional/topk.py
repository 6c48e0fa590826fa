"""Top-k over a dim that may be sharded over the ranks of a group."""

import torch
import torch.distributed as dist

from ._collectives import all_gather, group_size

__all__ = ["batch_sharded_topk", "topk"]


def topk(
    tensor: torch.Tensor,
    k: int,
    dim: int,
    gather_dim: int,
    process_group: dist.ProcessGroup | None = None,
    rank: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the k largest values of ``dim`` over all ranks, largest first.

    Args:
        tensor: this rank's shard, ``[..., n, ...]``, n equal on all ranks.
        k: how many; may exceed one shard's width.
        dim: dim to reduce.
        gather_dim: dim that is sharded over the group.
        process_group: ranks that hold the shards; None is no sharding.
        rank: this rank's number in the group as a one-element tensor, so that no rank number
            enters a compiled graph.

    Returns:
        (values, int64 indices). Without a group or in a group of one the values keep the input
        dtype; in a larger group they are float32 and the indices global.

    Raises:
        ValueError: the reduced dim is sharded and rank is None.
    """
    if group_size(process_group) == 1:
        return torch.topk(tensor, k, dim=dim)
    dim = dim % tensor.dim()
    gather_dim = gather_dim % tensor.dim()
    wide = tensor.float()
    if dim != gather_dim:
        values, indices = torch.topk(wide, k, dim=dim)
        return (
            all_gather(values, gather_dim, process_group),
            all_gather(indices, gather_dim, process_group),
        )
    if rank is None:
        raise ValueError(
            f"topk: dim {dim} is sharded over {group_size(process_group)} ranks, so rank must be "
            "given as a tensor"
        )
    width = tensor.shape[dim]
    values, indices = torch.topk(wide, min(k, width), dim=dim)
    indices = indices + rank.reshape(-1)[0].to(torch.int64) * width
    values = all_gather(values, dim, process_group)
    indices = all_gather(indices, dim, process_group)
    best_values, places = torch.topk(values, k, dim=dim)
    return best_values, torch.gather(indices, dim, places)


def batch_sharded_topk(
    tensor: torch.Tensor,
    k: int,
    dim: int,
    dp_degree: int,
    all2all_group: dist.ProcessGroup | None,
    gather_group: dist.ProcessGroup | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Top-k with the batch shared out over sampling data-parallel ranks.

    Args:
        tensor: this rank's vocabulary shard, ``[batch, n]``.
        k: how many.
        dim: dim to reduce.
        dp_degree: sampling data-parallel degree; 1 in the stand-in.
        all2all_group: unused at degree 1.
        gather_group: unused at degree 1.

    Returns:
        (values, int64 indices).

    Raises:
        NotImplementedError: dp_degree above 1.
    """
    if dp_degree != 1:
        raise NotImplementedError(
            f"batch_sharded_topk: the stand-in samples with dp_degree 1, not {dp_degree}"
        )
    return topk(tensor, k, dim, dim)
