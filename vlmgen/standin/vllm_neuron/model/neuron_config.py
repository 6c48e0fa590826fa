"""Configuration of the text model, the vision tower and on-device sampling.

Built by ``from_dict`` from ``additional_config["neuron_config"]`` and
``additional_config["vision_neuron_config"]`` of a vLLM engine.

Stricter than the plugin: keys that ``from_dict`` does not know are dropped as there, but with a
warning that names them and the nearest known key.
"""

from __future__ import annotations

import difflib
import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

__all__ = [
    "NeuronConfig",
    "OnDeviceSamplingConfig",
    "TensorCaptureConfig",
    "TensorReplacementConfig",
    "VisionNeuronConfig",
]

_SPLIT_ENCODER_HOLD_TIME_MS = 100.0


def _known_keys(config: Mapping[str, Any], known: Sequence[str], where: str) -> dict[str, Any]:
    """Drop unknown keys, with a warning."""
    unknown = [str(key) for key in config if key not in known]
    if unknown:
        described = []
        for key in unknown:
            near = difflib.get_close_matches(key, known, n=1)
            described.append(f"{key!r}" + (f" (did you mean {near[0]!r}?)" if near else ""))
        warnings.warn(f"{where} ignores unknown keys: {', '.join(described)}", stacklevel=3)
    return {key: value for key, value in config.items() if key in known}


def _as_bool(value: Any) -> bool:
    """Booleans as JSON, the command line or a shell writes them."""
    if isinstance(value, str):
        return value.strip().lower() in ("true", "1", "yes")
    return bool(value)


class OnDeviceSamplingConfig:
    """How tokens are sampled on the device.

    Args:
        **kwargs: ``all_greedy`` (False), ``max_top_k`` (256), ``deterministic`` (False),
            ``sampling_dp_degree`` (1), ``capture_topk`` (False). Booleans may be strings. Other
            keys are dropped with a warning.
    """

    def __init__(self, **kwargs: Any) -> None:
        known = ("all_greedy", "max_top_k", "deterministic", "sampling_dp_degree", "capture_topk")
        kwargs = _known_keys(kwargs, known, "on_device_sampling_config")
        self.all_greedy = _as_bool(kwargs.get("all_greedy", False))
        self.max_top_k = int(kwargs.get("max_top_k", 256))
        self.deterministic = _as_bool(kwargs.get("deterministic", False))
        self.sampling_dp_degree = int(kwargs.get("sampling_dp_degree", 1))
        self.capture_topk = _as_bool(kwargs.get("capture_topk", False))

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({values})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OnDeviceSamplingConfig) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]


@dataclass
class TensorCaptureConfig:
    """Which module outputs are written to disk for debugging."""

    modules: list[str] = field(default_factory=list)
    draft_modules: list[str] = field(default_factory=list)
    capture_dir: str = "/tmp/vllm_neuron_tensor_captures"
    capture_filter: list[str] | None = None


@dataclass
class TensorReplacementConfig:
    """Which module outputs are replaced by stored tensors for debugging."""

    tensors: list[dict[str, Any]] = field(default_factory=list)
    tensors_path: str | None = None
    prompt_token_ids: list[list[int]] | None = None
    prompt_token_ids_path: str | None = None

    def resolve(self) -> tuple[list[dict[str, Any]], list[list[int]] | None]:
        """Return tensors and prompt token ids, read from their JSON files where paths are given.

        Raises:
            FileNotFoundError: a path does not exist.
        """
        tensors, prompts = self.tensors, self.prompt_token_ids
        if self.tensors_path is not None:
            tensors = json.loads(Path(self.tensors_path).read_text(encoding="utf-8"))
        if self.prompt_token_ids_path is not None:
            prompts = json.loads(Path(self.prompt_token_ids_path).read_text(encoding="utf-8"))
        return tensors, prompts


