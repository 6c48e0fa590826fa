"""QKV, RoPE, windowed attention and output projection of a prefill chunk in one call.

Shapes: B batch, S tokens, H hidden width, d head width.
"""

import torch

from .._sizes_rule import check_kernel_sizes
from .attention_segmented_cte import segmented_attention

__all__ = ["swa_fused_attention"]


def swa_fused_attention(
    hidden_states: torch.Tensor,
    qkv_weight: torch.Tensor,
    op_weight: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    cos_cache: torch.Tensor,
    sin_cache: torch.Tensor,
    sink: torch.Tensor,
    prior_tokens: torch.Tensor,
    qkv_bias: torch.Tensor,
    op_bias: torch.Tensor,
    scale: float,
    sliding_window: int,
    block_size: int,
    num_q_heads: int,
    num_kv_heads: int,
    d_head: int,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run one sliding-window attention layer over a chunk and write its K and V to the cache.

    Works in float32. Reading prior_tokens as a number makes the call untraceable.

    Args:
        hidden_states: ``[B, S, H]``.
        qkv_weight: ``[H, (n_q + 2*n_kv)*d]``.
        op_weight: ``[n_q*d, H]``.
        k_cache: ``[blocks, n_kv, block_size, d]``, written in place.
        v_cache: as k_cache.
        block_tables: int32 ``[B, max_blocks]``.
        cos_cache: ``[B, S, d]``.
        sin_cache: ``[B, S, d]``.
        sink: ``[B, n_q]``.
        prior_tokens: int32 ``[1, 1]``.
        qkv_bias: ``[1, (n_q + 2*n_kv)*d]``.
        op_bias: ``[1, H]``.
        scale: factor on the scores.
        sliding_window: window length.
        block_size: tokens per block.
        num_q_heads: n_q.
        num_kv_heads: n_kv.
        d_head: d.
        k_scale: no effect on a CPU.
        v_scale: no effect on a CPU.

    Returns:
        (output ``[B, S, H]`` in the input dtype, k_cache, v_cache).
    """
    batch, tokens, _ = hidden_states.shape
    check_kernel_sizes(
        "swa_fused_attention",
        (sliding_window <= block_size, f"window <= block {block_size}, not {sliding_window}"),
        (tokens % 128 == 0, f"S % 128 == 0, not {tokens}"),
        (d_head <= 128, f"head width <= 128, not {d_head}"),
    )
    prior = int(prior_tokens.reshape(-1)[0])
    fused = torch.matmul(hidden_states.float(), qkv_weight.float()) + qkv_bias.float()
    heads = fused.unflatten(-1, (-1, d_head))  # [B, S, n_q + 2*n_kv, d]
    first_v = num_q_heads + num_kv_heads
    rotated = _rotate(heads[:, :, :first_v], cos_cache.float(), sin_cache.float())
    q, k, v = rotated[:, :, :num_q_heads], rotated[:, :, num_q_heads:], heads[:, :, first_v:]

    outputs = []
    for row in range(batch):
        positions = torch.arange(prior, prior + tokens)
        blocks = block_tables[row].long()[positions // block_size]
        offsets = positions % block_size
        # Earlier keys come from the cache as stored, the chunk's own ones unrounded.
        context_k = _with_chunk(k_cache, block_tables[row], k[row], prior)
        context_v = _with_chunk(v_cache, block_tables[row], v[row], prior)
        attended = segmented_attention(
            q=q[row].transpose(0, 1),
            k_cache=context_k,
            v_cache=context_v,
            block_tables=torch.zeros(1, 1, dtype=torch.int32),
            prior_tokens=torch.full((1, 1), prior),
            block_size=context_k.shape[2],
            kv_segment_size=tokens,
            scale=scale,
            sliding_window=sliding_window,
            sink=sink[row].unsqueeze(-1),
        )  # [n_q, S, d]
        k_cache[blocks, :, offsets] = k[row].to(k_cache.dtype)
        v_cache[blocks, :, offsets] = v[row].to(v_cache.dtype)
        outputs.append(attended.transpose(0, 1).flatten(1))
    output = torch.matmul(torch.stack(outputs), op_weight.float()) + op_bias.float()
    return output.to(hidden_states.dtype), k_cache, v_cache


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the halves of ``[B, S, heads, d]`` by tables ``[B, S, d]``."""
    half = x.shape[-1] // 2
    low, high = x[..., :half], x[..., half:]
    cos_low, sin_low = cos[:, :, None, :half], sin[:, :, None, :half]
    return torch.cat([low * cos_low - high * sin_low, high * cos_low + low * sin_low], dim=-1)


def _with_chunk(
    cache: torch.Tensor, table: torch.Tensor, chunk: torch.Tensor, prior: int
) -> torch.Tensor:
    """Lay a request's earlier tokens and its new ones ``[S, n_kv, d]`` out as one block."""
    earlier = cache[table.clamp(min=0)].float().transpose(0, 1).flatten(1, 2)[:, :prior]
    return torch.cat([earlier, chunk.transpose(0, 1)], dim=1).unsqueeze(0)
