"""Fused QKV projection with optional norm, QK-norm, RoPE and paged cache write.

Shapes: B batch, S tokens, H hidden width, d head width, n_q and n_kv heads per rank,
F = (n_q + 2*n_kv)*d.
"""

import torch
from nkilib.core.utils.common_types import (
    NormType,
    QKVOutputLayout,
    QKVWeightLayout,
    QuantizationType,
)

from .._norm import norm_in_input_dtype, rms_norm_float32
from .._sizes_rule import check_kernel_sizes

__all__ = ["qkv_proj"]


def qkv_proj(
    hidden: torch.Tensor,
    qkv_weights: torch.Tensor,
    norm_weights: torch.Tensor | None = None,
    mlp_prev: torch.Tensor | None = None,
    attn_prev: torch.Tensor | None = None,
    d_head: int | None = None,
    output_layout: QKVOutputLayout = QKVOutputLayout.BSD,
    eps: float = 1e-6,
    norm_type: NormType = NormType.NO_NORM,
    use_dma_transpose: bool = True,
    store_output_in_sbuf: bool = False,
    bias: torch.Tensor | None = None,
    norm_b: torch.Tensor | None = None,
    hidden_actual: int | None = None,
    cos_cache: torch.Tensor | None = None,
    sin_cache: torch.Tensor | None = None,
    num_q_heads: int | None = None,
    num_kv_heads: int | None = None,
    quantization_type: QuantizationType = QuantizationType.NONE,
    qkv_w_scale: torch.Tensor | None = None,
    qkv_in_scale: torch.Tensor | None = None,
    weight_layout: QKVWeightLayout = QKVWeightLayout.CONTIGUOUS,
    sbm_lower_bound: int | None = None,
    sbm_upper_bound: int | None = None,
    sbm_use_auto_alloc: bool = False,
    sbm_default_stack_alloc: bool = True,
    use_auto_allocation: bool = False,
    qk_norm_pre_rope_q_norm: NormType | None = None,
    qk_norm_pre_rope_k_norm: NormType | None = None,
    qk_norm_pre_rope_eps: float = 1e-6,
    qk_norm_pre_rope_gamma_fused_in_rope_caches: bool = False,
    qk_norm_pre_rope_q_gamma: torch.Tensor | None = None,
    qk_norm_pre_rope_k_gamma: torch.Tensor | None = None,
    qk_norm_pre_rope_q_beta: torch.Tensor | None = None,
    qk_norm_pre_rope_k_beta: torch.Tensor | None = None,
    qk_norm_post_rope_q_norm: NormType | None = None,
    qk_norm_post_rope_k_norm: NormType | None = None,
    qk_norm_post_rope_eps: float = 1e-6,
    qk_norm_post_rope_gamma_fused_in_rope_caches: bool = False,
    qk_norm_post_rope_q_gamma: torch.Tensor | None = None,
    qk_norm_post_rope_k_gamma: torch.Tensor | None = None,
    qk_norm_post_rope_q_beta: torch.Tensor | None = None,
    qk_norm_post_rope_k_beta: torch.Tensor | None = None,
    k_cache: torch.Tensor | None = None,
    v_cache: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    fp8_max: float | None = None,
    fp8_min: float | None = None,
    kv_dtype: torch.dtype | None = None,
    use_block_kv: bool = False,
    transpose_k_cache: bool = False,
    fp8_packed: bool = False,
    block_size: int | None = None,
    slot_mapping: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Project hidden states to Q, K and V in one matmul.

    Order of work: residual add, norm, matmul, bias, QK-norm, RoPE, second QK-norm. RoPE happens
    only if both tables and both head counts are given. With ``use_block_kv`` the call writes K and
    V into the paged cache and applies bias and RoPE only: norms, residuals and the layout are
    dropped without a word, as on the plugin's CPU path.

    Args:
        hidden: ``[B, S, H]``.
        qkv_weights: ``[H, F]``, columns Q, K, V.
        norm_weights: ``[1, H]``.
        mlp_prev: ``[B, S, H]`` residual; the two residuals count only together.
        attn_prev: ``[B, S, H]`` residual.
        d_head: head width; derived from F and the head counts when None.
        output_layout: BSD, NBSd or NBdS.
        eps: epsilon of the norm.
        norm_type: norm before the projection, computed in the input dtype.
        use_dma_transpose: no effect on a CPU, like the ``sbm_*`` parameters, store_output_in_sbuf,
            use_auto_allocation and weight_layout.
        store_output_in_sbuf: no effect.
        bias: ``[1, F]``.
        norm_b: ``[1, H]``, LAYER_NORM only.
        hidden_actual: true width when H is padded; RMS norms divide by it.
        cos_cache: ``[B, S, d]``.
        sin_cache: ``[B, S, d]``; only its first half is read.
        num_q_heads: n_q.
        num_kv_heads: n_kv.
        quantization_type: NONE on a CPU.
        qkv_w_scale: None on a CPU.
        qkv_in_scale: None on a CPU.
        weight_layout: no effect.
        sbm_lower_bound: no effect.
        sbm_upper_bound: no effect.
        sbm_use_auto_alloc: no effect.
        sbm_default_stack_alloc: no effect.
        use_auto_allocation: no effect.
        qk_norm_pre_rope_q_norm: RMS_NORM switches the norm before RoPE on; both or neither.
        qk_norm_pre_rope_k_norm: see q_norm.
        qk_norm_pre_rope_eps: epsilon.
        qk_norm_pre_rope_gamma_fused_in_rope_caches: False on a CPU.
        qk_norm_pre_rope_q_gamma: ``[1, d]`` for all query heads.
        qk_norm_pre_rope_k_gamma: ``[1, d]`` for all key heads.
        qk_norm_pre_rope_q_beta: ``[1, d]``.
        qk_norm_pre_rope_k_beta: ``[1, d]``.
        qk_norm_post_rope_q_norm: the same after RoPE.
        qk_norm_post_rope_k_norm: see above.
        qk_norm_post_rope_eps: see above.
        qk_norm_post_rope_gamma_fused_in_rope_caches: see above.
        qk_norm_post_rope_q_gamma: see above.
        qk_norm_post_rope_k_gamma: see above.
        qk_norm_post_rope_q_beta: see above.
        qk_norm_post_rope_k_beta: see above.
        k_cache: ``[blocks, n_kv, block_size, d]``; ignored without use_block_kv.
        v_cache: as k_cache.
        k_scale: **divides** K before the clamp; both scales or none.
        v_scale: the same for V.
        fp8_max: upper clamp limit, with scales only.
        fp8_min: lower clamp limit, with scales only.
        kv_dtype: must be the cache's dtype.
        use_block_kv: write the cache in place and return it.
        transpose_k_cache: False on a CPU.
        fp8_packed: False on a CPU.
        block_size: tokens per cache block.
        slot_mapping: integer ``[B*S]``, ``block*block_size + offset``. -1 overwrites the last
            offset of the last block.

    Returns:
        BSD ``[B, S, F]``, NBSd ``[heads, B, S, d]`` or NBdS ``[heads, B, d, S]``; with
        use_block_kv the tuple (q ``[B, S, n_q*d]``, k_cache, v_cache) of the caches passed in.

    Raises:
        NotImplementedError: quantisation, a transposed or packed K cache, caches that are not 4-D.
        ValueError: NBSd, NBdS or a cache write without head width and counts.
        AssertionError: QK-norm without head counts, with one norm only, of another type than
            RMS_NORM, or with gamma folded into the tables.
        IndexError: a slot past the end of the cache.
        RuntimeError: scales without a clamp limit, or kv_dtype other than the cache's.
    """
    if quantization_type != QuantizationType.NONE or qkv_w_scale is not None:
        raise NotImplementedError(f"qkv_proj: {quantization_type} has no CPU path")
    _check_sizes(hidden, qkv_weights, output_layout, d_head)

    if use_block_kv:
        return _project_into_cache(
            hidden=hidden,
            qkv_weights=qkv_weights,
            bias=bias,
            cos_cache=cos_cache,
            sin_cache=sin_cache,
            d_head=d_head,
            num_q_heads=num_q_heads,
            num_kv_heads=num_kv_heads,
            k_cache=k_cache,
            v_cache=v_cache,
            k_scale=k_scale,
            v_scale=v_scale,
            fp8_max=fp8_max,
            fp8_min=fp8_min,
            kv_dtype=kv_dtype,
            transpose_k_cache=transpose_k_cache,
            fp8_packed=fp8_packed,
            block_size=block_size,
            slot_mapping=slot_mapping,
        )

    if mlp_prev is not None and attn_prev is not None:
        hidden = hidden + mlp_prev + attn_prev
    hidden = norm_in_input_dtype(hidden, norm_type, norm_weights, norm_b, eps, hidden_actual)
    output = torch.matmul(hidden, qkv_weights)
    if bias is not None:
        output = output + bias

    output = _qk_norm(
        output,
        "pre",
        d_head,
        num_q_heads,
        num_kv_heads,
        (qk_norm_pre_rope_q_norm, qk_norm_pre_rope_k_norm),
        qk_norm_pre_rope_eps,
        qk_norm_pre_rope_gamma_fused_in_rope_caches,
        (qk_norm_pre_rope_q_gamma, qk_norm_pre_rope_q_beta),
        (qk_norm_pre_rope_k_gamma, qk_norm_pre_rope_k_beta),
    )
    if cos_cache is not None and sin_cache is not None and num_q_heads and num_kv_heads:
        output = _rotate_q_and_k(output, cos_cache, sin_cache, num_q_heads, num_kv_heads, d_head)
    output = _qk_norm(
        output,
        "post",
        d_head,
        num_q_heads,
        num_kv_heads,
        (qk_norm_post_rope_q_norm, qk_norm_post_rope_k_norm),
        qk_norm_post_rope_eps,
        qk_norm_post_rope_gamma_fused_in_rope_caches,
        (qk_norm_post_rope_q_gamma, qk_norm_post_rope_q_beta),
        (qk_norm_post_rope_k_gamma, qk_norm_post_rope_k_beta),
    )
    return _to_layout(output, output_layout, d_head)


def _check_sizes(
    hidden: torch.Tensor,
    qkv_weights: torch.Tensor,
    output_layout: QKVOutputLayout,
    d_head: int | None,
) -> None:
    width, fused = hidden.shape[-1], qkv_weights.shape[-1]
    check_kernel_sizes(
        "qkv_proj",
        (width <= 24576 and width % 128 == 0, f"H % 128 == 0 and <= 24576, not {width}"),
        (fused <= 4096 and fused <= width, f"F <= 4096 and <= H {width}, not {fused}"),
        (output_layout != QKVOutputLayout.NBdS, "layout BSD or NBSd, not NBdS"),
        (output_layout != QKVOutputLayout.NBSd or d_head == 128, f"NBSd at d 128, not {d_head}"),
    )


def _head_width(fused: int, d_head: int | None, num_q_heads: int, num_kv_heads: int) -> int:
    return d_head if d_head is not None else fused // (num_q_heads + 2 * num_kv_heads)


def _qk_norm(
    output: torch.Tensor,
    place: str,
    d_head: int | None,
    num_q_heads: int | None,
    num_kv_heads: int | None,
    norms: tuple[NormType | None, NormType | None],
    eps: float,
    gamma_fused_in_rope_caches: bool,
    q_gamma_beta: tuple[torch.Tensor | None, torch.Tensor | None],
    k_gamma_beta: tuple[torch.Tensor | None, torch.Tensor | None],
) -> torch.Tensor:
    """RMS-normalise every Q and K head in float32, rounded to the input dtype; V passes."""
    if norms == (None, None):
        return output
    name = f"qkv_proj: qk_norm_{place}_rope"
    assert all(
        norm == NormType.RMS_NORM for norm in norms
    ), f"{name}: q_norm and k_norm must both be NormType.RMS_NORM (off is None), not {norms}"
    assert num_q_heads and num_kv_heads, f"{name}: num_q_heads and num_kv_heads are required"
    assert not gamma_fused_in_rope_caches, f"{name}: gamma folded into the tables has no CPU path"
    d = _head_width(output.shape[-1], d_head, num_q_heads, num_kv_heads)
    heads = output.unflatten(-1, (-1, d))  # [B, S, n_q + 2*n_kv, d]
    first_v = num_q_heads + num_kv_heads
    q_gamma, q_beta = q_gamma_beta
    k_gamma, k_beta = k_gamma_beta
    q = rms_norm_float32(heads[:, :, :num_q_heads], q_gamma, eps, q_beta)
    k = rms_norm_float32(heads[:, :, num_q_heads:first_v], k_gamma, eps, k_beta)
    return torch.cat([q, k, heads[:, :, first_v:]], dim=2).flatten(2)


def _rotate_q_and_k(
    output: torch.Tensor,
    cos_cache: torch.Tensor,
    sin_cache: torch.Tensor,
    num_q_heads: int,
    num_kv_heads: int,
    d_head: int | None,
) -> torch.Tensor:
    """Rotate the two halves of every Q and K head.

    The products are taken in the wider of table and output dtype and rounded to the output dtype.
    """
    d = _head_width(output.shape[-1], d_head, num_q_heads, num_kv_heads)
    heads = output.unflatten(-1, (-1, d))  # [B, S, n_q + 2*n_kv, d]
    first_v = num_q_heads + num_kv_heads
    turned = heads[:, :, :first_v]
    low, high = turned[..., : d // 2], turned[..., d // 2 :]
    cos_low = cos_cache[:, :, None, : d // 2]
    cos_high = cos_cache[:, :, None, d // 2 :]
    sin = sin_cache[:, :, None, : d // 2]
    rotated = torch.cat([low * cos_low - high * sin, high * cos_high + low * sin], dim=-1)
    return torch.cat([rotated.to(output.dtype), heads[:, :, first_v:]], dim=2).flatten(2)


def _to_layout(
    output: torch.Tensor, output_layout: QKVOutputLayout, d_head: int | None
) -> torch.Tensor:
    if output_layout == QKVOutputLayout.BSD:
        return output
    if d_head is None:
        raise ValueError(f"qkv_proj: output layout {output_layout.name} needs d_head")
    heads = output.unflatten(-1, (-1, d_head))  # [B, S, heads, d]
    if output_layout == QKVOutputLayout.NBSd:
        return heads.permute(2, 0, 1, 3)
    return heads.permute(2, 0, 3, 1)


def _project_into_cache(
    *,
    hidden: torch.Tensor,
    qkv_weights: torch.Tensor,
    bias: torch.Tensor | None,
    cos_cache: torch.Tensor | None,
    sin_cache: torch.Tensor | None,
    d_head: int | None,
    num_q_heads: int | None,
    num_kv_heads: int | None,
    k_cache: torch.Tensor | None,
    v_cache: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    fp8_max: float | None,
    fp8_min: float | None,
    kv_dtype: torch.dtype | None,
    transpose_k_cache: bool,
    fp8_packed: bool,
    block_size: int | None,
    slot_mapping: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Project, rotate, write K and V into their slots and return Q with the caches."""
    if transpose_k_cache or fp8_packed:
        raise NotImplementedError("qkv_proj: a transposed or packed K cache has no CPU path")
    if d_head is None or num_q_heads is None or num_kv_heads is None:
        raise ValueError(
            "qkv_proj: use_block_kv needs d_head, num_q_heads and num_kv_heads, "
            f"not {d_head}, {num_q_heads}, {num_kv_heads}"
        )
    if k_cache is None or v_cache is None or slot_mapping is None or block_size is None:
        raise AttributeError(
            "qkv_proj: use_block_kv needs k_cache, v_cache, slot_mapping and block_size"
        )
    if k_cache.dim() != 4 or v_cache.dim() != 4:
        raise NotImplementedError(
            "qkv_proj: caches must be [blocks, n_kv, block_size, d] on a CPU, "
            f"not {list(k_cache.shape)} and {list(v_cache.shape)}"
        )
    output = torch.matmul(hidden, qkv_weights)
    if bias is not None:
        output = output + bias
    if cos_cache is not None and sin_cache is not None:
        output = _rotate_q_and_k(output, cos_cache, sin_cache, num_q_heads, num_kv_heads, d_head)
    q_width = num_q_heads * d_head
    kv_width = num_kv_heads * d_head
    q = output[..., :q_width]
    k = output[..., q_width : q_width + kv_width].reshape(-1, num_kv_heads, d_head)
    v = output[..., q_width + kv_width :].reshape(-1, num_kv_heads, d_head)
    if k_scale is not None and v_scale is not None:
        k = _scale_and_clamp(k, k_scale, fp8_min, fp8_max)
        v = _scale_and_clamp(v, v_scale, fp8_min, fp8_max)
    if kv_dtype is not None and not kv_dtype == k_cache.dtype == v_cache.dtype:
        raise RuntimeError(
            f"qkv_proj: kv_dtype {kv_dtype} must be the caches' dtype "
            f"({k_cache.dtype}, {v_cache.dtype})"
        )
    slots = slot_mapping.reshape(-1)
    block = torch.div(slots, block_size, rounding_mode="floor")
    offset = torch.remainder(slots, block_size)
    k_cache[block, :, offset] = k.to(k_cache.dtype)
    v_cache[block, :, offset] = v.to(v_cache.dtype)
    return q, k_cache, v_cache


def _scale_and_clamp(
    x: torch.Tensor, scale: torch.Tensor, low: float | None, high: float | None
) -> torch.Tensor:
    if low is None and high is None:
        raise RuntimeError("qkv_proj: k_scale and v_scale need fp8_min or fp8_max")
    return torch.clamp(x / scale.reshape(-1)[0], min=low, max=high)
