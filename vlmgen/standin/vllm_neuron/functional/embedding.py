"""Row lookup in an embedding table."""

import torch
import torch.nn.functional as F

__all__ = ["embedding"]


def embedding(input_ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Pick the rows of a table.

    Args:
        input_ids: integer ``[...]``.
        weight: ``[V, D]``.

    Returns:
        ``[..., D]`` in the table's dtype.
    """
    return F.embedding(input_ids, weight)
