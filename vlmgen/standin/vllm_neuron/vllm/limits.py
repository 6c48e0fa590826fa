"""What one request may ask of the vision side, in blocks and merged tokens.

The front end refuses by these numbers, the scheduler plans by them and the runner allocates by
them, so they are worked out in one place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from vllm.config import VllmConfig
from vllm_neuron.utils.vision_utils import get_vision_token_merge_factor
from vllm_neuron.vllm.settings import additional_config_of
from vllm_neuron.vllm.worker.vision_sizes import EncoderCacheSizes, encoder_cache_sizes

__all__ = ["VisionLimits", "frames_of"]


@dataclass(frozen=True)
class VisionLimits:
    """Sizes of the encoder cache and of one prefill.

    Attributes:
        rows_per_block: merged tokens per cache block.
        blocks_per_request: blocks one prefill can read.
        tokens_per_step: merged tokens one step can encode, the largest vision bucket.
        allocatable_blocks: blocks of the cache without the scratch block; 0 when only the limits
            of a request are known.
    """

    rows_per_block: int
    blocks_per_request: int
    tokens_per_step: int
    allocatable_blocks: int = 0

    @classmethod
    def from_vllm_config(
        cls, vllm_config: VllmConfig, scheduler_encoder_cache_size: int | None = None
    ) -> VisionLimits:
        """Read the resolved configuration.

        Args:
            vllm_config: after the platform hook.
            scheduler_encoder_cache_size: merged tokens vLLM's budget gives the cache; None leaves
                the number of blocks open.
        """
        hf_config = vllm_config.model_config.hf_config
        vision = additional_config_of(vllm_config)["vision_neuron_config"]
        factor = get_vision_token_merge_factor(hf_config)
        buckets = vision["num_vision_tokens_buckets"]
        rows = vision["vision_attention_block_size"] // factor
        tokens = max(buckets) // factor
        blocks = 0
        if scheduler_encoder_cache_size is not None:
            sizes = cache_sizes(vllm_config, scheduler_encoder_cache_size)
            blocks = sizes.num_blocks - 1
        return cls(rows, -(-tokens // rows), tokens, blocks)

    def blocks_of(self, frames: Sequence[int]) -> int:
        """Cache blocks of one item: as many whole frames per block as fit.

        Args:
            frames: merged tokens of each frame.
        """
        largest = max(frames, default=0)
        per_block = max(1, self.rows_per_block // largest) if largest else 1
        return max(-(-len(frames) // per_block), -(-sum(frames) // self.rows_per_block))

    def problem(self, items: Sequence[tuple[str, Sequence[int]]]) -> str | None:
        """Why a request cannot be served, or None.

        Args:
            items: modality and frames of each item, in prompt order.
        """
        for index, (modality, frames) in enumerate(items):
            largest = max(frames, default=0)
            if largest > self.rows_per_block:
                return (
                    f"{modality} {index} of the request needs {largest} vision tokens in one "
                    f"attention block, which holds {self.rows_per_block}; send it smaller, or "
                    "raise vision_attention_block_size and num_vision_tokens_buckets"
                )
        blocks = sum(self.blocks_of(frames) for _, frames in items)
        tokens = sum(sum(frames) for _, frames in items)
        counts = f"the {len(items)} images and videos of the request"
        if blocks > self.blocks_per_request:
            return (
                f"{counts} need {blocks} blocks of the encoder cache, and one prompt can read "
                f"{self.blocks_per_request}; every item takes blocks of its own. Send fewer, or "
                "raise the largest of num_vision_tokens_buckets"
            )
        if tokens > self.tokens_per_step:
            return (
                f"{counts} have {tokens} vision tokens together, and one prompt can have "
                f"{self.tokens_per_step}; send fewer or smaller ones, or raise the largest of "
                "num_vision_tokens_buckets"
            )
        return None


def frames_of(position: Any, data: Mapping[str, Any] | None = None) -> list[int]:
    """Merged tokens of each frame of an item.

    Args:
        position: its placeholder.
        data: its processor outputs, where they are at hand. Frames are then counted by the grid,
            or by the number of tiles; each tile takes the room of one token more, for a class
            token. Otherwise a frame is an unbroken run of the embedding mask.
    """
    mask = position.is_embed
    tokens = position.length if mask is None else int(mask.sum())
    for name, element in (data or {}).items():
        if name.endswith("_grid_thw"):
            frames = int(element.data.reshape(-1)[0])
            return [tokens // frames] * frames
        if name.endswith("_num_patches"):
            tiles = int(element.data)
            return [tokens // tiles + 1] * tiles
    if mask is None:
        return [tokens]
    return [len(list(run)) for embeds, run in groupby(mask.tolist()) if embeds]


def cache_sizes(vllm_config: VllmConfig, scheduler_encoder_cache_size: int) -> EncoderCacheSizes:
    """Sizes of the encoder cache, see :func:`encoder_cache_sizes`."""
    hf_config = vllm_config.model_config.hf_config
    vision = additional_config_of(vllm_config)["vision_neuron_config"]
    return encoder_cache_sizes(
        hf_config.vision_config,
        vllm_config.model_config.get_hidden_size(),
        get_vision_token_merge_factor(hf_config),
        vision["vision_attention_block_size"],
        vision["num_vision_tokens_buckets"],
        scheduler_encoder_cache_size,
        vision.get("encoder_cache_num_blocks"),
        vision.get("encoder_cache_min_hold_time_ms"),
    )
