"""Values that follow from a spec: widths, blocks, shards, parameter counts. Pure functions.

Legend: H text hidden size, V vocabulary, L decoder layers, I intermediate size, D vision hidden
size, m merge area, tp tensor-parallel size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from vlmgen.check.parallel import legal_text_tp, legal_vision_tp, padded_vocab, text_split
from vlmgen.errors import UsageError
from vlmgen.spec.model import Spec
from vlmgen.spec.text import TextSpec
from vlmgen.spec.vision import DeepstackMerger, Merger, VisionSpec

__all__ = [
    "Derived",
    "KvShard",
    "derive",
    "kv_shard",
    "padded_vocab",
    "position_grid",
    "text_parameters",
    "vision_parameters",
]


@dataclass(frozen=True)
class KvShard:
    """Key/value heads of one rank.

    Args:
        heads: KV heads per rank.
        replicas: Ranks that hold the same head; 1 without replication.
    """

    heads: int
    replicas: int


@dataclass(frozen=True)
class Derived:
    """Derived values of one checkpoint.

    Args:
        name: The checkpoint.
        q_size: Query width, heads x head_dim.
        kv_size: Key width, KV heads x head_dim.
        gqa_ratio: Query heads per KV head.
        rotary_dim: Rotated elements of a text head.
        merge_area: Patches per merged row, m.
        patch_dim: Width of one pixel row.
        vision_head_dim: Width of a vision head.
        merged_width: Width of a joined merge window, m x D.
        position_grid: Side of the learned position table.
        levels: Deepstack levels.
        fat_width: Width of an encoder-cache row, out_hidden_size x (1 + levels).
        cache_block_tokens: Merged rows of one cache block, block size / m.
        text_parameters: Parameters of the text tower with the head.
        vision_parameters: Parameters of the vision tower with mergers.
        text_tp: Legal text TP up to 64.
        vision_tp: Legal vision TP up to 64.
    """

    name: str
    q_size: int
    kv_size: int
    gqa_ratio: int
    rotary_dim: int
    merge_area: int
    patch_dim: int
    vision_head_dim: int
    merged_width: int
    position_grid: int
    levels: int
    fat_width: int
    cache_block_tokens: int
    text_parameters: int
    vision_parameters: int
    text_tp: tuple[int, ...]
    vision_tp: tuple[int, ...]

    @property
    def parameters(self) -> int:
        """Parameters of the whole model; a tied head counts once."""
        return self.text_parameters + self.vision_parameters


def derive(spec: Spec, checkpoint: str | None = None) -> Derived:
    """Derived values of a checkpoint.

    Args:
        spec: The spec.
        checkpoint: A published name; the default checkpoint if left out.

    Raises:
        UsageError: The spec lists no such checkpoint.
    """
    resolved = spec.checkpoint(checkpoint or spec.defaults_from)
    text, vision = resolved.text, resolved.vision
    return Derived(
        name=resolved.name,
        q_size=text.attention.q_size,
        kv_size=text.attention.kv_size,
        gqa_ratio=text.attention.num_heads // text.attention.num_kv_heads,
        rotary_dim=text.rotary_dim,
        merge_area=vision.merge_area,
        patch_dim=vision.patch_embed.patch_dim,
        vision_head_dim=vision.head_dim,
        merged_width=vision.merged_width,
        position_grid=position_grid(vision),
        levels=vision.num_levels,
        fat_width=vision.fat_width,
        cache_block_tokens=spec.neuron.vision_attention_block_size // vision.merge_area,
        text_parameters=text_parameters(text),
        vision_parameters=vision_parameters(vision),
        text_tp=legal_text_tp(text),
        vision_tp=legal_vision_tp(vision),
    )


def position_grid(vision: VisionSpec) -> int:
    """Side of the learned square position table."""
    return math.isqrt(vision.position.num_embeddings)


def kv_shard(text: TextSpec, tp: int) -> KvShard:
    """KV heads of a rank at a legal TP; heads are replicated when TP exceeds them.

    Args:
        text: The text tower.
        tp: A legal text TP.

    Raises:
        UsageError: The TP is illegal.

    Source: runner contract 8.1, KV shard = rank // replicas.
    """
    split = text_split(text, tp)
    if not split.legal:
        raise UsageError(f"text TP {tp} is illegal: {'; '.join(split.problems)}")
    return KvShard(split.kv_heads, split.kv_replicas)


def text_parameters(text: TextSpec) -> int:
    """Parameters of the decoder, the embedding and, unless tied, the head."""
    hidden = text.hidden_size
    attention, mlp = text.attention, text.mlp
    per_layer = hidden * (attention.q_size + 2 * attention.kv_size)  # q, k, v
    per_layer += attention.q_size * hidden  # o
    per_layer += 2 * attention.head_dim  # q_norm, k_norm
    per_layer += 3 * hidden * mlp.intermediate_size  # gate, up, down
    per_layer += 2 * hidden  # two layer norms
    tables = 1 if text.tie_word_embeddings else 2
    return tables * text.vocab_size * hidden + text.num_layers * per_layer + hidden


def vision_parameters(vision: VisionSpec) -> int:
    """Parameters of the tower with its merger and deepstack mergers."""
    width, inner = vision.hidden_size, vision.mlp.intermediate_size
    per_block = 2 * 2 * width  # norm1, norm2 with bias
    per_block += width * 3 * width + 3 * width + width * width + width  # qkv, proj
    per_block += width * inner + inner + inner * width + width  # fc1, fc2
    total = vision.patch_embed.patch_dim * width + width
    total += vision.position.num_embeddings * width
    total += vision.depth * per_block
    total += _merger_parameters(vision, vision.merger)
    total += vision.num_levels * _merger_parameters(vision, vision.deepstack.merger)
    return total


def _merger_parameters(vision: VisionSpec, merger: Merger | DeepstackMerger) -> int:
    joined, out = vision.merged_width, vision.out_hidden_size
    normed = vision.hidden_size if merger.norm_position == "before_merge" else joined
    return 2 * normed + joined * joined + joined + joined * out + out
