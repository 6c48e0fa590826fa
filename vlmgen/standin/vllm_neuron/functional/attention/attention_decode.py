"""One decode step of attention over a paged cache, projections included.

Shapes: B requests, S new tokens per request, H hidden width, d head width, n_q and n_kv heads per
rank, S_ctx gathered context slots, nb cache blocks.
"""

import math

import torch
from nkilib.core.utils.common_types import QuantizationType

from .._norm import rms_norm_float32
from .._sizes_rule import check_kernel_sizes
from .attention_decode_mask import TILE, core_split, plain_decode_mask, slot_order

__all__ = ["attention_decode", "packed_fp8_viable_for_bucket", "scatter_packed_k"]

FP8_LIMIT = 448.0  # largest finite float8_e4m3fn; the CPU mode's clamp


def attention_decode(
    X: torch.Tensor,
    X_hidden_dim_actual: int | None = None,
    rmsnorm_X_enabled: bool = False,
    rmsnorm_X_eps: float | None = None,
    rmsnorm_X_gamma: torch.Tensor | None = None,
    W_qkv: torch.Tensor | None = None,
    bias_qkv: torch.Tensor | None = None,
    quantization_type_qkv: QuantizationType = QuantizationType.NONE,
    weight_dequant_scale_qkv: torch.Tensor | None = None,
    input_dequant_scale_qkv: torch.Tensor | None = None,
    rmsnorm_QK_pre_rope_enabled: bool = False,
    rmsnorm_QK_pre_rope_eps: float = 1e-6,
    rmsnorm_QK_pre_rope_W_Q: torch.Tensor | None = None,
    rmsnorm_QK_pre_rope_W_K: torch.Tensor | None = None,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    rope_contiguous_layout: bool = True,
    rmsnorm_QK_post_rope_enabled: bool = False,
    rmsnorm_QK_post_rope_eps: float = 1e-6,
    rmsnorm_QK_post_rope_W_Q: torch.Tensor | None = None,
    rmsnorm_QK_post_rope_W_K: torch.Tensor | None = None,
    K_cache_transposed: bool = False,
    active_blocks_table: torch.Tensor | None = None,
    K_cache: torch.Tensor | None = None,
    V_cache: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    pos_ids: torch.Tensor | None = None,
    swa_start_pos_ids: torch.Tensor | None = None,
    update_cache: bool = False,
    kv_cache_update_idx: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    fp8_packed: bool = False,
    W_out: torch.Tensor | None = None,
    bias_out: torch.Tensor | None = None,
    quantization_type_out: QuantizationType = QuantizationType.NONE,
    weight_dequant_scale_out: torch.Tensor | None = None,
    input_dequant_scale_out: torch.Tensor | None = None,
    transposed_out: bool = False,
    out_in_sb: bool = False,
    skip_attention: bool = False,
    is_h_transposed_by_4: bool = False,
    sbm_lower_bound: int | None = None,
    sbm_upper_bound: int | None = None,
    sbm_use_auto_alloc: bool = True,
    sbm_default_stack_alloc: bool = True,
    attention_dp: int = 1,
    attention_dp_group: object | None = None,
    attention_dp_rank: int = 0,
    kv_needs_a2a: bool = False,
    dcp_size: int = 1,
    dcp_group: object | None = None,
    dcp_collective_mode: str = "auto",
    dcp_active_owner: torch.Tensor | None = None,
    fp8_fused_mask_allowed: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Norm, QKV, QK-norm, RoPE, paged attention and output projection of a decode step.

    Norms run in float32 and are rounded; matmuls, the scale and RoPE run in X's dtype; mask, sink
    and softmax in float32. The new tokens take the last S slots of the gathered context, so a
    position may be at most ``S_ctx - S``. A row that sees nothing gives NaN.

    Args:
        X: ``[B, S, H]``.
        X_hidden_dim_actual: true width when H is padded; the input norm divides by it.
        rmsnorm_X_enabled: normalise X first.
        rmsnorm_X_eps: its epsilon; None counts as 1e-3, so always give it.
        rmsnorm_X_gamma: ``[1, H]``.
        W_qkv: ``[H, d*(n_q + 2*n_kv)]``, columns Q, K, V.
        bias_qkv: ``[1, d*(n_q + 2*n_kv)]``.
        quantization_type_qkv: NONE on a CPU.
        weight_dequant_scale_qkv: None on a CPU.
        input_dequant_scale_qkv: None on a CPU.
        rmsnorm_QK_pre_rope_enabled: normalise Q and K heads before RoPE.
        rmsnorm_QK_pre_rope_eps: its epsilon.
        rmsnorm_QK_pre_rope_W_Q: ``[1, d]`` or ``[d, 1]``.
        rmsnorm_QK_pre_rope_W_K: ``[1, d]`` or ``[d, 1]``.
        cos: ``[d//2, B, S]``; None is no RoPE.
        sin: ``[d//2, B, S]``.
        rope_contiguous_layout: True rotates halves, False adjacent pairs.
        rmsnorm_QK_post_rope_enabled: the same norm after RoPE.
        rmsnorm_QK_post_rope_eps: see above.
        rmsnorm_QK_post_rope_W_Q: see above.
        rmsnorm_QK_post_rope_W_K: see above.
        K_cache_transposed: no effect on a CPU.
        active_blocks_table: int32 ``[B, blocks]``, -1 inactive; ``[B, 1, blocks]`` with one KV
            head. With several KV heads only the 2-D table works on a CPU.
        K_cache: ``[nb, n_kv, block, d]``, or ``[nb, block, d]`` with one KV head; packed fp8
            ``[..., block//2, d, 2]``.
        V_cache: as K_cache, never packed.
        attention_mask: ``[S_ctx, B, n_q, S]`` in the order of gen_attention_decode_mask; with
            pos_ids it may be None and only its shape ``[S, B, n_q, S]`` is checked.
        sink: ``[n_q, 1]``, an unscaled softmax column.
        softmax_scale: None is ``d ** -0.5``.
        pos_ids: ``[B, S]``, number of earlier tokens.
        swa_start_pos_ids: ``[B, S]``, first visible position, inclusive; needs pos_ids.
        update_cache: write K and V of the new tokens into the caches, in place.
        kv_cache_update_idx: ``[B, S]`` slots. A negative slot or one past the end is redirected
            to the last offset of the last block; on a device -1 writes nothing.
        k_scale: **multiplies** new K values before they become fp8; both scales or none.
        v_scale: the same for V.
        fp8_packed: K_cache holds pairs of tokens in its last dim.
        W_out: ``[n_q*d, H]``.
        bias_out: ``[1, H]``.
        quantization_type_out: NONE on a CPU.
        weight_dequant_scale_out: None on a CPU.
        input_dequant_scale_out: None on a CPU.
        transposed_out: no effect on a CPU, like is_h_transposed_by_4 and the ``sbm_*`` parameters.
        out_in_sb: False on a CPU.
        skip_attention: False on a CPU.
        is_h_transposed_by_4: no effect.
        sbm_lower_bound: no effect.
        sbm_upper_bound: no effect.
        sbm_use_auto_alloc: no effect.
        sbm_default_stack_alloc: no effect.
        attention_dp: 1 in the stand-in.
        attention_dp_group: unused.
        attention_dp_rank: unused.
        kv_needs_a2a: unused.
        dcp_size: 1 in the stand-in.
        dcp_group: unused.
        dcp_collective_mode: unused.
        dcp_active_owner: unused.
        fp8_fused_mask_allowed: no effect.

    Returns:
        The output ``[B*S, H]`` with W_out, else ``[B, n_q, d, S]``; without update_cache the tuple
        (output, K_new ``[d, B*n_kv, S]``, V_new ``[B, n_kv, S, d]``). Nothing is reduced over
        ranks.

    Raises:
        NotImplementedError: quantised weights, out_in_sb, skip_attention, a 3-D table with several
            KV heads, attention data parallelism or context parallelism.
        ValueError: n_kv does not divide n_q, swa_start_pos_ids without pos_ids, pos_ids without a
            table, S_ctx no multiple of 128.
        AssertionError: no W_qkv, no table or one that is not int32, no K_cache, no V_cache or one
            of other dims, update_cache without slots, an active mask of the wrong shape.
        IndexError: S_ctx cannot be laid out in whole tiles.
        AttributeError: neither pos_ids nor attention_mask.
    """
    if quantization_type_qkv != QuantizationType.NONE:
        raise NotImplementedError(f"attention_decode: {quantization_type_qkv} has no CPU path")
    if quantization_type_out != QuantizationType.NONE:
        raise NotImplementedError(f"attention_decode: {quantization_type_out} has no CPU path")
    if out_in_sb or skip_attention:
        raise NotImplementedError("attention_decode: out_in_sb and skip_attention need a device")
    if attention_dp > 1 or dcp_size > 1:
        raise NotImplementedError(
            "attention_decode: the stand-in computes attention_dp 1 and dcp_size 1, "
            f"not {attention_dp} and {dcp_size}"
        )
    if swa_start_pos_ids is not None and pos_ids is None:
        raise ValueError("attention_decode: swa_start_pos_ids needs pos_ids")
    if pos_ids is not None and active_blocks_table is None:
        raise ValueError("attention_decode: pos_ids needs active_blocks_table")
    assert active_blocks_table is not None, "attention_decode: active_blocks_table is required"
    assert (
        active_blocks_table.dtype == torch.int32
    ), f"attention_decode: active_blocks_table must be int32, not {active_blocks_table.dtype}"
    assert V_cache is not None and V_cache.dim() in (3, 4), (
        "attention_decode: V_cache must be [nb, n_kv, block, d] or [nb, block, d], "
        f"not {None if V_cache is None else list(V_cache.shape)}"
    )
    assert K_cache is not None, "attention_decode: K_cache is required"
    assert W_qkv is not None, "attention_decode: W_qkv is required"
    num_kv_heads = V_cache.shape[1] if V_cache.dim() == 4 else 1
    block_len, d = V_cache.shape[-2:]
    batch, new_tokens, hidden = X.shape
    num_q_heads = W_qkv.shape[1] // d - 2 * num_kv_heads
    if num_q_heads % num_kv_heads:
        raise ValueError(
            f"attention_decode: {num_q_heads} query heads do not divide over {num_kv_heads} "
            "KV heads"
        )
    if active_blocks_table.dim() == 3:
        if num_kv_heads > 1:
            raise NotImplementedError(
                f"attention_decode: a per-head block table with {num_kv_heads} KV heads has no "
                "CPU path; pass the 2-D table and 4-D caches"
            )
        active_blocks_table = active_blocks_table[:, 0]
    check_kernel_sizes(
        "attention_decode",
        (hidden % 128 == 0, f"H % 128 == 0, not {hidden}"),
        (d % 2 == 0, f"even head width, not {d}"),
    )

    x = X
    if rmsnorm_X_enabled:
        eps = 1e-3 if rmsnorm_X_eps is None else rmsnorm_X_eps
        x = rms_norm_float32(x, rmsnorm_X_gamma, eps, hidden_actual=X_hidden_dim_actual)
    fused = torch.matmul(x, W_qkv)
    if bias_qkv is not None:
        fused = fused + bias_qkv
    heads = fused.unflatten(-1, (-1, d))  # [B, S, n_q + 2*n_kv, d]
    q = heads[:, :, :num_q_heads]
    k = heads[:, :, num_q_heads : num_q_heads + num_kv_heads]
    v = heads[:, :, num_q_heads + num_kv_heads :]
    if rmsnorm_QK_pre_rope_enabled:
        q = rms_norm_float32(q, rmsnorm_QK_pre_rope_W_Q, rmsnorm_QK_pre_rope_eps)
        k = rms_norm_float32(k, rmsnorm_QK_pre_rope_W_K, rmsnorm_QK_pre_rope_eps)
    if cos is not None and sin is not None:
        q = _rotate(q, cos, sin, rope_contiguous_layout)
        k = _rotate(k, cos, sin, rope_contiguous_layout)
    if rmsnorm_QK_post_rope_enabled:
        q = rms_norm_float32(q, rmsnorm_QK_post_rope_W_Q, rmsnorm_QK_post_rope_eps)
        k = rms_norm_float32(k, rmsnorm_QK_post_rope_W_K, rmsnorm_QK_post_rope_eps)

    if k_scale is not None and v_scale is not None:
        stored_k = _to_fp8(k, k_scale, K_cache.dtype)
        stored_v = _to_fp8(v, v_scale, V_cache.dtype)
        k, v = stored_k.to(X.dtype), stored_v.to(X.dtype)
    else:
        stored_k, stored_v = k, v

    s_ctx = active_blocks_table.shape[1] * block_len
    visible = _visible_slots(
        pos_ids, swa_start_pos_ids, attention_mask, s_ctx, batch, num_q_heads, new_tokens, block_len
    )
    context_k = _gather_context(K_cache, active_blocks_table, num_kv_heads, fp8_packed, X.dtype)
    context_v = _gather_context(V_cache, active_blocks_table, num_kv_heads, False, X.dtype)
    # The last S slots of the context belong to the new tokens, whatever the cache holds there.
    context_k = torch.cat([context_k[:, :, : s_ctx - new_tokens], k.transpose(1, 2)], dim=2)
    context_v = torch.cat([context_v[:, :, : s_ctx - new_tokens], v.transpose(1, 2)], dim=2)
    scale = d**-0.5 if softmax_scale is None else softmax_scale
    attended = _attend(q, context_k, context_v, visible, scale, sink)  # [B, n_q, S, d]

    if W_out is None:
        output = attended.transpose(2, 3)  # [B, n_q, d, S]
    else:
        rows = attended.transpose(1, 2).reshape(batch * new_tokens, num_q_heads * d)
        output = torch.matmul(rows, W_out)
        if bias_out is not None:
            output = output + bias_out

    if not update_cache:
        k_new = stored_k.permute(3, 0, 2, 1).flatten(1, 2)  # [d, B*n_kv, S]
        return output, k_new, stored_v.transpose(1, 2)
    assert (
        kv_cache_update_idx is not None
    ), "attention_decode: update_cache needs kv_cache_update_idx"
    _write_caches(K_cache, V_cache, stored_k, stored_v, kv_cache_update_idx, fp8_packed)
    return output


def _rotate(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, contiguous: bool
) -> torch.Tensor:
    """Rotate ``[B, S, heads, d]`` by tables ``[d//2, B, S]``, in x's dtype."""
    cos_x = cos.to(x.dtype).permute(1, 2, 0).unsqueeze(2)  # [B, S, 1, d//2]
    sin_x = sin.to(x.dtype).permute(1, 2, 0).unsqueeze(2)
    half = x.shape[-1] // 2
    if contiguous:
        first, second = x[..., :half], x[..., half:]
    else:
        first, second = x[..., 0::2], x[..., 1::2]
    turned_first = first * cos_x - second * sin_x
    turned_second = second * cos_x + first * sin_x
    if contiguous:
        return torch.cat([turned_first, turned_second], dim=-1)
    return torch.stack([turned_first, turned_second], dim=-1).flatten(-2)


def _to_fp8(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    scaled = x.float() * scale.float().reshape(-1)[0]
    return scaled.clamp(-FP8_LIMIT, FP8_LIMIT).to(dtype)


def _visible_slots(
    pos_ids: torch.Tensor | None,
    swa_start_pos_ids: torch.Tensor | None,
    attention_mask: torch.Tensor | None,
    s_ctx: int,
    batch: int,
    num_q_heads: int,
    new_tokens: int,
    block_len: int,
) -> torch.Tensor:
    """Tell which slot each query sees: bool ``[B, n_q or 1, S, S_ctx]``."""
    if s_ctx % TILE:
        raise ValueError(
            f"attention_decode: {s_ctx} context slots (blocks in the table * block size) must be "
            f"{TILE} or a multiple of {2 * TILE}"
        )
    order = slot_order(s_ctx, batch, num_q_heads, new_tokens, block_len)
    if pos_ids is None:
        if attention_mask is None:
            raise AttributeError("attention_decode: neither pos_ids nor attention_mask was given")
        in_kernel_order = attention_mask.reshape(s_ctx, batch, num_q_heads, new_tokens) != 0
        plain = torch.zeros_like(in_kernel_order)
        plain = plain.index_copy(0, order.to(plain.device), in_kernel_order)
        return plain.permute(1, 2, 3, 0)
    if attention_mask is not None:
        assert attention_mask.shape[0] == attention_mask.shape[-1] == new_tokens, (
            "attention_decode: with pos_ids the mask must be [S, B, n_q, S], S new tokens "
            f"({new_tokens}), not {list(attention_mask.shape)}"
        )
    start = None
    if swa_start_pos_ids is not None:
        start = swa_start_pos_ids.reshape(batch, new_tokens)
    plain = plain_decode_mask(pos_ids.reshape(batch, new_tokens), s_ctx, start)
    return plain.permute(1, 2, 0).unsqueeze(1)


def _gather_context(
    cache: torch.Tensor,
    table: torch.Tensor,
    num_kv_heads: int,
    packed: bool,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Gather every request's blocks: ``[B, n_kv, S_ctx, d]``; inactive entries read block 0."""
    if packed:
        cache = cache.transpose(-1, -2).flatten(-3, -2)  # [.., block/2, d, 2] -> [.., block, d]
    if cache.dim() == 3:
        cache = cache.unsqueeze(1)
    blocks = cache[table.clamp(min=0)]  # [B, blocks, n_kv, block, d]
    return blocks.transpose(1, 2).flatten(2, 3).to(dtype)


def _attend(
    q: torch.Tensor,
    context_k: torch.Tensor,
    context_v: torch.Tensor,
    visible: torch.Tensor,
    scale: float,
    sink: torch.Tensor | None,
) -> torch.Tensor:
    """Softmax attention.

    Args:
        q: ``[B, S, n_q, d]``.
        context_k: ``[B, n_kv, S_ctx, d]``.
        context_v: ``[B, n_kv, S_ctx, d]``.
        visible: bool, broadcasts to ``[B, n_q, S, S_ctx]``.
        scale: factor on the scores.
        sink: ``[n_q, 1]`` or None.

    Returns:
        ``[B, n_q, S, d]`` in the dtype of q.
    """
    group = q.shape[2] // context_k.shape[1]
    key = context_k.repeat_interleave(group, dim=1)
    value = context_v.repeat_interleave(group, dim=1)
    query = q.transpose(1, 2)  # [B, n_q, S, d]
    scores = (torch.matmul(query, key.transpose(2, 3)) * scale).float()
    scores = scores.masked_fill(~visible, float("-inf"))
    if sink is not None:
        column = sink.float().reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = torch.softmax(scores, dim=-1)
    if sink is not None:
        weights = weights[..., :-1]
    return torch.matmul(weights.to(value.dtype), value)


def _write_caches(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slots: torch.Tensor,
    packed: bool,
) -> None:
    """Write K and V ``[B, S, n_kv, d]`` into their slots, in place."""
    num_blocks, block_len = v_cache.shape[0], v_cache.shape[-2]
    last_slot = num_blocks * block_len - 1
    flat = slots.reshape(-1).long()
    flat = torch.where((flat < 0) | (flat > last_slot), last_slot, flat)
    block = torch.div(flat, block_len, rounding_mode="floor")
    offset = flat % block_len
    rows_k, rows_v = k.flatten(0, 1), v.flatten(0, 1)  # [B*S, n_kv, d]
    if v_cache.dim() == 3:
        v_cache[block, offset] = rows_v[:, 0].to(v_cache.dtype)
    else:
        v_cache[block, :, offset] = rows_v.to(v_cache.dtype)
    half = torch.div(offset, 2, rounding_mode="floor")
    if packed and k_cache.dim() == 4:
        k_cache[block, half, :, offset % 2] = rows_k[:, 0].to(k_cache.dtype)
    elif packed:
        k_cache[block, :, half, :, offset % 2] = rows_k.to(k_cache.dtype)
    elif k_cache.dim() == 3:
        k_cache[block, offset] = rows_k[:, 0].to(k_cache.dtype)
    else:
        k_cache[block, :, offset] = rows_k.to(k_cache.dtype)


def packed_fp8_viable_for_bucket(
    block_len: int, bs: int, q_head: int, s_active: int, s_prior: int
) -> bool:
    """Tell whether the packed fp8 K layout can serve a decode bucket.

    The layout pairs neighbouring tokens, so the run of tokens that the kernel reads at once must
    keep an even length.

    Args:
        block_len: tokens per cache block.
        bs: requests.
        q_head: query heads per rank.
        s_active: new tokens per request.
        s_prior: context slots.

    Returns:
        True when packed keys can be used.
    """
    parts = core_split(s_prior, bs, q_head, s_active)
    if block_len > 0 and s_prior % (TILE * parts) == 0:
        run = math.gcd(block_len, s_prior // (TILE * parts))
    else:
        run = block_len
    return run > 0 and run % 2 == 0


def scatter_packed_k(
    k_cache: torch.Tensor,
    k_flat: torch.Tensor,
    block_indices: torch.Tensor,
    head_indices: torch.Tensor,
    position_indices: torch.Tensor,
) -> None:
    """Write pairs of consecutive tokens into a packed K cache, in place.

    Args:
        k_cache: ``[nb, n_kv, block/2, d, 2]``; the even position comes first in the last dim.
        k_flat: ``[rows, d]``, rows in token order for each head.
        block_indices: ``[rows]`` block of each row.
        head_indices: ``[rows]`` KV head of each row.
        position_indices: ``[rows]`` offset inside the block of each row.

    Raises:
        AssertionError: an odd number of rows.
    """
    rows = k_flat.shape[0]
    assert rows % 2 == 0, f"scatter_packed_k: rows come in pairs of tokens, not {rows}"
    pairs = torch.stack([k_flat[0::2], k_flat[1::2]], dim=-1)  # [rows/2, d, 2]
    half = torch.div(position_indices[0::2], 2, rounding_mode="floor")
    k_cache[block_indices[0::2], head_indices[0::2], half] = pairs.to(k_cache.dtype)
