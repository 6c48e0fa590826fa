"""Running sum, done as a product as on the device."""

import torch

__all__ = ["cumsum"]


def cumsum(tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Sum each row up to and including every entry.

    Args:
        tensor: ``[rows, n]``.
        dim: the last dim.

    Returns:
        ``[rows, n]`` in the input dtype: the product with an upper triangle of ones.

    Raises:
        ValueError: not 2-D, or another dim.
    """
    if tensor.dim() != 2:
        raise ValueError(f"cumsum: 2-D tensors only, not {list(tensor.shape)}")
    if dim not in (-1, 1):
        raise ValueError(f"cumsum: dim must be the last one (-1 or 1), not {dim}")
    width = tensor.shape[1]
    triangle = torch.ones(width, width, dtype=tensor.dtype, device=tensor.device).triu()
    return torch.matmul(tensor, triangle)
