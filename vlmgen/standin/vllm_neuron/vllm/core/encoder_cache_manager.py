"""vLLM's account of the encoder cache, kept in blocks.

vLLM counts merged tokens. The worker's cache gives every item blocks of its own, so many small
items run out of blocks while the token account still has room, and the plugin's engine then ends
with "encoder cache full". Here an item counts as the whole of its blocks: a request waits, or an
unused item is evicted, before that happens.
"""

from __future__ import annotations

from typing import cast

from vllm.config import VllmConfig
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.request import Request
from vllm_neuron.vllm.limits import VisionLimits, frames_of

__all__ = ["BlockEncoderCacheManager"]


class BlockEncoderCacheManager(EncoderCacheManager):
    """Counts an item as ``blocks * rows per block`` tokens.

    Args:
        limits: sizes of the cache.
    """

    def __init__(self, limits: VisionLimits) -> None:
        super().__init__(cache_size=limits.allocatable_blocks * limits.rows_per_block)
        self._limits = limits
        self._embeds: dict[str, int] = {}  # rows that an item really has
        self._pending = 0  # whole blocks promised to the request that is being looked at

    @classmethod
    def create_manager(cls, *, cache_size: int, vllm_config: VllmConfig) -> EncoderCacheManager:
        """Called by vLLM's scheduler; ``cache_size`` in tokens is what it would use itself."""
        return cls(VisionLimits.from_vllm_config(vllm_config, cache_size))

    @property
    def num_used_blocks(self) -> int:
        """Blocks of all cached items, used or evictable."""
        return (self.cache_size - self.num_free_slots) // self._limits.rows_per_block

    def reset(self) -> None:
        """Forget every item."""
        super().reset()
        self._embeds.clear()

    def get_cached_num_encoder_embeds(self, request: Request, input_id: int) -> int | None:
        """Rows of a cached item, or None."""
        mm_hash = request.mm_features[input_id].identifier
        return self._embeds.get(mm_hash) if mm_hash in self.cached else None

    def can_allocate(
        self,
        request: Request,
        input_id: int,
        encoder_compute_budget: int,
        num_embeds_to_schedule: int,
    ) -> bool:
        """Whether an item has room beside those promised before it; evicts unused items."""
        if request.get_num_encoder_embeds(input_id) > encoder_compute_budget:
            return False
        if num_embeds_to_schedule == 0:
            self._pending = 0
        whole = _whole_blocks(request, self._limits)
        size = whole.get_num_encoder_embeds(input_id)
        if not super().can_allocate(whole, input_id, size, self._pending):
            return False
        self._pending += size
        return True

    def allocate(self, request: Request, input_id: int) -> None:
        """Take the item's blocks."""
        mm_hash = request.mm_features[input_id].identifier
        self._embeds[mm_hash] = request.get_num_encoder_embeds(input_id)
        super().allocate(_whole_blocks(request, self._limits), input_id)


def _whole_blocks(request: Request, limits: VisionLimits) -> Request:
    """A request for vLLM's manager, which looks at what `_WholeBlocks` has and no more."""
    return cast(Request, _WholeBlocks(request, limits))


class _WholeBlocks:
    """A request whose items have the size of their blocks."""

    def __init__(self, request: Request, limits: VisionLimits) -> None:
        self.request_id = request.request_id
        self.mm_features = request.mm_features
        self._limits = limits

    def get_num_encoder_embeds(self, input_id: int) -> int:
        """Rows of the item's blocks."""
        feature = self.mm_features[input_id]
        frames = frames_of(feature.mm_position, feature.data)
        return self._limits.blocks_of(frames) * self._limits.rows_per_block
