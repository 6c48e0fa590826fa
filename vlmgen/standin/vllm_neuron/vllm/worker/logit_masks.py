"""Masks of allowed tokens, as the model takes them.

Legend: ``R`` rows of a call, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

__all__ = ["LogitMasks"]


class LogitMasks:
    """Makes the argument ``logit_mask`` of one rank.

    Args:
        vocab_size: ``V``.
        tp_size: ranks over which the package samples; 1 when it returns whole logits.
        rank: this one.
    """

    def __init__(self, vocab_size: int, tp_size: int, rank: int) -> None:
        self._vocab_size, self._tp_size, self._rank = vocab_size, tp_size, rank

    def open(self, rows: int) -> torch.Tensor:
        """Everything is allowed: bool ``[R, V]``, or ``[R, V / ranks]``."""
        return self._own_columns(torch.ones(rows, self._vocab_size, dtype=torch.bool))

    def of_grammar(self, rows: int, grammar_output: Any, row_of: Mapping[str, int]) -> torch.Tensor:
        """What the grammars of a step allow, rows without one open.

        Args:
            rows: ``R``, padding included.
            grammar_output: vLLM's bit masks, int32 words with the first token in the lowest bit;
                None for a step without a grammar.
            row_of: request id -> row.
        """
        if grammar_output is None:
            return self.open(rows)
        mask = np.ones((rows, self._vocab_size), dtype=bool)
        names = grammar_output.structured_output_request_ids
        for name, words in zip(names, grammar_output.grammar_bitmask, strict=False):
            row = row_of.get(name)
            if row is not None:
                bits = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), bitorder="little")
                mask[row] = bits[: self._vocab_size].astype(bool)
        return self._own_columns(torch.from_numpy(mask))

    def _own_columns(self, mask: torch.Tensor) -> torch.Tensor:
        if self._tp_size == 1:
            return mask
        width = -(-self._vocab_size // self._tp_size)
        mask = torch.nn.functional.pad(mask, (0, width * self._tp_size - self._vocab_size))
        return mask[:, self._rank * width : (self._rank + 1) * width].contiguous()
