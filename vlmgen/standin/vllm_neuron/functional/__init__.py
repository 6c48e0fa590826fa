"""Operators that models build on, written in plain PyTorch.

Each function computes what the plugin's CPU path computes, in the dtype it is given. None of them
reduces over tensor-parallel ranks unless it takes a group.
"""

from .attention.attention_cte import flash_attention
from .attention.attention_decode import attention_decode
from .attention.attention_decode_mask import gen_attention_decode_mask
from .attention.attention_segmented_cte import segmented_attention, segmented_attention_cp
from .attention.o_proj import o_proj
from .attention.qkv import qkv_proj
from .attention.swa_fused import swa_fused_attention
from .cumsum import cumsum
from .embedding import embedding
from .expert_parallel import (
    calculate_local_expert_indices,
    get_local_expert_affinities,
    validate_expert_parallelism_config,
)
from .mlp import mlp
from .moe.moe_block_tkg import moe_block_tkg
from .moe.moe_blockwise import build_blockwise_mapping
from .moe.moe_cte import moe_cte
from .moe.moe_tkg import moe_tkg
from .moe.rmsnorm_router_topk_tkg import rmsnorm_router_topk_tkg
from .moe.router import router
from .prompt_embeds import merge_prompt_embeds
from .rmsnorm_quant import rmsnorm_quant
from .sampling import sample

__all__ = [
    "attention_decode",
    "build_blockwise_mapping",
    "calculate_local_expert_indices",
    "cumsum",
    "embedding",
    "flash_attention",
    "gen_attention_decode_mask",
    "get_local_expert_affinities",
    "merge_prompt_embeds",
    "mlp",
    "moe_block_tkg",
    "moe_cte",
    "moe_tkg",
    "o_proj",
    "qkv_proj",
    "rmsnorm_quant",
    "rmsnorm_router_topk_tkg",
    "router",
    "sample",
    "segmented_attention",
    "segmented_attention_cp",
    "swa_fused_attention",
    "validate_expert_parallelism_config",
]
