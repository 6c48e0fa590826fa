"""Mixture of experts over a prefill's tokens.

Shapes: T tokens, H hidden width, I expert width, E experts on this rank, N blocks.
"""

import torch
from nkilib.core.moe.moe_cte.moe_cte import BlockShardStrategy, MoECTEImplementation
from nkilib.core.utils.common_types import ActFnType, ExpertAffinityScaleMode, QuantizationType

from .._sizes_rule import check_kernel_sizes
from ._experts import clamp_between, expert_activation

__all__ = ["moe_cte"]

MX_IMPLEMENTATIONS = (
    MoECTEImplementation.shard_on_block_mx,
    MoECTEImplementation.shard_on_i_mx,
    MoECTEImplementation.shard_on_i_mx_hybrid,
)
NARROWEST_KERNEL_WIDTH = 128


def moe_cte(
    hidden_states: torch.Tensor,
    expert_affinities_masked: torch.Tensor,
    gate_up_proj_weight: torch.Tensor,
    down_proj_weight: torch.Tensor,
    token_position_to_id: torch.Tensor,
    block_to_expert: torch.Tensor,
    block_size: int,
    implementation: MoECTEImplementation,
    n_block_per_iter: int = 1,
    block_sharding_strategy: BlockShardStrategy = BlockShardStrategy.PING_PONG,
    n_static_blocks: int = -1,
    n_dynamic_blocks: int = -1,
    top_k: int = 1,
    ep_degree: int = 1,
    checkpoint_activation: bool = False,
    expert_affinity_multiply_on_I: bool = False,
    num_static_block: int | None = None,
    conditions: torch.Tensor | None = None,
    gate_and_up_proj_bias: torch.Tensor | None = None,
    down_proj_bias: torch.Tensor | None = None,
    gate_up_proj_scale: torch.Tensor | None = None,
    down_proj_scale: torch.Tensor | None = None,
    gate_up_activations_T: torch.Tensor | None = None,
    down_activations: torch.Tensor | None = None,
    activation_function: ActFnType = ActFnType.SiLU,
    skip_token: bool = False,
    skip_weight: bool = False,
    compute_dtype: torch.dtype = torch.bfloat16,
    is_tensor_update_accumulating: bool = True,
    expert_affinities_scaling_mode: ExpertAffinityScaleMode = ExpertAffinityScaleMode.POST_SCALE,
    gate_clamp_upper_limit: float | None = None,
    gate_clamp_lower_limit: float | None = None,
    up_clamp_upper_limit: float | None = None,
    up_clamp_lower_limit: float | None = None,
    quantization_type: QuantizationType = QuantizationType.NONE,
    gate_w_scale: torch.Tensor | None = None,
    up_w_scale: torch.Tensor | None = None,
    down_w_scale: torch.Tensor | None = None,
    gate_up_in_scale: torch.Tensor | None = None,
    down_in_scale: torch.Tensor | None = None,
    use_packed_scales: bool = False,
) -> torch.Tensor:
    """Run every expert on every token and sum by affinity; the block mapping has no effect here.

    NO_SCALE sums **all** experts for every token, as on the plugin's CPU path.

    Args:
        hidden_states: ``[T, H]`` or ``[T+1, H]``, whose last row is dropped.
        expert_affinities_masked: ``[T*E, 1]``, zero where a token does not use an expert. float32
            ones make POST_SCALE accumulate in float32.
        gate_up_proj_weight: ``[E, H, 2, I]``.
        down_proj_weight: ``[E, I, H]``.
        token_position_to_id: ``[N*block_size]``; no effect on a CPU.
        block_to_expert: ``[N]``; no effect.
        block_size: no effect.
        implementation: no effect but for the MX forms, which need a device from I 128 up.
        n_block_per_iter: no effect.
        block_sharding_strategy: no effect.
        n_static_blocks: no effect.
        n_dynamic_blocks: no effect.
        top_k: no effect.
        ep_degree: no effect.
        checkpoint_activation: no effect.
        expert_affinity_multiply_on_I: no effect.
        num_static_block: no effect.
        conditions: no effect.
        gate_and_up_proj_bias: ``[E, 2, I]``.
        down_proj_bias: ``[E, 1, H]`` on a CPU (``[E, H]`` for the kernel: here it is broadcast over
            tokens, which is right for one expert only).
        gate_up_proj_scale: MX forms only.
        down_proj_scale: MX forms only.
        gate_up_activations_T: no effect.
        down_activations: no effect.
        activation_function: SiLU, erf GELU, or Swish as ``x*sigmoid(1.702x)``.
        skip_token: no effect.
        skip_weight: no effect.
        compute_dtype: no effect.
        is_tensor_update_accumulating: no effect.
        expert_affinities_scaling_mode: where the affinity enters.
        gate_clamp_upper_limit: limit on the gate before the activation.
        gate_clamp_lower_limit: limit on the gate before the activation.
        up_clamp_upper_limit: limit on the up part.
        up_clamp_lower_limit: limit on the up part.
        quantization_type: NONE on a CPU.
        gate_w_scale: no effect.
        up_w_scale: no effect.
        down_w_scale: no effect.
        gate_up_in_scale: no effect.
        down_in_scale: no effect.
        use_packed_scales: no effect.

    Returns:
        ``[T, H]`` in the dtype of hidden_states.

    Raises:
        ValueError: tanh GELU.
        AssertionError: an MX form from I 128 up without both scales.
        RuntimeError: an MX form from I 128 up, STATIC_MX, or hidden and weights of other dtypes.
    """
    experts, hidden_width, _, width = gate_up_proj_weight.shape
    if quantization_type == QuantizationType.STATIC_MX:
        raise RuntimeError(
            "moe_cte: STATIC_MX works with shard_on_block_mx on a device only, "
            f"not with {implementation.name} on a CPU"
        )
    if implementation in MX_IMPLEMENTATIONS and width >= NARROWEST_KERNEL_WIDTH:
        assert (
            gate_up_proj_scale is not None and down_proj_scale is not None
        ), f"moe_cte: {implementation.name} needs gate_up_proj_scale and down_proj_scale"
        raise RuntimeError(f"moe_cte: {implementation.name} has no CPU path at width {width}")
    check_kernel_sizes(
        "moe_cte",
        (
            width % 16 == 0 and width >= NARROWEST_KERNEL_WIDTH,
            f"I % 16 == 0 and >= 128, not {width}",
        ),
        (block_size % 128 == 0, f"block_size % 128 == 0, not {block_size}"),
        (
            (gate_and_up_proj_bias is None) == (down_proj_bias is None),
            "gate/up bias and down bias both or neither",
        ),
    )

    mode = ExpertAffinityScaleMode
    affinities = expert_affinities_masked.reshape(-1, experts)  # [T, E]
    tokens = affinities.shape[0]
    x = hidden_states[:tokens].unsqueeze(0)  # [1, T, H]
    weights = affinities.t().unsqueeze(-1)  # [E, T, 1]
    if expert_affinities_scaling_mode == mode.PRE_SCALE:
        x = (x * weights).to(hidden_states.dtype)
    x = x.expand(experts, tokens, hidden_width)

    gate_up = torch.bmm(x, gate_up_proj_weight.flatten(2)).unflatten(-1, (2, width))
    if gate_and_up_proj_bias is not None:
        gate_up = gate_up + gate_and_up_proj_bias.unsqueeze(1)
    gate = clamp_between(gate_up[:, :, 0], gate_clamp_lower_limit, gate_clamp_upper_limit)
    up = clamp_between(gate_up[:, :, 1], up_clamp_lower_limit, up_clamp_upper_limit)
    activation = expert_activation(activation_function)
    if activation is None:
        raise ValueError(
            f"moe_cte: {activation_function} has no CPU path, only SiLU, GELU and Swish"
        )
    inner = activation(gate) * up
    if expert_affinities_scaling_mode == mode.PRE_SCALE_DELAYED:
        inner = (inner * weights).to(hidden_states.dtype)
    output = torch.bmm(inner, down_proj_weight)  # [E, T, H]
    if down_proj_bias is not None:
        output = output + down_proj_bias
    if expert_affinities_scaling_mode == mode.POST_SCALE:
        output = output * weights
    return output.sum(dim=0).to(hidden_states.dtype)
