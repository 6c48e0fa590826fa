"""What the front end looks at in a request before the engine sees it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_neuron.model.neuron_config import NeuronConfig
from vllm_neuron.vllm.limits import frames_of

__all__ = ["media_of", "sampling_problem"]

# Neutral values of the sampling parameters that the on-device sampler does not have.
_NOT_ON_DEVICE: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0.0, None),
    "frequency_penalty": (0.0, None),
    "repetition_penalty": (1.0, None),
    "min_p": (0.0, None),
    "seed": (None,),
    "logit_bias": (None, {}),
    "bad_words": (None, []),
    "allowed_token_ids": (None, []),
    "min_tokens": (0, None),
    "thinking_token_budget": (None,),
    "logprob_token_ids": (None, []),
}


def media_of(processed_inputs: Any) -> list[tuple[str, list[int]]]:
    """Modality and frames of every image and video, in prompt order; see `frames_of`."""
    if not isinstance(processed_inputs, Mapping):
        return []
    placeholders = processed_inputs.get("mm_placeholders") or {}
    outputs = processed_inputs.get("mm_kwargs") or {}
    items = []
    for modality, places in placeholders.items():
        for index, place in enumerate(places):
            data = outputs[modality][index] if modality in outputs else None
            items.append((place.offset, modality, frames_of(place, data)))
    return [(modality, frames) for _, modality, frames in sorted(items)]


def sampling_problem(params: Any, config: NeuronConfig) -> str | None:
    """Why a request's sampling parameters cannot be served, or None.

    Args:
        params: vLLM's sampling or pooling parameters.
        config: the engine's.
    """
    if not hasattr(params, "temperature"):
        return f"{type(params).__name__}: this engine only generates text"
    if params.prompt_logprobs is not None:
        return (
            "prompt_logprobs is not available: a prefill computes logits for the last token of "
            "the prompt only. Leave it out"
        )
    if params.structured_outputs is not None and not config.enable_structured_outputs:
        return (
            "structured outputs are off; start the server with "
            '{"neuron_config": {"enable_structured_outputs": true}} in --additional-config'
        )
    sampling = config.on_device_sampling_config
    if sampling is None:
        return None
    off = 'set "on_device_sampling_config": null in neuron_config to sample on the host'
    wanted = params.logprobs
    if wanted is not None and not 0 <= wanted <= config.max_logprobs:
        return (
            f"logprobs {wanted} with on-device sampling: the model returns logits for at most "
            f'neuron_config["max_logprobs"] = {config.max_logprobs}; raise it, or {off}'
        )
    if wanted is not None and config.max_logprobs == 0:
        return f'logprobs with on-device sampling need neuron_config["max_logprobs"]; or {off}'
    unknown = [
        f"{name}={getattr(params, name)!r}"
        for name, neutral in _NOT_ON_DEVICE.items()
        if getattr(params, name, neutral[0]) not in neutral
    ]
    if unknown:
        return f"the on-device sampler has no {', '.join(unknown)}; leave it out, or {off}"
    if params.top_k > sampling.max_top_k:
        return (
            f"top_k {params.top_k} is above max_top_k {sampling.max_top_k} of the on-device "
            f"sampler; use at most that, or {off}"
        )
    return None
