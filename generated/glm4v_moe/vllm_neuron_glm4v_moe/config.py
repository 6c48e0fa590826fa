"""Configuration of GLM-4.5V: one text tower, one vision tower, and what joins them.

The values come from the checkpoint's `config.json`; the defaults are those of
GLM-4.5V. Fields that change the structure of the model are checked against
the specification this package was generated from, so that a checkpoint of another family, or of a
variant that this code does not implement, is refused before any weight is read.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PretrainedConfig
from vllm_neuron.model.neuron_config import NeuronConfig, VisionNeuronConfig

logger = logging.getLogger(__name__)

ARCHITECTURE = "Glm4vMoeForConditionalGeneration"
MODEL_TYPE = "glm4v_moe"

# Published checkpoints: (text hidden size, text layers, vision hidden size, vision depth) -> name.
PUBLISHED_SIZES = {
    (4096, 46, 1536, 24): "GLM-4.5V",
}

# Fields of the text section whose value is structure: name, the value that is implemented, and
# where the specification says so.
TEXT_STRUCTURE = (
    ("model_type", "glm4v_moe_text", "text.model_type"),
    ("hidden_act", "silu", "text.mlp.activation"),
    ("attention_bias", True, "text.attention.qkv_bias"),
    ("use_qk_norm", False, "text.attention.qk_norm"),
    ("use_sliding_window", False, "text.attention.kind"),
    ("norm_topk_prob", True, "text.moe.renormalize"),
    ("n_group", 1, "text.moe.router"),
    ("topk_group", 1, "text.moe.router"),
)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Glm4vMoeConfigError(ValueError):
    """A `config.json` or Neuron configuration that contradicts what this package implements."""


@dataclass
class Glm4vMoeTextConfig:
    """Sizes of the text decoder. Field names are those of the checkpoint's `text_config`."""

    hidden_size: int = 4_096
    intermediate_size: int = 10_944
    num_hidden_layers: int = 46
    num_attention_heads: int = 96
    num_key_value_heads: int = 8
    head_dim: int = 128
    vocab_size: int = 151_552
    max_position_embeddings: int = 65_536
    rms_norm_eps: float = 1e-05
    rope_theta: float = 10000.0
    mrope_section: tuple[int, int, int] = (8, 12, 12)
    num_experts: int = 128
    num_experts_per_tok: int = 8
    moe_intermediate_size: int = 1_408
    first_dense: int = 1
    num_shared_experts: int = 1
    routed_scale: float = 1.0
    tie_word_embeddings: bool = False
    dtype: torch.dtype = torch.bfloat16
    neuron_config: NeuronConfig | None = None

    @property
    def rotary_dim(self) -> int:
        """Elements of each head that are rotated, from its start."""
        return int(self.head_dim * 0.5)

    def padded_vocab_size(self, tp_size: int) -> int:
        """Vocabulary rounded up to a multiple of the tensor-parallel size."""
        return -(-self.vocab_size // tp_size) * tp_size

    def legal_tp_sizes(self, ep_degree: int = 1) -> list[int]:
        """Tensor-parallel sizes at which heads, KV heads and all widths divide (up to the head
        count).
        """
        return [
            tp
            for tp in range(1, self.num_attention_heads + 1)
            if not self.tp_problems(tp, ep_degree)
        ]

    def tp_problems(self, tp_size: int, ep_degree: int = 1) -> list[str]:
        """Why `tp_size` is not legal with `ep_degree` shares of the experts; empty when it is."""
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        problems = []
        if heads % tp_size:
            problems.append(f"num_attention_heads {heads} is not divisible by {tp_size}")
        elif (heads // tp_size) % 2:
            problems.append(f"{heads // tp_size} attention heads per rank: the number must be even")
        if kv_heads % tp_size and tp_size % kv_heads:
            problems.append(
                f"num_key_value_heads {kv_heads}: neither divides {tp_size} nor is divided by it"
            )
        if self.intermediate_size % tp_size:
            problems.append(
                f"intermediate_size {self.intermediate_size} is not divisible by {tp_size}"
            )
        if self.num_experts % ep_degree:
            problems.append(
                f"num_experts {self.num_experts} is not divisible by ep_degree {ep_degree}"
            )
        if tp_size % ep_degree:
            problems.append(f"ep_degree {ep_degree} does not divide {tp_size}")
        elif self.moe_intermediate_size % (tp_size // ep_degree):
            problems.append(
                f"moe_intermediate_size {self.moe_intermediate_size} is not divisible by "
                f"{tp_size // ep_degree}"
            )
        shared_width = self.num_shared_experts * self.moe_intermediate_size
        if shared_width % tp_size:
            problems.append(
                f"width {shared_width} of the shared experts is not divisible by {tp_size}"
            )
        return problems


@dataclass
class Glm4vMoeVisionConfig:
    """Sizes of the vision tower. Field names are those of the checkpoint's `vision_config`, but for
    those that stand there under another name (`_parse_vision`)."""

    depth: int = 24
    hidden_size: int = 1_536
    intermediate_size: int = 4_096
    num_heads: int = 12
    in_channels: int = 3
    patch_size: int = 14
    temporal_patch_size: int = 2
    spatial_merge_size: int = 2
    out_hidden_size: int = 4_096
    merger_intermediate_size: int = 10_944
    num_position_embeddings: int = 576
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-05
    dtype: torch.dtype = torch.bfloat16
    neuron_config: VisionNeuronConfig | None = None

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_heads

    @property
    def merge_area(self) -> int:
        """Patches that become one text position."""
        return self.spatial_merge_size**2

    @property
    def patch_dim(self) -> int:
        """Values of one flattened patch, in the order C, T, height, width."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def position_grid_side(self) -> int:
        """Side of the square table of learned positions."""
        return round(self.num_position_embeddings**0.5)

    @property
    def fat_width(self) -> int:
        """Width of one encoder-cache row."""
        return self.out_hidden_size

    def legal_tp_sizes(self) -> list[int]:
        """Vision tensor-parallel sizes at which heads and all sharded widths divide."""
        return [tp for tp in range(1, self.num_heads + 1) if not self.tp_problems(tp)]

    def tp_problems(self, tp_size: int) -> list[str]:
        """Why `tp_size` is not legal for the tower; empty when it is."""
        widths = {
            "num_heads": self.num_heads,
            "intermediate_size": self.intermediate_size,
            "merger width": self.merger_intermediate_size,
            "output width": self.out_hidden_size,
        }
        return [
            f"vision {name} {n} is not divisible by {tp_size}"
            for name, n in widths.items()
            if n % tp_size
        ]


@dataclass
class Glm4vMoeConfig:
    """Both towers, and the token ids that mark where vision enters the text."""

    text_config: Glm4vMoeTextConfig = field(default_factory=Glm4vMoeTextConfig)
    vision_config: Glm4vMoeVisionConfig = field(default_factory=Glm4vMoeVisionConfig)
    image_token_id: int = 151363
    video_token_id: int = 151364
    vision_start_token_id: int = 151339
    vision_end_token_id: int = 151340
    video_start_token_id: int = 151341
    video_end_token_id: int = 151342

    @classmethod
    def from_configs(
        cls,
        hf_config: PretrainedConfig | Mapping[str, Any],
        neuron_config: NeuronConfig | None = None,
        *,
        text_neuron_config: NeuronConfig | None = None,
        vision_neuron_config: VisionNeuronConfig | None = None,
    ) -> "Glm4vMoeConfig":
        """Parse and check a Hugging Face configuration.

        Args:
            hf_config: the checkpoint's configuration, as transformers reads it or as the JSON
                object.
            neuron_config: text settings when called by position (text-only form of the runner).
            text_neuron_config: text settings when called by keyword (multimodal form).
            vision_neuron_config: settings of the vision tower, or None for a text-only build.

        Returns:
            The composed configuration; `vision_config.neuron_config` is None for a text-only build.

        Raises:
            Glm4vMoeConfigError: naming every field that contradicts the package, its value
            and the rule.
        """
        if neuron_config is not None and text_neuron_config is not None:
            raise Glm4vMoeConfigError(
                "both neuron_config and text_neuron_config were given; they are two names of one "
                "argument"
            )
        raw = _as_dict(hf_config)
        problems: list[str] = []
        _check_identity(raw, problems)
        text = _section(raw, "text_config", problems)
        vision = _section(raw, "vision_config", problems)
        if problems:  # a config of another family: its other fields would only add noise
            raise _refusal(problems)
        config = cls(
            text_config=_parse_text(raw, text, problems),
            vision_config=_parse_vision(raw, vision, problems),
            image_token_id=raw.get("image_token_id", 151363),
            video_token_id=raw.get("video_token_id", 151364),
            vision_start_token_id=raw.get("image_start_token_id", 151339),
            vision_end_token_id=raw.get("image_end_token_id", 151340),
            video_start_token_id=raw.get("video_start_token_id", 151341),
            video_end_token_id=raw.get("video_end_token_id", 151342),
        )
        config.text_config.neuron_config = text_neuron_config or neuron_config
        config.vision_config.neuron_config = vision_neuron_config
        _check_together(config, problems)
        _check_stored_quantization((raw, text, vision), problems)
        _check_neuron(config, problems)
        if problems:
            raise _refusal(problems)
        config._note_unpublished_size()
        return config

    def _note_unpublished_size(self) -> None:
        text, vision = self.text_config, self.vision_config
        size = (text.hidden_size, text.num_hidden_layers, vision.hidden_size, vision.depth)
        if size not in PUBLISHED_SIZES:
            logger.info(
                "This configuration equals no published checkpoint of GLM-4.5V (%s): "
                "text %d x %d layers, vision %d x %d blocks.",
                ", ".join(PUBLISHED_SIZES.values()),
                *size,
            )


def _refusal(problems: list[str]) -> Glm4vMoeConfigError:
    lines = "\n".join(f"  - {problem}" for problem in problems)
    return Glm4vMoeConfigError(
        f"this checkpoint cannot be served by the glm4v_moe package:\n{lines}"
    )


def _as_dict(config: PretrainedConfig | Mapping[str, Any]) -> dict[str, Any]:
    return dict(config) if isinstance(config, Mapping) else config.to_dict()


def _section(raw: Mapping[str, Any], key: str, problems: list[str]) -> dict[str, Any]:
    section = raw.get(key)
    if section is None:
        problems.append(f"{key} is missing; a {MODEL_TYPE} configuration nests both towers")
        return {}
    return _as_dict(section)


def _check_identity(raw: Mapping[str, Any], problems: list[str]) -> None:
    names = list(raw.get("architectures") or [ARCHITECTURE])
    if names != [ARCHITECTURE]:
        near = " (the name is case-sensitive)" if names[0].lower() == ARCHITECTURE.lower() else ""
        problems.append(
            f"architectures is {names}; this package implements [{ARCHITECTURE!r}]{near}"
        )
    model_type = raw.get("model_type", MODEL_TYPE)
    if model_type != MODEL_TYPE:
        problems.append(f"model_type is {model_type!r}; this package implements {MODEL_TYPE!r}")


def _fixed(
    section: Mapping[str, Any],
    where: str,
    name: str,
    legal: Any,
    spec_path: str,
    problems: list[str],
) -> None:
    """A field whose value is structure: absent or null is fine, another value is refused."""
    value = section.get(name)
    if value is not None and value != legal:
        problems.append(
            f"{where}.{name} is {value!r}; the specification ({spec_path}) fixes it to {legal!r}"
        )


def _either(section: Mapping[str, Any], names: tuple[str, ...]) -> str:
    """The first of some names of one field that the section has; transformers renames some."""
    return next((name for name in names if name in section), names[0])


def _size(section: Mapping[str, Any], where: str, name: str, problems: list[str]) -> int:
    value = section.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        problems.append(f"{where}.{name} is {value!r}; a positive integer is needed")
        return 1
    return value


def _dtype(*sections: Mapping[str, Any]) -> torch.dtype:
    """The first dtype stated; newer files call it `dtype`, older ones `torch_dtype`."""
    for section in sections:
        for name in ("dtype", "torch_dtype"):
            value = section.get(name)
            if value is not None:
                return (
                    value
                    if isinstance(value, torch.dtype)
                    else _DTYPES[str(value).removeprefix("torch.")]
                )
    return torch.bfloat16


def _parse_rope(
    raw: Mapping[str, Any], text: Mapping[str, Any], where: str, head_dim: int, problems: list[str]
) -> tuple[float, tuple[int, int, int]]:
    """Read the rotary settings from either published form; every key is used or refused.

    Older files hold `rope_theta` beside `rope_scaling`, newer ones hold both inside
    `rope_parameters`; some keep them at the top level, outside of the text tower's section.
    """
    rope, outside = _rope_settings(text), _rope_settings(raw)
    if rope and outside and rope != outside:
        problems.append(
            f"rope settings at top level {outside} contradict those of {where} {rope}; state "
            "them once"
        )
    rope = dict(rope or outside)
    theta = rope.pop("rope_theta", None)
    sections = tuple(rope.pop("mrope_section", (8, 12, 12)))
    interleaved = rope.pop("mrope_interleaved", False)
    kinds = {rope.pop("rope_type", "default"), rope.pop("type", "default")} - {"default", "mrope"}
    partial = rope.pop("partial_rotary_factor", 0.5)
    if theta is None:
        problems.append(
            f"{where}.rope_theta is absent, at top level and in rope_parameters; the base must "
            "be stated"
        )
        theta = 10000.0
    if interleaved is not False:
        problems.append(
            f"{where}: mrope_interleaved is {interleaved!r}; the specification (text.rope.order) "
            "says contiguous"
        )
    if kinds:
        problems.append(
            f"{where}: rope type {sorted(map(str, kinds))} is not implemented; legal: 'default', "
            "'mrope'"
        )
    if partial != 0.5:
        problems.append(
            f"{where}: partial_rotary_factor is {partial!r}; the specification "
            "(text.rope.partial) says 0.5"
        )
    if rope:
        problems.append(f"{where}: rope settings {sorted(rope)} are not known to this package")
    if head_dim % 4:
        problems.append(
            f"{where}: head_dim {head_dim} must be a multiple of 4 to be rotated in part"
        )
    rotary_dim = int(head_dim * 0.5)
    if len(sections) != 3 or 2 * sum(sections) != rotary_dim:
        problems.append(
            f"{where}: mrope_section is {list(sections)}, with sum {sum(sections)}; three "
            "sections must sum to half of the rotated "
            f"{rotary_dim} of head_dim {head_dim}, that is {rotary_dim // 2}"
        )
    return float(theta), sections


def _rope_settings(section: Mapping[str, Any]) -> dict[str, Any]:
    """All rotary settings of one section in the newer form; a plain rope type is left out."""
    rope = dict(section.get("rope_scaling") or {}) | dict(section.get("rope_parameters") or {})
    for name in ("rope_theta", "partial_rotary_factor"):
        if section.get(name) is not None:
            rope.setdefault(name, section[name])
    return {
        k: v
        for k, v in rope.items()
        if k not in ("rope_type", "type") or v not in ("default", "mrope")
    }


def _parse_text(
    raw: Mapping[str, Any], text: Mapping[str, Any], problems: list[str]
) -> Glm4vMoeTextConfig:
    where = "text_config"
    for name, legal, spec_path in TEXT_STRUCTURE:
        _fixed(text, where, name, legal, spec_path, problems)
    if set(text.get("layer_types") or ()) - {"full_attention"}:
        problems.append(
            f"{where}.layer_types is {text['layer_types']}; every layer of this package attends "
            "to the whole sequence ('full_attention')"
        )
    heads = _size(text, where, "num_attention_heads", problems)
    hidden_size = _size(text, where, "hidden_size", problems)
    head_dim = text.get("head_dim") or hidden_size // heads
    theta, sections = _parse_rope(raw, text, where, head_dim, problems)
    return Glm4vMoeTextConfig(
        hidden_size=hidden_size,
        intermediate_size=_size(text, where, "intermediate_size", problems),
        num_hidden_layers=_size(text, where, "num_hidden_layers", problems),
        num_attention_heads=heads,
        num_key_value_heads=text.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        vocab_size=_size(text, where, "vocab_size", problems),
        max_position_embeddings=_size(text, where, "max_position_embeddings", problems),
        rms_norm_eps=float(text.get("rms_norm_eps", 1e-05)),
        rope_theta=theta,
        mrope_section=sections,
        num_experts=_size(
            text, where, _either(text, ("n_routed_experts", "num_local_experts")), problems
        ),
        num_experts_per_tok=_size(text, where, "num_experts_per_tok", problems),
        moe_intermediate_size=_size(text, where, "moe_intermediate_size", problems),
        first_dense=text.get("first_k_dense_replace", 1),
        num_shared_experts=text.get("n_shared_experts", 1),
        routed_scale=text.get("routed_scaling_factor", 1.0),
        # Only the top-level flag counts, as in transformers; a different flag in text_config is
        # ignored there too.
        tie_word_embeddings=bool(
            raw.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
        ),
        dtype=_dtype(text, raw),
    )


# Fields that change the structure of the tower: what this package implements, and the axis.
VISION_STRUCTURE = (
    ("hidden_act", "silu", "vision.mlp.activation"),
    ("attention_bias", False, "vision.attention.qkv_bias"),
    ("deepstack_visual_indexes", [], "vision.deepstack"),
    ("fullatt_block_indexes", [], "vision.attention.window"),
    ("window_size", None, "vision.attention.window"),
)


def _parse_vision(
    raw: Mapping[str, Any], vision: Mapping[str, Any], problems: list[str]
) -> Glm4vMoeVisionConfig:
    where = "vision_config"
    for name, legal, axis in VISION_STRUCTURE:
        if vision.get(name) is not None:
            _fixed(vision, where, name, legal, axis, problems)
    rope = vision.get("rope_parameters") or {}
    hidden_size = _size(vision, where, "hidden_size", problems)
    patch_size = _side(vision, where, "patch_size", problems)
    return Glm4vMoeVisionConfig(
        depth=_size(vision, where, "depth", problems),
        hidden_size=hidden_size,
        intermediate_size=_size(vision, where, "out_hidden_size", problems),
        num_heads=_size(vision, where, "num_heads", problems),
        in_channels=vision.get("in_channels", vision.get("in_chans", 3)),
        patch_size=patch_size,
        temporal_patch_size=_size(vision, where, "temporal_patch_size", problems),
        spatial_merge_size=_size(vision, where, "spatial_merge_size", problems),
        out_hidden_size=_size(vision, where, "out_hidden_size", problems),
        merger_intermediate_size=_size(vision, where, "intermediate_size", problems),
        num_position_embeddings=(_side(vision, where, "image_size", problems) // patch_size) ** 2,
        rope_theta=float(rope.get("rope_theta", 10000.0)),
        rms_norm_eps=float(vision.get("rms_norm_eps", 1e-05)),
        dtype=_dtype(vision, raw),
    )


def _side(section: Mapping[str, Any], where: str, name: str, problems: list[str]) -> int:
    """Side of a square that is stated as one number or as [height, width]."""
    value = section.get(name)
    if isinstance(value, (list, tuple)) and len(set(value)) == 1:
        value = value[0]
    return _size({name: value}, where, name, problems)


def _check_together(config: Glm4vMoeConfig, problems: list[str]) -> None:
    """Rules that join fields, or towers."""
    text, vision = config.text_config, config.vision_config
    if vision.out_hidden_size != text.hidden_size:
        problems.append(
            f"vision_config.out_hidden_size is {vision.out_hidden_size}; "
            f"it must equal text_config.hidden_size {text.hidden_size}"
        )
    if text.num_experts_per_tok > text.num_experts:
        problems.append(
            f"num_experts_per_tok {text.num_experts_per_tok} is more than num_experts "
            f"{text.num_experts}"
        )
    if text.num_attention_heads % text.num_key_value_heads:
        problems.append(
            f"num_attention_heads {text.num_attention_heads} is not divisible by "
            f"num_key_value_heads {text.num_key_value_heads}"
        )
    if vision.hidden_size % vision.num_heads or vision.head_dim % 4:
        problems.append(
            f"vision hidden_size {vision.hidden_size} over {vision.num_heads} heads: the head "
            "width must be a multiple of 4"
        )


def _check_stored_quantization(sections: Iterable[Mapping[str, Any]], problems: list[str]) -> None:
    """A checkpoint whose tensors are stored quantised: neither tower has the scales to read it."""
    for section in sections:
        stored = section.get("quantization_config")
        if stored:
            method = stored.get("quant_method") if isinstance(stored, Mapping) else stored
            problems.append(
                f"quantization_config names the method {method!r}; this package loads "
                "unquantised checkpoints only "
                "(float32, bfloat16 or float16 tensors, no quantization_config)"
            )


def _check_neuron(config: Glm4vMoeConfig, problems: list[str]) -> None:
    """Settings of `additional_config` that this package cannot honour."""
    neuron, vision_neuron = config.text_config.neuron_config, config.vision_config.neuron_config
    if neuron is not None and neuron.quantization not in (None, "bf16"):
        problems.append(
            f"neuron_config.quantization is {neuron.quantization!r}; both towers are served in "
            "the checkpoint's dtype, so only None and 'bf16' are legal"
        )
    if neuron is not None and neuron.modules_to_not_convert:
        problems.append(
            f"neuron_config.modules_to_not_convert is {neuron.modules_to_not_convert}; nothing "
            "is converted, so the "
            "patterns match nothing; leave it out"
        )
    if vision_neuron is None:
        return
    merge_area = config.vision_config.merge_area
    block = vision_neuron.vision_attention_block_size
    if block % 128 or block % merge_area:
        problems.append(
            f"vision_attention_block_size is {block}; it must be a multiple of 128 and of the "
            f"merge area {merge_area}; "
            f"the next legal value is {next_block_size(block, merge_area)}"
        )
    for bucket in vision_neuron.num_vision_tokens_buckets or []:
        if bucket % merge_area:
            problems.append(
                f"num_vision_tokens_buckets: {bucket} is not a multiple of the merge area "
                f"{merge_area}"
            )
    if vision_neuron.mm_encoder_only or vision_neuron.mm_language_model_only:
        problems.append(
            "split roles (encoder only, language model only) are not implemented by this package"
        )


def next_block_size(patches: int, merge_area: int) -> int:
    """The smallest legal vision attention block that holds `patches` patches."""
    step = 128
    while step % merge_area:
        step += 128
    return -(-patches // step) * step
