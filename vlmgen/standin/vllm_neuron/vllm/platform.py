"""The vLLM platform of the stand-in: vLLM's CPU platform with the plugin's rules on top.

Every setting that the plugin refuses is refused here, while the configuration is made and with
the legal values; a request that is too large is refused in the front end, before the engine.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from vllm.exceptions import VLLMValidationError
from vllm.platforms.cpu import CpuPlatform
from vllm_neuron.vllm.settings import check_engine, resolve_additional_config

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm_neuron.model.neuron_config import NeuronConfig
    from vllm_neuron.vllm.limits import VisionLimits

__all__ = ["NeuronPlatform"]

_PACKAGE = "vllm_neuron.vllm"
DEFAULT_KV_BLOCK_SIZE = 32


class NeuronPlatform(CpuPlatform):
    """The plugin's platform on a CPU."""

    device_name: str = "neuron-standin"
    # vLLM's sampler compiles two small functions; without this it would need a C++ compiler.
    simple_compile_backend: str = "eager"
    supported_quantization: list[str] = []

    _neuron_config: NeuronConfig | None = None
    _limits: VisionLimits | None = None

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        """Name for logs."""
        return cls.device_name

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Take the configuration over, or refuse it; may be called twice on one.

        Raises:
            ValueError: with the setting, its value, the rule and the legal values.
        """
        from vllm.config import CompilationMode

        if vllm_config.model_config is None:
            return super().check_and_update_config(vllm_config)
        check_engine(vllm_config)
        text, has_vision = resolve_additional_config(vllm_config)

        parallel = vllm_config.parallel_config
        executor = parallel.distributed_executor_backend
        parallel.worker_cls = f"{_PACKAGE}.worker.neuron_worker.NeuronWorker"
        vllm_config.scheduler_config.scheduler_cls = (
            f"{_PACKAGE}.core.neuron_scheduler.NeuronScheduler"
        )
        vllm_config.ec_manager_config.encoder_cache_manager_cls = (
            f"{_PACKAGE}.core.encoder_cache_manager.BlockEncoderCacheManager"
        )
        if not vllm_config.cache_config.user_specified_block_size:
            vllm_config.cache_config.block_size = DEFAULT_KV_BLOCK_SIZE
            vllm_config.cache_config.user_specified_block_size = True
        # A whole prompt is one prefill, so there is nothing to cut into chunks.
        vllm_config.scheduler_config.enable_chunked_prefill = False
        # The runner compiles the two towers itself.
        vllm_config.compilation_config.mode = CompilationMode.NONE
        super().check_and_update_config(vllm_config)
        # vLLM would give each rank a memory node of its own, which a laptop does not have.
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        if parallel.world_size == 1 and executor in (None, "uni"):
            # vLLM's CPU platform wants a process of its own in order to bind threads.
            parallel.distributed_executor_backend = "uni"

        cls._neuron_config = text
        cls._limits = None
        if has_vision:
            from vllm_neuron.vllm.limits import VisionLimits

            cls._limits = VisionLimits.from_vllm_config(vllm_config)
            _keep_items_in_the_front_end(vllm_config)

    @classmethod
    def validate_request(cls, processed_inputs: Any, params: Any) -> None:
        """Refuse what the runner could not serve; vLLM answers with HTTP 400.

        Raises:
            VLLMValidationError: with the numbers.
        """
        from vllm_neuron.vllm.requests import media_of, sampling_problem

        if cls._neuron_config is not None:
            problem = sampling_problem(params, cls._neuron_config)
            if problem is not None:
                raise VLLMValidationError(problem)
        items = media_of(processed_inputs)
        if items and cls._limits is not None:
            problem = cls._limits.problem(items)
            if problem is not None:
                raise VLLMValidationError(problem)

    @classmethod
    def is_async_output_supported(cls, enforce_eager: bool | None) -> bool:
        """Results are taken synchronously."""
        return False

    @classmethod
    def pre_register_and_update(cls, parser: Any = None) -> None:
        """Called before the command line is read."""
        os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")


def _keep_items_in_the_front_end(vllm_config: VllmConfig) -> None:
    """Let vLLM's front end keep processed images and videos, and send them with every request.

    vLLM's `lru` cache has a copy in the engine, and the front end sends an item once. The copies
    drift apart when the request that carried the item is refused, or is overtaken by another with
    the same item; vLLM answers the later one with HTTP 500, to be sent again. `processor_only` is
    what vLLM itself takes where there are several front ends or engines.
    """
    multimodal: Any = vllm_config.model_config.multimodal_config
    multimodal.mm_processor_cache_type = "processor_only"
