"""One gated expert, as the mixture-of-experts operators share it."""

import torch
import torch.nn.functional as F
from nkilib.core.utils.common_types import ActFnType

__all__ = ["SWISH_FACTOR", "clamp_between", "expert_activation"]

SWISH_FACTOR = 1.702  # Swish of the MoE operators: x * sigmoid(1.702 x)


def clamp_between(x: torch.Tensor, low: float | None, high: float | None) -> torch.Tensor:
    """Clamp to the limits that are given."""
    if low is None and high is None:
        return x
    return x.clamp(min=low, max=high)


def expert_activation(x: torch.Tensor, act_fn: ActFnType) -> torch.Tensor | None:
    """Apply SiLU, erf GELU or the Swish of the MoE operators; None for any other."""
    if act_fn == ActFnType.SiLU:
        return F.silu(x)
    if act_fn == ActFnType.GELU:
        return F.gelu(x)
    if act_fn == ActFnType.Swish:
        return x * torch.sigmoid(SWISH_FACTOR * x)
    return None
