"""What one rank holds in memory: weights and KV cache. Pure functions of sizes.

Legend: H text hidden size, V vocabulary, I intermediate size, D vision width, m merge area, tp
tensor-parallel size. Weights are bfloat16 but for what the packages keep in float32, the router
and its correction bias; activations and what the compiler adds are not counted.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from vlmgen.check.parallel import legal_vision_tp, padded_vocab, text_split
from vlmgen.errors import UsageError
from vlmgen.spec.derive import vision_parameters
from vlmgen.spec.model import ResolvedCheckpoint
from vlmgen.spec.text import TextMoe, TextSpec

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
        vision_weights=vision_parameters(vision, vision_tp) * BFLOAT16,
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
