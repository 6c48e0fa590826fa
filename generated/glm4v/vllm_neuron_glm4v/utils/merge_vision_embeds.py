"""Put cached vision rows in the place of their placeholder tokens, inside the prefill graph.

Shapes: P cache blocks of C rows, H hidden size, L rows of this rank.
"""

from collections.abc import Sequence

import torch


def local_rows(positions: torch.Tensor, length: int, rank: torch.Tensor | None) -> torch.Tensor:
    """Token index in the whole prompt -> row on this rank; `length` for rows that lie elsewhere
    or nowhere.

    `L = 4, rank 1: 2 5 7 16 -> 4 1 3 4`
    """
    local = positions if rank is None else positions - rank * length
    return torch.where((local >= 0) & (local < length), local, length)


def place_rows(base: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Copy of `base` `[L, H]` with `values` at `rows`; row L is a dummy that takes what has no
    place here.
    """
    padded = torch.cat([base, base.new_zeros(1, base.shape[1])])
    padded.index_put_((rows,), values.to(base.dtype))
    return padded[:-1]


def merge_vision_embeddings(
    hidden: torch.Tensor,
    vision_embedding_blocks: Sequence[torch.Tensor],
    vision_positions: torch.Tensor,
    rank: torch.Tensor | None,
) -> torch.Tensor:
    """Overwrite placeholder embeddings.

    Args:
        hidden: token embeddings of this rank, `[L, H]`.
        vision_embedding_blocks: P tensors `[C, H]`.
        vision_positions: int64 `[P, C]`, token index of each row in the whole prompt; out of
            range for none.
        rank: this rank's number in the text group, a scalar tensor; None on a single rank.

    Returns:
        `[L, H]`.

    Raises:
        ValueError: the rows have another width.
    """
    length, width = hidden.shape
    rows = torch.cat(list(vision_embedding_blocks))  # [P * C, H]
    if rows.shape[1] != width:
        raise ValueError(
            f"cached vision rows have width {rows.shape[1]}; the hidden size is {width}"
        )
    return place_rows(hidden, local_rows(vision_positions.reshape(-1), length, rank), rows)
