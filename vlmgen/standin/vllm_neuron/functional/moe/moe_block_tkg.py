"""Mixture-of-experts block of a decode step: norm, router and experts in one call.

Shapes: T tokens, H hidden width, I expert width, E routed experts, E_local experts on this rank.
"""

import torch
from nkilib.core.utils.common_types import ActFnType, ExpertAffinityScaleMode, RouterActFnType

from .._norm import rms_norm_float32
from .._sizes_rule import check_kernel_sizes
from ._experts import clamp_between, expert_activation

__all__ = ["moe_block_tkg"]


def moe_block_tkg(
    inp: torch.Tensor,
    gamma: torch.Tensor,
    router_weights: torch.Tensor,
    expert_gate_up_weights: torch.Tensor,
    expert_down_weights: torch.Tensor,
    rank_id: torch.Tensor | None = None,
    top_k: int = 1,
    shared_expert_gate_w: torch.Tensor | None = None,
    shared_expert_up_w: torch.Tensor | None = None,
    shared_expert_down_w: torch.Tensor | None = None,
    expert_gate_up_weights_scale: torch.Tensor | None = None,
    expert_down_weights_scale: torch.Tensor | None = None,
    router_bias: torch.Tensor | None = None,
    expert_gate_up_bias: torch.Tensor | None = None,
    expert_down_bias: torch.Tensor | None = None,
    shared_expert_gate_bias: torch.Tensor | None = None,
    shared_expert_up_bias: torch.Tensor | None = None,
    shared_expert_down_bias: torch.Tensor | None = None,
    eps: float = 1e-6,
    router_act_fn: RouterActFnType = RouterActFnType.SIGMOID,
    router_pre_norm: bool = True,
    norm_topk_prob: bool = False,
    expert_affinities_scaling_mode: ExpertAffinityScaleMode = ExpertAffinityScaleMode.NO_SCALE,
    hidden_act_fn: ActFnType = ActFnType.SiLU,
    hidden_act_scale_factor: float | None = None,
    hidden_act_bias: float | None = None,
    gate_clamp_upper_limit: float | None = None,
    gate_clamp_lower_limit: float | None = None,
    up_clamp_upper_limit: float | None = None,
    up_clamp_lower_limit: float | None = None,
    router_mm_dtype: torch.dtype = torch.bfloat16,
    hidden_actual: int | None = None,
    skip_router_logits: bool = False,
    is_all_expert: bool = False,
    residual: torch.Tensor | None = None,
    expert_gate_up_input_scale: torch.Tensor | None = None,
    expert_down_input_scale: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Normalise, route and run the selected experts; the caller sums over ranks.

    Works in float32, except that the normalised input is first rounded to the input dtype.

    Args:
        inp: ``[B, S, H]`` or ``[T, H]``, not normalised.
        gamma: ``[1, H]`` weight of the fused RMS norm.
        router_weights: ``[H, E]``.
        expert_gate_up_weights: ``[E_local, H, 2, I]``.
        expert_down_weights: ``[E_local, I, H]``.
        rank_id: int ``[1, 1]`` expert-parallel rank; counts, and is needed, only when fewer experts
            are local than routed.
        top_k: experts per token.
        shared_expert_gate_w: None on a CPU, like every ``shared_expert_*``.
        shared_expert_up_w: None on a CPU.
        shared_expert_down_w: None on a CPU.
        expert_gate_up_weights_scale: None on a CPU.
        expert_down_weights_scale: None on a CPU.
        router_bias: ``[1, E]`` or ``[E]``.
        expert_gate_up_bias: ``[E_local, 2, I]``.
        expert_down_bias: ``[E_local, H]``.
        shared_expert_gate_bias: None on a CPU.
        shared_expert_up_bias: None on a CPU.
        shared_expert_down_bias: None on a CPU.
        eps: epsilon of the norm.
        router_act_fn: SIGMOID or SOFTMAX.
        router_pre_norm: activation over all experts before the top k, else over the k logits.
        norm_topk_prob: make the k affinities sum to one.
        expert_affinities_scaling_mode: NO_SCALE counts every selected expert as 1; any other mode
            weighs it after its down projection.
        hidden_act_fn: SiLU, erf GELU, or Swish as ``x*sigmoid(1.702x)``.
        hidden_act_scale_factor: None on a CPU.
        hidden_act_bias: None on a CPU.
        gate_clamp_upper_limit: limit on the gate before the activation.
        gate_clamp_lower_limit: limit on the gate before the activation.
        up_clamp_upper_limit: limit on the up part.
        up_clamp_lower_limit: limit on the up part.
        router_mm_dtype: no effect on a CPU.
        hidden_actual: true width when H is padded; the rest of the norm's result is zero.
        skip_router_logits: return the output alone.
        is_all_expert: no effect on a CPU.
        residual: None on a CPU.
        expert_gate_up_input_scale: None on a CPU.
        expert_down_input_scale: None on a CPU.

    Returns:
        The output ``[T, H]`` in the input dtype, or (output, float32 logits ``[T, E]``).

    Raises:
        NotImplementedError: shared experts, scales, residual, activation placeholders, tanh GELU.
        RuntimeError: fewer experts local than routed, and no rank_id.
    """
    unsupported = {
        "shared experts": (
            shared_expert_gate_w,
            shared_expert_up_w,
            shared_expert_down_w,
            shared_expert_gate_bias,
            shared_expert_up_bias,
            shared_expert_down_bias,
        ),
        "weight scales": (expert_gate_up_weights_scale, expert_down_weights_scale),
        "input scales": (expert_gate_up_input_scale, expert_down_input_scale),
        "a fused residual": (residual,),
        "an activation scale or bias": (hidden_act_scale_factor, hidden_act_bias),
    }
    for what, values in unsupported.items():
        if any(value is not None for value in values):
            raise NotImplementedError(f"moe_block_tkg: {what} has no CPU path")
    activation = expert_activation(hidden_act_fn)
    if activation is None:
        raise NotImplementedError(f"moe_block_tkg: {hidden_act_fn} has no CPU path")

    tokens = inp.reshape(-1, inp.shape[-1])
    hidden = tokens.shape[1]
    local, routed = expert_gate_up_weights.shape[0], router_weights.shape[1]
    check_kernel_sizes("moe_block_tkg", (hidden % 256 == 0, f"H % 256 == 0, not {hidden}"))
    rank = rank_id if local < routed else None
    if rank is None and local < routed:
        raise RuntimeError(
            f"moe_block_tkg: {local} of {routed} experts are local: rank_id is needed"
        )

    actual = hidden if hidden_actual is None else hidden_actual
    inside = torch.arange(hidden, device=inp.device) < actual
    real = torch.where(inside, tokens, torch.zeros_like(tokens))
    x = rms_norm_float32(real, gamma, eps, hidden_actual=actual).float()  # rounded once

    logits = torch.matmul(x, router_weights.float())
    if router_bias is not None:
        logits = logits + router_bias.float().reshape(1, -1)
    if router_pre_norm:
        best, selected = torch.topk(_activate_router(logits, router_act_fn), top_k, dim=-1)
    else:
        best_logits, selected = torch.topk(logits, top_k, dim=-1)
        best = _activate_router(best_logits, router_act_fn)
    if norm_topk_prob:
        best = best / best.sum(-1, keepdim=True)
    if expert_affinities_scaling_mode == ExpertAffinityScaleMode.NO_SCALE:
        best = torch.ones_like(best)
    affinities = torch.zeros_like(logits).scatter(-1, selected, best)  # [T, E]
    if rank is not None:
        columns = rank.reshape(-1)[0].long() * local + torch.arange(local, device=inp.device)
        affinities = affinities.index_select(1, columns)

    gate_up = torch.einsum("th,ehci->etci", x, expert_gate_up_weights.float())
    if expert_gate_up_bias is not None:
        gate_up = gate_up + expert_gate_up_bias.float().unsqueeze(1)
    gate = clamp_between(gate_up[:, :, 0], gate_clamp_lower_limit, gate_clamp_upper_limit)
    up = clamp_between(gate_up[:, :, 1], up_clamp_lower_limit, up_clamp_upper_limit)
    inner = activation(gate) * up
    output = torch.bmm(inner, expert_down_weights.float())  # [E_local, T, H]
    if expert_down_bias is not None:
        output = output + expert_down_bias.float().unsqueeze(1)
    output = (output * affinities.t().unsqueeze(-1)).sum(dim=0).to(inp.dtype)
    return output if skip_router_logits else (output, logits)


def _activate_router(logits: torch.Tensor, act_fn: RouterActFnType) -> torch.Tensor:
    if act_fn == RouterActFnType.SOFTMAX:
        return torch.softmax(logits, dim=-1)
    return torch.sigmoid(logits)
