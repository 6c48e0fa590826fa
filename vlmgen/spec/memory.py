"""What one rank holds in memory: weights and KV cache. Pure functions of sizes.

Legend: H text hidden size, V vocabulary, I intermediate size, D vision width, m merge area, tp
tensor-parallel size. Weights are bfloat16 but for what the packages keep in float32, the router
and its correction bias; activations and what the compiler adds are not counted.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from vlmgen.check.parallel import legal_vision_tp, padded_vocab, text_split
from vlmgen.errors import UsageError
from vlmgen.spec.model import ResolvedCheckpoint
from vlmgen.spec.text import TextMoe, TextSpec
from vlmgen.spec.vision import DeepstackMerger, Merger, VisionSpec

BFLOAT16 = 2
FLOAT32 = 4


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank.

    Args:
        text_tp: Text TP.
        vision_tp: Vision TP.
        text_weights: Weights of the text tower and the head, bytes.
        vision_weights: Weights of the vision tower, bytes.
        kv_per_token: KV cache of one token, bytes.
    """

    text_tp: int
    vision_tp: int
    text_weights: int
    vision_weights: int
    kv_per_token: int

    @property
    def weights(self) -> int:
        """Weights of both towers, bytes."""
        return self.text_weights + self.vision_weights

    def to_dict(self) -> dict[str, int]:
        """Plain data for `--json`."""
        return {**asdict(self), "weights": self.weights}


def rank_memory(checkpoint: ResolvedCheckpoint, text_tp: int) -> RankMemory:
    """Bytes of one rank, the tower split as far as it may be within the text's ranks.

    Args:
        checkpoint: Both towers with the sizes of a checkpoint.
        text_tp: A legal text TP; the world size.

    Raises:
        UsageError: The text TP is illegal.
    """
    text, vision = checkpoint.text, checkpoint.vision
    split = text_split(text, text_tp)
    if not split.legal:
        raise UsageError(f"text TP {text_tp} is illegal: {'; '.join(split.problems)}")
    # Vision TP x DP is the world size.
    vision_tp = max(tp for tp in (1, *legal_vision_tp(vision)) if text_tp % tp == 0)
    halves = text.num_layers * 2 * split.kv_heads * text.attention.head_dim
    return RankMemory(
        text_tp=text_tp,
        vision_tp=vision_tp,
        text_weights=text_rank_bytes(text, text_tp),
        vision_weights=vision_rank_parameters(vision, vision_tp) * BFLOAT16,
        kv_per_token=halves * BFLOAT16,
    )


def text_rank_bytes(text: TextSpec, tp: int) -> int:
    """Bytes of the text tower's weights on one rank; a tied head is a second view, not counted.

    Args:
        text: The text tower.
        tp: A legal text TP.
    """
    hidden, attention = text.hidden_size, text.attention
    split = text_split(text, tp)
    q_width = split.heads * attention.head_dim
    layer = hidden * split.qkv_width + q_width * hidden
    layer += split.qkv_width if attention.qkv_bias else 0
    layer += 2 * attention.head_dim if attention.qk_norm != "none" else 0
    layer += (2 if text.norm.topology == "pre" else 4) * hidden
    moe = text.moe
    dense = text.num_layers if moe is None else moe.first_dense
    tables = 1 if text.tie_word_embeddings else 2
    total = tables * (padded_vocab(text.vocab_size, tp) // tp) * hidden + hidden
    total += text.num_layers * layer
    total += dense * 3 * hidden * (text.mlp.intermediate_size // tp)
    size = total * BFLOAT16
    if moe is not None:
        size += (text.num_layers - dense) * _expert_layer_bytes(moe, hidden, tp)
    return size


def _expert_layer_bytes(moe: TextMoe, hidden: int, tp: int) -> int:
    experts = moe.num_experts * 3 * hidden * (moe.intermediate_size // tp)
    if moe.shared is not None:
        experts += 3 * hidden * (moe.shared.count * moe.intermediate_size // tp)
    router = hidden * moe.num_experts
    router += moe.num_experts if moe.router == "sigmoid_bias" else 0
    return experts * BFLOAT16 + router * FLOAT32


def vision_rank_parameters(vision: VisionSpec, tp: int) -> int:
    """Parameters of the vision tower on one rank.

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
    total += vision.depth * block + _merger(vision, tp)
    if vision.deepstack is not None:
        level = _window_merger(vision, vision.deepstack.merger, vision.merged_width, tp)
        total += vision.num_levels * level
    return total


def _merger(vision: VisionSpec, tp: int) -> int:
    merger, out, inner = vision.merger, vision.out_hidden_size, vision.merger_width // tp
    if merger.op == "window":
        return _window_merger(vision, merger, vision.merger_width, tp)
    own = out // tp  # the convolution is cut by its output, the layer after it by its input
    total = vision.merged_width * own + own + own * out + _norm(merger.norm, out) + 3 * out * inner
    return total + (2 * out + 2 * inner if merger.bias else 0)


def _window_merger(
    vision: VisionSpec, merger: Merger | DeepstackMerger, width: int, tp: int
) -> int:
    joined, out, inner = vision.merged_width, vision.out_hidden_size, width // tp
    normed = vision.hidden_size if merger.norm_position == "before_merge" else joined
    total = _norm(merger.norm, normed) + joined * inner + inner * out
    return total + (inner + out if merger.bias else 0)


def _norm(kind: str, width: int) -> int:
    """A layer norm has a weight and a bias, an RMS norm a weight."""
    return 2 * width if kind == "layer" else width
