"""Sampling as a module, configured once and called with per-request settings."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from ..functional._collectives import group_size
from ..functional.sampling import sample

if TYPE_CHECKING:
    from ..model.neuron_config import OnDeviceSamplingConfig

__all__ = ["Sampler"]


class Sampler(nn.Module):
    """Turns logits into token ids, with an optional mask of allowed tokens."""

    def __init__(
        self,
        sampling_config: OnDeviceSamplingConfig,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        """Read the configuration.

        Args:
            sampling_config: how tokens are sampled.
            process_group: ranks that hold the vocabulary shards; None is no sharding.
        """
        super().__init__()
        self.process_group = process_group
        self.all_greedy: bool = sampling_config.all_greedy
        self.max_top_k: int = sampling_config.max_top_k
        self.deterministic: bool = sampling_config.deterministic
        self.capture_topk: bool = sampling_config.capture_topk

    def forward(
        self,
        logits: torch.Tensor,
        sampling_params: torch.Tensor | None = None,
        logit_mask: torch.Tensor | None = None,
        tp_rank: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Draw one token per row.

        Args:
            logits: ``[batch, vocab]``, or this rank's vocabulary shard.
            sampling_params: float ``[batch, 3]``, columns top_k, top_p, temperature; None is top-k
                off, top-p 1, temperature 1. all_greedy wins over it.
            logit_mask: bool, True = allowed: the full vocabulary's width (cut to the shard with
                tp_rank) or the shard's own.
            tp_rank: this rank's number as a one-element tensor.

        Returns:
            int32 ``[batch]`` global token ids.

        Raises:
            ValueError: a full-width mask over several ranks without tp_rank as a tensor of one
                element.
        """
        if logit_mask is not None:
            allowed = self._shard_of_mask(logit_mask, logits.shape[-1], tp_rank)
            logits = logits.masked_fill(~allowed, float("-inf"))
        top_k: int | torch.Tensor = -1
        top_p: float | torch.Tensor = 1.0
        temperature: float | torch.Tensor = 1.0
        if not self.all_greedy and sampling_params is not None:
            top_k = sampling_params[:, 0].to(torch.int32)
            top_p = sampling_params[:, 1]
            temperature = sampling_params[:, 2]
        return sample(
            logits=logits,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            deterministic=self.deterministic,
            all_greedy=self.all_greedy,
            tp_group=self.process_group,
            max_top_k=self.max_top_k,
            tp_rank=tp_rank,
            capture_topk=self.capture_topk,
        )

    def _shard_of_mask(
        self, logit_mask: torch.Tensor, width: int, tp_rank: torch.Tensor | None
    ) -> torch.Tensor:
        """Cut this rank's columns ``[batch, width]`` out of a full-width mask."""
        if group_size(self.process_group) == 1 or logit_mask.shape[-1] == width:
            return logit_mask
        if not torch.is_tensor(tp_rank) or tp_rank.numel() != 1:
            raise ValueError(
                f"Sampler: a mask of the full width {logit_mask.shape[-1]} over shards of {width} "
                f"needs tp_rank as a tensor of one element, not {tp_rank!r}"
            )
        columns = tp_rank.reshape(-1).long() * width + torch.arange(width, device=logit_mask.device)
        return logit_mask.index_select(-1, columns)
