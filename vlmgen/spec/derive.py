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
    """Side of the learned square position table without the class token; 0 without a table."""
    if vision.position is None:
        return 0
    return math.isqrt(vision.position.num_embeddings - (1 if vision.class_token else 0))


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
    hidden, attention, moe = text.hidden_size, text.attention, text.moe
    norms = 2 if text.norm.topology == "pre" else 4
    fused = attention.q_size + 2 * attention.kv_size
    per_layer = hidden * fused + attention.q_size * hidden + norms * hidden
    per_layer += fused if attention.qkv_bias else 0
    per_layer += 2 * attention.head_dim if attention.qk_norm != "none" else 0
    dense_layers = text.num_layers if moe is None else moe.first_dense
    total = text.num_layers * per_layer + dense_layers * _gated(hidden, text.mlp.intermediate_size)
    if moe is not None:
        experts = hidden * moe.num_experts
        experts += moe.num_experts if moe.router == "sigmoid_bias" else 0
        experts += moe.num_experts * _gated(hidden, moe.intermediate_size)
        if moe.shared is not None:
            experts += _gated(hidden, moe.shared.count * moe.intermediate_size)
        total += (text.num_layers - dense_layers) * experts
    tables = 1 if text.tie_word_embeddings else 2
    return tables * text.vocab_size * hidden + total + hidden


def vision_parameters(vision: VisionSpec, tp: int = 1) -> int:
    """Parameters of the tower with its merger and deepstack mergers, on one rank.

    Args:
        vision: The vision tower.
        tp: A legal vision TP.
    """
    width, attention, mlp = vision.hidden_size, vision.attention, vision.mlp
    own, inner = width // tp, mlp.intermediate_size // tp
    block = 2 * _norm(vision.norm.kind, width) + 4 * width * own
    block += 3 * own if attention.qkv_bias else 0
    block += width if attention.output_bias else 0
    block += 2 * own if attention.qk_norm != "none" else 0
    block += 2 * width if vision.layer_scale else 0
    matrices = 1 if mlp.kind == "plain" else 2  # before the last
    block += (matrices + 1) * width * inner
    block += matrices * inner + width if mlp.bias else 0
    embed = vision.patch_embed
    total = embed.patch_dim * width + (width if embed.bias else 0)
    total += vision.position.num_embeddings * width if vision.position else 0
    total += width if vision.class_token else 0
    for norm in (vision.embed_norm, vision.final_norm):
        total += _norm(norm.kind, width) if norm else 0
    total += vision.depth * block + _merger_parameters(vision, tp)
    if vision.deepstack is not None:
        level = _window_merger(vision, vision.deepstack.merger, vision.merged_width, tp)
        total += vision.num_levels * level
    return total


def _merger_parameters(vision: VisionSpec, tp: int) -> int:
    merger, out, inner = vision.merger, vision.out_hidden_size, vision.merger_width // tp
    if merger.op == "window":
        return _window_merger(vision, merger, vision.merger_width, tp)
    own = out // tp  # the convolution is cut by its output, the layer after it by its input
    total = vision.merged_width * own + own + own * out
    total += _norm(merger.norm, out) + _gated(out, inner)
    return total + (2 * out + 2 * inner if merger.bias else 0)


def _window_merger(
    vision: VisionSpec, merger: Merger | DeepstackMerger, width: int, tp: int
) -> int:
    joined, out, inner = vision.merged_width, vision.out_hidden_size, width // tp
    normed = vision.hidden_size if merger.norm_position == "before_merge" else joined
    total = _norm(merger.norm, normed) + joined * inner + inner * out
    return total + (inner + out if merger.bias else 0)


def _gated(outer: int, inner: int) -> int:
    """Three matrices: gate, up and down."""
    return 3 * outer * inner


def _norm(kind: str, width: int) -> int:
    """A layer norm has a weight and a bias, an RMS norm a weight."""
    return 2 * width if kind == "layer" else width
