"""What a prefill reads from the encoder cache: blocks, and where each of their rows goes.

Legend: ``M`` blocks one request may read, ``C`` rows per block, ``T`` padded tokens of the prefill.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from vllm_neuron.vllm.worker.encoder_cache_blocks import EncoderCacheBlocks

__all__ = ["GatheredVision", "gather_mm_embeddings"]


class GatheredVision(NamedTuple):
    """Arguments of one prefill.

    Attributes:
        vision_embedding_blocks: ``M`` views ``[C, fat]`` of the cache's buffer, scratch where
            nothing is wanted.
        vision_positions: int64 ``[M, C]`` on the CPU, place of each row in the prefill; ``T``
            where the row is not wanted.
        block_ids: ids of the views.
    """

    vision_embedding_blocks: tuple[torch.Tensor, ...]
    vision_positions: torch.Tensor
    block_ids: list[int]


def gather_mm_embeddings(
    encoder_cache: EncoderCacheBlocks,
    mm_features: Sequence[Any],
    num_computed_tokens: int,
    num_scheduled_tokens: int,
    padded_num_tokens: int,
    max_vision_blocks: int,
    strict: bool = False,
) -> GatheredVision:
    """Collect the cached blocks of one request's items for one prefill.

    The window of the prefill is ``[num_computed, num_computed + num_scheduled)`` of the prompt.
    An item that only touches it costs all its blocks; its rows outside get the sentinel ``T``. Row
    ``r`` of an item goes to the ``r``-th True place of its ``is_embed`` mask (without a mask, to
    the ``r``-th place of its span).

    Args:
        encoder_cache: the cache.
        mm_features: the request's features in prompt order, each with ``identifier`` and
            ``mm_position`` (``offset``, ``length``, ``is_embed``).
        num_computed_tokens: prompt tokens already computed.
        num_scheduled_tokens: prompt tokens computed now.
        padded_num_tokens: ``T``.
        max_vision_blocks: ``M``.
        strict: stricter than the plugin: an item that is wanted but not cached, or has fewer rows
            than places, is an error. Otherwise its places keep their token embeddings.

    Returns:
        The blocks and the position table.

    Raises:
        RuntimeError: the items have more blocks than ``M``.
        KeyError: ``strict`` and an item is not in the cache.
        ValueError: ``strict`` and an item has fewer cached rows than places in its span.
    """
    first, end = num_computed_tokens, num_computed_tokens + num_scheduled_tokens
    positions = torch.full(
        (max_vision_blocks, encoder_cache.block_size), padded_num_tokens, dtype=torch.int64
    )
    block_ids: list[int] = []
    for feature in mm_features:
        places = _wanted_places(feature.mm_position, first, end)
        if places is None:
            continue
        ids = encoder_cache.get_block_ids(feature.identifier)
        counts = encoder_cache.get_tokens_per_block(feature.identifier)
        if ids is None or counts is None:
            if strict:
                raise KeyError(
                    f"item {feature.identifier!r} at prompt offset {feature.mm_position.offset} is "
                    "wanted by this prefill but not in the encoder cache; encode it first"
                )
            continue
        if strict and sum(counts) < len(places):
            raise ValueError(
                f"item {feature.identifier!r} has {sum(counts)} cached rows for {len(places)} "
                "places in the prompt"
            )
        row = 0
        for block_id, count in zip(ids, counts, strict=True):
            view = len(block_ids)
            if view == max_vision_blocks:
                raise RuntimeError(
                    f"the request's images and videos need more than the {max_vision_blocks} cache "
                    "blocks one prefill can read; every item takes blocks of its own. Raise the "
                    "largest of num_vision_tokens_buckets."
                )
            block_ids.append(block_id)
            for offset, place in enumerate(places[row : row + count]):
                if first <= place < end:
                    positions[view, offset] = place - first
            row += count
    missing = max_vision_blocks - len(block_ids)
    block_ids += [encoder_cache.scratch_block_id] * missing
    views = tuple(encoder_cache.buffer[block_id] for block_id in block_ids)
    return GatheredVision(views, positions, block_ids)


def _wanted_places(position: Any, first: int, end: int) -> list[int] | None:
    """Prompt places of an item's rows, or None when none of them lies in ``[first, end)``."""
    offset, length = position.offset, position.length
    if offset >= end or offset + length <= first:
        return None
    mask = getattr(position, "is_embed", None)
    if mask is None:
        return list(range(offset, offset + length))
    places = [offset + place for place, embeds in enumerate(mask) if embeds]
    return places if any(first <= place < end for place in places) else None
