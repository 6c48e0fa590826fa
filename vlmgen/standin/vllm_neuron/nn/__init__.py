"""Parallel layers and the sampler that model packages build on."""

from .embedding import EmbedDimShardedEmbedding, VocabDimShardedEmbedding
from .linear import ColumnParallelLinear, RowParallelLinear
from .sampler import Sampler

__all__ = [
    "ColumnParallelLinear",
    "EmbedDimShardedEmbedding",
    "RowParallelLinear",
    "Sampler",
    "VocabDimShardedEmbedding",
]
