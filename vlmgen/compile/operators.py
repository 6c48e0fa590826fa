"""Lowerings of ATen operators for which torchax's own are no faithful program.

torchax takes the variance of a layer norm from NumPy's interface, which holds a float64 constant
that the package has not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def native_layer_norm(
    value: Any, shape: Sequence[int], weight: Any, bias: Any, eps: float
) -> tuple[Any, Any, Any]:
    """Layer norm with float32 statistics: the result, the mean and the reciprocal deviation."""
    import jax
    import jax.numpy as jnp

    axes = tuple(range(value.ndim - len(shape), value.ndim))
    wide = value.astype(jnp.float32)
    mean = wide.mean(axes, keepdims=True)
    centred = wide - mean
    scale = jax.lax.rsqrt((centred * centred).mean(axes, keepdims=True) + jnp.float32(eps))
    result = centred * scale
    if weight is not None:
        result = result * weight.astype(jnp.float32)
    if bias is not None:
        result = result + bias.astype(jnp.float32)
    return result.astype(value.dtype), mean, scale


OWN: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.native_layer_norm.default: native_layer_norm,
}
