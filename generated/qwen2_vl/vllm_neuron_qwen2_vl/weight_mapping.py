"""Weight table of Qwen2-VL: which checkpoint keys fill which parameter, as data.

`keys` lack the tower's prefix, which depends on the layout of the checkpoint (`LAYOUTS`). The verb
says what the loader does with them (`weight_loaders.py`); all matrices are stored `[in, out]`.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from .config import Qwen2VLConfig


class Entry(NamedTuple):
    """One row: a parameter, the checkpoint keys that fill it in order, and the verb."""

    parameter: str
    keys: tuple[str, ...]
    verb: str


class Layout(NamedTuple):
    """Prefixes of the towers in one published naming."""

    text: str
    vision: str
    head: str


LAYOUTS: Mapping[str, Layout] = {
    "published": Layout(text="model.", vision="visual.", head="lm_head."),
    "nested": Layout(text="model.language_model.", vision="model.visual.", head="lm_head."),
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
        "layers.{layer}.self_attn.qkv_proj_bias",
        (
            "layers.{layer}.self_attn.q_proj.bias",
            "layers.{layer}.self_attn.k_proj.bias",
            "layers.{layer}.self_attn.v_proj.bias",
        ),
        "fuse_qkv",
    ),
    Entry(
        "layers.{layer}.self_attn.o_proj_weight",
        ("layers.{layer}.self_attn.o_proj.weight",),
        "transpose",
    ),
    Entry(
        "layers.{layer}.post_attention_layernorm.weight",
        ("layers.{layer}.post_attention_layernorm.weight",),
        "rename",
    ),
    Entry(
        "layers.{layer}.mlp.gate_proj_weight", ("layers.{layer}.mlp.gate_proj.weight",), "transpose"
    ),
    Entry("layers.{layer}.mlp.up_proj_weight", ("layers.{layer}.mlp.up_proj.weight",), "transpose"),
    Entry(
        "layers.{layer}.mlp.down_proj_weight", ("layers.{layer}.mlp.down_proj.weight",), "transpose"
    ),
)
HEAD = (Entry("weight", ("weight",), "shard_rows"),)
VISION = (
    Entry("patch_embed.proj_weight", ("patch_embed.proj.weight",), "flatten_transpose"),
    Entry("merger.norm.weight", ("merger.ln_q.weight",), "rename"),
    Entry("merger.norm.bias", ("merger.ln_q.bias",), "rename"),
    Entry("merger.fc1_weight", ("merger.mlp.0.weight",), "transpose"),
    Entry("merger.fc1_bias", ("merger.mlp.0.bias",), "rename"),
    Entry("merger.fc2_weight", ("merger.mlp.2.weight",), "transpose"),
    Entry("merger.fc2_bias", ("merger.mlp.2.bias",), "rename"),
)
VISION_BLOCK = (
    Entry("blocks.{block}.norm1.weight", ("blocks.{block}.norm1.weight",), "rename"),
    Entry("blocks.{block}.norm1.bias", ("blocks.{block}.norm1.bias",), "rename"),
    Entry("blocks.{block}.norm2.weight", ("blocks.{block}.norm2.weight",), "rename"),
    Entry("blocks.{block}.norm2.bias", ("blocks.{block}.norm2.bias",), "rename"),
    Entry(
        "blocks.{block}.attn.qkv_weight", ("blocks.{block}.attn.qkv.weight",), "split_qkv_thirds"
    ),
    Entry("blocks.{block}.attn.qkv_bias", ("blocks.{block}.attn.qkv.bias",), "split_qkv_thirds"),
    Entry("blocks.{block}.attn.proj_weight", ("blocks.{block}.attn.proj.weight",), "transpose"),
    Entry("blocks.{block}.attn.proj_bias", ("blocks.{block}.attn.proj.bias",), "rename"),
    Entry("blocks.{block}.mlp.fc1_weight", ("blocks.{block}.mlp.fc1.weight",), "transpose"),
    Entry("blocks.{block}.mlp.fc1_bias", ("blocks.{block}.mlp.fc1.bias",), "rename"),
    Entry("blocks.{block}.mlp.fc2_weight", ("blocks.{block}.mlp.fc2.weight",), "transpose"),
    Entry("blocks.{block}.mlp.fc2_bias", ("blocks.{block}.mlp.fc2.bias",), "rename"),
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
    config: Qwen2VLConfig, layout: Layout, has_head: bool = False
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
        | _expand(layout.text, TEXT_LAYER, layer=range(text.num_hidden_layers)),
        "head": _expand(head_prefix, head_entries),
        "vision": _expand(layout.vision, VISION)
        | _expand(layout.vision, VISION_BLOCK, block=range(vision.depth)),
    }


def _expand(prefix: str, entries: Iterable[Entry], **over: range) -> dict[str, list[str]]:
    """Fill in the repeated index (layer, block or level), if there is one."""
    indexes = [{name: i} for name, numbers in over.items() for i in numbers] if over else [{}]
    return {
        entry.parameter.format(**index): [prefix + key.format(**index) for key in entry.keys]
        for index in indexes
        for entry in entries
    }
