"""Lowerings of ATen operators for which torchax's own are no faithful program.

torchax takes the variance of a layer norm from NumPy's interface, which holds a float64 constant
that the package has not, and the top k from a sort, where XLA and devices have an operator for it.
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


def topk(
    value: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[Any, Any]:
    """The k largest (or smallest) values along a dimension in order, and where they are."""
    import jax
    import jax.numpy as jnp

    last = jnp.moveaxis(value, dim, -1)
    best, index = jax.lax.top_k(last if largest else -last, k)
    best = best if largest else -best
    return jnp.moveaxis(best, -1, dim), jnp.moveaxis(index, -1, dim).astype(jnp.int64)


OWN: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.native_layer_norm.default: native_layer_norm,
    torch.ops.aten.topk.default: topk,
}
