"""Engine settings under the plugin's rules: what is refused, and what is filled in."""

from __future__ import annotations

import copy
import difflib
import os
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm_neuron.model import registry
from vllm_neuron.model.neuron_config import NeuronConfig, VisionNeuronConfig
from vllm_neuron.utils.vision_utils import (
    get_max_pixels_token_count,
    get_vision_token_merge_factor,
)
from vllm_neuron.vllm.worker.vision_sizes import default_buckets, resolve_vision_auto_config

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["additional_config_of", "check_engine", "resolve_additional_config"]

MAX_MODEL_LEN = 16384  # longest prompt that the plugin computes in one piece
QUANTIZATIONS = (None, "bf16")
TABLE_TOKENS = 128  # a block table covers a multiple of so many tokens

_TOP_LEVEL = ("neuron_config", "vision_neuron_config", "mm_language_model_only")


def check_engine(vllm_config: VllmConfig) -> None:
    """Refuse engine settings that the plugin does not serve.

    Raises:
        ValueError: all that is wrong, one line each.
    """
    problems = list(_engine_problems(vllm_config))
    if problems:
        lines = "\n".join(f"  - {problem}" for problem in problems)
        raise ValueError(f"the vLLM Neuron platform cannot serve these settings:\n{lines}")


def _engine_problems(vllm_config: VllmConfig) -> Any:
    model, cache = vllm_config.model_config, vllm_config.cache_config
    scheduler, parallel = vllm_config.scheduler_config, vllm_config.parallel_config
    table = dict(registry.get_models())
    if model.architecture not in table:
        yield (
            f"architecture {model.architecture}: no package serves it; registered are "
            f"{sorted(table) or 'none'}. Install the generated package with pip, or start with "
            "`vlmgen serve PACKAGE`"
        )
    if cache.enable_prefix_caching:
        yield (
            "prefix caching needs segmented prefill, which is not available: pass "
            "--no-enable-prefix-caching"
        )
    if scheduler.max_num_batched_tokens < model.max_model_len:
        yield (
            f"max_num_batched_tokens {scheduler.max_num_batched_tokens} is below max_model_len "
            f"{model.max_model_len}: a prompt would be cut into chunks (chunked or segmented "
            "prefill), and is computed in one piece here; legal is "
            f"--max-num-batched-tokens {model.max_model_len}"
        )
    if scheduler.long_prefill_token_threshold > 0:
        yield (
            f"long_prefill_token_threshold {scheduler.long_prefill_token_threshold} cuts prompts "
            "into chunks; legal is 0"
        )
    if model.max_model_len > MAX_MODEL_LEN:
        yield (
            f"max_model_len {model.max_model_len} is above {MAX_MODEL_LEN}, the longest prompt "
            "in one piece; legal is 1 to that"
        )
    if scheduler.policy != "fcfs":
        yield f"scheduling policy {scheduler.policy!r}; legal is 'fcfs'"
    if TABLE_TOKENS % cache.block_size and cache.user_specified_block_size:
        legal = [size for size in range(8, TABLE_TOKENS + 1) if TABLE_TOKENS % size == 0]
        yield f"block_size {cache.block_size} does not divide {TABLE_TOKENS}; legal are {legal}"
    if cache.cache_dtype not in ("auto", str(model.dtype).removeprefix("torch.")):
        yield f"kv cache dtype {cache.cache_dtype!r}; legal is 'auto', the model's"
    if parallel.data_parallel_size > 1:
        yield f"data_parallel_size {parallel.data_parallel_size}; legal is 1"
    if model.runner_type != "generate":
        yield f"runner {model.runner_type!r}; legal is 'generate'"
    if model.enable_prompt_embeds:
        yield "enable_prompt_embeds: prompts are token ids here; leave it out"
    if getattr(model.multimodal_config, "mm_processor_cache_type", None) == "shm":
        yield (
            "mm_processor_cache_type 'shm' shows the front end an address instead of the item, "
            "whose frames are counted there; leave it out"
        )
    if model.quantization is not None:
        yield (
            f"quantization {model.quantization!r}; leave it out, and name it in neuron_config, "
            f"where legal are {list(QUANTIZATIONS)}"
        )
    for name, wanted in (
        ("speculative decoding", vllm_config.speculative_config),
        ("LoRA", vllm_config.lora_config),
        ("a KV connector", vllm_config.kv_transfer_config),
        ("an encoder-cache connector", getattr(vllm_config, "ec_transfer_config", None)),
    ):
        if wanted is not None:
            yield f"{name} is not available"
    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER", "0").lower() in ("1", "true"):
        yield "VLLM_USE_V2_MODEL_RUNNER is set: the plugin's runner has the older interface; unset"


