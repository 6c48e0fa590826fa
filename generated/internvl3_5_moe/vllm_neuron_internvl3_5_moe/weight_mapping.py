"""Weight table of InternVL3.5-MoE: which checkpoint keys fill which parameter, as data.

`keys` lack the tower's prefix, which depends on the layout of the checkpoint (`LAYOUTS`). The verb
says what the loader does with them (`weight_loaders.py`); all matrices are stored `[in, out]`.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from .config import InternVLConfig


class Entry(NamedTuple):
    """One row: a parameter, the checkpoint keys that fill it in order, and the verb."""

    parameter: str
    keys: tuple[str, ...]
    verb: str


class Layout(NamedTuple):
    """Prefixes of the towers in one published naming."""

    text: str
    vision: str
    projector: str
    head: str


LAYOUTS: Mapping[str, Layout] = {
    "published": Layout(
        text="language_model.model.",
        vision="vision_tower.",
        projector="multi_modal_projector.",
        head="language_model.lm_head.",
    ),
    "nested": Layout(
        text="model.language_model.",
        vision="model.vision_tower.",
        projector="model.multi_modal_projector.",
        head="lm_head.",
    ),
}

# Checkpoint keys that no parameter needs: pattern with * -> reason.
IGNORED: Mapping[str, str] = {}

TEXT = (
    Entry("embed_tokens.weight", ("embed_tokens.weight",), "shard_rows"),
    Entry("norm.weight", ("norm.weight",), "rename"),
)
TEXT_LAYER = (
    Entry(
        "layers.{layer}.input_layernorm.weight",
        ("layers.{layer}.input_layernorm.weight",),
        "rename",
    ),
    Entry(
        "layers.{layer}.self_attn.qkv_proj_weight",
        (
            "layers.{layer}.self_attn.q_proj.weight",
            "layers.{layer}.self_attn.k_proj.weight",
            "layers.{layer}.self_attn.v_proj.weight",
        ),
        "fuse_qkv",
    ),
    Entry(
        "layers.{layer}.self_attn.o_proj_weight",
        ("layers.{layer}.self_attn.o_proj.weight",),
        "transpose",
    ),
    Entry(
        "layers.{layer}.self_attn.q_layernorm.weight",
        ("layers.{layer}.self_attn.q_norm.weight",),
        "rename",
    ),
    Entry(
        "layers.{layer}.self_attn.k_layernorm.weight",
        ("layers.{layer}.self_attn.k_norm.weight",),
        "rename",
    ),
    Entry(
        "layers.{layer}.post_attention_layernorm.weight",
        ("layers.{layer}.post_attention_layernorm.weight",),
        "rename",
    ),
    Entry("layers.{layer}.mlp.router_weight", ("layers.{layer}.mlp.gate.weight",), "transpose"),
    Entry(
        "layers.{layer}.mlp.gate_up_weight",
        (
            "layers.{layer}.mlp.experts.{expert}.gate_proj.weight",
            "layers.{layer}.mlp.experts.{expert}.up_proj.weight",
        ),
        "stack_experts",
    ),
    Entry(
        "layers.{layer}.mlp.down_weight",
        ("layers.{layer}.mlp.experts.{expert}.down_proj.weight",),
        "stack_experts",
    ),
)
HEAD = (Entry("weight", ("weight",), "shard_rows"),)
VISION = (
    Entry(
        "patch_embed.proj_weight",
        ("embeddings.patch_embeddings.projection.weight",),
        "flatten_transpose",
    ),
    Entry("patch_embed.proj_bias", ("embeddings.patch_embeddings.projection.bias",), "rename"),
    Entry("patch_embed.class_token", ("embeddings.cls_token",), "squeeze"),
    Entry("pos_embed.pos_embed_weight", ("embeddings.position_embeddings",), "squeeze"),
)
VISION_BLOCK = (
    Entry(
        "blocks.{block}.norm1.weight", ("encoder.layer.{block}.layernorm_before.weight",), "rename"
    ),
    Entry("blocks.{block}.norm1.bias", ("encoder.layer.{block}.layernorm_before.bias",), "rename"),
    Entry(
        "blocks.{block}.norm2.weight", ("encoder.layer.{block}.layernorm_after.weight",), "rename"
    ),
    Entry("blocks.{block}.norm2.bias", ("encoder.layer.{block}.layernorm_after.bias",), "rename"),
    Entry(
        "blocks.{block}.attn.qkv_weight",
        (
            "encoder.layer.{block}.attention.q_proj.weight",
            "encoder.layer.{block}.attention.k_proj.weight",
            "encoder.layer.{block}.attention.v_proj.weight",
        ),
        "fuse_vision_qkv",
    ),
    Entry(
        "blocks.{block}.attn.qkv_bias",
        (
            "encoder.layer.{block}.attention.q_proj.bias",
            "encoder.layer.{block}.attention.k_proj.bias",
            "encoder.layer.{block}.attention.v_proj.bias",
        ),
        "fuse_vision_qkv",
    ),
    Entry(
        "blocks.{block}.attn.proj_weight",
        ("encoder.layer.{block}.attention.projection_layer.weight",),
        "transpose",
    ),
    Entry(
        "blocks.{block}.attn.proj_bias",
        ("encoder.layer.{block}.attention.projection_layer.bias",),
        "rename",
    ),
    Entry("blocks.{block}.scale1", ("encoder.layer.{block}.lambda_1",), "rename"),
    Entry("blocks.{block}.scale2", ("encoder.layer.{block}.lambda_2",), "rename"),
    Entry("blocks.{block}.mlp.fc1_weight", ("encoder.layer.{block}.mlp.fc1.weight",), "transpose"),
    Entry("blocks.{block}.mlp.fc1_bias", ("encoder.layer.{block}.mlp.fc1.bias",), "rename"),
    Entry("blocks.{block}.mlp.fc2_weight", ("encoder.layer.{block}.mlp.fc2.weight",), "transpose"),
    Entry("blocks.{block}.mlp.fc2_bias", ("encoder.layer.{block}.mlp.fc2.bias",), "rename"),
)
PROJECTOR = (
    Entry("merger.norm.weight", ("layer_norm.weight",), "rename"),
    Entry("merger.norm.bias", ("layer_norm.bias",), "rename"),
    Entry("merger.fc1_weight", ("linear_1.weight",), "transpose"),
    Entry("merger.fc1_bias", ("linear_1.bias",), "rename"),
    Entry("merger.fc2_weight", ("linear_2.weight",), "transpose"),
    Entry("merger.fc2_bias", ("linear_2.bias",), "rename"),
)


def find_layout(names: Iterable[str]) -> str:
    """The layout that most checkpoint keys belong to; the first one listed wins a tie.

    A key belongs to the layouts that hold its longest matching prefix: `model.` also begins every
    key of `model.language_model.`.
    """
    belongs: Counter[str] = Counter()
    for name in names:
        matched = {
            layout: max((len(prefix) for prefix in prefixes if name.startswith(prefix)), default=-1)
            for layout, prefixes in LAYOUTS.items()
        }
        longest = max(matched.values())
        belongs.update(layout for layout, length in matched.items() if length == longest >= 0)
    return max(LAYOUTS, key=lambda layout: belongs[layout])


def build_mappings(
    config: InternVLConfig, layout: Layout, has_head: bool = False
) -> dict[str, dict[str, list[str]]]:
    """Parameter -> checkpoint keys, for each tower on its own: `text`, `head` and `vision`.

    A tied head is filled from the embedding's key, unless the checkpoint has a head.
    """
    text, vision = config.text_config, config.vision_config
    head_prefix, head_entries = layout.head, HEAD
    if text.tie_word_embeddings and not has_head:
        head_prefix, head_entries = layout.text, (HEAD[0]._replace(keys=TEXT[0].keys),)
    return {
        "text": _expand(layout.text, TEXT)
        | _expand(
            layout.text, TEXT_LAYER, layer=range(text.num_hidden_layers), experts=text.num_experts
        ),
        "head": _expand(head_prefix, head_entries),
        "vision": _expand(layout.vision, VISION)
        | _expand(layout.vision, VISION_BLOCK, block=range(vision.depth))
        | _expand(layout.projector, PROJECTOR),
    }


def _expand(
    prefix: str, entries: Iterable[Entry], experts: int = 0, **over: range
) -> dict[str, list[str]]:
    """Fill in the repeated index (layer or block), if there is one, and the experts' keys, expert
    by expert.
    """
    indexes = [{name: i} for name, numbers in over.items() for i in numbers] if over else [{}]
    return {
        entry.parameter.format(**index): [
            prefix + key.format(expert=expert, **index)
            for expert in range(experts if "{expert}" in entry.keys[0] else 1)
            for key in entry.keys
        ]
        for index in indexes
        for entry in entries
    }
