"""The encoder cache: vision rows in fixed-size blocks of one device buffer.

Legend: ``N`` blocks, ``C`` rows per block (merged tokens), ``F`` width of a row (the text hidden
size times one plus the number of deepstack levels).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

__all__ = ["EncoderCacheBlocks"]

_POLL_INTERVAL_S = 0.001


@dataclass
class _Item:
    block_ids: list[int]
    tokens_per_block: list[int]
    written_at: float = 0.0  # a monotonic clock is far from 0, so "never" counts as long ago


class EncoderCacheBlocks:
    """Blocks of vision rows by item; a block never holds rows of two items.

    The last block is scratch: writes that belong nowhere go there, and it is never allocated.
    Ids come from the front of a queue and freed ones go to its end, so the ids of one item need
    be neither consecutive nor ascending.

    Args:
        num_blocks: ``N``, scratch included.
        block_size: ``C``.
        fat_dim: ``F``.
        dtype: dtype of the buffer; the plugin's runner always takes bfloat16.
        device: device of the buffer.
        min_hold_time_ms: a freed item keeps its blocks until so long after it was last marked as
            written.

    Attributes:
        buffer: zeros ``[N, C, F]``, written in place by the vision tower.
        scratch_block_id: ``N - 1``.
        block_size: ``C``.
        clock: monotonic clock in seconds; tests replace it.
        sleep: waits so many seconds; tests replace it.
        check_counts: stricter than the plugin, off by default: reject counts above the block
            size, which otherwise read back silently cut.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        fat_dim: int,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        min_hold_time_ms: float = 100.0,
    ) -> None:
        self.buffer = torch.zeros(num_blocks, block_size, fat_dim, dtype=dtype, device=device)
        self.block_size = block_size
        self.scratch_block_id = num_blocks - 1
        self.clock: Callable[[], float] = time.monotonic
        self.sleep: Callable[[float], None] = time.sleep
        self.check_counts = False
        self._hold_time_s = min_hold_time_ms / 1000.0
        self._free: deque[int] = deque(range(num_blocks - 1))
        self._active: dict[str, _Item] = {}
        self._held: dict[str, _Item] = {}

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated at once; held ones do not count."""
        return len(self._free)

    @staticmethod
    def dense_tokens_per_block(num_tokens: int, block_size: int) -> list[int]:
        """Return the row counts of an item without padding: full blocks, then the remainder.

        ``(9, 4) -> [4, 4, 1]``
        """
        full, rest = divmod(num_tokens, block_size)
        return [block_size] * full + ([rest] if rest else [])

    def contains(self, mm_hash: str) -> bool:
        """Tell whether an item is allocated. A held item is not."""
        return mm_hash in self._active

    def allocate(self, mm_hash: str, tokens_per_block: Sequence[int]) -> list[int]:
        """Give an item its blocks.

        A known item keeps its ids and the new counts are ignored. A held item gives its blocks
        back first. Short of blocks, expired held blocks are taken back, then the call waits for
        held ones, at most the hold time.

        Args:
            mm_hash: key of the item.
            tokens_per_block: real rows of each block, one entry per block.

        Returns:
            The block ids, as many as there are counts.

        Raises:
            RuntimeError: too few blocks; none is taken.
            ValueError: ``check_counts`` is on and a count exceeds the block size.
        """
        if mm_hash in self._active:
            return self._active[mm_hash].block_ids
        counts = list(tokens_per_block)
        if self.check_counts and any(not 0 <= count <= self.block_size for count in counts):
            raise ValueError(
                f"item {mm_hash!r}: counts per block must lie in 0..{self.block_size}, got {counts}"
            )
        if mm_hash in self._held:
            self._free.extend(self._held.pop(mm_hash).block_ids)
        if len(counts) > len(self._free):
            self._wait_for(len(counts))
        if len(counts) > len(self._free):
            raise RuntimeError(
                f"encoder cache full: item {mm_hash!r} of {sum(counts)} tokens needs "
                f"{len(counts)} blocks; {len(self._free)} are free, "
                f"{len(self._active)} items are active and {len(self._held)} held. "
                "Raise encoder_cache_num_blocks."
            )
        block_ids = [self._free.popleft() for _ in counts]
        self._active[mm_hash] = _Item(block_ids, counts)
        return block_ids

    def _wait_for(self, wanted: int) -> None:
        self.reclaim_held()
        deadline = self.clock() + self._hold_time_s
        while wanted > len(self._free) and self._held and self.clock() < deadline:
            self.sleep(_POLL_INTERVAL_S)
            self.reclaim_held()

    def mark_written(self, mm_hash: str) -> None:
        """Start an item's hold clock, or start it again. Unknown items are ignored."""
        item = self._active.get(mm_hash)
        if item is not None:
            item.written_at = self.clock()

    def get_block_ids(self, mm_hash: str) -> list[int] | None:
        """Return an item's block ids, or None."""
        item = self._active.get(mm_hash)
        return None if item is None else item.block_ids

    def get_num_tokens(self, mm_hash: str) -> int | None:
        """Return an item's number of real rows, or None."""
        item = self._active.get(mm_hash)
        return None if item is None else sum(item.tokens_per_block)

    def get_tokens_per_block(self, mm_hash: str) -> list[int] | None:
        """Return an item's real rows per block, or None."""
        item = self._active.get(mm_hash)
        return None if item is None else item.tokens_per_block

    def free(self, mm_hash: str) -> None:
        """Give an item's blocks back, or hold them until its hold time has passed."""
        item = self._active.pop(mm_hash, None)
        if item is None:
            return
        if self._expired(item):
            self._free.extend(item.block_ids)
        else:
            self._held[mm_hash] = item

    def _expired(self, item: _Item) -> bool:
        return self.clock() - item.written_at >= self._hold_time_s

    def reclaim_held(self) -> int:
        """Give expired held blocks back.

        Returns:
            The number of blocks.
        """
        expired = [mm_hash for mm_hash, item in self._held.items() if self._expired(item)]
        before = len(self._free)
        for mm_hash in expired:
            self._free.extend(self._held.pop(mm_hash).block_ids)
        return len(self._free) - before

    def clear(self) -> None:
        """Forget every item, zero the buffer and put the ids in their first order."""
        self._active.clear()
        self._held.clear()
        self._free = deque(range(self.scratch_block_id))
        self.buffer.zero_()

    def get(self, mm_hash: str) -> torch.Tensor | None:
        """Return an item's rows ``[n, F]``, or None.

        Returns:
            A view of the buffer for one block, a copy for several.

        Raises:
            ValueError: the item has no block.
        """
        item = self._active.get(mm_hash)
        if item is None:
            return None
        if not item.block_ids:
            raise ValueError(f"item {mm_hash!r} owns no block; there is nothing to read")
        parts = [
            self.buffer[block_id, :count]
            for block_id, count in zip(item.block_ids, item.tokens_per_block, strict=True)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def put(self, mm_hash: str, tensor: torch.Tensor) -> None:
        """Store an item's rows from the host side and mark it as written.

        Args:
            mm_hash: key of the item; a known one is left as it is.
            tensor: ``[n, F]``, cast to the buffer's dtype. The tail of the last block is zeroed.

        Raises:
            RuntimeError: too few blocks, with none taken; or a wrong width, found after the
                blocks were taken, as in the plugin: the item stays allocated, unwritten.
        """
        if mm_hash in self._active:
            return
        counts = self.dense_tokens_per_block(tensor.shape[0], self.block_size)
        block_ids = self.allocate(mm_hash, counts)
        if tensor.shape[1:] != self.buffer.shape[2:]:
            raise RuntimeError(
                f"item {mm_hash!r} has rows of shape {list(tensor.shape[1:])}, the cache's are "
                f"{list(self.buffer.shape[2:])}"
            )
        start = 0
        for block_id, count in zip(block_ids, counts, strict=True):
            self.buffer[block_id, :count] = tensor[start : start + count].to(self.buffer.dtype)
            self.buffer[block_id, count:] = 0
            start += count
        self.mark_written(mm_hash)

    def items(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (key, rows) of every allocated item, in the order of allocation."""
        for mm_hash in list(self._active):
            rows = self.get(mm_hash)
            assert rows is not None
            yield mm_hash, rows
