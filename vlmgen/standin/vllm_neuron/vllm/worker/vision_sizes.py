"""Sizes of the vision side that the platform hook and the runner derive from the configuration.

Raw patches before merging, merged tokens after; ``m`` raw patches make one merged token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = [
    "EncoderCacheSizes",
    "default_buckets",
    "encoder_cache_sizes",
    "resolve_vision_auto_config",
]

DEFAULT_VISION_ATTENTION_BLOCK_SIZE = 2048


def _next_power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


def _doublings(first: int, last: int) -> list[int]:
    """``(2048, 5000) -> [2048, 4096, 5000]``; the last one need be no doubling."""
    sizes = []
    size = first
    while size < last:
        sizes.append(size)
        size *= 2
    return [*sizes, last]


def default_buckets(kind: str, maximum: int) -> list[int]:
    """Return the buckets the platform takes when the configuration names none.

    Args:
        kind: ``"num_batched_tokens_buckets"`` (doublings from 128) or ``"num_seqs_buckets"``
            (doublings from 1).
        maximum: the last bucket.

    Raises:
        ValueError: another kind, or a maximum below 1.
    """
    first = {"num_batched_tokens_buckets": 128, "num_seqs_buckets": 1}
    if kind not in first:
        raise ValueError(f"no default buckets for {kind!r}; legal are {sorted(first)}")
    if maximum < 1:
        raise ValueError(f"{kind}: the largest bucket must be at least 1, got {maximum}")
    return _doublings(first[kind], maximum)


def resolve_vision_auto_config(
    vision_neuron_config: dict[str, Any],
    max_model_len: int,
    merge_factor: int,
    max_pixels_token_count: int | None = None,
) -> int:
    """Fill in vision buckets and block size the way the platform hook does, in place.

    Without an explicit list the buckets are doublings of the block size up to the smaller of the
    next power of two of ``max_model_len * merge_factor`` and ``max_vision_seq_len``; without the
    latter there is exactly one bucket. An empty list and a ``max_vision_seq_len`` of 0 count as
    not set. The derived list is written into the dict, so a second call over a dict with
    ``max_vision_seq_len`` raises, as does one over a bucket that came out below the block.

    Args:
        vision_neuron_config: ``additional_config["vision_neuron_config"]``; changed.
        max_model_len: longest sequence in merged tokens.
        merge_factor: ``m`` of the factory.
        max_pixels_token_count: raw patches of one item at the processor's ``max_pixels``, if both
            are known. The block size is raised to the next power of two that holds them.

    Returns:
        The most merged tokens one item may have: the largest bucket divided by ``m``.

    Raises:
        ValueError: both an explicit list and ``max_vision_seq_len``; a largest explicit bucket or
            a ``max_vision_seq_len`` below the block size.
    """
    config = vision_neuron_config
    block_size = config.get("vision_attention_block_size") or DEFAULT_VISION_ATTENTION_BLOCK_SIZE
    buckets = config.get("num_vision_tokens_buckets")
    longest = config.get("max_vision_seq_len")
    if buckets and longest:
        raise ValueError(
            "vision_neuron_config: num_vision_tokens_buckets and max_vision_seq_len exclude one "
            "another; an explicit list needs no cap"
        )
    if max_pixels_token_count is not None and max_pixels_token_count > block_size:
        block_size = _next_power_of_two(max_pixels_token_count)
        config["vision_attention_block_size"] = block_size
    if buckets:
        if max(buckets) < block_size:
            raise ValueError(
                f"vision_neuron_config: the largest of num_vision_tokens_buckets, {max(buckets)}, "
                f"is below vision_attention_block_size {block_size}; an item that fills a block "
                f"would fit no bucket. Add a bucket of at least {block_size}."
            )
        return max(buckets) // merge_factor
    if longest and longest < block_size:
        raise ValueError(
            f"vision_neuron_config: max_vision_seq_len {longest} is below "
            f"vision_attention_block_size {block_size}; legal is {block_size} or more"
        )
    cap = min(_next_power_of_two(max_model_len * merge_factor), longest or block_size)
    config["num_vision_tokens_buckets"] = _doublings(block_size, cap)
    return cap // merge_factor


@dataclass(frozen=True)
class EncoderCacheSizes:
    """How large the encoder cache is.

    Attributes:
        fat_dim: width of a row, the text width times one plus the deepstack levels.
        cache_block_size: merged tokens per block.
        max_vision_blocks_per_request: blocks one prefill can read; a shape of the graph.
        num_blocks: blocks, scratch included.
        min_hold_time_ms: how long a freed item stays readable.
    """

    fat_dim: int
    cache_block_size: int
    max_vision_blocks_per_request: int
    num_blocks: int
    min_hold_time_ms: float

    @property
    def scratch_block_id(self) -> int:
        """The last block."""
        return self.num_blocks - 1


def encoder_cache_sizes(
    vision_config: Any,
    model_hidden_size: int,
    merge_factor: int,
    vision_attention_block_size: int,
    num_vision_tokens_buckets: Sequence[int],
    scheduler_encoder_cache_size: int,
    encoder_cache_num_blocks: int | None = None,
    encoder_cache_min_hold_time_ms: float | None = None,
) -> EncoderCacheSizes:
    """Derive the encoder cache's sizes as the runner does.

    Args:
        vision_config: the Hugging Face vision configuration (object or mapping) or None, of which
            ``out_hidden_size`` and ``deepstack_visual_indexes`` are read.
        model_hidden_size: width of a row without an ``out_hidden_size``.
        merge_factor: ``m`` of the factory.
        vision_attention_block_size: raw patches per block.
        num_vision_tokens_buckets: raw patches per bucket, in any order; only the largest counts.
        scheduler_encoder_cache_size: merged tokens vLLM's budget object gives the cache.
        encoder_cache_num_blocks: the user's floor; a smaller one is raised silently.
        encoder_cache_min_hold_time_ms: None counts as 0.

    Raises:
        AssertionError: the block size or the largest bucket is no multiple of ``m``.
        ValueError: one request may read more blocks than can be allocated.
    """

    def field(name: str) -> Any:
        if isinstance(vision_config, dict):
            return vision_config.get(name)
        return getattr(vision_config, name, None)

    largest = max(num_vision_tokens_buckets)
    for name, size in (
        ("vision_attention_block_size", vision_attention_block_size),
        ("the largest of num_vision_tokens_buckets", largest),
    ):
        if size % merge_factor:
            raise AssertionError(
                f"{name}, {size}, must be a multiple of the merge area {merge_factor}"
            )
    width = field("out_hidden_size") or model_hidden_size
    levels = len(field("deepstack_visual_indexes") or [])
    cache_block_size = vision_attention_block_size // merge_factor
    max_blocks = -(-(largest // merge_factor) // cache_block_size)
    needed = -(-scheduler_encoder_cache_size // cache_block_size) + 1
    num_blocks = max(encoder_cache_num_blocks or 0, needed)
    if max_blocks > num_blocks - 1:
        raise ValueError(
            f"the encoder cache has {num_blocks} blocks, of which {num_blocks - 1} can be "
            f"allocated, but one request may read {max_blocks}: the largest vision bucket is "
            f"{largest} patches, a block holds {cache_block_size} merged tokens and the scheduler "
            f"caches {scheduler_encoder_cache_size}. Set encoder_cache_num_blocks to at least "
            f"{max_blocks + 1}."
        )
    return EncoderCacheSizes(
        fat_dim=width * (1 + levels),
        cache_block_size=cache_block_size,
        max_vision_blocks_per_request=max_blocks,
        num_blocks=num_blocks,
        min_hold_time_ms=float(encoder_cache_min_hold_time_ms or 0.0),
    )
