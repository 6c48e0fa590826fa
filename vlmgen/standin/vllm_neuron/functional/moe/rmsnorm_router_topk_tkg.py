"""Norm and routing of a decode step in one call.

Shapes: B requests, S tokens, T = B*S, H hidden width, E experts, K experts per token.
"""

import torch
from nkilib.core.utils.common_types import QuantizationType, RouterActFnType

from .._norm import rms_norm_float32
from .._sizes_rule import check_kernel_sizes

__all__ = ["rmsnorm_router_topk_tkg"]


def rmsnorm_router_topk_tkg(
    hidden_states: torch.Tensor,
    gamma: torch.Tensor,
    router_weights: torch.Tensor,
    router_bias: torch.Tensor | None = None,
    eps: float = 1e-6,
    top_k: int = 1,
    hidden_actual: int | None = None,
    quantization_type: QuantizationType = QuantizationType.NONE,
    router_mm_dtype: torch.dtype = torch.bfloat16,
    router_act_fn: RouterActFnType = RouterActFnType.SIGMOID,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Normalise the tokens and pick each one's experts.

    No recorded result of the plugin's own code exists for this function; it follows the described
    shapes, with the activation over all experts before the top k and no renormalisation.

    Args:
        hidden_states: ``[B, S, H]``.
        gamma: ``[1, H]``.
        router_weights: ``[H, E]``.
        router_bias: ``[1, E]`` or ``[E]``.
        eps: epsilon of the norm.
        top_k: K.
        hidden_actual: true width when H is padded.
        quantization_type: NONE on a CPU.
        router_mm_dtype: no effect on a CPU, where the product is float32.
        router_act_fn: SIGMOID or SOFTMAX.

    Returns:
        (normalised ``[B, S, H]``, experts int32 ``[T, K]``, affinities bfloat16 ``[T, E]``, zero
        off the top k).

    Raises:
        NotImplementedError: quantisation.
    """
    if quantization_type != QuantizationType.NONE:
        raise NotImplementedError(f"rmsnorm_router_topk_tkg: {quantization_type} has no CPU path")
    hidden, experts = router_weights.shape
    check_kernel_sizes(
        "rmsnorm_router_topk_tkg",
        (hidden % 256 == 0, f"H % 256 == 0, not {hidden}"),
        (experts <= 512, f"E <= 512, not {experts}"),
    )
    normed = rms_norm_float32(hidden_states, gamma, eps, hidden_actual=hidden_actual)
    logits = torch.matmul(normed.reshape(-1, hidden).float(), router_weights.float())
    if router_bias is not None:
        logits = logits + router_bias.float().reshape(1, -1)
    if router_act_fn == RouterActFnType.SOFTMAX:
        scores = torch.softmax(logits, dim=-1)
    else:
        scores = torch.sigmoid(logits)
    best, selected = torch.topk(scores, top_k, dim=-1)
    affinities = torch.zeros_like(scores).scatter(-1, selected, best)
    return normed, selected.to(torch.int32), affinities.to(torch.bfloat16)