@dataclass
class NeuronConfig:
    """Configuration of the text model.

    Construct by keyword. ``quantization`` and the bucket lists are not checked here but where
    they are used. ``on_device_sampling_config=None`` turns sampling on the device off; it is on
    by default.

    Raises:
        ValueError: one of the five sizes is no positive integer, or ``enable_structured_outputs``
            no boolean. Strings and floats are not converted.
    """

    ep_degree: int = 1
    attention_dp_size: int = 1
    embedding_dp_size: int = 1
    lm_head_dp_size: int = 1
    mlp_dp_size: int = 1
    on_device_sampling_config: OnDeviceSamplingConfig | None = field(
        default_factory=OnDeviceSamplingConfig
    )
    max_logprobs: int = 0
    tensor_capture: TensorCaptureConfig | None = None
    tensor_replacement: TensorReplacementConfig | None = None
    kv_segment_size_buckets: list[int] | None = None
    debug_logits_dir: str | None = None
    quantization: str | None = None
    all2all_backend: str | None = None
    modules_to_not_convert: list[str] | None = None
    num_batched_tokens_buckets: list[int] | None = None
    num_seqs_buckets: list[int] | None = None
    decode_context_length_buckets: list[int] | None = None
    enable_structured_outputs: bool = False
    fp8_packed_kv: bool = False

    def __post_init__(self) -> None:
        for name in (
            "ep_degree",
            "attention_dp_size",
            "embedding_dp_size",
            "lm_head_dp_size",
            "mlp_dp_size",
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        if not isinstance(self.enable_structured_outputs, bool):
            raise ValueError(
                "enable_structured_outputs must be true or false, got "
                f"{self.enable_structured_outputs!r}"
            )

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> NeuronConfig:
        """Build the configuration from ``additional_config["neuron_config"]``.

        Args:
            config: field name -> value; the nested objects as mappings.

        Returns:
            The configuration. Unknown keys are dropped with a warning.

        Raises:
            TypeError: a nested object is neither a mapping nor null.
            ValueError: see the class.
        """
        known = _known_keys(config, [f.name for f in fields(cls)], "neuron_config")
        nested: dict[str, type] = {
            "on_device_sampling_config": OnDeviceSamplingConfig,
            "tensor_capture": TensorCaptureConfig,
            "tensor_replacement": TensorReplacementConfig,
        }
        for name, kind in nested.items():
            value = known.get(name)
            if value is None or isinstance(value, kind):
                continue
            if not isinstance(value, Mapping):
                raise TypeError(f"{name} must be an object or null, got {value!r}")
            known[name] = kind(**value)
        return cls(**known)


@dataclass
class VisionNeuronConfig:
    """Configuration of the vision tower.

    Sizes count raw patches, before merging.

    Attributes:
        num_vision_tokens_buckets: patch counts the tower is compiled for, in any order.
        vision_attention_block_size: patches of one attention block.
        tp_size: ranks that share one copy of the tower.
        dp_size: copies of the tower that share the blocks.
        max_vision_seq_len: cap for derived buckets; None becomes the block size.
        encoder_cache_num_blocks: floor for the number of cache blocks.
        encoder_cache_min_hold_time_ms: how long a freed item stays readable.
        mm_encoder_only: role of this process, set by :meth:`set_construction_role` only.
        mm_language_model_only: likewise.
        num_total_vision_attention_blocks: derived, blocks per bucket, a multiple of ``dp_size``.

    Raises:
        ValueError: ``tp_size``, ``dp_size`` or ``max_vision_seq_len`` below 1.
    """

    num_vision_tokens_buckets: list[int] | None = None
    vision_attention_block_size: int = 2048
    tp_size: int = 1
    dp_size: int = 1
    max_vision_seq_len: int | None = None
    encoder_cache_num_blocks: int | None = None
    encoder_cache_min_hold_time_ms: float | None = None
    mm_encoder_only: bool = False
    mm_language_model_only: bool = False
    num_total_vision_attention_blocks: list[int] | None = None

    def __post_init__(self) -> None:
        if self.max_vision_seq_len is None:
            self.max_vision_seq_len = self.vision_attention_block_size
        for name in ("tp_size", "dp_size", "max_vision_seq_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        self._count_blocks()

    def _count_blocks(self) -> None:
        buckets = self.num_vision_tokens_buckets
        if buckets is None:
            self.num_total_vision_attention_blocks = None
            return
        blocks = [-(-bucket // self.vision_attention_block_size) for bucket in buckets]
        self.num_total_vision_attention_blocks = [
            int(-(-count // self.dp_size) * self.dp_size) for count in blocks
        ]

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> VisionNeuronConfig:
        """Build the configuration from ``additional_config["vision_neuron_config"]``.

        Args:
            config: field name -> value. The two role flags and the derived block counts are not
                taken from here.

        Returns:
            The configuration. Unknown keys are dropped with a warning; values are not converted.

        Raises:
            ValueError: see the class.
        """
        derived = {"mm_encoder_only", "mm_language_model_only", "num_total_vision_attention_blocks"}
        names = [f.name for f in fields(cls) if f.name not in derived]
        return cls(**_known_keys(config, names, "vision_neuron_config"))

    def resolve_tp_dp(self, world_size: int) -> tuple[int, int]:
        """Fill in the size that was left open and recount the blocks.

        A size of 1 counts as left open: with both at 1 the tower is replicated
        (1, ``world_size``); with one of them set the other is what remains.

        Args:
            world_size: number of ranks; ``tp_size * dp_size`` must be equal to it.

        Returns:
            The tuple (tp_size, dp_size), which is also set on the object.

        Raises:
            ValueError: the sizes do not fit; the message gives them and the world size.
        """
        tp_size, dp_size = self.tp_size, self.dp_size
        if tp_size == 1 and dp_size == 1:
            dp_size = world_size
        elif dp_size == 1:
            dp_size = _remaining(world_size, tp_size, "vision tp_size")
        elif tp_size == 1:
            tp_size = _remaining(world_size, dp_size, "vision dp_size")
        elif tp_size * dp_size != world_size:
            raise ValueError(
                f"vision tp_size {tp_size} x dp_size {dp_size} = {tp_size * dp_size} must be the "
                f"world size {world_size}"
            )
        self.tp_size, self.dp_size = tp_size, dp_size
        self._count_blocks()
        return tp_size, dp_size

    def set_construction_role(
        self, multimodal_config: Any, additional_config: Mapping[str, Any]
    ) -> None:
        """Set the role of this process and the cache's hold time that goes with it.

        Args:
            multimodal_config: vLLM's multimodal configuration, of which ``mm_encoder_only`` is
                read, or None.
            additional_config: of which ``mm_language_model_only`` is read. Any non-empty string
                counts as true.

        Raises:
            ValueError: both roles at once.
        """
        encoder_only = bool(getattr(multimodal_config, "mm_encoder_only", False))
        language_only = bool(additional_config.get("mm_language_model_only", False))
        if encoder_only and language_only:
            raise ValueError(
                "mm_encoder_only and mm_language_model_only exclude one another: a process runs "
                "the encoder, the language model or both (then set neither)"
            )
        self.mm_encoder_only = encoder_only
        self.mm_language_model_only = language_only
        if self.encoder_cache_min_hold_time_ms is None:
            split = encoder_only or language_only
            self.encoder_cache_min_hold_time_ms = _SPLIT_ENCODER_HOLD_TIME_MS if split else 0.0


def _remaining(world_size: int, size: int, name: str) -> int:
    if size > world_size or world_size % size:
        raise ValueError(f"the world size {world_size} cannot be divided by {name} {size}")
    return world_size // size
