"""Output projection of attention.

Shapes: B batch, N heads per rank, D head width, S tokens, H hidden width.
"""

import torch
from nkilib.core.utils.common_types import QuantizationType

from .._sizes_rule import check_kernel_sizes

__all__ = ["o_proj"]


def o_proj(
    active: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    quantization_type: QuantizationType = QuantizationType.NONE,
    input_scales: torch.Tensor | None = None,
    weight_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Project the heads' results back to the hidden width; sums over ranks are the caller's.

    Args:
        active: ``[B, N, D, S]``, as :func:`flash_attention` gives it with ``tp_out``, or
            ``[B, S, N*D]``.
        weight: ``[N*D, H]``.
        bias: ``[1, H]``.
        quantization_type: NONE on a CPU.
        input_scales: None on a CPU.
        weight_scales: None on a CPU.

    Returns:
        ``[B, S, H]`` in the input dtype.

    Raises:
        AssertionError: quantisation or scales are given.
        ValueError: ``active`` has neither 3 nor 4 dims.
        RuntimeError: N*D differs from the weight's rows.
    """
    assert (
        quantization_type == QuantizationType.NONE
    ), f"o_proj: {quantization_type} has no CPU path, only QuantizationType.NONE"
    assert (
        input_scales is None and weight_scales is None
    ), "o_proj: quantisation scales have no CPU path"
    if active.dim() == 4:
        flat = active.permute(0, 3, 1, 2).flatten(2)  # [B, N, D, S] -> [B, S, N*D]
        heads, head_width = active.shape[1], active.shape[2]
    elif active.dim() == 3:
        flat = active
        head_width = max(d for d in range(1, 129) if active.shape[2] % d == 0)
        heads = active.shape[2] // head_width
    else:
        raise ValueError(
            f"o_proj: active must be [B, N, D, S] or [B, S, N*D], not {list(active.shape)}"
        )
    hidden = weight.shape[1]
    check_kernel_sizes(
        "o_proj",
        (hidden <= 20705 and hidden % 2 == 0, f"H even and <= 20705, not {hidden}"),
        (flat.shape[0] * flat.shape[1] <= 131072, f"B*S <= 131072, not {flat.shape[:2]}"),
        (heads <= 17, f"heads <= 17, not {heads}"),
        (head_width <= 128, f"head width <= 128, not {head_width}"),
    )
    output = torch.matmul(flat, weight)
    return output if bias is None else output + bias
