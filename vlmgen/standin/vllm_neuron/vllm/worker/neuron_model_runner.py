"""Drives a package inside a vLLM engine, with the plugin's keywords, shapes, dtypes and padding.

Shapes: T padded tokens of a prefill, B padded requests of a decode, P cache blocks one prefill
reads, C merged rows of a block.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from vllm import ModelRegistry
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_tp_group
from vllm.logger import init_logger
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.encoder_budget import MultiModalBudget
from vllm.multimodal.utils import group_and_batch_mm_kwargs
from vllm.sampling_params import SamplingType
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, LogprobsTensors, ModelRunnerOutput
from vllm.v1.sample.logits_processor import build_logitsprocs
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch
from vllm_neuron import envs
from vllm_neuron.model.interfaces import (
    SupportsMRoPE,
    SupportsSpatialMerge,
    SupportsVisionWarmup,
)
from vllm_neuron.model.neuron_config import NeuronConfig, VisionNeuronConfig
from vllm_neuron.utils.neuron_utils import model_forward_context
from vllm_neuron.vllm.limits import cache_sizes
from vllm_neuron.vllm.settings import TABLE_TOKENS
from vllm_neuron.vllm.worker.call_signatures import CallSignatures, RunnerContractError
from vllm_neuron.vllm.worker.encoder_cache_blocks import EncoderCacheBlocks
from vllm_neuron.vllm.worker.gather_mm_embeddings import gather_mm_embeddings
from vllm_neuron.vllm.worker.graph_log import Graph, GraphRecorder

__all__ = ["NeuronModelRunner"]

logger = init_logger(f"vllm.{__name__}")

MAX_GRAPHS = 4096  # per compiled function; the default of 8 is below the number of buckets
PADDING_SLOT = 0  # in vLLM's null block
WARM_UP_POSITION = 255
TOWER_INPUTS = {"encoder_cache_buffer", "write_block_ids"}


class NeuronModelRunner:
    """One rank's model, caches and requests.

    Args:
        vllm_config: after the platform hook.
        neuron_config: settings of the text model.
        vision_config: settings of the tower, sizes resolved; None without a tower.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        neuron_config: NeuronConfig,
        vision_config: VisionNeuronConfig | None,
    ) -> None:
        self.vllm_config, self.model_config = vllm_config, vllm_config.model_config
        self.neuron_config, self.vision_config = neuron_config, vision_config
        self.device = torch.device("cpu")
        self.max_model_len = self.model_config.max_model_len
        self.max_num_seqs = vllm_config.scheduler_config.max_num_seqs
        self.token_buckets: list[int] = neuron_config.num_batched_tokens_buckets or []
        self.seq_buckets: list[int] = neuron_config.num_seqs_buckets or []
        self.sampling = neuron_config.on_device_sampling_config
        self.uses_mrope = self.model_config.uses_mrope
        self.vocab_size = self.model_config.get_vocab_size()
        self.tp_group = get_tp_group()
        self.rank = torch.tensor(self.tp_group.rank_in_group, dtype=torch.int32)
        self.sampler = Sampler(logprobs_mode=self.model_config.logprobs_mode)
        self.requests: dict[str, CachedRequestState] = {}
        self.encoder_cache: EncoderCacheBlocks | None = None
        self._signatures = CallSignatures()
        self._recorder: GraphRecorder | None = None
        self._pending: Callable[[torch.Tensor | None], Any] | None = None
        self._items_encoded = 0
        self._timings = {"steps": 0, "seconds": 0.0, "model_seconds": 0.0}

    # ---------------------------------------------------------------------------------- loading

    def load_model(self) -> None:
        """Resolve the class, build it on the meta device, load it and make the encoder cache.

        Raises:
            RunnerContractError: the package breaks a rule of the runner.
        """
        factory, _ = ModelRegistry.resolve_model_cls(
            self.model_config.architecture, model_config=self.model_config
        )
        config = _with_dtype(self.model_config.hf_config, self.model_config.dtype)
        with torch.device("meta"):
            if self.vision_config is None:
                self.model = factory.from_configs(config, self.neuron_config)
            else:
                self.model = factory.from_configs(
                    hf_config=config,
                    text_neuron_config=self.neuron_config,
                    vision_neuron_config=self.vision_config,
                )
        self._check_interfaces(factory)
        started = time.perf_counter()
        with torch.no_grad():
            self.model.load_weights(
                self.model_config.model, self.device, self.vllm_config.load_config.download_dir
            )
        tensors = [*self.model.named_parameters(), *self.model.named_buffers()]
        stranded = [name for name, tensor in tensors if tensor.is_meta]
        if stranded:
            raise RunnerContractError(f"still on the meta device after loading: {stranded}")
        self.model.eval()
        count = sum(parameter.numel() for parameter in self.model.parameters())
        logger.info(
            "Loaded %s: %d parameters in %.2f s",
            type(self.model).__name__,
            count,
            time.perf_counter() - started,
        )
        if self.vision_config is not None:
            self._make_encoder_cache()
        self._compile()

    def _check_interfaces(self, factory: type) -> None:
        wanted: list[tuple[Any, bool, type]] = []
        if self.uses_mrope:
            wanted.append((self.model, isinstance(self.model, SupportsMRoPE), SupportsMRoPE))
        names = ["get_kv_spec", "bind_kv_cache", "load_weights"]
        if self.vision_config is not None:
            warm_up = isinstance(self.model, SupportsVisionWarmup)
            wanted.append((self.model, warm_up, SupportsVisionWarmup))
            merge = issubclass(factory, SupportsSpatialMerge)
            wanted.append((factory, merge, SupportsSpatialMerge))
            names += ["visual", "embed_multimodal"]
        for thing, fine, protocol in wanted:
            if not fine:
                name = getattr(thing, "__name__", type(thing).__name__)
                raise RunnerContractError(f"{name} is no {protocol.__name__}")
        missing = [name for name in names if not hasattr(self.model, name)]
        if missing:
            raise RunnerContractError(f"the model lacks {missing}")

    def _make_encoder_cache(self) -> None:
        if not self.model_config.supports_multimodal_inputs:
            raise RunnerContractError(
                f"{self.model_config.architecture} has a vision tower but no multimodal "
                "processor; vLLM would serve it as text only"
            )
        budget = MultiModalBudget(self.vllm_config, MULTIMODAL_REGISTRY)
        sizes = cache_sizes(self.vllm_config, budget.encoder_cache_size)
        self.max_vision_blocks = sizes.max_vision_blocks_per_request
        self.encoder_cache = EncoderCacheBlocks(
            sizes.num_blocks,
            sizes.cache_block_size,
            sizes.fat_dim,
            dtype=self.model_config.dtype,
            device=self.device,
            min_hold_time_ms=self.vision_config.encoder_cache_min_hold_time_ms or 0.0,
        )
        self.encoder_cache.check_counts = True
        logger.info(
            "Encoder cache: %d blocks of %d rows x %d and one scratch block; one prompt reads %d",
            sizes.num_blocks - 1,
            sizes.cache_block_size,
            sizes.fat_dim,
            self.max_vision_blocks,
        )
        smallest = budget.encoder_cache_size // (sizes.num_blocks - 1)
        if smallest > 1:
            logger.info(
                "The plugin's scheduler counts %d tokens for these blocks, so items below %d "
                "tokens can exhaust them there; encoder_cache_num_blocks raises the number",
                budget.encoder_cache_size,
                smallest,
            )

    def _compile(self) -> None:
        self.compiled = self.model
        visual = getattr(self.model, "visual", None)
        if visual is not None:
            visual.register_forward_pre_hook(self._before_tower, with_kwargs=True)
        if self.model_config.enforce_eager:
            return
        torch._dynamo.config.recompile_limit = MAX_GRAPHS
        torch._dynamo.config.accumulated_recompile_limit = MAX_GRAPHS
        self._recorder = GraphRecorder(envs.get_compile_backend_name())
        options: dict[str, Any] = {
            "fullgraph": not envs.VLLM_NEURON_DEBUG_MODE,
            "backend": self._recorder,
            "dynamic": False,
        }
        if visual is not None:
            # The hook stays outside of the graph: the module's call runs it, then the graph.
            visual.forward = torch.compile(visual.forward, **options)
        self.compiled_forward = torch.compile(self.model.forward, **options)

    # ----------------------------------------------------------------------------------- caches

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """vLLM's description of the layers that the package names."""
        dtype = self.model_config.dtype
        return {
            layer.name: FullAttentionSpec(
                block_size=self.vllm_config.cache_config.block_size,
                num_kv_heads=layer.num_kv_heads,
                head_size=layer.head_size,
                dtype=dtype,
                sliding_window=layer.sliding_window_size,
                attention_chunk_size=layer.chunk_size,
            )
            for layer in self.model.get_kv_spec().layers
        }

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig) -> None:
        """Make the KV caches, `(2, blocks, KV heads, block size, head size)`, and bind them."""
        (group,) = kv_cache_config.kv_cache_groups
        self.block_size = group.kv_cache_spec.block_size
        self.num_blocks = kv_cache_config.num_blocks
        specs = self.get_kv_cache_spec()
        self.kv_caches = {
            name: torch.zeros(
                (2, self.num_blocks, spec.num_kv_heads, self.block_size, spec.head_size),
                dtype=spec.dtype,
            )
            for name, spec in specs.items()
        }
        self.model.bind_kv_cache(
            {name: [cache[0], cache[1]] for name, cache in self.kv_caches.items()}
        )
        step = max(1, TABLE_TOKENS // self.block_size)
        blocks = -(-self.max_model_len // self.block_size)
        self.table_width = -(-blocks // step) * step
        self.batch = InputBatch(
            max_num_reqs=self.max_num_seqs,
            max_model_len=self.max_model_len,
            max_num_batched_tokens=self.max_model_len,
            device=self.device,
            vocab_size=self.vocab_size,
            block_sizes=[self.block_size],
            max_num_blocks_per_req=[self.table_width],
            logitsprocs=build_logitsprocs(
                self.vllm_config,
                self.device,
                False,
                False,
                self.model_config.logits_processors or (),
            ),
            logitsprocs_need_output_token_ids=bool(self.model_config.logits_processors),
        )

    # ---------------------------------------------------------------------------------- warm-up

    @torch.no_grad()
    def warm_up(self) -> tuple[float, float]:
        """Learn the call of every bucket, and trace it unless the engine is eager.

        Returns:
            Seconds for the text graphs and for the vision graphs.
        """
        started = time.perf_counter()
        if self.vision_config is not None and not envs.VLLM_NEURON_SKIP_ENCODER_WARMUP:
            self._warm_up_vision()
        between = time.perf_counter()
        skip = envs.VLLM_NEURON_SKIP_PREFILL_DECODE_WARMUP
        if not (skip or envs.VLLM_NEURON_SKIP_PREFILL_WARMUP):
            for tokens in self.token_buckets:
                self._warm_up_call(("prefill", tokens), self._warm_up_prefill(tokens))
        if not (skip or envs.VLLM_NEURON_SKIP_DECODE_WARMUP):
            for seqs in self.seq_buckets:
                self._warm_up_call(("decode", seqs), self._warm_up_decode(seqs))
        ended = time.perf_counter()
        if self._recorder is not None:
            logger.info(
                "Warm-up: %d graphs in %.1f s; recompiling is an error from here on",
                len(self._recorder.graphs),
                ended - started,
            )
        return ended - between, between - started

    def _warm_up_vision(self) -> None:
        visual, vision = self.model.visual, self.vision_config
        names = set(inspect.signature(type(visual).forward).parameters) - {"self"}
        for bucket in sorted(vision.num_vision_tokens_buckets):
            inputs = self.model.build_vision_synthetic_inputs(bucket, vision, self.device)
            if names != {*inputs, *TOWER_INPUTS}:
                raise RunnerContractError(
                    f"visual.forward takes {sorted(names)}, warm-up gives "
                    f"{sorted({*inputs, *TOWER_INPUTS})}"
                )
            blocks = -(-bucket // vision.vision_attention_block_size)
            blocks = -(-blocks // vision.dp_size) * vision.dp_size
            inputs["encoder_cache_buffer"] = self.encoder_cache.buffer
            inputs["write_block_ids"] = torch.zeros(blocks, dtype=torch.int64)
            self._signatures.learn(("vision", blocks), inputs)
            self._timed(f"vision {bucket} patches, {blocks} blocks", lambda: visual(**inputs))
        self.encoder_cache.buffer.zero_()

    def _warm_up_call(self, graph: tuple[str, int], kwargs: dict[str, Any]) -> None:
        self._signatures.learn(graph, kwargs)
        unit = "tokens" if graph[0] == "prefill" else "requests"
        self._timed(f"{graph[0]} {graph[1]} {unit}", lambda: self.compiled_forward(**kwargs))

    def _timed(self, name: str, call: Callable[[], Any]) -> Graph | None:
        if self._recorder is None:
            return None
        started = time.perf_counter()
        call()
        graph = self._recorder.record(name, time.perf_counter() - started)
        if graph is None:
            logger.info("Graph %s: as one before", name)
        else:
            logger.info(
                "Graph %s: %d operators, %.2f s", graph.name, graph.operators, graph.seconds
            )
        return graph

    def _warm_up_prefill(self, tokens: int) -> dict[str, Any]:
        places = torch.arange(tokens)
        kwargs = self._text_arguments(
            input_ids=(torch.arange(1, tokens + 1) % self.vocab_size).to(torch.int32),
            positions=places,
            rotary=places.repeat(3, 1),
            table=torch.arange(self.table_width, dtype=torch.int32)[None] % self.num_blocks,
            slots=torch.zeros(tokens, dtype=torch.int64),
            max_query_len=tokens,
            rows=torch.tensor([tokens - 1]),
            params=torch.tensor([[0.0, 1.0, 1.0]]),
        )
        if self.vision_config is not None:
            shape = self.encoder_cache.buffer.shape[1:]
            kwargs["vision_embedding_blocks"] = tuple(
                torch.zeros(shape, dtype=self.encoder_cache.buffer.dtype)
                for _ in range(self.max_vision_blocks)
            )
            kwargs["vision_positions"] = torch.full((self.max_vision_blocks, shape[0]), tokens)
        return kwargs | {"logit_mask": self._open_mask(1)}

    def _warm_up_decode(self, seqs: int) -> dict[str, Any]:
        table = torch.arange(self.table_width, dtype=torch.int32) % self.num_blocks
        kwargs = self._text_arguments(
            input_ids=torch.ones(seqs, dtype=torch.int32),
            positions=torch.full((seqs,), WARM_UP_POSITION),
            rotary=torch.full((3, seqs), WARM_UP_POSITION),
            table=table.repeat(seqs, 1),
            slots=torch.zeros(seqs, dtype=torch.int64),
            max_query_len=1,
            rows=torch.arange(seqs),
            params=torch.tensor([0.0, 1.0, 1.0]).repeat(seqs, 1),
        )
        return kwargs | {"logit_mask": self._open_mask(seqs)}

    def _open_mask(self, rows: int) -> torch.Tensor | None:
        if not self.neuron_config.enable_structured_outputs:
            return None
        return self._own_columns(torch.ones(rows, self.vocab_size, dtype=torch.bool))

    def _own_columns(self, mask: torch.Tensor) -> torch.Tensor:
        """This rank's vocabulary shard where the package samples over several ranks."""
        tp_size = self.tp_group.world_size
        if self.sampling is None or tp_size == 1:
            return mask
        width = -(-self.vocab_size // tp_size)
        mask = torch.nn.functional.pad(mask, (0, width * tp_size - self.vocab_size))
        first = self.tp_group.rank_in_group * width
        return mask[:, first : first + width].contiguous()

    # ------------------------------------------------------------------------------------- step

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        """First half of a step: states, vision, inputs, and the forward pass.

        With structured outputs the forward pass waits for the mask, which vLLM hands over in
        :meth:`sample_tokens`.

        Returns:
            An empty result when nothing was scheduled, otherwise None.
        """
        started = time.perf_counter()
        self._update_states(scheduler_output)
        if not scheduler_output.total_num_scheduled_tokens:
            return EMPTY_MODEL_RUNNER_OUTPUT
        counts = scheduler_output.num_scheduled_tokens
        self._model_seconds = 0.0
        prefills = [r for r in self.batch.req_ids if self._is_prefill(r, counts[r])]
        if prefills:
            if len(self.batch.req_ids) != 1:
                raise RunnerContractError(f"a step of {len(counts)} requests has a prefill")
            (req_id,) = prefills
            self._encode(scheduler_output)
            graph, kwargs = self._prefill(self.requests[req_id], counts[req_id])
        else:
            graph, kwargs = self._decode()
        if self.neuron_config.enable_structured_outputs:
            self._pending = lambda mask: self._forward(graph, kwargs | {"logit_mask": mask})
        else:
            output = self._forward(graph, kwargs)
            self._pending = lambda mask: output
        self._graph, self._started = graph, started
        self._first_half = time.perf_counter() - started
        return None

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> ModelRunnerOutput:
        """Second half of a step: mask, sampling, and the result.

        Raises:
            RunnerContractError: structured outputs without the setting, or no first half.
        """
        started = time.perf_counter()
        if self._pending is None:
            return EMPTY_MODEL_RUNNER_OUTPUT
        mask = None
        if self.neuron_config.enable_structured_outputs:
            mask = self._mask(grammar_output, self._graph)
        elif grammar_output is not None:
            raise RunnerContractError("a grammar, but enable_structured_outputs is off")
        output, self._pending = self._pending(mask), None
        count = len(self.batch.req_ids)
        tokens, logprobs = self._sample(output, count)
        req_ids = list(self.batch.req_ids)
        for index, (req_id, token) in enumerate(zip(req_ids, tokens, strict=True)):
            state = self.requests[req_id]
            place = state.num_tokens
            if place < self.max_model_len:
                self.batch.token_ids_cpu[index, place] = token
            self.batch.num_tokens_no_spec[index] = place + 1
            state.output_token_ids.append(token)
        result = ModelRunnerOutput(
            req_ids=req_ids,
            req_id_to_index=dict(self.batch.req_id_to_index),
            sampled_token_ids=[[token] for token in tokens],
            logprobs=None if logprobs is None else logprobs.tolists(),
        )
        if self._graph[0] == "decode":
            self._timings["steps"] += 1
            self._timings["seconds"] += self._first_half + time.perf_counter() - started
            self._timings["model_seconds"] += self._model_seconds
        return result

    def _is_prefill(self, req_id: str, count: int) -> bool:
        state = self.requests[req_id]
        return count > 1 or state.num_computed_tokens < state.num_prompt_tokens

    def _update_states(self, scheduler_output: SchedulerOutput) -> None:
        for req_id in scheduler_output.finished_req_ids:
            self.requests.pop(req_id, None)
            self.batch.remove_request(req_id)
        if self.encoder_cache is not None:
            for mm_hash in scheduler_output.free_encoder_mm_hashes:
                self.encoder_cache.free(mm_hash)
        cached = scheduler_output.scheduled_cached_reqs
        staying = scheduler_output.num_scheduled_tokens.keys() - cached.resumed_req_ids
        for req_id in self.batch.req_id_to_index.keys() - staying:
            self.batch.remove_request(req_id)
        joining = [self._new_state(data) for data in scheduler_output.scheduled_new_reqs]
        for index, req_id in enumerate(cached.req_ids):
            state = self.requests[req_id]
            state.num_computed_tokens = cached.num_computed_tokens[index]
            blocks = cached.new_block_ids[index]
            if req_id in cached.resumed_req_ids:
                assert blocks is not None
                state.block_ids = blocks
                del state.output_token_ids[cached.num_output_tokens[index] :]
            elif blocks is not None:
                for own, new in zip(state.block_ids, blocks, strict=True):
                    own.extend(new)
            row = self.batch.req_id_to_index.get(req_id)
            if row is None:
                joining.append(state)
                continue
            self.batch.num_computed_tokens_cpu[row] = state.num_computed_tokens
            if blocks is not None:
                self.batch.block_table.append_row(blocks, row)
        for state in joining:
            self.batch.add_request(state)
        self.batch.condense()
        self.batch.refresh_metadata()

    def _new_state(self, data: Any) -> CachedRequestState:
        params, generator = data.sampling_params, None
        if params is not None and params.sampling_type == SamplingType.RANDOM_SEED:
            generator = torch.Generator(device=self.device)
            generator.manual_seed(params.seed)
        state = CachedRequestState(
            req_id=data.req_id,
            prompt_token_ids=data.prompt_token_ids,
            mm_features=data.mm_features,
            sampling_params=params,
            generator=generator,
            block_ids=data.block_ids,
            num_computed_tokens=data.num_computed_tokens,
            output_token_ids=[],
        )
        if self.uses_mrope:
            self._init_mrope(state)
        self.requests[data.req_id] = state
        return state

    def _init_mrope(self, state: CachedRequestState) -> None:
        """Positions of a new request; computed once, while its processor outputs are there."""
        tokens = state.prompt_token_ids
        features = [f for f in state.mm_features if f.modality != "prompt_embeds"]
        positions, delta = self.model.get_mrope_input_positions(tokens, features)
        if positions.dtype != torch.int64 or positions.shape != (3, len(tokens)):
            raise RunnerContractError(
                f"get_mrope_input_positions gave {positions.dtype} {list(positions.shape)}; the "
                f"runner needs int64 {[3, len(tokens)]}"
            )
        if type(delta) is not int:
            raise RunnerContractError(f"the position delta is a {type(delta).__name__}, not an int")
        state.mrope_positions, state.mrope_position_delta = positions, delta

    # ----------------------------------------------------------------------------------- vision

    def _encode(self, scheduler_output: SchedulerOutput) -> None:
        """Run the tower on the scheduled items that are not in the cache."""
        if self.encoder_cache is None:
            return
        waiting: dict[str, Any] = {}
        for req_id, indexes in scheduler_output.scheduled_encoder_inputs.items():
            for index in indexes:
                feature = self.requests[req_id].mm_features[index]
                if feature.data is not None and not self.encoder_cache.contains(feature.identifier):
                    waiting.setdefault(feature.identifier, feature)
        features = list(waiting.values())
        first = 0
        items = [(feature.modality, feature.data) for feature in features]
        for _, count, kwargs in group_and_batch_mm_kwargs(items):
            keys = [feature.identifier for feature in features[first : first + count]]
            first += count
            self.model.embed_multimodal(encoder_cache=self.encoder_cache, mm_hashes=keys, **kwargs)
            for key in keys:
                if not self.encoder_cache.contains(key):
                    raise RunnerContractError(f"embed_multimodal allocated nothing for {key}")
                self.encoder_cache.mark_written(key)
            self._items_encoded += count

    def _before_tower(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[()], dict[str, Any]]:
        """Check a call of the tower against warm-up."""
        bound = inspect.signature(type(module).forward).bind(module, *args, **kwargs).arguments
        bound.pop("self")
        blocks = bound["write_block_ids"].shape[0]
        self._signatures.check(("vision", blocks), bound)
        return (), dict(bound)

    # ------------------------------------------------------------------------------------- text

    def _prefill(
        self, state: CachedRequestState, count: int
    ) -> tuple[tuple[str, int], dict[str, Any]]:
        if state.num_computed_tokens or count != state.num_tokens:
            raise RunnerContractError(
                f"a prefill of {count} tokens after {state.num_computed_tokens} of "
                f"{state.num_tokens}: the prompt was cut into chunks"
            )
        padded = _bucket(count, self.token_buckets)
        padding = padded - count
        ids = torch.zeros(padded, dtype=torch.int32)
        ids[:count] = torch.from_numpy(self.batch.token_ids_cpu[0, :count])
        places = np.arange(count)
        positions = torch.full((padded,), count - 1, dtype=torch.int64)
        positions[:count] = torch.from_numpy(places)
        slots = torch.full((padded,), PADDING_SLOT, dtype=torch.int64)
        slots[:count] = torch.from_numpy(self._slots(0, places))
        rotary = None
        if self.uses_mrope:
            rotary = torch.zeros(3, padded, dtype=torch.int64)
            rotary[:, :count] = self._rotary(state, count)
        kwargs = self._text_arguments(
            input_ids=ids,
            positions=positions,
            rotary=rotary,
            table=self._table(1, 1),
            slots=slots,
            max_query_len=padded,
            rows=torch.tensor([count - 1]),
            params=self._params(1, 1),
        )
        if self.encoder_cache is not None:
            gathered = gather_mm_embeddings(
                self.encoder_cache,
                state.mm_features,
                state.num_computed_tokens,
                count,
                padded,
                self.max_vision_blocks,
                strict=True,
            )
            kwargs["vision_embedding_blocks"] = gathered.vision_embedding_blocks
            kwargs["vision_positions"] = gathered.vision_positions
        del padding
        return ("prefill", padded), kwargs

    @staticmethod
    def _rotary(state: CachedRequestState, count: int) -> torch.Tensor:
        """Positions of the prompt, and of what was generated before a preemption."""
        prompt = state.num_prompt_tokens
        later = torch.arange(prompt, count) + state.mrope_position_delta
        return torch.cat([state.mrope_positions, later.repeat(3, 1)], dim=1)

    def _decode(self) -> tuple[tuple[str, int], dict[str, Any]]:
        count = len(self.batch.req_ids)
        padded = _bucket(count, self.seq_buckets)
        states = [self.requests[req_id] for req_id in self.batch.req_ids]
        computed = self.batch.num_computed_tokens_cpu[:count].astype(np.int64)
        ids = torch.zeros(padded, dtype=torch.int32)
        rows = np.arange(count)
        ids[:count] = torch.from_numpy(self.batch.token_ids_cpu[rows, computed])
        positions = torch.zeros(padded, dtype=torch.int64)
        positions[:count] = torch.from_numpy(computed)
        slots = torch.full((padded,), PADDING_SLOT, dtype=torch.int64)
        slots[:count] = torch.from_numpy(self._slots(rows, computed))
        rotary = None
        if self.uses_mrope:
            rotary = torch.zeros(3, padded, dtype=torch.int64)
            deltas = np.array([state.mrope_position_delta for state in states])
            rotary[:, :count] = torch.from_numpy(computed + deltas)
        kwargs = self._text_arguments(
            input_ids=ids,
            positions=positions,
            rotary=rotary,
            table=self._table(count, padded),
            slots=slots,
            max_query_len=1,
            rows=torch.arange(padded).clamp(max=count - 1),
            params=self._params(count, padded),
        )
        return ("decode", padded), kwargs

    def _slots(self, rows: Any, places: np.ndarray) -> np.ndarray:
        table = self.batch.block_table[0].get_numpy_array()
        blocks = table[rows, places // self.block_size].astype(np.int64)
        return blocks * self.block_size + places % self.block_size

    def _table(self, count: int, padded: int) -> torch.Tensor:
        """int32 `[padded, width]`; -1 where there is no block."""
        group = self.batch.block_table[0]
        table = np.full((padded, self.table_width), -1, dtype=np.int32)
        for row in range(count):
            blocks = group.num_blocks_per_row[row]
            table[row, :blocks] = group.get_numpy_array()[row, :blocks]
        return torch.from_numpy(table)

    def _params(self, count: int, padded: int) -> torch.Tensor | None:
        """float32 `[padded, 3]`: top-k (-1 is off), top-p, temperature (0 is greedy)."""
        if self.sampling is None:
            return None
        params = np.zeros((padded, 3), dtype=np.float32)
        for row, req_id in enumerate(self.batch.req_ids):
            own = self.requests[req_id].sampling_params
            top_k = own.top_k if 0 < own.top_k < self.vocab_size else -1
            params[row] = (top_k, own.top_p, own.temperature)
        return torch.from_numpy(params)

    def _text_arguments(
        self,
        *,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        rotary: torch.Tensor | None,
        table: torch.Tensor,
        slots: torch.Tensor,
        max_query_len: int,
        rows: torch.Tensor,
        params: torch.Tensor | None,
    ) -> dict[str, Any]:
        metadata = {
            "block_table_tensor": table,
            "slot_mapping": slots,
            "max_query_len": max_query_len,
            "decode_token_threshold": 1,
            "block_size": self.block_size,
            "max_blocks_per_seq": self.table_width,
            "cached_seq_len": torch.zeros(1, 1, dtype=torch.int32),
            "kv_segment_size": 0,
            "full_block_table_tensor": table.clone(),
        }
        kwargs: dict[str, Any] = {
            "input_ids": input_ids,
            "positions": positions,
            "attn_metadata": dict.fromkeys(self.kv_caches, metadata),
            "sampling_positions": rows,
            "sampling_params": params if self.sampling is not None else None,
            "spec_decode_metadata": None,
            "rank": self.rank,
            "logit_mask": None,
        }
        if self.uses_mrope:
            kwargs["rotary_position_ids"] = rotary
        return kwargs

    def _forward(self, graph: tuple[str, int], kwargs: dict[str, Any]) -> Any:
        self._signatures.check(graph, kwargs)
        started = time.perf_counter()
        with model_forward_context(self.vllm_config):
            output = (self.model if self._recorder is None else self.compiled_forward)(**kwargs)
        self._model_seconds = time.perf_counter() - started
        return output

    # --------------------------------------------------------------------------------- sampling

    def _mask(
        self, grammar_output: GrammarOutput | None, graph: tuple[str, int]
    ) -> torch.Tensor | None:
        """bool `[rows, vocab]`, or this rank's shard of it, True = allowed."""
        rows = 1 if graph[0] == "prefill" else graph[1]
        mask = np.ones((rows, self.vocab_size), dtype=bool)
        if grammar_output is not None:
            bits = grammar_output.grammar_bitmask
            for line, req_id in enumerate(grammar_output.structured_output_request_ids):
                row = self.batch.req_id_to_index.get(req_id)
                if row is not None:
                    words = np.ascontiguousarray(bits[line]).view(np.uint8)
                    allowed = np.unpackbits(words, bitorder="little")
                    mask[row] = allowed[: self.vocab_size].astype(bool)
        return self._own_columns(torch.from_numpy(mask))

    def _sample(self, output: Any, count: int) -> tuple[list[int], LogprobsTensors | None]:
        """Tokens of the first `count` rows, and their log-probabilities if one wants them."""
        metadata = self.batch.sampling_metadata
        if self.sampling is None:
            if isinstance(output, tuple):
                raise RunnerContractError("on-device sampling is off, the model returned a tuple")
            sampled = self.sampler(output[:count], metadata)
            return sampled.sampled_token_ids[:, 0].tolist(), sampled.logprobs_tensors
        ids, logits = output if isinstance(output, tuple) else (output, None)
        tokens = ids[:count].to(torch.int64)
        wanted = metadata.max_num_logprobs
        if wanted is None:
            return tokens.tolist(), None
        if logits is None:
            raise RunnerContractError(
                "log-probabilities are wanted, but the model returned no logits"
            )
        logprobs = self.sampler.compute_logprobs(logits[:count])
        return tokens.tolist(), self.sampler.gather_logprobs(logprobs, wanted, token_ids=tokens)

    # --------------------------------------------------------------------------------- diagnosis

    def cache_state(self) -> dict[str, Any]:
        """Counters and free blocks, for tests and benchmarks."""
        state: dict[str, Any] = {
            "requests": len(self.requests),
            "items_encoded": self._items_encoded,
            "graphs": (
                []
                if self._recorder is None
                else [
                    (graph.name, graph.operators, round(graph.seconds, 3))
                    for graph in self._recorder.graphs
                ]
            ),
            "decode": dict(self._timings),
        }
        if self.encoder_cache is not None:
            items = {
                key: self.encoder_cache.get_block_ids(key) for key, _ in self.encoder_cache.items()
            }
            state["encoder_cache"] = {
                "blocks": self.encoder_cache.scratch_block_id,
                "free": self.encoder_cache.num_free_blocks,
                "used": sum(len(ids or ()) for ids in items.values()),
                "items": len(items),
            }
        return state

    def reset_encoder_cache(self) -> None:
        """Forget every item."""
        if self.encoder_cache is not None:
            self.encoder_cache.clear()


def _bucket(size: int, buckets: list[int]) -> int:
    """Smallest bucket that holds `size`; the largest when none does, as in the plugin."""
    return next((bucket for bucket in buckets if bucket >= size), buckets[-1])


def _with_dtype(hf_config: Any, dtype: torch.dtype) -> Any:
    """The configuration with the engine's dtype, which `--dtype` may have changed."""
    config = deepcopy(hf_config)
    parts = (config, config.get_text_config(), getattr(config, "vision_config", None))
    for part in parts:
        if part is not None and not isinstance(part, Mapping):
            part.dtype = dtype
    return config
