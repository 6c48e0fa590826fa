"""Floating-point operations of a graph, counted from the spec.

A matrix product of [m, k] and [k, n] is 2mkn operations. Elementwise work is counted too, one
operation per element and step, for in small models it matters; transcendental functions are not,
as XLA counts them apart. What is counted is what the graph computes: padded tokens, the whole
square of the scores, every expert for every token as on the plugin's CPU path.

Legend: T tokens, H hidden size, N query heads, K key/value heads, D head width, I MLP width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vlmgen.compile.graphs import Deployment, Graph

if TYPE_CHECKING:
    from vlmgen.spec.text import TextSpec
    from vlmgen.spec.vision import VisionSpec

NORM = 4
"""Operations per element of an RMS norm: square, sum, times the deviation, times the weight."""
LAYER_NORM = 7
"""Of a layer norm: sum, difference, square, sum, times the deviation, weight, bias."""
SCORE = 6
"""Per score: scale, mask, maximum, difference, sum, quotient."""
ROTATE = 3
"""Per rotated element: two products and a sum."""


@dataclass(frozen=True)
class Count:
    """Operations of one graph.

    Args:
        matrices: Of the matrix products.
        elementwise: Of everything else.
    """

    matrices: float
    elementwise: float

    @property
    def total(self) -> float:
        """Both."""
        return self.matrices + self.elementwise


def count(
    text: TextSpec,
    vision: VisionSpec,
    deployment: Deployment,
    graph: Graph,
    *,
    narrow: bool = False,
) -> Count:
    """Operations of a graph on one rank that holds the whole model.

    Args:
        text: The decoder, with the checkpoint's sizes.
        vision: The tower, with the checkpoint's sizes.
        deployment: Lengths of cache and blocks.
        graph: The graph.
        narrow: The model is in a 16-bit dtype: the decode step with experts then widens their
            weights, one operation per weight.
    """
    if graph.kind == "vision":
        blocks = -(-graph.size // deployment.vision_block)
        return _tower(vision, blocks, deployment.vision_block)
    if graph.kind == "prefill":
        return _decoder(text, graph.size, graph.size, rows=1)
    context = deployment.max_model_len
    decode = _decoder(text, graph.size, context, rows=graph.size)
    moe = text.moe
    if narrow and moe is not None and moe.router == "softmax":
        layers = text.num_layers - moe.first_dense
        widened = 3.0 * layers * moe.num_experts * moe.intermediate_size * text.hidden_size
        return Count(decode.matrices, decode.elementwise + widened)
    return decode


def _decoder(text: TextSpec, tokens: int, keys: int, rows: int) -> Count:
    attention, hidden = text.attention, text.hidden_size
    q, kv = attention.q_size, attention.kv_size
    matrices = 2.0 * tokens * hidden * (q + 2 * kv) + 2.0 * tokens * q * hidden
    matrices += 2 * 2.0 * tokens * keys * q
    norms = 2 if text.norm.topology == "pre" else 4
    element = tokens * hidden * (norms * NORM + 2.0)
    element += SCORE * tokens * keys * attention.num_heads
    element += ROTATE * tokens * (q + kv) * text.rope.partial
    element += tokens * (q + 2 * kv) if attention.qkv_bias else 0
    element += NORM * tokens * (q + kv) if attention.qk_norm != "none" else 0
    layers = text.num_layers
    matrices, element = layers * matrices, layers * element
    moe = text.moe
    dense = layers if moe is None else moe.first_dense
    matrices += dense * 3 * 2.0 * tokens * hidden * text.mlp.intermediate_size
    element += dense * 3.0 * tokens * text.mlp.intermediate_size
    if moe is not None:
        inner = moe.num_experts * moe.intermediate_size
        shared = 0 if moe.shared is None else moe.shared.count * moe.intermediate_size
        sparse = layers - dense
        matrices += sparse * 3 * 2.0 * tokens * hidden * (inner + shared)
        matrices += sparse * 2.0 * tokens * hidden * moe.num_experts
        element += sparse * tokens * (3.0 * (inner + shared) + 2.0 * moe.num_experts * hidden)
    matrices += 2.0 * rows * hidden * text.vocab_size
    return Count(matrices, element + NORM * tokens * hidden)


def _tower(vision: VisionSpec, blocks: int, size: int) -> Count:
    patches, width = blocks * size, vision.hidden_size
    inner, embed = vision.mlp.intermediate_size, vision.patch_embed
    norm = LAYER_NORM if vision.norm.kind == "layer" else NORM
    gates = 2 if vision.mlp.kind == "swiglu" else 1
    matrices = 4 * 2.0 * patches * width * width + 2 * 2.0 * patches * size * width
    matrices += (gates + 1) * 2.0 * patches * width * inner
    element = 2 * norm * patches * width + 2.0 * patches * width
    element += SCORE * patches * size * vision.attention.num_heads
    element += 2 * ROTATE * patches * width if vision.rope is not None else 0
    element += _activation(vision) * patches * inner
    element += patches * width * 4.0 if vision.attention.qkv_bias else 0
    matrices, element = vision.depth * matrices, vision.depth * element
    matrices += 2.0 * patches * embed.patch_dim * width
    rows = patches / vision.merge_area
    merged, out = vision.merged_width, vision.out_hidden_size
    if vision.merger.op == "window":
        matrices += 2.0 * rows * (merged * vision.merger_width + vision.merger_width * out)
        element += _GELU * rows * vision.merger_width
    else:
        matrices += 2.0 * rows * (merged * out + out * out + 3 * out * vision.merger_width)
        element += _GELU * rows * out
    matrices += vision.num_levels * 2.0 * rows * (merged * merged + merged * out)
    element += vision.num_levels * _GELU * rows * merged
    return Count(matrices, element)


_GELU = 28
"""Exact GELU: the error function is a rational function of as many steps."""


def _activation(vision: VisionSpec) -> float:
    """Operations per element of the MLP's activation, and of the gate's product."""
    own = {"gelu_tanh": 9, "gelu": _GELU, "quick_gelu": 4, "silu": 3}[vision.mlp.activation]
    return own + (1 if vision.mlp.kind == "swiglu" else 0)
