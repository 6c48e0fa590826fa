"""Arguments of the text model for a prefill, a decode and their warm-up calls.

Shapes: T padded tokens of a prefill, B padded requests of a decode, W blocks in a row of the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

__all__ = ["TextInputs", "bucket_of"]

PADDING_SLOT = 0  # in vLLM's null block
WARM_UP_POSITION = 255
WARM_UP_SAMPLING = (0.0, 1.0, 1.0)


@dataclass(frozen=True)
class TextInputs:
    """Builds the keyword arguments; the vision arguments and the mask are added by the runner.

    Args:
        layers: names of the layers that have a KV cache.
        block_size: tokens of a KV block.
        num_blocks: blocks of the KV cache.
        table_width: W.
        vocab_size: size of the vocabulary.
        uses_mrope: pass `rotary_position_ids`.
        samples: the package samples, so pass `sampling_params`.
        rank: int32 scalar, rank in the text group.
    """

    layers: tuple[str, ...]
    block_size: int
    num_blocks: int
    table_width: int
    vocab_size: int
    uses_mrope: bool
    samples: bool
    rank: torch.Tensor

    # ------------------------------------------------------------------------------------- steps

    def prefill(
        self, batch: InputBatch, state: CachedRequestState, count: int, padded: int
    ) -> dict[str, Any]:
        """The whole prompt of the only request in the batch, `padded` = T."""
        ids = torch.zeros(padded, dtype=torch.int32)
        ids[:count] = torch.from_numpy(batch.token_ids_cpu[0, :count])
        places = np.arange(count)
        positions = torch.full((padded,), count - 1, dtype=torch.int64)
        positions[:count] = torch.from_numpy(places)
        rotary = torch.zeros(3, padded, dtype=torch.int64)
        if self.uses_mrope:
            rotary[:, :count] = _rotary(state, count)
        return self._arguments(
            input_ids=ids,
            positions=positions,
            rotary=rotary,
            table=self._table(batch, 1, 1),
            slots=self._slots(batch, np.zeros(count, dtype=np.int64), places, padded),
            max_query_len=padded,
            rows=torch.tensor([count - 1]),
            params=self._sampling_params(batch, [state], 1),
        )

    def decode(
        self, batch: InputBatch, states: Sequence[CachedRequestState], padded: int
    ) -> dict[str, Any]:
        """The last token of every request in the batch, `padded` = B."""
        count = len(states)
        rows = np.arange(count)
        computed = batch.num_computed_tokens_cpu[:count].astype(np.int64)
        ids = torch.zeros(padded, dtype=torch.int32)
        ids[:count] = torch.from_numpy(batch.token_ids_cpu[rows, computed])
        positions = torch.zeros(padded, dtype=torch.int64)
        positions[:count] = torch.from_numpy(computed)
        rotary = torch.zeros(3, padded, dtype=torch.int64)
        if self.uses_mrope:
            deltas = np.array([state.mrope_position_delta for state in states])
            rotary[:, :count] = torch.from_numpy(computed + deltas)
        return self._arguments(
            input_ids=ids,
            positions=positions,
            rotary=rotary,
            table=self._table(batch, count, padded),
            slots=self._slots(batch, rows, computed, padded),
            max_query_len=1,
            rows=torch.arange(padded).clamp(max=count - 1),
            params=self._sampling_params(batch, states, padded),
        )

    # ----------------------------------------------------------------------------------- warm-up

    def warm_up_prefill(self, padded: int) -> dict[str, Any]:
        """The worker's synthetic prefill."""
        places = torch.arange(padded)
        return self._arguments(
            input_ids=(torch.arange(1, padded + 1) % self.vocab_size).to(torch.int32),
            positions=places,
            rotary=places.repeat(3, 1),
            table=self._warm_up_table()[None],
            slots=torch.zeros(padded, dtype=torch.int64),
            max_query_len=padded,
            rows=torch.tensor([padded - 1]),
            params=torch.tensor([WARM_UP_SAMPLING]),
        )

    def warm_up_decode(self, padded: int) -> dict[str, Any]:
        """The worker's synthetic decode."""
        return self._arguments(
            input_ids=torch.ones(padded, dtype=torch.int32),
            positions=torch.full((padded,), WARM_UP_POSITION),
            rotary=torch.full((3, padded), WARM_UP_POSITION),
            table=self._warm_up_table().repeat(padded, 1),
            slots=torch.zeros(padded, dtype=torch.int64),
            max_query_len=1,
            rows=torch.arange(padded),
            params=torch.tensor(WARM_UP_SAMPLING).repeat(padded, 1),
        )

    def _warm_up_table(self) -> torch.Tensor:
        return torch.arange(self.table_width, dtype=torch.int32) % self.num_blocks

    # ------------------------------------------------------------------------------------- parts

    def _slots(
        self, batch: InputBatch, rows: np.ndarray, places: np.ndarray, padded: int
    ) -> torch.Tensor:
        """int64 `[padded]`, KV slot of each token."""
        table = batch.block_table[0].get_numpy_array()
        blocks = table[rows, places // self.block_size].astype(np.int64)
        slots = torch.full((padded,), PADDING_SLOT, dtype=torch.int64)
        slots[: len(places)] = torch.from_numpy(blocks * self.block_size + places % self.block_size)
        return slots

    def _table(self, batch: InputBatch, count: int, padded: int) -> torch.Tensor:
        """int32 `[padded, W]`; -1 where there is no block."""
        group = batch.block_table[0]
        table = np.full((padded, self.table_width), -1, dtype=np.int32)
        for row in range(count):
            blocks = group.num_blocks_per_row[row]
            table[row, :blocks] = group.get_numpy_array()[row, :blocks]
        return torch.from_numpy(table)

    def _sampling_params(
        self, batch: InputBatch, states: Sequence[CachedRequestState], padded: int
    ) -> torch.Tensor | None:
        """float32 `[padded, 3]`: top-k (-1 is off), top-p, temperature (0 is greedy)."""
        if not self.samples:
            return None
        params = np.zeros((padded, 3), dtype=np.float32)
        for row, state in enumerate(states):
            own = state.sampling_params
            assert own is not None
            top_k = own.top_k if 0 < own.top_k < self.vocab_size else -1
            params[row] = (top_k, own.top_p, own.temperature)
        return torch.from_numpy(params)

    def _arguments(
        self,
        *,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        rotary: torch.Tensor,
        table: torch.Tensor,
        slots: torch.Tensor,
        max_query_len: int,
        rows: torch.Tensor,
        params: torch.Tensor | None,
    ) -> dict[str, Any]:
        metadata = {
            "block_table_tensor": table,
            "slot_mapping": slots,
            "max_query_len": max_query_len,
            "decode_token_threshold": 1,
            "block_size": self.block_size,
            "max_blocks_per_seq": self.table_width,
            "cached_seq_len": torch.zeros(1, 1, dtype=torch.int32),
            "kv_segment_size": 0,
            "full_block_table_tensor": table.clone(),
        }
        kwargs: dict[str, Any] = {
            "input_ids": input_ids,
            "positions": positions,
            "attn_metadata": dict.fromkeys(self.layers, metadata),
            "sampling_positions": rows,
            "sampling_params": params if self.samples else None,
            "spec_decode_metadata": None,
            "rank": self.rank,
            "logit_mask": None,
        }
        if self.uses_mrope:
            kwargs["rotary_position_ids"] = rotary
        return kwargs


def bucket_of(size: int, buckets: Sequence[int]) -> int:
    """Smallest bucket that holds `size`; the largest when none does, as in the plugin."""
    return next((bucket for bucket in buckets if bucket >= size), buckets[-1])


def _rotary(state: CachedRequestState, count: int) -> torch.Tensor:
    """Positions of the prompt, and of what was generated before a preemption, `[3, count]`."""
    assert state.mrope_positions is not None and state.mrope_position_delta is not None
    later = torch.arange(state.num_prompt_tokens, count) + state.mrope_position_delta
    return torch.cat([state.mrope_positions, later.repeat(3, 1)], dim=1)
