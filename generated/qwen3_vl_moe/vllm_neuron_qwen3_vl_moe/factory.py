"""What vLLM finds under the architecture name Qwen3VLMoeForConditionalGeneration.

The class validates, answers what the platform asks before any worker exists, and builds the
implementation (`model.py`), which is imported only then.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig
from vllm.distributed.parallel_state import get_tp_group
from vllm_neuron.model.neuron_config import NeuronConfig, VisionNeuronConfig
from vllm_neuron.parallel.neuron_parallel_state import get_neuron_ep_degree

from .config import ARCHITECTURE, Qwen3VLMoeConfig, Qwen3VLMoeConfigError

# Widest aspect ratio that the image processor takes; it refuses more.
MAX_ASPECT_RATIO = 200


class _UpstreamProcessor:
    """vLLM's multimodal processor of this architecture, looked up when vLLM asks for it.

    Without a processor vLLM would fall back to text only in silence, so a failure here must not
    look like an absent attribute.
    """

    def __get__(self, instance: Any, owner: type) -> Any:
        try:
            return _upstream_class().__dict__["_processor_factory"]
        except KeyError:
            raise RuntimeError(f"vLLM has no multimodal processor for {ARCHITECTURE}") from None


def _upstream_class() -> Any:
    """vLLM's own class of this architecture; imported late, it brings all of vLLM's layers."""
    import vllm.model_executor.models.qwen3_vl_moe as upstream

    return upstream.Qwen3VLMoeForConditionalGeneration


class Qwen3VLMoeForConditionalGeneration(nn.Module):
    """Factory of the Qwen3-VL-MoE implementation."""

    _processor_factory = _UpstreamProcessor()
    supports_multimodal = True
    supports_mrope = True
    supports_on_device_sampling = True

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        raise TypeError(
            f"{ARCHITECTURE} is built through from_configs, on the vLLM Neuron platform"
        )

    @classmethod
    def from_configs(
        cls,
        hf_config: PretrainedConfig,
        neuron_config: NeuronConfig | None = None,
        *,
        text_neuron_config: NeuronConfig | None = None,
        vision_neuron_config: VisionNeuronConfig | None = None,
    ) -> nn.Module:
        """Validate, and build the model; both call forms of the runner.

        Args:
            hf_config: the checkpoint's configuration.
            neuron_config: text settings, by position (text-only form).
            text_neuron_config, vision_neuron_config: settings of both towers, by keyword
                (multimodal form).

        Returns:
            The implementation, on the current default device (the runner's is meta).

        Raises:
            Qwen3VLMoeConfigError: the configuration or the parallel layout is not legal.
        """
        config = Qwen3VLMoeConfig.from_configs(
            hf_config,
            neuron_config,
            text_neuron_config=text_neuron_config,
            vision_neuron_config=vision_neuron_config,
        )
        check_parallel(config, get_tp_group().world_size)

        from .model import Qwen3VLMoeNeuronModel

        return Qwen3VLMoeNeuronModel(config)

    @classmethod
    def get_vision_token_merge_factor(cls, hf_config: PretrainedConfig | Mapping[str, Any]) -> int:
        """Patches per merged row; the platform sizes cache blocks with it."""
        return Qwen3VLMoeConfig.from_configs(hf_config).vision_config.merge_area

    @classmethod
    def get_max_pixels_token_count(
        cls, hf_config: PretrainedConfig | Mapping[str, Any], max_pixels: int
    ) -> int:
        """Most raw patches of one image, for a processor limited to `max_pixels` pixels.

        The processor rounds both sides down to whole merge windows within the limit, but keeps a
        side of at least one window: a strip of one window's width may pass the limit, up to the
        widest aspect ratio that the processor takes.
        Source: `smart_resize` of transformers' Qwen2VLImageProcessor.
        """
        vision = Qwen3VLMoeConfig.from_configs(hf_config).vision_config
        window = vision.patch_size * vision.spatial_merge_size
        strip = math.isqrt(MAX_ASPECT_RATIO * max_pixels) // window
        return max(1, max_pixels // window**2, strip) * vision.merge_area

    @classmethod
    def get_epd_kwargs(cls, item: Mapping[str, Any]) -> dict[str, Any]:
        """Grid of an item for a disaggregated encoder; works for images and videos."""
        names = ("image_grid_thw", "video_grid_thw")
        return {name: item[name] for name in names if name in item}

    @classmethod
    def get_placeholder_str(cls, modality: str, i: int) -> str | None:
        """Text that stands for an image or video in a prompt without a chat template."""
        return _upstream_class().get_placeholder_str(modality, i)

    # vLLM decides by these methods' presence and signature that the class is a generative
    # multimodal model.

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Present for vLLM's inspection; the runner never calls it on the factory."""
        raise TypeError(f"{ARCHITECTURE}: the factory holds no weights")

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Present for vLLM's inspection; the runner never calls it on the factory."""
        raise TypeError(f"{ARCHITECTURE}: the factory holds no weights")

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Present for vLLM's inspection; the runner never calls it on the factory."""
        raise TypeError(f"{ARCHITECTURE}: the factory holds no weights")


def check_parallel(config: Qwen3VLMoeConfig, tp_size: int) -> None:
    """Refuse a parallel layout that does not divide, before any weight is read.

    Raises:
        Qwen3VLMoeConfigError: with the reason and the legal sizes.
    """
    problems = []
    text, vision = config.text_config, config.vision_config
    ep_degree = get_neuron_ep_degree()
    if reasons := text.tp_problems(tp_size, ep_degree):
        problems.append(
            f"tensor-parallel size {tp_size}: {'; '.join(reasons)}; legal sizes: "
            f"{text.legal_tp_sizes(ep_degree)}"
        )
    for bucket in (text.neuron_config and text.neuron_config.num_batched_tokens_buckets) or []:
        if tp_size > 1 and (bucket % tp_size or bucket <= tp_size):
            problems.append(
                f"num_batched_tokens_buckets: {bucket} must be a multiple of the tensor-parallel "
                f"size {tp_size} and above it"
            )
    neuron = vision.neuron_config
    if neuron is not None:
        if reasons := vision.tp_problems(neuron.tp_size):
            problems.append(
                f"vision tensor-parallel size {neuron.tp_size}: {'; '.join(reasons)}; legal "
                f"sizes: {vision.legal_tp_sizes()}"
            )
        if neuron.tp_size * neuron.dp_size != tp_size:
            problems.append(
                f"vision tp_size {neuron.tp_size} x dp_size {neuron.dp_size} = "
                f"{neuron.tp_size * neuron.dp_size}; "
                f"the product must equal the world size {tp_size}"
            )
    if problems:
        lines = "\n".join(f"  - {problem}" for problem in problems)
        raise Qwen3VLMoeConfigError(
            f"this parallel layout is not legal for the qwen3_vl_moe package:\n{lines}"
        )
