"""Embedding tables sharded over tensor-parallel ranks.

Shapes: T tokens, V vocabulary, D embedding width, ``tp`` ranks in the group.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from vllm_neuron.utils.weight_loader import set_weight_loader, sharding_weight_loader

from ..functional._collectives import (
    all_gather,
    all_reduce_sum,
    group_rank,
    group_size,
    reduce_scatter_sum,
)
from ._groups import resolve_group

__all__ = ["EmbedDimShardedEmbedding", "VocabDimShardedEmbedding"]


class VocabDimShardedEmbedding(nn.Module):
    """Embedding whose rows are shared out; the last shard is filled up with zero rows."""

    def __init__(
        self,
        vocab_size: int,
        embed_dim: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        tp_group: dist.ProcessGroup | None = None,
    ) -> None:
        """Allocate this rank's ``[ceil(V/tp), D]`` rows.

        Args:
            vocab_size: V.
            embed_dim: D.
            device: where the table lives; ``meta`` is allowed.
            dtype: dtype of the table.
            tp_group: ranks; None is the world group.
        """
        super().__init__()
        self.tp_group = resolve_group(tp_group)
        self.tp_size = group_size(self.tp_group)
        self.tp_rank = group_rank(self.tp_group)
        self.vocab_size = vocab_size
        self.embed_dim = embed_dim
        self.vocab_size_per_rank = -(-vocab_size // self.tp_size)
        self.vocab_start_idx = self.tp_rank * self.vocab_size_per_rank
        self.weight = nn.Parameter(
            torch.empty(self.vocab_size_per_rank, embed_dim, device=device, dtype=dtype),
            requires_grad=False,
        )
        set_weight_loader(
            self.weight,
            sharding_weight_loader(
                shard_dim=0,
                shard_size=self.vocab_size_per_rank,
                num_shards=self.tp_size,
                pad_shard=True,
            ),
        )

    def forward(
        self,
        input: torch.Tensor,
        scatter_tokens: bool = True,
        rank: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Look tokens up and bring the ranks' parts together.

        Args:
            input: integer ``[T]``, the same on every rank.
            scatter_tokens: True leaves each rank its share of the tokens (the start of sequence
                parallelism), False gives all tokens to every rank.
            rank: this rank's number as a one-element tensor, so that one compiled graph serves
                every rank; None takes the number known at construction.

        Returns:
            ``[T/tp, D]`` with scatter_tokens, else ``[T, D]``.

        Raises:
            AssertionError: scatter_tokens and tp does not divide T, or input is not 1-D.
        """
        assert input.dim() == 1, f"VocabDimShardedEmbedding: ids are [T], not {list(input.shape)}"
        if self.tp_size == 1:
            return F.embedding(input, self.weight)
        assert not scatter_tokens or input.shape[0] % self.tp_size == 0, (
            f"VocabDimShardedEmbedding: {input.shape[0]} tokens do not divide over "
            f"{self.tp_size} ranks"
        )
        if rank is None:
            start: int | torch.Tensor = self.vocab_start_idx
        else:
            start = rank.reshape(-1)[0].to(input.dtype) * self.vocab_size_per_rank
        local = input - start
        here = (local >= 0) & (local < self.vocab_size_per_rank)
        rows = F.embedding(torch.where(here, local, torch.zeros_like(local)), self.weight)
        rows = torch.where(here.unsqueeze(-1), rows, torch.zeros_like(rows))
        if scatter_tokens:
            return reduce_scatter_sum(rows, self.tp_group)
        return all_reduce_sum(rows, self.tp_group)


class EmbedDimShardedEmbedding(nn.Module):
    """Embedding whose columns are shared out over the ranks."""

    def __init__(
        self,
        vocab_size: int,
        embed_dim: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        tp_group: dist.ProcessGroup | None = None,
    ) -> None:
        """Allocate this rank's ``[V, D/tp]`` columns.

        Args:
            vocab_size: V.
            embed_dim: D, divisible by tp.
            device: where the table lives; ``meta`` is allowed.
            dtype: dtype of the table.
            tp_group: ranks; None is the world group.

        Raises:
            AssertionError: tp does not divide embed_dim.
        """
        super().__init__()
        self.tp_group = resolve_group(tp_group)
        self.tp_size = group_size(self.tp_group)
        self.tp_rank = group_rank(self.tp_group)
        assert (
            embed_dim % self.tp_size == 0
        ), f"EmbedDimShardedEmbedding: width {embed_dim} does not divide over {self.tp_size} ranks"
        self.vocab_size = vocab_size
        self.embed_dim = embed_dim
        self.embed_dim_per_rank = embed_dim // self.tp_size
        self.weight = nn.Parameter(
            torch.empty(vocab_size, self.embed_dim_per_rank, device=device, dtype=dtype),
            requires_grad=False,
        )
        set_weight_loader(
            self.weight,
            sharding_weight_loader(
                shard_dim=1, shard_size=self.embed_dim_per_rank, num_shards=self.tp_size
            ),
        )

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Look ``[T]`` ids up: ``[T, D]`` after an all-gather on dim 1."""
        return all_gather(F.embedding(input, self.weight), 1, self.tp_group)
