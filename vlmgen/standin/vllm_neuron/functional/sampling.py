"""On-device sampling: top-k, temperature, softmax, top-p, draw."""

import torch
import torch.distributed as dist

from ._collectives import group_size
from .argmax import argmax
from .cumsum import cumsum
from .topk import topk

__all__ = ["sample"]

GREEDY_BELOW = 1e-5  # temperatures below this take the best candidate
CUT_LOGIT = -3000.0  # what entries beyond top_k get; finite, as on the device
DETERMINISTIC_DRAW = 0.5


def sample(
    logits: torch.Tensor,
    temperature: float | torch.Tensor = 1.0,
    top_k: int | torch.Tensor = -1,
    top_p: float | torch.Tensor = 1.0,
    deterministic: bool = False,
    all_greedy: bool = False,
    tp_group: dist.ProcessGroup | None = None,
    max_top_k: int = 256,
    all2all_group: dist.ProcessGroup | None = None,
    gather_group: dist.ProcessGroup | None = None,
    tp_rank: torch.Tensor | None = None,
    capture_topk: bool = False,
) -> torch.Tensor:
    """Draw one token per row.

    The candidates are the best ``min(max_top_k, width of the local logits)`` entries, even with
    top_k off. Top-p keeps an entry when the running sum including it does not exceed p, and always
    the first: stricter than the usual rule, which keeps the entry that crosses p.

    Args:
        logits: ``[batch, vocab]``, or this rank's vocabulary shard when tp_group is given.
        temperature: number or ``[batch]`` (one element serves all rows); below 1e-5 is greedy.
        top_k: number or ``[batch]``; 0 and below is off.
        top_p: number or ``[batch]``.
        deterministic: use 0.5 in place of a random number.
        all_greedy: take the largest logit of every row, whatever the other settings.
        tp_group: ranks that hold the vocabulary shards.
        max_top_k: upper limit of the number of candidates.
        all2all_group: None in the stand-in, which samples without data parallelism.
        gather_group: None in the stand-in.
        tp_rank: this rank's number as a one-element tensor; needed with several ranks unless
            all_greedy.
        capture_topk: False in the stand-in.

    Returns:
        int32 ``[batch]`` global token ids.

    Raises:
        ValueError: several ranks, not all_greedy, and no tp_rank.
        NotImplementedError: data-parallel sampling or capture_topk.
    """
    if all2all_group is not None or gather_group is not None:
        raise NotImplementedError("sample: the stand-in samples without data parallelism")
    if capture_topk:
        raise NotImplementedError("sample: capture_topk has no stand-in")
    sharded = group_size(tp_group) > 1
    if all_greedy:
        if sharded:
            return argmax(logits, -1, -1, process_group=tp_group).to(torch.int32)
        return torch.argmax(logits, dim=-1).to(torch.int32)
    if sharded and tp_rank is None:
        raise ValueError(
            f"sample: the vocabulary is split over {group_size(tp_group)} ranks, so tp_rank must "
            "be given as a tensor"
        )

    candidates = min(max_top_k, logits.shape[-1])
    values, token_ids = topk(logits, candidates, -1, -1, process_group=tp_group, rank=tp_rank)

    k_limit = _per_row(top_k, values, torch.int64)
    places = torch.arange(candidates, device=values.device)
    values = values.masked_fill((k_limit > 0) & (places >= k_limit), CUT_LOGIT)

    temperatures = _per_row(temperature, values)
    greedy = temperatures < GREEDY_BELOW
    scaled = values / torch.where(greedy, torch.ones_like(temperatures), temperatures)
    probabilities = torch.softmax(scaled, dim=-1)

    # A running sum may round to just above one, so p = 1 is not left to the comparison.
    p_limit = _per_row(top_p, probabilities)
    kept = (cumsum(probabilities) <= p_limit) | (places == 0) | (p_limit >= 1)
    probabilities = probabilities * kept

    # The draw picks the first entry whose running share of what is left reaches it.
    running = cumsum(probabilities)
    total = running[:, -1:]
    if deterministic:
        draw = torch.full_like(total, DETERMINISTIC_DRAW)
    else:
        draw = torch.rand_like(total)
    place = (running < draw * total).sum(dim=-1, keepdim=True)
    place = torch.minimum(place, kept.sum(dim=-1, keepdim=True) - 1)
    place = torch.where(greedy, torch.zeros_like(place), place)
    return torch.gather(token_ids, -1, place).squeeze(-1).to(torch.int32)


def _per_row(
    setting: float | torch.Tensor, values: torch.Tensor, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Bring a setting to ``[batch, 1]``; numbers take the dtype of the values."""
    batch = values.shape[0]
    if torch.is_tensor(setting):
        return setting.to(values.device).reshape(-1, 1).expand(batch, 1)
    return torch.full((batch, 1), setting, dtype=dtype or values.dtype, device=values.device)
