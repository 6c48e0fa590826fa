"""The two- or three-matrix MLP of a transformer block.

Shapes: T tokens, H hidden width, I MLP width per rank.
"""

import math

import torch
import torch.nn.functional as F
from nkilib.core.utils.common_types import ActFnType, NormType, QuantizationType

from ._norm import norm_in_input_dtype
from ._sizes_rule import check_kernel_sizes, kernel_sizes_enforced

__all__ = ["mlp"]


def mlp(
    hidden: torch.Tensor,
    gate_w: torch.Tensor | None,
    up_w: torch.Tensor,
    down_w: torch.Tensor,
    eps: float = 1e-6,
    ln_w: torch.Tensor | None = None,
    skip_gate: bool = False,
    act_fn: ActFnType = ActFnType.SiLU,
    gate_b: torch.Tensor | None = None,
    up_b: torch.Tensor | None = None,
    down_b: torch.Tensor | None = None,
    norm_b: torch.Tensor | None = None,
    norm_type: NormType = NormType.NO_NORM,
    fused_add_tensor: torch.Tensor | None = None,
    store_fused_add_result: bool = False,
    quantization_type: QuantizationType = QuantizationType.NONE,
    gate_w_scale: torch.Tensor | None = None,
    up_w_scale: torch.Tensor | None = None,
    down_w_scale: torch.Tensor | None = None,
    gate_up_in_scale: torch.Tensor | None = None,
    down_in_scale: torch.Tensor | None = None,
    quant_clipping_bound: float = 0.0,
    output_dtype: torch.dtype | None = None,
    gate_clamp_upper_limit: float | None = None,
    gate_clamp_lower_limit: float | None = None,
    up_clamp_upper_limit: float | None = None,
    up_clamp_lower_limit: float | None = None,
    gate_up_w_layout: object | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute ``act(x gate) * (x up)`` and project down, or ``act(x up)`` with ``skip_gate``.

    Everything runs in the input dtype, norms included. As on the plugin's CPU path, clamp limits,
    quantisation, scales and output_dtype have no effect.

    Args:
        hidden: ``[T, H]``.
        gate_w: ``[H, I]``; unused and may be None with ``skip_gate``.
        up_w: ``[H, I]``.
        down_w: ``[I, H]``.
        eps: epsilon of the norm.
        ln_w: ``[1, H]`` norm weight.
        skip_gate: the two-matrix MLP.
        act_fn: SiLU, GELU (erf), GELU_Tanh_Approx, or Swish, which equals SiLU here.
        gate_b: ``[1, I]``.
        up_b: ``[1, I]``.
        down_b: ``[1, H]``.
        norm_b: ``[1, H]``, LAYER_NORM only.
        norm_type: norm in front of the MLP.
        fused_add_tensor: ``[T, H]``, added to hidden before the norm; not part of the output.
        store_fused_add_result: also return that sum.
        quantization_type: no effect on a CPU, like the parameters below.
        gate_w_scale: no effect.
        up_w_scale: no effect.
        down_w_scale: no effect.
        gate_up_in_scale: no effect.
        down_in_scale: no effect.
        quant_clipping_bound: no effect.
        output_dtype: no effect.
        gate_clamp_upper_limit: no effect.
        gate_clamp_lower_limit: no effect.
        up_clamp_upper_limit: no effect.
        up_clamp_lower_limit: no effect.
        gate_up_w_layout: no effect.

    Returns:
        ``[T, H]``; with store_fused_add_result and fused_add_tensor a tuple
        (output, hidden + fused_add_tensor).

    Raises:
        ValueError: hidden is not ``[T, H]``.
        TypeError: gate_w missing without skip_gate, or RMS_NORM without ln_w.
    """
    if hidden.dim() != 2:
        raise ValueError(f"mlp: hidden must be [T, H], not {list(hidden.shape)}")
    gate = None if skip_gate else gate_w
    if gate is None and not skip_gate:
        raise TypeError("mlp: gate_w is None; only skip_gate=True works without a gate")
    if norm_type == NormType.RMS_NORM and ln_w is None:
        raise TypeError("mlp: NormType.RMS_NORM needs ln_w on a CPU")
    if kernel_sizes_enforced():
        has_bias = any(bias is not None for bias in (gate_b, up_b, down_b))
        _check_sizes(hidden.shape[0], hidden.shape[1], up_w.shape[1], has_bias)

    summed = hidden if fused_add_tensor is None else hidden + fused_add_tensor
    x = norm_in_input_dtype(summed, norm_type, ln_w, norm_b, eps)
    up = _linear(x, up_w, up_b)
    if gate is None:
        inner = _activate(up, act_fn)
    else:
        inner = _activate(_linear(x, gate, gate_b), act_fn) * up
    output = _linear(inner, down_w, down_b)
    if store_fused_add_result and fused_add_tensor is not None:
        return output, summed
    return output


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    product = torch.matmul(x, weight)
    return product if bias is None else product + bias


def _activate(x: torch.Tensor, act_fn: ActFnType) -> torch.Tensor:
    if act_fn in (ActFnType.SiLU, ActFnType.Swish):
        return F.silu(x)
    if act_fn == ActFnType.GELU:
        return F.gelu(x)
    if act_fn == ActFnType.GELU_Tanh_Approx:
        return F.gelu(x, approximate="tanh")
    raise ValueError(f"mlp: act_fn {act_fn!r} is none of {[member.name for member in ActFnType]}")


def _check_sizes(tokens: int, hidden: int, width: int, has_bias: bool) -> None:
    halved = hidden >= 7168 and width >= 1024 and tokens <= 256 and not has_bias
    effective_width = width // 2 if halved else width
    check_kernel_sizes(
        "mlp",
        (hidden % 128 == 0, f"H % 128 == 0, not H {hidden}"),
        (tokens > 128 or hidden % 256 == 0, f"H % 256 == 0 up to 128 tokens, not H {hidden}"),
        (
            tokens <= 128 or math.ceil(effective_width / 512) <= 8,
            f"ceil(I/512) <= 8 above 128 tokens, not I {effective_width}",
        ),
    )