def additional_config_of(vllm_config: VllmConfig) -> Mapping[str, Any]:
    """`additional_config` as the object that it is for this platform; vLLM would take others.

    Raises:
        ValueError: it is no object.
    """
    given = vllm_config.additional_config
    if not isinstance(given, Mapping):
        raise ValueError(f"additional_config must be an object, got {given!r}")
    return given


def resolve_additional_config(vllm_config: VllmConfig) -> tuple[NeuronConfig, bool]:
    """Check `additional_config` and fill in what was left open, in place; idempotent.

    Returns:
        The text settings, and whether the model has a vision tower.

    Raises:
        ValueError: an unknown key, with the nearest known one, or an illegal value.
    """
    given = copy.deepcopy(dict(additional_config_of(vllm_config)))
    for key in given:
        if key not in _TOP_LEVEL:
            near = difflib.get_close_matches(str(key), _TOP_LEVEL, n=1)
            known = near[0] if near else f"one of {list(_TOP_LEVEL)}"
            raise ValueError(f"additional_config: unknown key {key!r}; did you mean {known!r}?")
    if given.get("mm_language_model_only") or _encoder_only(vllm_config):
        raise ValueError(
            "a disaggregated encoder (mm_language_model_only, --mm-encoder-only) is not available "
            "in the stand-in; legal is one process with both towers"
        )
    text = dict(given.get("neuron_config") or {})
    _fill_text_buckets(text, vllm_config)
    text_config = _strictly(NeuronConfig, text, "neuron_config")
    _check_text(text_config)
    given["neuron_config"] = text

    hf_config = vllm_config.model_config.hf_config
    has_vision = hasattr(hf_config, "vision_config")
    if has_vision:
        vision = dict(given.get("vision_neuron_config") or {})
        _strictly(VisionNeuronConfig, vision, "vision_neuron_config")
        given["vision_neuron_config"] = _resolve_vision(vision, vllm_config)
    elif given.get("vision_neuron_config"):
        raise ValueError("vision_neuron_config: the model has no vision tower; leave it out")
    vllm_config.additional_config = given
    return text_config, has_vision


def _encoder_only(vllm_config: VllmConfig) -> bool:
    return bool(getattr(vllm_config.model_config.multimodal_config, "mm_encoder_only", False))


