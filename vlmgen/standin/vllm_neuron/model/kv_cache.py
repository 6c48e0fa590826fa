"""What a model says about the KV cache it needs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["KVSpec", "LayerSpec"]


@dataclass
class LayerSpec:
    """KV cache of one attention layer.

    Attributes:
        name: layer name, also the key of ``attn_metadata`` and ``bind_kv_cache``.
        num_kv_heads: KV heads **per rank**.
        head_size: width of a head.
        dtype: dtype wanted; the runner takes the cache config's instead.
        sliding_window_size: window in tokens, or None for full attention.
        chunk_size: chunk of chunked attention, or None.
    """

    name: str
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    sliding_window_size: int | None = None
    chunk_size: int | None = None


@dataclass
class KVSpec:
    """The layers with a KV cache, in order. An empty list is legal for an encoder-only role."""

    layers: list[LayerSpec]
