"""One gated expert, as the mixture-of-experts operators share it."""

from collections.abc import Callable

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


def expert_activation(act_fn: ActFnType) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """SiLU, erf GELU or the Swish of the MoE operators; None for any other."""
    if act_fn == ActFnType.SiLU:
        return F.silu
    if act_fn == ActFnType.GELU:
        return F.gelu
    if act_fn == ActFnType.Swish:
        return _swish
    return None


def _swish(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(SWISH_FACTOR * x)
