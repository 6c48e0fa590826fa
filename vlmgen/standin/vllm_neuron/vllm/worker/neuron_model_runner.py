"""Drives a package inside a vLLM engine, with the plugin's keywords, shapes, dtypes and padding.

A step is one prefill or all decodes: states are brought up to date, waiting pictures encoded, the
arguments built (:mod:`text_inputs`) and compared with those of warm-up, the model called, tokens
sampled by the package or by vLLM's own sampler.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_tp_group
from vllm.logger import init_logger
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.encoder_budget import MultiModalBudget
from vllm.multimodal.utils import group_and_batch_mm_kwargs
from vllm.sampling_params import SamplingType
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, LogprobsTensors, ModelRunnerOutput
from vllm.v1.sample.logits_processor import build_logitsprocs
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch
from vllm_neuron import envs
from vllm_neuron.model.neuron_config import NeuronConfig, VisionNeuronConfig
from vllm_neuron.utils.neuron_utils import model_forward_context
from vllm_neuron.vllm.limits import cache_sizes
from vllm_neuron.vllm.settings import TABLE_TOKENS
from vllm_neuron.vllm.worker.call_signatures import CallSignatures, RunnerContractError
from vllm_neuron.vllm.worker.encoder_cache_blocks import EncoderCacheBlocks
from vllm_neuron.vllm.worker.gather_mm_embeddings import gather_mm_embeddings
from vllm_neuron.vllm.worker.graph_log import GraphRecorder
from vllm_neuron.vllm.worker.logit_masks import LogitMasks
from vllm_neuron.vllm.worker.model_loading import dtype_of, load_model
from vllm_neuron.vllm.worker.text_inputs import TextInputs, bucket_of

__all__ = ["NeuronModelRunner"]

logger = init_logger(f"vllm.{__name__}")

MAX_GRAPHS = 4096  # per compiled function; the default of 8 is below the number of buckets
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
        samplers = 1 if self.sampling is None else self.tp_group.world_size
        self.masks = LogitMasks(self.vocab_size, samplers, self.tp_group.rank_in_group)
        self.sampler = Sampler(logprobs_mode=self.model_config.logprobs_mode)
        self.requests: dict[str, CachedRequestState] = {}
        self.encoder_cache: EncoderCacheBlocks | None = None
        self._signatures = CallSignatures()
        self._recorder: GraphRecorder | None = None
        self._pending: Callable[[torch.Tensor | None], Any] | None = None
        self._skipped = False  # a warm-up was left out, so graphs are still to come
        self._items_encoded = 0
        self._timings = {"steps": 0, "seconds": 0.0, "model_seconds": 0.0}

    # ---------------------------------------------------------------------------------- loading

    def load_model(self) -> None:
        """Load the package's model, make the encoder cache and compile.

        Raises:
            RunnerContractError: the package breaks a rule of the runner.
        """
        self.model = load_model(self.vllm_config, self.neuron_config, self.vision_config)
        if self.vision_config is not None:
            self._make_encoder_cache(self.vision_config)
        self._compile()

    def _make_encoder_cache(self, vision: VisionNeuronConfig) -> None:
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
            dtype=dtype_of(self.model_config),
            device=self.device,
            min_hold_time_ms=vision.encoder_cache_min_hold_time_ms or 0.0,
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
        visual = getattr(self.model, "visual", None)
        self.forward = self.model
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
        self.forward = torch.compile(self.model.forward, **options)

    # ----------------------------------------------------------------------------------- caches

    def get_kv_cache_spec(self) -> dict[str, FullAttentionSpec]:
        """vLLM's description of the layers that the package names."""
        dtype = dtype_of(self.model_config)
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
        table_width = -(-blocks // step) * step
        self.text_inputs = TextInputs(
            layers=tuple(self.kv_caches),
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            table_width=table_width,
            vocab_size=self.vocab_size,
            uses_mrope=self.uses_mrope,
            samples=self.sampling is not None,
            rank=torch.tensor(self.tp_group.rank_in_group, dtype=torch.int32),
        )
        self.batch = InputBatch(
            max_num_reqs=self.max_num_seqs,
            max_model_len=self.max_model_len,
            max_num_batched_tokens=self.max_model_len,
            device=self.device,
            vocab_size=self.vocab_size,
            block_sizes=[self.block_size],
            max_num_blocks_per_req=[table_width],
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
        if self.vision_config is not None:
            self._warm_up_vision(self.vision_config, envs.VLLM_NEURON_SKIP_ENCODER_WARMUP)
        between = time.perf_counter()
        skip = envs.VLLM_NEURON_SKIP_PREFILL_DECODE_WARMUP
        for tokens in self.token_buckets:
            kwargs = self._warm_up_prefill(tokens)
            self._warm_up_text(
                ("prefill", tokens), kwargs, skip or envs.VLLM_NEURON_SKIP_PREFILL_WARMUP
            )
        for seqs in self.seq_buckets:
            kwargs = self.text_inputs.warm_up_decode(seqs)
            self._warm_up_text(
                ("decode", seqs), kwargs, skip or envs.VLLM_NEURON_SKIP_DECODE_WARMUP
            )
        ended = time.perf_counter()
        if self._recorder is not None:
            rule = "a graph that is missing is traced when it is needed"
            if not self._skipped:
                rule = "recompiling is an error from here on"
            seconds, count = ended - started, len(self._recorder.graphs)
            logger.info("Warm-up: %d graphs in %.1f s; %s", count, seconds, rule)
        return ended - between, between - started

    def _warm_up_vision(self, vision: VisionNeuronConfig, skip: bool) -> None:
        visual, cache = self.model.visual, self.encoder_cache
        assert cache is not None and vision.num_vision_tokens_buckets is not None
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
            inputs["encoder_cache_buffer"] = cache.buffer
            inputs["write_block_ids"] = torch.zeros(blocks, dtype=torch.int64)
            self._signatures.learn(("vision", blocks), inputs)
            name = f"vision {bucket} patches, {blocks} blocks"
            self._trace(name, partial(visual, **inputs), skip)
        cache.buffer.zero_()

    def _warm_up_text(self, graph: tuple[str, int], kwargs: dict[str, Any], skip: bool) -> None:
        if self.neuron_config.enable_structured_outputs:
            kwargs["logit_mask"] = self.masks.open(1 if graph[0] == "prefill" else graph[1])
        self._signatures.learn(graph, kwargs)
        unit = "tokens" if graph[0] == "prefill" else "requests"
        self._trace(f"{graph[0]} {graph[1]} {unit}", partial(self.forward, **kwargs), skip)

    def _trace(self, name: str, call: Callable[[], Any], skip: bool) -> None:
        if self._recorder is None:
            return
        if skip:
            self._skipped = True
            return
        started = time.perf_counter()
        call()
        graph = self._recorder.record(name, time.perf_counter() - started)
        if graph is None:
            logger.info("Graph %s: as one before", name)
        else:
            logger.info(
                "Graph %s: %d operators, %.2f s", graph.name, graph.operators, graph.seconds
            )

    def _warm_up_prefill(self, tokens: int) -> dict[str, Any]:
        kwargs = self.text_inputs.warm_up_prefill(tokens)
        if self.encoder_cache is not None:
            shape = self.encoder_cache.buffer.shape[1:]
            kwargs["vision_embedding_blocks"] = tuple(
                torch.zeros(shape, dtype=self.encoder_cache.buffer.dtype)
                for _ in range(self.max_vision_blocks)
            )
            kwargs["vision_positions"] = torch.full((self.max_vision_blocks, shape[0]), tokens)
        return kwargs

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
            kind, padded = self._graph
            rows = 1 if kind == "prefill" else padded
            mask = self.masks.of_grammar(rows, grammar_output, self.batch.req_id_to_index)
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
        assert tokens is not None  # a state without prompt embeddings has token ids
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
            with self._no_recompiling():
                self.model.embed_multimodal(
                    encoder_cache=self.encoder_cache, mm_hashes=keys, **kwargs
                )
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
        padded = bucket_of(count, self.token_buckets)
        kwargs = self.text_inputs.prefill(self.batch, state, count, padded)
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
        return ("prefill", padded), kwargs

    def _decode(self) -> tuple[tuple[str, int], dict[str, Any]]:
        states = [self.requests[req_id] for req_id in self.batch.req_ids]
        padded = bucket_of(len(states), self.seq_buckets)
        return ("decode", padded), self.text_inputs.decode(self.batch, states, padded)

    def _forward(self, graph: tuple[str, int], kwargs: dict[str, Any]) -> Any:
        self._signatures.check(graph, kwargs)
        started = time.perf_counter()
        with self._no_recompiling():
            output = self.forward(**kwargs)
        self._model_seconds = time.perf_counter() - started
        return output

    def _no_recompiling(self) -> AbstractContextManager[None]:
        """Only around the package: vLLM's sampler compiles small functions of its own."""
        return nullcontext() if self._skipped else model_forward_context(self.vllm_config)

    # --------------------------------------------------------------------------------- sampling

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
            "late_graphs": 0 if self._recorder is None else len(self._recorder.traced),
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
