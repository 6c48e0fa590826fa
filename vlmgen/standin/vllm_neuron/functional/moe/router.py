"""Routing of tokens to experts.

Shapes: T tokens, H hidden width, E experts, k experts per token.
"""

from collections.abc import Callable
from enum import Enum

import torch

__all__ = ["RouterComputationOrder", "router"]

COMPUTATION_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class RouterComputationOrder(Enum):
    """Order in which logits become affinities; the norm and the projection always come first."""

    PRENORM_LINEAR_TOPK_ACT_SCATTER = "prenorm_linear_topk_act_scatter"
    PRENORM_LINEAR_ACT_TOPK_RENORM_SCATTER = "prenorm_linear_act_topk_renorm_scatter"
    PRENORM_LINEAR_TOPK_SCATTER_ACT = "prenorm_linear_topk_scatter_act"


def router(
    hidden_states: torch.Tensor,
    router_weights: torch.Tensor,
    top_k: int,
    router_bias: torch.Tensor | None = None,
    activation: str | Callable[[torch.Tensor], torch.Tensor] = "softmax",
    return_logits: bool = False,
    gamma: torch.Tensor | None = None,
    eps: float = 1e-6,
    computation_dtype: torch.dtype = torch.float32,
    router_computation_order: RouterComputationOrder = (
        RouterComputationOrder.PRENORM_LINEAR_TOPK_ACT_SCATTER
    ),
    shard_on_tokens: bool | None = None,
    transposed_hidden_states: bool = False,
    x_sb_layout: object | None = None,
    use_column_tiling: bool | None = None,
    use_indirect_dma_scatter: bool | None = None,
    use_PE_broadcast_w_bias: bool | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute every token's affinity to every expert, zero off the best k.

    Args:
        hidden_states: ``[T, H]``, or ``[H, T]`` with transposed_hidden_states.
        router_weights: ``[H, E]``.
        top_k: k, 1 to E.
        router_bias: ``[E]``.
        activation: "softmax", "sigmoid" or a function of the last dim.
        return_logits: also return the logits.
        gamma: ``[H]``; given, an RMS norm comes first.
        eps: epsilon of that norm.
        computation_dtype: float32, float16 or bfloat16; everything runs in it.
        router_computation_order: the enum, never its value.
        shard_on_tokens: no effect on a CPU, like the parameters below but for the transposition.
        transposed_hidden_states: layout of hidden_states.
        x_sb_layout: no effect.
        use_column_tiling: no effect.
        use_indirect_dma_scatter: no effect.
        use_PE_broadcast_w_bias: no effect.

    Returns:
        Affinities ``[T, E]`` in computation_dtype, or (affinities, logits).

    Raises:
        ValueError: a shape, dtype, order or activation outside the above.
    """
    if hidden_states.dim() != 2 or router_weights.dim() != 2:
        raise ValueError(
            "router: hidden_states and router_weights must be 2-D, "
            f"not {list(hidden_states.shape)} and {list(router_weights.shape)}"
        )
    x = hidden_states.t() if transposed_hidden_states else hidden_states
    hidden, experts = router_weights.shape
    if x.shape[1] != hidden:
        raise ValueError(f"router: hidden width {x.shape[1]} against weights [{hidden}, {experts}]")
    if not 1 <= top_k <= experts:
        raise ValueError(f"router: top_k must lie in 1..{experts}, not {top_k}")
    if router_bias is not None and tuple(router_bias.shape) != (experts,):
        raise ValueError(f"router: router_bias must be [{experts}], not {list(router_bias.shape)}")
    if gamma is not None and tuple(gamma.shape) != (hidden,):
        raise ValueError(f"router: gamma must be [{hidden}], not {list(gamma.shape)}")
    if computation_dtype not in COMPUTATION_DTYPES:
        raise ValueError(
            f"router: computation_dtype must be one of {COMPUTATION_DTYPES}, "
            f"not {computation_dtype}"
        )
    if not isinstance(router_computation_order, RouterComputationOrder):
        raise ValueError(
            "router: router_computation_order must be a RouterComputationOrder, "
            f"not {router_computation_order!r}"
        )
    activate = _activation(activation)

    x = x.to(computation_dtype)
    if gamma is not None:
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
        x = x * gamma.to(computation_dtype)
    logits = torch.matmul(x, router_weights.to(computation_dtype))
    if router_bias is not None:
        logits = logits + router_bias.to(computation_dtype)

    order = RouterComputationOrder
    if router_computation_order == order.PRENORM_LINEAR_TOPK_ACT_SCATTER:
        best, experts_of = torch.topk(logits, top_k, dim=-1)
        affinities = torch.zeros_like(logits).scatter(-1, experts_of, activate(best))
    elif router_computation_order == order.PRENORM_LINEAR_ACT_TOPK_RENORM_SCATTER:
        best, experts_of = torch.topk(activate(logits), top_k, dim=-1)
        best = best / best.abs().sum(-1, keepdim=True)
        affinities = torch.zeros_like(logits).scatter(-1, experts_of, best)
    else:
        best, experts_of = torch.topk(logits, top_k, dim=-1)
        hidden_logits = torch.full_like(logits, float("-inf"))
        affinities = activate(hidden_logits.scatter(-1, experts_of, best))
    return (affinities, logits) if return_logits else affinities


def _activation(
    activation: str | Callable[[torch.Tensor], torch.Tensor],
) -> Callable[[torch.Tensor], torch.Tensor]:
    if callable(activation):
        return activation
    if activation == "softmax":
        return lambda x: torch.softmax(x, dim=-1)
    if activation == "sigmoid":
        return torch.sigmoid
    raise ValueError(f"router: activation must be 'softmax' or 'sigmoid', not {activation!r}")
