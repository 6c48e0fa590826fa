"""From an architecture name to a loaded model, as the plugin's runner gets there."""

from __future__ import annotations

import time
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from vllm import ModelRegistry
from vllm.config import ModelConfig, VllmConfig
from vllm.logger import init_logger
from vllm_neuron.model.interfaces import (
    SupportsMRoPE,
    SupportsSpatialMerge,
    SupportsVisionWarmup,
)
from vllm_neuron.model.neuron_config import NeuronConfig, VisionNeuronConfig
from vllm_neuron.vllm.worker.call_signatures import RunnerContractError

__all__ = ["dtype_of", "load_model"]

logger = init_logger(f"vllm.{__name__}")

TEXT_MEMBERS = ("get_kv_spec", "bind_kv_cache", "load_weights")
VISION_MEMBERS = ("visual", "embed_multimodal")


def dtype_of(model_config: ModelConfig) -> torch.dtype:
    """The engine's dtype; names like `auto` are resolved before there is a worker."""
    assert isinstance(model_config.dtype, torch.dtype)
    return model_config.dtype


def load_model(
    vllm_config: VllmConfig,
    neuron_config: NeuronConfig,
    vision_config: VisionNeuronConfig | None,
) -> Any:
    """Resolve the class, build it on the meta device and load it.

    Args:
        vllm_config: after the platform hook.
        neuron_config: settings of the text model.
        vision_config: settings of the tower, sizes resolved; None without a tower.

    Returns:
        The package's model on the CPU.

    Raises:
        RunnerContractError: the package lacks something that the runner looks up, or left a
            parameter or buffer on the meta device.
    """
    model_config = vllm_config.model_config
    factory: Any
    factory, _ = ModelRegistry.resolve_model_cls(
        model_config.architecture, model_config=model_config
    )
    config = _with_dtype(model_config.hf_config, dtype_of(model_config))
    with torch.device("meta"):
        if vision_config is None:
            model = factory.from_configs(config, neuron_config)
        else:
            model = factory.from_configs(
                hf_config=config,
                text_neuron_config=neuron_config,
                vision_neuron_config=vision_config,
            )
    _check_members(model, factory, model_config.uses_mrope, vision_config is not None)
    started = time.perf_counter()
    with torch.no_grad():
        model.load_weights(
            model_config.model, torch.device("cpu"), vllm_config.load_config.download_dir
        )
    tensors = [*model.named_parameters(), *model.named_buffers()]
    stranded = [name for name, tensor in tensors if tensor.is_meta]
    if stranded:
        raise RunnerContractError(f"still on the meta device after loading: {stranded}")
    logger.info(
        "Loaded %s: %d parameters in %.2f s",
        type(model).__name__,
        sum(parameter.numel() for parameter in model.parameters()),
        time.perf_counter() - started,
    )
    return model.eval()


def _check_members(model: Any, factory: Any, uses_mrope: bool, has_vision: bool) -> None:
    wanted = [(model, SupportsMRoPE, uses_mrope and not isinstance(model, SupportsMRoPE))]
    members = list(TEXT_MEMBERS)
    if has_vision:
        members += VISION_MEMBERS
        wanted += [
            (model, SupportsVisionWarmup, not isinstance(model, SupportsVisionWarmup)),
            (factory, SupportsSpatialMerge, not issubclass(factory, SupportsSpatialMerge)),
        ]
    for thing, protocol, missing in wanted:
        if missing:
            name = getattr(thing, "__name__", type(thing).__name__)
            raise RunnerContractError(f"{name} is no {protocol.__name__}")
    absent = [name for name in members if not hasattr(model, name)]
    if absent:
        raise RunnerContractError(f"the model lacks {absent}")


def _with_dtype(hf_config: Any, dtype: torch.dtype) -> Any:
    """The configuration with the engine's dtype, which `--dtype` may have changed."""
    config = deepcopy(hf_config)
    parts = (config, config.get_text_config(), getattr(config, "vision_config", None))
    for part in parts:
        if part is not None and not isinstance(part, Mapping):
            part.dtype = dtype
    return config
