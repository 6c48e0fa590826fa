"""Mixture of experts over a decode step's tokens: device only."""

import torch
from nkilib.core.utils.common_types import (
    ActFnType,
    ExpertAffinityScaleMode,
    MoEAllToAllVStrategy,
)

__all__ = ["moe_tkg"]


def moe_tkg(
    hidden_input: torch.Tensor,
    expert_gate_up_weights: torch.Tensor,
    expert_down_weights: torch.Tensor,
    expert_affinities: torch.Tensor,
    expert_index: torch.Tensor,
    is_all_expert: bool,
    rank_id: torch.Tensor | None = None,
    expert_gate_up_bias: torch.Tensor | None = None,
    expert_down_bias: torch.Tensor | None = None,
    expert_gate_up_weights_scale: torch.Tensor | None = None,
    expert_down_weights_scale: torch.Tensor | None = None,
    hidden_input_scale: torch.Tensor | None = None,
    expert_gate_up_input_scale: torch.Tensor | None = None,
    expert_down_input_scale: torch.Tensor | None = None,
    mask_unselected_experts: bool = False,
    expert_affinities_eager: torch.Tensor | None = None,
    expert_affinities_scaling_mode: ExpertAffinityScaleMode = ExpertAffinityScaleMode.NO_SCALE,
    activation_fn: ActFnType = ActFnType.SiLU,
    output_dtype: torch.dtype | None = None,
    gate_clamp_upper_limit: float | None = None,
    gate_clamp_lower_limit: float | None = None,
    up_clamp_upper_limit: float | None = None,
    up_clamp_lower_limit: float | None = None,
    output_in_sbuf: bool = False,
    is_all_expert_dynamic: bool = False,
    block_size: int | None = None,
    input_dequant_scale: torch.Tensor | None = None,
    all_to_all_v_strategy: MoEAllToAllVStrategy = MoEAllToAllVStrategy.DISABLED,
) -> torch.Tensor:
    """Refuse to run: the plugin has no CPU path for this operator either.

    Raises:
        NotImplementedError: always; use moe_block_tkg, which has a CPU path.
    """
    raise NotImplementedError("moe_tkg: needs a device; moe_block_tkg has a CPU path")
