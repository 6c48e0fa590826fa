"""Norms in front of the fused projections."""

import torch
from nkilib.core.utils.common_types import NormType

__all__ = ["norm_in_input_dtype", "rms_norm_float32"]


def norm_in_input_dtype(
    x: torch.Tensor,
    norm_type: NormType,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    hidden_actual: int | None = None,
) -> torch.Tensor:
    """Normalise the last dim without widening the dtype, as the fused projections do on a CPU.

    Args:
        x: ``[..., H]``.
        norm_type: kind of norm; RMS_NORM_SKIP_GAMMA ignores the weight.
        weight: ``[1, H]`` or None.
        bias: ``[1, H]`` or None; LAYER_NORM only.
        eps: epsilon under the root.
        hidden_actual: RMS norms divide the sum of squares by this number instead of H.

    Returns:
        ``[..., H]`` in the dtype of x.
    """
    if norm_type == NormType.NO_NORM:
        return x
    if norm_type == NormType.LAYER_NORM:
        centred = x - x.mean(-1, keepdim=True)
        normed = centred * torch.rsqrt(x.var(-1, keepdim=True, unbiased=False) + eps)
        if weight is not None:
            normed = normed * weight
        return normed if bias is None else normed + bias
    mean_square = x.pow(2).sum(-1, keepdim=True) / (hidden_actual or x.shape[-1])
    normed = x * torch.rsqrt(mean_square + eps)
    if norm_type == NormType.RMS_NORM_SKIP_GAMMA or weight is None:
        return normed
    return normed * weight


def rms_norm_float32(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    bias: torch.Tensor | None = None,
    hidden_actual: int | None = None,
) -> torch.Tensor:
    """RMS norm of the last dim in float32, rounded once to the dtype of x.

    Args:
        x: ``[..., D]``.
        weight: one value per column, any shape with D elements, or None.
        eps: epsilon under the root.
        bias: one value per column or None.
        hidden_actual: divide the sum of squares by this number instead of D.

    Returns:
        ``[..., D]`` in the dtype of x.
    """
    wide = x.float()
    mean_square = wide.pow(2).sum(-1, keepdim=True) / (hidden_actual or x.shape[-1])
    normed = wide * torch.rsqrt(mean_square + eps)
    if weight is not None:
        normed = normed * weight.reshape(-1).float()
    if bias is not None:
        normed = normed + bias.reshape(-1).float()
    return normed.to(x.dtype)