def _strictly(kind: Any, config: dict[str, Any], name: str) -> Any:
    """Build a configuration; a key that the plugin would drop is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            return kind.from_dict(config)
        except UserWarning as warning:
            raise ValueError(f"additional_config: {warning}") from None
        except TypeError as error:
            raise ValueError(f"additional_config[{name!r}]: {error}") from None


def _fill_text_buckets(text: dict[str, Any], vllm_config: VllmConfig) -> None:
    scheduler = vllm_config.scheduler_config
    limits = {
        "num_batched_tokens_buckets": min(
            scheduler.max_num_batched_tokens, vllm_config.model_config.max_model_len
        ),
        "num_seqs_buckets": scheduler.max_num_seqs,
    }
    for name, last in limits.items():
        if text.get(name) is None:
            text[name] = default_buckets(name, last)
        check_buckets(f"neuron_config[{name!r}]", text[name])
        if text[name][-1] != last:
            source = "max_num_seqs" if name == "num_seqs_buckets" else "max_model_len"
            raise ValueError(
                f"neuron_config[{name!r}] {text[name]} must end in {last}, the engine's "
                f"{source}; legal is for example {[*[b for b in text[name] if b < last], last]}"
            )


def check_buckets(name: str, buckets: Any) -> None:
    """Buckets are positive integers in ascending order.

    Raises:
        ValueError: they are not.
    """
    whole = isinstance(buckets, list) and all(type(b) is int and b > 0 for b in buckets)
    if not whole or not buckets:
        raise ValueError(f"{name} must be a list of positive integers, got {buckets!r}")
    if buckets != sorted(set(buckets)):
        raise ValueError(
            f"{name} must be ascending, got {buckets}; legal is {sorted(set(buckets))}"
        )


def _check_text(config: NeuronConfig) -> None:
    if config.quantization not in QUANTIZATIONS:
        raise ValueError(
            f"neuron_config['quantization'] {config.quantization!r} is not available on a CPU; "
            f"legal are {list(QUANTIZATIONS)}"
        )
    for name in ("kv_segment_size_buckets", "decode_context_length_buckets"):
        if getattr(config, name):
            raise ValueError(
                f"neuron_config[{name!r}] {getattr(config, name)}: not available in the "
                "stand-in; legal is null"
            )
    for name in ("tensor_capture", "tensor_replacement", "debug_logits_dir"):
        if getattr(config, name) is not None:
            raise ValueError(f"neuron_config[{name!r}] is not available in the stand-in")
    for name in ("attention_dp_size", "embedding_dp_size", "lm_head_dp_size"):
        if getattr(config, name) != 1:
            raise ValueError(
                f"neuron_config[{name!r}] {getattr(config, name)} is not available in the "
                "stand-in; legal is 1"
            )


def _resolve_vision(vision: dict[str, Any], vllm_config: VllmConfig) -> dict[str, Any]:
    model = vllm_config.model_config
    factor = get_vision_token_merge_factor(model.hf_config)
    max_pixels = (getattr(model.multimodal_config, "mm_processor_kwargs", None) or {}).get(
        "max_pixels"
    )
    patches = (
        None if max_pixels is None else get_max_pixels_token_count(model.hf_config, max_pixels)
    )

    def resolved(config: dict[str, Any]) -> dict[str, Any]:
        config = dict(config)
        resolve_vision_auto_config(config, model.max_model_len, factor, patches)
        config.setdefault("vision_attention_block_size", 2048)
        return config

    if vision.get("num_vision_tokens_buckets") and vision.get("max_vision_seq_len"):
        # Either the user gave both, or this is the second pass over a derived list.
        again = {k: v for k, v in vision.items() if k != "num_vision_tokens_buckets"}
        if resolved(again) == vision:
            return vision
    if vision.get("num_vision_tokens_buckets"):
        check_buckets(
            "vision_neuron_config['num_vision_tokens_buckets']",
            vision["num_vision_tokens_buckets"],
        )
    derived = {k: v for k, v in vision.items() if k != "num_vision_tokens_buckets"}
    if "vision_attention_block_size" in vision and resolved(derived) == vision:
        return vision  # a derived bucket may lie below the block, an explicit one may not
    vision = resolved(vision)
    block = vision["vision_attention_block_size"]
    if type(block) is not int or block < factor or block % factor:
        raise ValueError(
            f"vision_neuron_config['vision_attention_block_size'] {block!r} must be a positive "
            f"multiple of the merge area {factor}; legal is for example "
            f"{max(factor, int(block) // factor * factor) if isinstance(block, int) else 2048}"
        )
    if max(vision["num_vision_tokens_buckets"]) % factor:
        raise ValueError(
            "vision_neuron_config['num_vision_tokens_buckets'] "
            f"{vision['num_vision_tokens_buckets']}: the last one must be a multiple of the "
            f"merge area {factor}"
        )
    world_size = vllm_config.parallel_config.world_size
    _strictly(VisionNeuronConfig, vision, "vision_neuron_config").resolve_tp_dp(world_size)
    return vision
