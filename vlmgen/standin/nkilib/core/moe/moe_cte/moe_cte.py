"""Enums of the mixture-of-experts prefill kernel (``nkilib.core.moe.moe_cte.moe_cte``)."""

from enum import Enum

__all__ = ["BlockShardStrategy", "MoECTEImplementation"]


class MoECTEImplementation(Enum):
    """How the kernel shares its work between the two cores of a pair."""

    shard_on_block = "shard_on_block"
    shard_on_i = "shard_on_i"
    shard_on_i_hybrid = "shard_on_i_hybrid"
    shard_on_i_dropping = "shard_on_i_dropping"
    shard_on_block_mx = "shard_on_block_mx"
    shard_on_i_mx = "shard_on_i_mx"
    shard_on_i_mx_hybrid = "shard_on_i_mx_hybrid"


class BlockShardStrategy(Enum):
    """Which core of a pair takes which token block."""

    PING_PONG = "PING_PONG"
    HI_LO = "HI_LO"
