"""Prefill attention over a paged cache, one segment of the prompt at a time.

Shapes: n_q query heads, n_kv KV heads, S_q query tokens, D head width.
"""

import torch

from .._sizes_rule import check_kernel_sizes

__all__ = ["segmented_attention", "segmented_attention_cp"]

SEGMENT_SIZES = (512, 1024, 2048, 4096, 8192)


def segmented_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    prior_tokens: torch.Tensor,
    block_size: int,
    kv_segment_size: int,
    scale: float | None = None,
    tp_q: bool = True,
    tp_out: bool = False,
    sliding_window: int | None = None,
    sink: torch.Tensor | None = None,
    fp8_packed: bool = False,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend causally to everything that one request has in its cache blocks.

    The current chunk's K and V must already be in the cache. Everything runs in float32; rows that
    see nothing are zero.

    Args:
        q: ``[n_q, S_q, D]``, or ``[n_q, D, S_q]`` with ``tp_q=False``.
        k_cache: ``[blocks, n_kv, block_size, D]``; packed ``[blocks, n_kv, block_size//2, D, 2]``.
        v_cache: ``[blocks, n_kv, block_size, D]``.
        block_tables: int32 ``[rows, max_blocks]``; row 0 is read, negative entries as block 0.
        prior_tokens: integer ``[n_q, 1]``; the first element counts.
        block_size: tokens per block.
        kv_segment_size: no effect on a CPU.
        scale: None is ``D ** -0.5``.
        tp_q: layout of q.
        tp_out: True gives ``[n_q, D, S_q]``.
        sliding_window: query i sees keys above ``i - window``; None or 0 is off.
        sink: ``[n_q, 1]``, an unscaled softmax column that is dropped afterwards.
        fp8_packed: layout of k_cache.
        k_scale: no effect on a CPU.
        v_scale: no effect on a CPU.

    Returns:
        ``[n_q, S_q, D]`` or ``[n_q, D, S_q]`` in q's dtype.
    """
    query = (q if tp_q else q.transpose(1, 2)).float()
    check_kernel_sizes(
        "segmented_attention",
        (query.shape[2] <= 128, f"head width <= 128, not {query.shape[2]}"),
        (kv_segment_size in SEGMENT_SIZES, f"segment in {SEGMENT_SIZES}, not {kv_segment_size}"),
        (kv_segment_size % block_size == 0, f"block {block_size} divides the segment"),
        ((sliding_window or 0) % block_size == 0, f"block {block_size} divides the window"),
        (query.shape[1] == kv_segment_size, f"S_q == segment, not {query.shape[1]}"),
    )
    if fp8_packed:
        k_cache = k_cache.transpose(-1, -2).flatten(2, 3)  # [blocks, n_kv, block_size, D]
    blocks = block_tables[0].clamp(min=0)
    key = k_cache[blocks].float().transpose(0, 1).flatten(1, 2)  # [n_kv, S_k, D]
    value = v_cache[blocks].float().transpose(0, 1).flatten(1, 2)
    group = query.shape[0] // key.shape[0]
    key = key.repeat_interleave(group, dim=0)
    value = value.repeat_interleave(group, dim=0)

    scale = query.shape[2] ** -0.5 if scale is None else scale
    scores = torch.matmul(query, key.transpose(1, 2)) * scale  # [n_q, S_q, S_k]
    positions = torch.arange(scores.shape[1], device=q.device) + prior_tokens.reshape(-1)[0]
    keys = torch.arange(scores.shape[2], device=q.device)
    visible = keys <= positions.unsqueeze(-1)
    if sliding_window:
        visible = visible & (keys > positions.unsqueeze(-1) - sliding_window)
    scores = scores.masked_fill(~visible, float("-inf"))
    if sink is not None:
        column = sink.float().unsqueeze(-1).expand(-1, scores.shape[1], 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = torch.nan_to_num(torch.softmax(scores, dim=-1), nan=0.0)
    if sink is not None:
        weights = weights[..., :-1]
    output = torch.matmul(weights, value).to(q.dtype)
    return output.transpose(1, 2) if tp_out else output


def segmented_attention_cp(
    q: torch.Tensor,
    k_local: torch.Tensor,
    v_local: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    prior_tokens: torch.Tensor,
    block_size: int,
    cp_rank: int | torch.Tensor,
    cp_world_size: int,
    cp_kv_cache_interleave_size: int,
    cp_group: object,
    scale: float | None = None,
    tp_q: bool = True,
    tp_out: bool = False,
) -> torch.Tensor:
    """Refuse to run: the stand-in has no decode context parallelism.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError(
        "segmented_attention_cp: the stand-in has no decode context parallelism "
        f"(cp_world_size {cp_world_size})"
    )
