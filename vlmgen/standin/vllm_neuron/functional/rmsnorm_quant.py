"""RMS norm fused with fp8 quantisation."""

import torch
from nkilib.core.utils.common_types import QuantizationType

__all__ = ["rmsnorm_quant"]

STATIC_LIMIT = 240.0
ROW_LIMIT = 448.0
SMALLEST_SCALE = 1e-12


def rmsnorm_quant(
    hidden: torch.Tensor,
    ln_w: torch.Tensor,
    input_dequant_scale: torch.Tensor | None = None,
    eps: float = 1e-6,
    quantization_type: QuantizationType = QuantizationType.STATIC,
) -> torch.Tensor:
    """Normalise in float32 and quantise to fp8.

    Args:
        hidden: ``[..., H]``.
        ln_w: ``[H]`` or ``[1, H]``.
        input_dequant_scale: float32 ``[128, 1]``, STATIC only; values are divided by it.
        eps: epsilon of the norm.
        quantization_type: STATIC or ROW.

    Returns:
        STATIC: float8_e4m3fn ``[..., H]``, clipped at 240. ROW: float8_e4m3fn ``[..., H+4]`` scaled
        so that a row's largest value is 448; the last four bytes are the row's float32 scale.

    Raises:
        ValueError: a weight of another shape, STATIC without a scale or with one of another shape.
        NotImplementedError: other quantisation types.
    """
    width = hidden.shape[-1]
    if tuple(ln_w.shape) not in ((width,), (1, width)):
        raise ValueError(
            f"rmsnorm_quant: ln_w must be [{width}] or [1, {width}], not {list(ln_w.shape)}"
        )
    if quantization_type not in (QuantizationType.STATIC, QuantizationType.ROW):
        raise NotImplementedError(
            f"rmsnorm_quant: STATIC and ROW are supported, not {quantization_type}"
        )
    wide = hidden.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    normed = normed * ln_w.reshape(-1).float()

    if quantization_type == QuantizationType.STATIC:
        if input_dequant_scale is None or tuple(input_dequant_scale.shape) != (128, 1):
            shape = None if input_dequant_scale is None else list(input_dequant_scale.shape)
            raise ValueError(
                f"rmsnorm_quant: STATIC needs input_dequant_scale [128, 1], not {shape}"
            )
        scaled = normed / input_dequant_scale.reshape(-1)[0]
        return scaled.clamp(-STATIC_LIMIT, STATIC_LIMIT).to(torch.float8_e4m3fn)

    scale = (normed.abs().amax(-1, keepdim=True) / ROW_LIMIT).clamp(min=SMALLEST_SCALE)
    quantised = (normed / scale).clamp(-ROW_LIMIT, ROW_LIMIT).to(torch.float8_e4m3fn)
    scale_bytes = scale.contiguous().view(torch.uint8)  # [..., 4], little endian
    rows = torch.cat([quantised.view(torch.uint8), scale_bytes], dim=-1)
    return rows.view(torch.float8_e4m3fn)
