"""Prefill and encoder attention over whole sequences.

Shapes: B = batch times query heads, B_kv = batch times KV heads, S_q and S_k tokens, D head width.
"""

import torch

from .._sizes_rule import check_kernel_sizes

__all__ = ["flash_attention"]


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float | None = None,
    causal_mask: bool = True,
    sink: torch.Tensor | None = None,
    sliding_window: int | None = None,
    tp_q: bool = True,
    tp_k: bool = False,
    tp_out: bool = False,
    cp_offset: torch.Tensor | None = None,
    global_cp_deg: int | None = None,
    cp_strided_q_slicing: bool = False,
    k_prior: torch.Tensor | None = None,
    v_prior: torch.Tensor | None = None,
    prior_used_len: torch.Tensor | None = None,
    bound_min: torch.Tensor | None = None,
    bound_max: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend from every query row to the keys its masks leave visible.

    Both matmuls run in the input dtype, the softmax in float32. A hidden score holds the dtype's
    lowest finite value, so a row that sees nothing returns the mean of all of V, or exact zeros
    when there is a sink.

    Args:
        q: ``[B, S_q, D]``, or ``[B, D, S_q]`` with ``tp_q=False``.
        k: ``[B_kv, D, S_k]``, or ``[B_kv, S_k, D]`` with ``tp_k=True``; query row i reads key row
            ``i // (B // B_kv)``.
        v: ``[B_kv, S_k, D]``.
        scale: factor on the scores; None is ``1/sqrt(D)`` with D from v.
        causal_mask: query i sees keys up to i, plus used prior length and cp_offset.
        sink: ``[B, 1]``, an unscaled extra softmax column that is dropped afterwards.
        sliding_window: query i sees keys above ``i - window``; 0 or None is off, and it counts
            only together with causal_mask.
        tp_q: layout of q.
        tp_k: layout of k.
        tp_out: True gives ``[B, D, S_q]``.
        cp_offset: ``[1, 1]`` integer, added to the query positions.
        global_cp_deg: no effect on a CPU.
        cp_strided_q_slicing: no effect on a CPU.
        k_prior: earlier keys in the layout of k.
        v_prior: earlier values in the layout of v.
        prior_used_len: ``[1]`` integer, how many earlier keys count; None counts as 0. Reading it
            makes the call untraceable.
        bound_min: int32 ``[B, S_q, 1]``, first visible key of each query.
        bound_max: int32 ``[B, S_q, 1]``, one past the last visible key.

    Returns:
        ``[B, S_q, D]``, or ``[B, D, S_q]`` with ``tp_out``, in q's dtype.

    Raises:
        AssertionError: one bound without the other.
        TypeError: k_prior without v_prior.
        RuntimeError: B is no multiple of B_kv.
    """
    assert (bound_min is None) == (
        bound_max is None
    ), "flash_attention: bound_min and bound_max belong together, only one was given"
    check_kernel_sizes(
        "flash_attention",
        (v.shape[0] <= 512, f"rows of v <= 512, not {v.shape[0]}"),
        (v.shape[1] <= 131072, f"keys <= 131072, not {v.shape[1]}"),
        (v.shape[2] <= 128, f"head width <= 128, not {v.shape[2]}"),
    )
    query = q if tp_q else q.transpose(1, 2)  # [B, S_q, D]
    key = k.transpose(1, 2) if tp_k else k  # [B_kv, D, S_k]
    value = v

    prior_length = 0
    if k_prior is not None:
        if v_prior is None:
            raise TypeError("flash_attention: k_prior given without v_prior")
        prior_length = 0 if prior_used_len is None else int(prior_used_len.reshape(-1)[0])
        prior_key = k_prior.transpose(1, 2) if tp_k else k_prior
        key = torch.cat([prior_key[:, :, :prior_length], key], dim=2)
        value = torch.cat([v_prior[:, :prior_length], value], dim=1)

    repeats = query.shape[0] // key.shape[0]
    if repeats > 1:
        key = key.repeat_interleave(repeats, dim=0)
        value = value.repeat_interleave(repeats, dim=0)

    if scale is None:
        scale = v.shape[2] ** -0.5
    scores = torch.matmul(query, key) * scale  # [B, S_q, S_k]
    visible = _visible_keys(
        scores, causal_mask, sliding_window, prior_length, cp_offset, bound_min, bound_max
    )
    if visible is not None:
        scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)

    if sink is not None:
        column = sink.unsqueeze(-1).expand(-1, scores.shape[1], 1)
        scores = torch.cat([scores, column.to(torch.promote_types(scores.dtype, sink.dtype))], -1)
    weights = torch.softmax(scores.float(), dim=-1)
    if sink is not None:
        weights = weights[..., :-1]
    output = torch.matmul(weights.to(query.dtype), value)
    return output.transpose(1, 2) if tp_out else output


def _visible_keys(
    scores: torch.Tensor,
    causal_mask: bool,
    sliding_window: int | None,
    prior_length: int,
    cp_offset: torch.Tensor | None,
    bound_min: torch.Tensor | None,
    bound_max: torch.Tensor | None,
) -> torch.Tensor | None:
    """Combine all masks into a bool tensor that broadcasts to the scores; None hides nothing."""
    keys = torch.arange(scores.shape[2], device=scores.device)
    visible = None
    if causal_mask:
        positions = torch.arange(scores.shape[1], device=scores.device) + prior_length
        if cp_offset is not None:
            positions = positions + cp_offset.reshape(-1)[0]
        positions = positions.unsqueeze(-1)
        visible = keys <= positions
        if sliding_window:
            visible = visible & (keys > positions - sliding_window)
    if bound_min is not None and bound_max is not None:
        in_bounds = (keys >= bound_min) & (keys < bound_max)
        visible = in_bounds if visible is None else visible & in_bounds
    return visible
