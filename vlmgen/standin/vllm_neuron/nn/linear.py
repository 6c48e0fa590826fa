"""Linear layers sharded over tensor-parallel ranks.

Shapes: ``tp`` ranks in the group.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from vllm_neuron.utils.weight_loader import set_weight_loader, sharding_weight_loader

from ..functional._collectives import all_gather, all_reduce_sum, group_rank, group_size
from ._groups import resolve_group

__all__ = ["ColumnParallelLinear", "RowParallelLinear"]


class ColumnParallelLinear(nn.Module):
    """Linear layer whose output features are shared out over the ranks."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        gather_output: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        tp_group: dist.ProcessGroup | None = None,
    ) -> None:
        """Allocate this rank's shard.

        Args:
            in_features: input width.
            out_features: output width over all ranks, divisible by tp.
            bias: add a bias ``[out/tp]``.
            gather_output: all-gather the result on dim 1, for 2-D inputs.
            device: where the parameters live; ``meta`` is allowed.
            dtype: dtype of the parameters.
            tp_group: ranks; None is the world group.

        Raises:
            AssertionError: tp does not divide out_features.
        """
        super().__init__()
        self.tp_group = resolve_group(tp_group)
        self.tp_size = group_size(self.tp_group)
        self.tp_rank = group_rank(self.tp_group)
        assert (
            out_features % self.tp_size == 0
        ), f"ColumnParallelLinear: {out_features} outputs do not divide over {self.tp_size} ranks"
        self.in_features = in_features
        self.out_features = out_features
        self.out_features_per_rank = out_features // self.tp_size
        self.gather_output = gather_output
        self.weight = nn.Parameter(
            torch.empty(self.out_features_per_rank, in_features, device=device, dtype=dtype),
            requires_grad=False,
        )
        loader = sharding_weight_loader(
            shard_dim=0, shard_size=self.out_features_per_rank, num_shards=self.tp_size
        )
        set_weight_loader(self.weight, loader)
        if bias:
            self.bias = nn.Parameter(
                torch.empty(self.out_features_per_rank, device=device, dtype=dtype),
                requires_grad=False,
            )
            set_weight_loader(self.bias, loader)
        else:
            self.register_parameter("bias", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Project ``[..., in]`` to ``[..., out/tp]``, or ``[T, out]`` with gather_output."""
        output = F.linear(x, self.weight, self.bias)
        return all_gather(output, 1, self.tp_group) if self.gather_output else output


class RowParallelLinear(nn.Module):
    """Linear layer whose input features are shared out over the ranks."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        input_is_parallel: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        tp_group: dist.ProcessGroup | None = None,
    ) -> None:
        """Allocate this rank's shard.

        Args:
            in_features: input width over all ranks, divisible by tp.
            out_features: output width.
            bias: add a bias ``[out]``, the same on every rank.
            input_is_parallel: the input is this rank's share ``[..., in/tp]`` already; False takes
                ``[..., in]`` and cuts the share out.
            device: where the parameters live; ``meta`` is allowed.
            dtype: dtype of the parameters.
            tp_group: ranks; None is the world group.

        Raises:
            AssertionError: tp does not divide in_features.
            NotImplementedError: a bias in another dtype than float32 over several ranks.
        """
        super().__init__()
        self.tp_group = resolve_group(tp_group)
        self.tp_size = group_size(self.tp_group)
        self.tp_rank = group_rank(self.tp_group)
        assert (
            in_features % self.tp_size == 0
        ), f"RowParallelLinear: {in_features} inputs do not divide over {self.tp_size} ranks"
        self.in_features = in_features
        self.out_features = out_features
        self.in_features_per_rank = in_features // self.tp_size
        self.input_is_parallel = input_is_parallel
        self.weight = nn.Parameter(
            torch.empty(out_features, self.in_features_per_rank, device=device, dtype=dtype),
            requires_grad=False,
        )
        set_weight_loader(
            self.weight,
            sharding_weight_loader(
                shard_dim=1, shard_size=self.in_features_per_rank, num_shards=self.tp_size
            ),
        )
        if bias:
            if self.tp_size > 1 and self.weight.dtype != torch.float32:
                raise NotImplementedError(
                    f"RowParallelLinear: a bias over {self.tp_size} ranks must be float32, "
                    f"not {self.weight.dtype}"
                )
            self.bias = nn.Parameter(
                torch.empty(out_features, device=device, dtype=dtype), requires_grad=False
            )
        else:
            self.register_parameter("bias", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Project to ``[..., out]``: linear, sum over the ranks, bias."""
        if not self.input_is_parallel and self.tp_size > 1:
            x = x.narrow(-1, self.tp_rank * self.in_features_per_rank, self.in_features_per_rank)
        output = all_reduce_sum(F.linear(x, self.weight), self.tp_group)
        return output if self.bias is None else output + self.bias
