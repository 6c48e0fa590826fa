"""The process side of one rank: groups, loading, memory, warm-up."""

from __future__ import annotations

import os
import re
from typing import Any

import psutil
import torch
from vllm import ModelRegistry
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.logger import init_logger
from vllm.tasks import SupportedTask
from vllm.utils.torch_utils import set_random_seed
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.worker.gpu_worker import init_worker_distributed_environment
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase
from vllm_neuron.model import registry
from vllm_neuron.model.neuron_config import NeuronConfig, VisionNeuronConfig
from vllm_neuron.parallel import neuron_parallel_state
from vllm_neuron.vllm.settings import additional_config_of
from vllm_neuron.vllm.worker.neuron_model_runner import NeuronModelRunner

__all__ = ["NeuronWorker"]

logger = init_logger(f"vllm.{__name__}")

KV_LAYOUT = "LBHNC"
MEMORY_SHARE = 0.5  # of what is free, at most, for KV blocks nobody asked for in so many words


class NeuronWorker(WorkerBase):
    """Worker of the stand-in; the arguments are vLLM's."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        local_rank: int,
        rank: int,
        distributed_init_method: str,
        is_driver_worker: bool = False,
    ) -> None:
        super().__init__(vllm_config, local_rank, rank, distributed_init_method, is_driver_worker)
        # As in the plugin: its own table goes over vLLM's classes, in the worker.
        for architecture, factory in registry.get_models():
            ModelRegistry.register_model(architecture, factory)
        self.model_runner: NeuronModelRunner

    # --------------------------------------------------------------------------------- start-up

    def init_device(self) -> None:
        """Make the groups of both towers and the runner."""
        self.device = torch.device("cpu")
        config = additional_config_of(self.vllm_config)
        text = NeuronConfig.from_dict(config["neuron_config"])
        vision = None
        if config.get("vision_neuron_config") is not None:
            vision = VisionNeuronConfig.from_dict(config["vision_neuron_config"])
            vision.resolve_tp_dp(self.parallel_config.world_size)
            vision.set_construction_role(self.model_config.multimodal_config, config)
        # vLLM's CPU groups name their shared memory by it.
        os.environ["VLLM_DIST_IDENT"] = re.split("[/:]", self.distributed_init_method)[-1]
        init_worker_distributed_environment(
            self.vllm_config,
            self.rank,
            self.distributed_init_method,
            self.local_rank,
            self.current_platform.dist_backend,
        )
        if not neuron_parallel_state.is_initialized():
            neuron_parallel_state.initialize_neuron_parallel_state(
                ep_degree=text.ep_degree,
                vision_tp_size=vision.tp_size if vision else 1,
                vision_dp_size=vision.dp_size if vision else 1,
                local_rank=self.local_rank,
            )
        set_random_seed(self.model_config.seed)
        self.model_runner = NeuronModelRunner(self.vllm_config, text, vision)

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Build on the meta device and load."""
        if load_dummy_weights:
            raise ValueError("dummy weights are not available; give a checkpoint")
        with set_current_vllm_config(self.vllm_config):
            self.model_runner.load_model()

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """One entry per decoder layer."""
        return {**self.model_runner.get_kv_cache_spec()}

    def get_supported_kv_cache_layouts(self) -> list[str]:
        """Head before token inside a block, the only one."""
        return [KV_LAYOUT]

    def determine_available_memory(self) -> int:
        """Bytes for KV blocks: what was asked for, or room for a full batch of full length."""
        if self.cache_config.kv_cache_memory_bytes is not None:
            return self.cache_config.kv_cache_memory_bytes
        pages = sum(spec.page_size_bytes for spec in self.get_kv_cache_spec().values())
        per_sequence = -(-self.model_config.max_model_len // self.cache_config.block_size)
        wanted = pages * (1 + per_sequence * self.scheduler_config.max_num_seqs)
        limit = int(psutil.virtual_memory().available * MEMORY_SHARE)
        limit //= self.parallel_config.world_size
        if wanted > limit:
            logger.warning(
                "KV cache: %d bytes would hold %d sequences of %d tokens; taking the %d bytes "
                "that are free",
                wanted,
                self.scheduler_config.max_num_seqs,
                self.model_config.max_model_len,
                limit,
            )
        return min(wanted, limit)

    def update_max_model_len(self, max_model_len: int) -> None:
        """vLLM would shorten sequences to fit its memory; the buckets are fixed by then."""
        raise ValueError(
            f"max_model_len must be given: the engine would shorten it to {max_model_len} after "
            "the buckets were chosen"
        )

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """Make the caches and bind them."""
        self.cache_config.num_gpu_blocks = kv_cache_config.num_blocks
        self.set_kv_cache_layout(kv_cache_config.kv_cache_layout or KV_LAYOUT)
        self.model_runner.initialize_kv_cache(kv_cache_config)

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Trace every bucket of both towers."""
        language, vision = self.model_runner.warm_up()
        set_random_seed(self.model_config.seed)
        return CompilationTimes(language_model=language, encoder=vision)

    # ---------------------------------------------------------------------------------- serving

    @torch.no_grad()
    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        """First half of a step, see the runner."""
        return self.model_runner.execute_model(scheduler_output)

    @torch.no_grad()
    def sample_tokens(self, grammar_output: GrammarOutput | None) -> ModelRunnerOutput:
        """Second half of a step."""
        return self.model_runner.sample_tokens(grammar_output)

    def get_supported_tasks(self) -> tuple[SupportedTask, ...]:
        """Text generation only."""
        return ("generate",)

    def get_model(self) -> torch.nn.Module:
        """The package's model, without the compile wrapper."""
        return self.model_runner.model

    def cache_state(self) -> dict[str, Any]:
        """What the encoder cache holds and what has been done, for tests and diagnosis."""
        return self.model_runner.cache_state()

    def reset_encoder_cache(self) -> None:
        """Forget every encoded item."""
        self.model_runner.reset_encoder_cache()

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """No speculative decoding."""
        return None

    def execute_dummy_batch(self) -> None:
        """Only data parallel engines need one; they are refused."""

    def synchronize_device(self) -> None:
        """A CPU has nothing in flight."""

    def supports_draft_weight_updates(self) -> bool:
        """No draft model."""
        return False

    def update_config(self, overrides: dict[str, Any]) -> None:
        """The configuration is fixed once graphs are traced."""
        raise ValueError(f"the configuration cannot change while serving: {sorted(overrides)}")
