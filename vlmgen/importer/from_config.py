"""What config.json says of the axes.

Both published forms are read: text fields in a section of their own or at the top level, rotary
settings as `rope_theta` and `rope_scaling` or as `rope_parameters`. A field that nothing here
reads is reported, unless it is one that no model's structure depends on.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from vlmgen.errors import CheckpointError
from vlmgen.importer.headers import printable
from vlmgen.importer.reading import Readings
from vlmgen.spec.model import Spec

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "quick_gelu": "quick_gelu",
}
NORMS = {"layer_norm": "layer", "rms_norm": "rms"}
TOKENS = ("image", "video", "vision_start", "vision_end", "video_start", "video_end")
PLAIN_ROPE_TYPES = frozenset(("default", "mrope", "axial"))

# Fields without a part in the structure: dropout, initialisation, generation, bookkeeping.
NEUTRAL = frozenset("""_attn_implementation _attn_implementation_autoset _commit_hash _name_or_path
    attention_dropout auto_map bos_token_id chunk_size_feed_forward decoder_start_token_id dtype
    eos_token_id experts_implementation hidden_dropout hidden_dropout_prob id2label ignore_index
    image_seq_length initializer_range is_decoder is_encoder_decoder keys_to_ignore_at_inference
    label2id layer_scale_init_value max_window_layers num_return_sequences output_attentions
    output_hidden_states output_router_logits pad_token_id pretraining_tp problem_type
    projection_dropout pruned_heads return_dict router_aux_loss_coef sep_token_id tokenizer_class
    torch_dtype torchscript transformers_version use_cache use_mask_token use_mean_pooling
    vision_token_id""".split())
# Ids of tokens that a family may leave unused.
_TOKEN_FIELD = re.compile(r"(image|video|vision)(_start|_end)?_token_(id|index)")

# Fields that stand for an axis value which no template implements: what asks for it, and the axis.
_UNSUPPORTED: dict[str, str] = {
    "attn_logit_softcapping": "a soft cap on attention scores",
    "final_logit_softcapping": "a soft cap on the logits",
    "kv_lora_rank": "text.attention.kind mla",
    "q_lora_rank": "text.attention.kind mla",
    "linear_num_value_heads": "text.attention.kind gated_delta",
    "attn_output_gate": "text.attention.kind gqa_gated",
    "query_pre_attn_scalar": "text.attention.scale",
    "attention_chunk_size": "text.layer_types chunked",
    "no_rope_layers": "text.layer_types without rotation",
    "quantization_config": "tensors that are stored quantised",
}


class Fields:
    """A section of config.json that remembers which of its fields were read."""

    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        self.data, self.where = data, where
        self.read: set[str] = set()

    def name(self, key: str) -> str:
        """A field as a message names it."""
        return f"{self.where}.{key}" if self.where else key

    def says(self, key: str) -> str:
        """Evidence: a field and its value."""
        return f"{self.name(key)} is {_shown(self.data.get(key))}"

    def has(self, key: str) -> bool:
        """Whether a field is stated and not null; it counts as read."""
        self.read.add(key)
        return self.data.get(key) is not None

    def first(self, *keys: str) -> str | None:
        """The first of some names of one field that the section has."""
        present = [key for key in keys if self.has(key)]
        return present[0] if present else None

    def value(self, key: str, *kinds: type) -> Any:
        """A field of one of some types.

        Raises:
            CheckpointError: It is of another type.
        """
        value = self.data.get(key)
        if type(value) not in kinds:
            words = {int: "an integer", float: "a number", bool: "true or false", str: "text",
                     list: "a list", dict: "an object"}  # fmt: skip
            legal = " or ".join(dict.fromkeys(words[kind] for kind in kinds))
            raise CheckpointError(f"config.json: {self.says(key)}; the field is {legal}")
        return value

    def size(self, key: str) -> int:
        """A positive integer.

        Raises:
            CheckpointError: It is none.
        """
        value: int = self.value(key, int)
        if value < 1 or value > 1 << 40:
            raise CheckpointError(f"config.json: {self.says(key)}; a size is a positive integer")
        return value

    def side(self, key: str) -> int:
        """A size that may be stated as height and width.

        Raises:
            CheckpointError: The two differ, or are no sizes.
        """
        value = self.data.get(key)
        if isinstance(value, list) and len(value) == 2 and value[0] == value[1]:
            return Fields({key: value[0]}, self.where).size(key)
        return self.size(key)


def config_readings(config: Mapping[str, Any], spec: Spec, readings: Readings) -> None:
    """Read every axis that config.json states.

    Args:
        config: The JSON object.
        spec: The family that the checkpoint is compared with; says which of several names of a
            field is meant where the file alone does not.
        readings: Takes the readings.

    Raises:
        CheckpointError: A field has a value of a wrong kind, or a tower is missing.
    """
    top = Fields(config, "")
    vision_key = _section(config, "vision", spec.vision.config_key)
    text_key = _section(config, "text", spec.text.config_key)
    if vision_key is None:
        raise CheckpointError(
            "config.json has no section of a vision tower (vision_config); vlmgen describes "
            "vision-language models"
        )
    vision = Fields(config[vision_key], vision_key)
    text = top if text_key is None else Fields(config[text_key], text_key)
    top.read |= {vision_key, text_key or "", "auto_map"}
    readings.add("vision.config_key", vision_key, f"{vision_key} is an object", "config")
    if text_key is None:
        readings.add("text.flat_config", True, "the text fields are at the top level", "config")
    else:
        readings.add("text.config_key", text_key, f"{text_key} is an object", "config")
    _identity(top, text, readings)
    _text(top, text, spec, readings)
    _rope(top, text, readings)
    _moe(text, spec, readings)
    _vision(top, text, vision, spec, readings)
    _tokens(top, vision, spec, readings)
    for section in (top, text, vision):
        for key, axis in _UNSUPPORTED.items():
            if section.has(key) and section.data[key] not in (False, 0, [], {}):
                readings.refuse(axis, section.says(key))
    for section in {id(s): s for s in (top, text, vision)}.values():
        for key in sorted(set(section.data) - section.read - NEUTRAL):
            if section.data[key] is not None and not _TOKEN_FIELD.fullmatch(key):
                readings.gap("config.json", f"{section.says(key)}; what that changes is not known")


def _section(config: Mapping[str, Any], tower: str, usual: str) -> str | None:
    """The key of a tower's section: the family's, the usual one, or the only one of such a name."""
    for key in (usual, f"{tower}_config"):
        if isinstance(config.get(key), dict):
            return key
    named = [k for k, v in config.items() if isinstance(v, dict) and k.startswith(f"{tower}_")]
    if tower == "text":
        named += [k for k in ("llm_config", "language_config") if isinstance(config.get(k), dict)]
    return named[0] if len(named) == 1 else None


def _identity(top: Fields, text: Fields, readings: Readings) -> None:
    if top.has("architectures"):
        names = top.value("architectures", list)
        if len(names) != 1 or not isinstance(names[0], str):
            raise CheckpointError(f"config.json: {top.says('architectures')}; one name is expected")
        readings.add(
            "architecture", names[0], f"architectures is [{printable(names[0])}]", "config"
        )
    if top.has("model_type"):
        name = top.value("model_type", str)
        readings.add("model_type", name, top.says("model_type"), "config")
    if text is not top and text.has("model_type"):
        name = text.value("model_type", str)
        readings.add("text.model_type", name, text.says("model_type"), "config")


def _text(top: Fields, text: Fields, spec: Spec, readings: Readings) -> None:
    def size(path: str, key: str) -> None:
        if text.has(key):
            readings.add(path, text.size(key), text.says(key), "config")

    size("text.hidden_size", "hidden_size")
    size("text.num_layers", "num_hidden_layers")
    size("text.vocab_size", "vocab_size")
    size("text.max_position_embeddings", "max_position_embeddings")
    size("text.attention.num_heads", "num_attention_heads")
    size("text.attention.num_kv_heads", "num_key_value_heads")
    size("text.mlp.intermediate_size", "intermediate_size")
    heads = readings.get("text.attention.num_heads")
    if heads and not text.has("num_key_value_heads"):
        readings.add(
            "text.attention.num_kv_heads", heads,
            f"{text.says('num_attention_heads')} and {text.name('num_key_value_heads')} is not "
            "stated", "config",
        )  # fmt: skip
    if text.has("head_dim"):
        size("text.attention.head_dim", "head_dim")
    elif heads and text.has("hidden_size"):
        readings.add(
            "text.attention.head_dim", text.size("hidden_size") // heads,
            f"{text.name('head_dim')} is not stated: hidden_size / num_attention_heads", "config",
            weak=True,
        )  # fmt: skip
    if text.has("rms_norm_eps"):
        eps = float(text.value("rms_norm_eps", float, int))
        readings.add("text.norm.eps", eps, text.says("rms_norm_eps"), "config")
    # Only the flag at the top level counts, as in transformers.
    tied = top if top.has("tie_word_embeddings") else text
    if tied.has("tie_word_embeddings"):
        value = tied.value("tie_word_embeddings", bool)
        evidence = tied.says("tie_word_embeddings")
        readings.add("text.tie_word_embeddings", value, evidence, "config")
    text.read.add("tie_word_embeddings")
    for key in dict.fromkeys((spec.text.attention.bias_key, "attention_bias", "use_bias")):
        if text.has(key):
            value = text.value(key, bool)
            readings.add("text.attention.qkv_bias", value, text.says(key), "config")
            if key != spec.text.attention.bias_key:
                readings.add("text.attention.bias_key", key, text.says(key), "config")
    if text.has("use_qk_norm"):
        normed = text.value("use_qk_norm", bool)
        if not normed:
            readings.add("text.attention.qk_norm", "none", text.says("use_qk_norm"), "config")
    _activation(text, "text.mlp.activation", readings, "hidden_act", "hidden_activation")
    if text.has("mlp_bias") and text.value("mlp_bias", bool):
        readings.add("text.mlp.bias", True, text.says("mlp_bias"), "config")
    _windows(text, readings)


def _activation(section: Fields, path: str, readings: Readings, *keys: str) -> None:
    key = section.first(*keys)
    if key is None:
        return
    name = section.value(key, str)
    if name in ACTIVATIONS:
        readings.add(path, ACTIVATIONS[name], section.says(key), "config")
    else:
        readings.refuse(path, f"{section.says(key)}, an activation that no template implements")


def _windows(text: Fields, readings: Readings) -> None:
    """Attention of the decoder that does not see the whole sequence."""
    if text.has("layer_types"):
        kinds = {str(kind) for kind in text.value("layer_types", list)}
        if kinds - {"full_attention"}:
            others = ", ".join(sorted(map(printable, kinds - {"full_attention"})))
            readings.refuse("text.layer_types", f"{text.name('layer_types')} has {others}")
    switch = text.data.get("use_sliding_window")
    text.read.add("use_sliding_window")
    if text.has("sliding_window") and (switch is True or switch is None):
        readings.refuse("text.layer_types", text.says("sliding_window"))


def _rope(top: Fields, text: Fields, readings: Readings) -> None:
    """Rotary settings from either form, in the text section or at the top level."""
    settings: dict[str, tuple[Any, str]] = {}
    for section in dict.fromkeys((text, top)):
        for key in ("rope_scaling", "rope_parameters"):
            if section.has(key):
                inner = section.value(key, dict)
                for name, value in inner.items():
                    evidence = f"{section.name(key)}.{printable(name)} is {_shown(value)}"
                    _rope_setting(settings, name, value, evidence, readings)
        for name in ("rope_theta", "partial_rotary_factor", "mrope_section"):
            if section.has(name):
                _rope_setting(settings, name, section.data[name], section.says(name), readings)
    kinds = [settings.pop(key) for key in ("rope_type", "type") if key in settings]
    for value, evidence in kinds:
        if value not in PLAIN_ROPE_TYPES:
            readings.refuse("text.rope.scaling", evidence)
    if "rope_theta" in settings:
        value, evidence = settings.pop("rope_theta")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 1:
            raise CheckpointError(f"config.json: {evidence}; the base is a number of at least 1")
        readings.add("text.rope.theta", float(value), evidence, "config")
    if "mrope_section" in settings:
        value, evidence = settings.pop("mrope_section")
        if not isinstance(value, list) or not all(type(n) is int and n > 0 for n in value):
            raise CheckpointError(f"config.json: {evidence}; sections are positive integers")
        readings.add("text.rope.kind", "mrope", evidence, "config")
        readings.add("text.rope.sections", tuple(value), evidence, "config")
    else:
        readings.add("text.rope.kind", "plain", "no mrope_section is stated", "config", weak=True)
    if "mrope_interleaved" in settings:
        value, evidence = settings.pop("mrope_interleaved")
        order = "interleaved" if value is True else "contiguous"
        readings.add("text.rope.order", order, evidence, "config")
    value, evidence = settings.pop(
        "partial_rotary_factor", (1.0, "partial_rotary_factor is not stated: the whole head")
    )
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
        raise CheckpointError(f"config.json: {evidence}; the rotated share is above 0, at most 1")
    readings.add("text.rope.partial", float(value), evidence, "config")
    for _, evidence in settings.values():
        readings.refuse("text.rope.scaling", evidence)


def _rope_setting(
    settings: dict[str, tuple[Any, str]], name: str, value: Any, evidence: str, readings: Readings
) -> None:
    if value is None:
        return
    # Newer files keep an older key beside its new form; the type is then another word for it.
    if name in settings and settings[name][0] != value:
        if name not in ("rope_type", "type"):
            readings.conflict(f"text.rope ({name})", settings[name][1], evidence)
        return
    settings.setdefault(name, (value, evidence))


def _moe(text: Fields, spec: Spec, readings: Readings) -> None:
    own = spec.text.moe.config_keys if spec.text.moe else None

    def names(field: str, *usual: str) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*(getattr(own, field) if own else ()), *usual)))

    counted = text.first(
        *names("num_experts", "num_experts", "num_local_experts", "n_routed_experts")
    )
    if counted is None:
        stated = [key for key in ("moe_intermediate_size", "num_experts_per_tok") if text.has(key)]
        if not stated:
            readings.add("text.moe", None, "no number of experts is stated", "config", weak=True)
        return
    experts = text.value(counted, int)
    if experts < 2:
        readings.add("text.moe", None, text.says(counted), "config")
        return
    readings.add("text.moe.num_experts", experts, text.says(counted), "config")
    for field, path, usual in (
        ("top_k", "text.moe.top_k", ("num_experts_per_tok",)),
        ("intermediate_size", "text.moe.intermediate_size", ("moe_intermediate_size",)),
    ):
        key = text.first(*names(field, *usual))
        if key:
            readings.add(path, text.size(key), text.says(key), "config")
    first = text.first(*names("first_dense", "first_k_dense_replace"))
    if first:
        value = text.value(first, int)
        readings.add("text.moe.first_dense", value, text.says(first), "config")
    shared = text.first(*names("shared", "n_shared_experts"))
    if shared:
        count = text.value(shared, int)
        if count:
            readings.add("text.moe.shared.count", count, text.says(shared), "config")
        else:
            readings.add("text.moe.shared", None, text.says(shared), "config")
    # Read only where the family's model reads it.
    for key in dict.fromkeys((*(own.renormalize if own else ()), "norm_topk_prob")):
        if text.has(key) and (own is None or key in own.renormalize):
            value = text.value(key, bool)
            readings.add("text.moe.renormalize", value, text.says(key), "config")
    scale = text.first(*names("routed_scale", "routed_scaling_factor"))
    if scale:
        value = float(text.value(scale, float, int))
        readings.add("text.moe.routed_scale", value, text.says(scale), "config")
    for key, legal in (
        ("n_group", 1), ("topk_group", 1), ("decoder_sparse_step", 1), ("mlp_only_layers", []),
        ("topk_method", None), ("scoring_func", None),
    ):  # fmt: skip
        if text.has(key) and legal is not None and text.data[key] != legal:
            axis = "text.moe.first_dense" if "layer" in key or "step" in key else "text.moe.router"
            readings.refuse(axis, f"{text.says(key)}; {_shown(legal)} is generated")


def _vision(top: Fields, text: Fields, vision: Fields, spec: Spec, readings: Readings) -> None:
    known = spec.vision.keys
    readings_of = readings.add

    def named(path: str, field: str, *keys: str) -> None:
        key = vision.first(*keys)
        if key:
            readings_of(path, vision.size(key), vision.says(key), "config")
            if field and key in ("depth", "num_hidden_layers", "num_heads", "num_attention_heads"):
                readings_of(f"vision.config_keys.{field}", key, vision.says(key), "config")

    vision.read.add("model_type")
    named("vision.depth", "depth", known.depth, "depth", "num_hidden_layers")
    named("vision.attention.num_heads", "num_heads", known.num_heads, "num_heads",
          "num_attention_heads")  # fmt: skip
    width_key = "embed_dim" if vision.has("embed_dim") else "hidden_size"
    if vision.has(width_key):
        readings_of("vision.hidden_size", vision.size(width_key), vision.says(width_key), "config")
        readings_of("vision.config_keys.hidden_size", width_key, vision.says(width_key), "config")
    _vision_widths(text, vision, spec, readings)
    if vision.has("patch_size"):
        side = vision.side("patch_size")
        readings_of("vision.patch_embed.patch_size", side, vision.says("patch_size"), "config")
        if vision.data.get("spatial_patch_size") == side:  # an older name beside the newer
            vision.read.add("spatial_patch_size")
    named("vision.patch_embed.temporal_patch_size", "", "temporal_patch_size")
    channels = vision.first("in_channels", "num_channels", "in_chans")
    if channels:
        size = vision.size(channels)
        readings_of("vision.patch_embed.in_channels", size, vision.says(channels), "config")
        key = "in_channels" if channels == "in_chans" else channels
        readings_of("vision.config_keys.in_channels", key, vision.says(channels), "config")
    _merge_size(top, vision, readings)
    _position(vision, spec, readings)
    _vision_structure(top, vision, readings)


def _vision_widths(text: Fields, vision: Fields, spec: Spec, readings: Readings) -> None:
    """Widths after the merger and inside the MLP, whose names are crossed in some families."""
    known, add = spec.vision.keys, readings.add
    if vision.has("out_hidden_size"):
        key = "out_hidden_size"
    elif vision.has("embed_dim") and vision.has("hidden_size"):
        key = "hidden_size"
    else:
        key = "text_hidden_size"
    holder, field = (text, "hidden_size") if key == "text_hidden_size" else (vision, key)
    if holder.has(field):
        add("vision.out_hidden_size", holder.size(field), holder.says(field), "config")
        evidence = (
            f"neither out_hidden_size nor embed_dim is in {vision.where}"
            if key == "text_hidden_size"
            else holder.says(field)
        )
        add("vision.config_keys.out_hidden_size", key, evidence, "config")
    width = readings.get("vision.hidden_size")
    if vision.has("mlp_ratio") and not vision.has("intermediate_size"):
        ratio = vision.value("mlp_ratio", int, float)
        evidence = f"{vision.says('mlp_ratio')}, times the width"
        if width and ratio > 0 and ratio * width == int(ratio * width):
            add("vision.mlp.intermediate_size", int(ratio * width), evidence, "config")
            add("vision.config_keys.intermediate_size", "mlp_ratio", evidence, "config")
    elif vision.has("intermediate_size"):
        crossed = known.intermediate_size == "out_hidden_size" and vision.has("out_hidden_size")
        field = "out_hidden_size" if crossed else "intermediate_size"
        add("vision.mlp.intermediate_size", vision.size(field), vision.says(field), "config")
        if known.merger_size == "intermediate_size":
            size = vision.size("intermediate_size")
            says = vision.says("intermediate_size")
            add("vision.merger.inner", size, says, "config")


def _merge_size(top: Fields, vision: Fields, readings: Readings) -> None:
    if vision.has("spatial_merge_size"):
        key = says = "spatial_merge_size"
        size, says = vision.size(key), vision.says(key)
    elif top.has("downsample_ratio"):
        key = "downsample_ratio"
        ratio = float(top.value(key, float, int))
        if not 0 < ratio <= 1 or not math.isclose(1 / ratio, round(1 / ratio)):
            raise CheckpointError(f"config.json: {top.says(key)}; it is 1 over a whole number")
        size, says = round(1 / ratio), top.says(key)
    else:
        return
    readings.add("vision.merger.merge_size", size, says, "config")
    readings.add("vision.config_keys.merge_size", key, says, "config")


def _position(vision: Fields, spec: Spec, readings: Readings) -> None:
    add = readings.add
    if vision.has("num_position_embeddings"):
        key = "num_position_embeddings"
        add("vision.position.num_embeddings", vision.size(key), vision.says(key), "config")
        add("vision.config_keys.num_embeddings", key, vision.says(key), "config")
    elif vision.has("image_size") and vision.has("patch_size"):
        side, patch = vision.side("image_size"), vision.side("patch_size")
        rows = (side // patch) ** 2 + (1 if spec.vision.class_token else 0)
        evidence = f"{vision.says('image_size')} and {vision.says('patch_size')}"
        add("vision.position.num_embeddings", rows, evidence, "config")
        add("vision.config_keys.num_embeddings", "image_size", evidence, "config")
    if vision.data.get("use_absolute_position_embeddings") is False:
        add("vision.position", None, vision.says("use_absolute_position_embeddings"), "config")
    vision.read.add("use_absolute_position_embeddings")
    rope = vision.data.get("rope_parameters")
    vision.read.add("rope_parameters")
    if isinstance(rope, dict) and isinstance(rope.get("rope_theta"), (int, float)):
        theta = float(rope["rope_theta"])
        evidence = f"{vision.name('rope_parameters')}.rope_theta is {_shown(rope['rope_theta'])}"
        add("vision.rope.theta", theta, evidence, "config")


def _vision_structure(top: Fields, vision: Fields, readings: Readings) -> None:
    add = readings.add
    _activation(vision, "vision.mlp.activation", readings, "hidden_act")
    top.read.add("projector_hidden_act")
    _activation(top, "vision.merger.activation", readings, "projector_hidden_act")
    for key in ("attention_bias", "qkv_bias"):
        if vision.has(key):
            add("vision.attention.qkv_bias", vision.value(key, bool), vision.says(key), "config")
    if vision.has("use_qk_norm"):
        kind = "full_width_rms" if vision.value("use_qk_norm", bool) else "none"
        add("vision.attention.qk_norm", kind, vision.says("use_qk_norm"), "config")
    if vision.has("norm_type"):
        name = vision.value("norm_type", str)
        if name in NORMS:
            add("vision.norm.kind", NORMS[name], vision.says("norm_type"), "config")
        else:
            readings.refuse("vision.norm.kind", vision.says("norm_type"))
    for key in ("rms_norm_eps", "layer_norm_eps"):
        if vision.has(key):
            eps = float(vision.value(key, float, int))
            add("vision.norm.eps", eps, vision.says(key), "config")
            add("vision.config_keys.norm_eps", key, vision.says(key), "config")
    if vision.has("window_size"):
        add("vision.attention.window.size", vision.size("window_size"), vision.says("window_size"),
            "config")  # fmt: skip
    if vision.has("fullatt_block_indexes"):
        blocks = _indices(vision, "fullatt_block_indexes")
        says = vision.says("fullatt_block_indexes")
        add("vision.attention.window.full_blocks", blocks, says, "config")
        add("vision.attention.bounds", "window", says, "config")
    if vision.data.get("deepstack_visual_indexes") == []:
        vision.read.add("deepstack_visual_indexes")
        add("vision.deepstack", None, vision.says("deepstack_visual_indexes"), "config")
    elif vision.has("deepstack_visual_indexes"):
        levels = _indices(vision, "deepstack_visual_indexes")
        add("vision.deepstack.indices", levels, vision.says("deepstack_visual_indexes"), "config")
    for key, usual in (("vision_feature_layer", -1), ("vision_feature_select_strategy", "default")):
        if top.has(key) and top.data[key] != usual:
            readings.refuse("vision.feature", top.says(key))


def _indices(section: Fields, key: str) -> tuple[int, ...]:
    values = section.value(key, list)
    if not all(type(n) is int and 0 <= n < 4096 for n in values):
        raise CheckpointError(f"config.json: {section.says(key)}; block indices are expected")
    return tuple(values)


def _tokens(top: Fields, vision: Fields, spec: Spec, readings: Readings) -> None:
    for name in TOKENS:
        token = getattr(spec.tokens, name)
        if token is not None and top.has(token.config_key):
            value = top.value(token.config_key, int)
            readings.add(f"tokens.{name}.id", value, top.says(token.config_key), "config")
    if spec.tokens.seconds is None:
        vision.read.add("tokens_per_second")
        if vision.has("tokens_per_second"):
            readings.add("tokens.seconds.tokens_per_second", vision.size("tokens_per_second"),
                         vision.says("tokens_per_second"), "config")  # fmt: skip
    elif vision.has(spec.tokens.seconds.config_key):
        key = spec.tokens.seconds.config_key
        path = "tokens.seconds.tokens_per_second"
        readings.add(path, vision.size(key), vision.says(key), "config")


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return repr(printable(value))
    if isinstance(value, dict):
        return "an object"
    return printable(str(value))
