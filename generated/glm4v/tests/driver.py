"""Drives a model package exactly as the runner of the vLLM Neuron plugin does, without an engine.

The model is built on the meta device, loaded, given paged KV caches and an encoder cache, warmed
up, and then called with the keywords, shapes, dtypes and padding that the runner uses. What the
runner would trip over late or in silence is an error here: an argument that differs from warm-up,
a tensor left on the meta device, a write outside the blocks that a request owns.

Shapes: T padded tokens of a prefill, B padded requests of a decode step, V vocabulary, P cache
blocks readable by one request, C merged rows per cache block, W width of one cache row.
"""

from __future__ import annotations

import hashlib
import inspect
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig
from vllm.distributed.parallel_state import get_tp_group
from vllm.multimodal.inputs import PlaceholderRange
from vllm.transformers_utils.config import uses_mrope
from vllm_neuron.model.interfaces import (
    SupportsMRoPE,
    SupportsSpatialMerge,
    SupportsVisionWarmup,
)
from vllm_neuron.model.neuron_config import NeuronConfig, VisionNeuronConfig
from vllm_neuron.vllm.worker.encoder_cache_blocks import EncoderCacheBlocks

GREEDY = (-1.0, 1.0, 0.0)  # top-k off, top-p off, temperature 0


class RunnerContractError(RuntimeError):
    """The package did something that the plugin's runner does not allow."""


# ------------------------------------------------------------------------------ multimodal features


@dataclass(frozen=True)
class FieldElement:
    """One processor output of one item, wrapped as vLLM wraps it.

    Args:
        data: What belongs to the item.
        kind: How vLLM joins the items of a call. `flat`: rows after one another. `batched`: one
            entry per item, stacked where all have one shape. `shared`: the same for all.
    """

    data: Any
    kind: str = "flat"


@dataclass(frozen=True)
class Feature:
    """One image or video of a prompt, with the fields of vLLM's `MultiModalFeatureSpec`."""

    modality: str
    data: dict[str, FieldElement] | None
    identifier: str
    mm_position: PlaceholderRange


def make_feature(
    modality: str,
    data: dict[str, FieldElement],
    tokens: Sequence[int],
    first: int,
    last: int,
    embed: int | None = None,
) -> Feature:
    """A feature at tokens `first .. last - 1`; its name is a hash of its contents.

    Args:
        modality: `image` or `video`.
        data: Processor outputs of the item.
        tokens: The prompt.
        first, last: Where the item stands in it, separators between frames included.
        embed: The token that stands for a vision row; None for all tokens of the range.
    """
    digest = hashlib.sha256(modality.encode())
    for name, element in sorted(data.items()):
        value = element.data
        digest.update(name.encode())
        digest.update(value.float().numpy().tobytes() if torch.is_tensor(value) else b"")
    mask = None if embed is None else torch.tensor(tokens[first:last]) == embed
    place = PlaceholderRange(offset=first, length=last - first, is_embed=mask)
    return Feature(modality, data, digest.hexdigest()[:16], place)


def grid_items(
    inputs: Mapping[str, Any], pixels: str, grids: str, kind: str = "flat"
) -> Iterator[dict[str, FieldElement]]:
    """Pixel rows and grid of every item, from a processor that joins the rows of all items.

    Args:
        inputs: Output of the Hugging Face processor.
        pixels: Name of the rows `[sum of t*h*w, ...]`.
        grids: Name of the grids `[items, 3]`; nothing is there without them.
        kind: How vLLM joins the pixels again.
    """
    if inputs.get(grids) is None:
        return
    rows = inputs[pixels]
    for grid in inputs[grids]:
        count = int(grid.prod())
        yield {pixels: FieldElement(rows[:count], kind), grids: FieldElement(grid, "batched")}
        rows = rows[count:]


def runs_of(tokens: Sequence[int], token: int) -> list[tuple[int, int]]:
    """(first, one past the last) of every unbroken run of `token`."""
    runs, place = [], 0
    for value, group in groupby(tokens):
        length = len(list(group))
        if value == token:
            runs.append((place, place + length))
        place += length
    return runs


# --------------------------------------------------------------------------------------- requests


@dataclass
class Request:
    """One sequence being served.

    Args:
        token_ids: Prompt, then what was generated.
        features: Images and videos of the prompt.
        positions: int64 `[3, prompt length]`, axes t, h, w; None without M-RoPE.
        delta: Position of a later token = its place + delta.
    """

    token_ids: list[int]
    features: list[Feature]
    positions: torch.Tensor | None = None
    delta: int = 0
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0


class PackageDriver:
    """A loaded package and the caches around it.

    Args:
        factory: The package's class that vLLM finds under the architecture name.
        checkpoint_dir: Folder with config.json and safetensors files.
        neuron_config: Further keys of `additional_config["neuron_config"]`.
        vision_neuron_config: Further keys of `additional_config["vision_neuron_config"]`.
        dtype: Dtype of both towers and their caches; None is the checkpoint's.
        max_model_len: Longest sequence; a multiple of 256.
        kv_block_size: Tokens per KV block.
        token_buckets: Padded lengths of a prefill.
        seq_buckets: Padded batches of a decode step.
        cache_dtype: Dtype of KV and encoder cache; None is the model's.
        noise: Amplitude of the noise that fills padding rows, the scratch block and everything in
            the caches that nobody owns; None leaves zeros.
        padding_slot: KV slot of padding tokens; the runner writes 0, older ones -1.
        on_device_sampling: Let the model pick tokens.
        warm_up: Call every graph once first, as the worker does.
        seed: Order in which KV blocks are handed out, and the noise.

    Raises:
        RunnerContractError: The package breaks a rule of the runner.
    """

    def __init__(
        self,
        factory: Any,
        checkpoint_dir: str | Path,
        *,
        neuron_config: Mapping[str, Any] | None = None,
        vision_neuron_config: Mapping[str, Any] | None = None,
        dtype: torch.dtype | None = None,
        max_model_len: int = 1024,
        kv_block_size: int = 32,
        token_buckets: Sequence[int] = (256, 512, 1024),
        seq_buckets: Sequence[int] = (1, 4),
        cache_dtype: torch.dtype | None = None,
        noise: float | None = None,
        padding_slot: int = 0,
        on_device_sampling: bool = False,
        warm_up: bool = True,
        seed: int = 0,
    ) -> None:
        if max_model_len % 256 or max(token_buckets) > max_model_len:
            raise ValueError(
                f"max_model_len {max_model_len} must be a multiple of 256 and not below the "
                f"largest of token_buckets {list(token_buckets)}"
            )
        self.factory = factory
        self.max_model_len, self.kv_block_size = max_model_len, kv_block_size
        self.token_buckets, self.seq_buckets = sorted(token_buckets), sorted(seq_buckets)
        self.noise, self.padding_slot = noise, padding_slot
        self.on_device_sampling = on_device_sampling
        self._random = torch.Generator().manual_seed(seed)
        self._signatures: dict[tuple[Any, ...], dict[str, Any]] = {}
        self._warming_up = False

        tp_group = get_tp_group()
        self.rank = torch.tensor(tp_group.rank_in_group, dtype=torch.int32)
        self.hf_config = hf_config = read_config(checkpoint_dir, dtype)
        self.text_config = hf_config.get_text_config()
        self.uses_mrope = uses_mrope(hf_config)
        self.neuron_config = NeuronConfig.from_dict(
            {
                "on_device_sampling_config": {} if on_device_sampling else None,
                "num_batched_tokens_buckets": list(self.token_buckets),
                "num_seqs_buckets": list(self.seq_buckets),
                **(neuron_config or {}),
            }
        )
        self.vision_config = VisionNeuronConfig.from_dict(
            {
                "vision_attention_block_size": 256,
                "num_vision_tokens_buckets": [512, 2048],
                **(vision_neuron_config or {}),
            }
        )
        self.vision_config.resolve_tp_dp(tp_group.world_size)

        with torch.device("meta"):
            self.model = factory.from_configs(
                hf_config=hf_config,
                text_neuron_config=self.neuron_config,
                vision_neuron_config=self.vision_config,
            )
        self._check_interfaces()
        with torch.no_grad():
            self.model.load_weights(str(checkpoint_dir), torch.device("cpu"), None)
        self._check_no_meta()
        self.model.eval()
        self.dtype = next(self.model.parameters()).dtype
        self._make_kv_cache(cache_dtype or self.dtype, random.Random(seed))
        self._make_encoder_cache(cache_dtype or self.dtype)
        self.model.visual.register_forward_pre_hook(self._before_tower, with_kwargs=True)
        if warm_up:
            self._warm_up()
        if noise is not None:
            for cache in self._kv.values():
                self._fill(cache)
            self._fill(self.encoder_cache.buffer)

    # ------------------------------------------------------------------------------- construction

    def _check_interfaces(self) -> None:
        for protocol in (SupportsVisionWarmup, *([SupportsMRoPE] if self.uses_mrope else [])):
            if not isinstance(self.model, protocol):
                raise RunnerContractError(f"the model is no {protocol.__name__}")
        if not issubclass(self.factory, SupportsSpatialMerge):
            raise RunnerContractError("the factory has no get_vision_token_merge_factor")
        missing = [
            name
            for name in (
                "visual",
                "embed_multimodal",
                "get_kv_spec",
                "bind_kv_cache",
                "load_weights",
            )
            if not hasattr(self.model, name)
        ]
        if missing:
            raise RunnerContractError(f"the model lacks {missing}")

    def _check_no_meta(self) -> None:
        tensors = [*self.model.named_parameters(), *self.model.named_buffers()]
        stranded = [name for name, tensor in tensors if tensor.is_meta]
        if stranded:
            raise RunnerContractError(f"still on the meta device after loading: {stranded}")

    def _make_kv_cache(self, dtype: torch.dtype, order: random.Random) -> None:
        per_sequence = -(-self.max_model_len // self.kv_block_size)
        step = max(1, 128 // self.kv_block_size)
        self.max_blocks_per_seq = -(-per_sequence // step) * step
        num_blocks = 1 + self.max_blocks_per_seq * max(self.seq_buckets)
        # Block 0 is the null block. The others are handed out in no order, as in a busy server.
        self._free_blocks = list(range(1, num_blocks))
        order.shuffle(self._free_blocks)
        self._kv: dict[str, torch.Tensor] = {}
        for layer in self.model.get_kv_spec().layers:
            shape = (2, num_blocks, layer.num_kv_heads, self.kv_block_size, layer.head_size)
            self._kv[layer.name] = torch.zeros(shape, dtype=dtype)
        self.model.bind_kv_cache({name: [cache[0], cache[1]] for name, cache in self._kv.items()})

    def _make_encoder_cache(self, dtype: torch.dtype) -> None:
        vision, neuron = self.hf_config.vision_config, self.vision_config
        merge = self.factory.get_vision_token_merge_factor(self.hf_config)
        largest = max(neuron.num_vision_tokens_buckets)
        if neuron.vision_attention_block_size % merge or largest % merge:
            raise RunnerContractError(
                f"block size {neuron.vision_attention_block_size} and largest bucket {largest} "
                f"must be multiples of the merge factor {merge}"
            )
        self.cache_block_rows = neuron.vision_attention_block_size // merge
        self.max_vision_blocks = -(-(largest // merge) // self.cache_block_rows)
        levels = len(getattr(vision, "deepstack_visual_indexes", None) or ())
        hidden_size = getattr(vision, "out_hidden_size", None) or self.text_config.hidden_size
        needed = -(-max(self.token_buckets) // self.cache_block_rows) + 1
        num_blocks = max(neuron.encoder_cache_num_blocks or 0, needed)
        if self.max_vision_blocks > num_blocks - 1:
            raise ValueError(
                f"one request may read {self.max_vision_blocks} cache blocks, but the encoder "
                f"cache has {num_blocks - 1}; set encoder_cache_num_blocks to "
                f"{self.max_vision_blocks + 1}"
            )
        self.encoder_cache = EncoderCacheBlocks(
            num_blocks,
            self.cache_block_rows,
            hidden_size * (1 + levels),
            dtype=dtype,
            device="cpu",
            min_hold_time_ms=0.0,
        )

    # ------------------------------------------------------------------------------------ warm-up

    @torch.no_grad()
    def _warm_up(self) -> None:
        """Call every graph once with the worker's synthetic inputs; real calls must look alike."""
        self._warming_up = True
        for bucket in sorted(self.vision_config.num_vision_tokens_buckets):
            inputs = self.model.build_vision_synthetic_inputs(
                bucket, self.vision_config, torch.device("cpu")
            )
            names = set(inspect.signature(self.model.visual.forward).parameters)
            given = {*inputs, "encoder_cache_buffer", "write_block_ids"}
            if names != given:
                raise RunnerContractError(
                    f"visual.forward takes {sorted(names)}, warm-up gives {sorted(given)}"
                )
            num_blocks = -(-bucket // self.vision_config.vision_attention_block_size)
            dp_size = self.vision_config.dp_size
            self.model.visual(
                **inputs,
                encoder_cache_buffer=self.encoder_cache.buffer,
                write_block_ids=torch.zeros(-(-num_blocks // dp_size) * dp_size, dtype=torch.int64),
            )
        vocab_size = self.text_config.vocab_size
        for tokens in self.token_buckets:
            ids = (torch.arange(1, tokens + 1) % vocab_size).to(torch.int32)
            places = torch.arange(tokens)
            self._call(
                ("prefill", tokens, 1),
                input_ids=ids,
                positions=places,
                rotary_position_ids=places.repeat(3, 1) if self.uses_mrope else None,
                table=torch.arange(self.max_blocks_per_seq, dtype=torch.int32)[None],
                slots=torch.zeros(tokens, dtype=torch.int64),
                max_query_len=tokens,
                rows=torch.tensor([tokens - 1]),
                vision_embedding_blocks=tuple(
                    torch.zeros_like(self.encoder_cache.buffer[0])
                    for _ in range(self.max_vision_blocks)
                ),
                vision_positions=torch.full(
                    (self.max_vision_blocks, self.cache_block_rows), tokens
                ),
            )
        for batch in self.seq_buckets:
            table = torch.arange(self.max_blocks_per_seq, dtype=torch.int32)
            self._call(
                ("decode", batch, batch),
                input_ids=torch.ones(batch, dtype=torch.int32),
                positions=torch.full((batch,), 255),
                rotary_position_ids=torch.full((3, batch), 255) if self.uses_mrope else None,
                table=table.repeat(batch, 1),
                slots=torch.zeros(batch, dtype=torch.int64),
                max_query_len=1,
                rows=torch.arange(batch),
            )
        self._warming_up = False

    # ----------------------------------------------------------------------------------- requests

    def add_request(self, token_ids: Sequence[int], features: Sequence[Feature] = ()) -> Request:
        """Take a new request in: its positions are computed once, here."""
        tokens = list(token_ids)
        if not self.uses_mrope:
            return Request(tokens, list(features))
        positions, delta = self.model.get_mrope_input_positions(tokens, list(features))
        if positions.dtype != torch.int64 or positions.shape != (3, len(tokens)):
            raise RunnerContractError(
                f"get_mrope_input_positions gave {positions.dtype} {list(positions.shape)}; the "
                f"runner needs int64 {[3, len(tokens)]}"
            )
        if type(delta) is not int:
            raise RunnerContractError(f"the position delta is a {type(delta).__name__}, not an int")
        return Request(tokens, list(features), positions, delta)

    def release(self, request: Request) -> None:
        """Give back the KV blocks and the cached vision rows of a finished request."""
        self._free_blocks.extend(request.blocks)
        if self.noise is not None:
            for cache in self._kv.values():
                self._fill(cache, request.blocks)
        request.blocks = []
        for feature in request.features:
            self.encoder_cache.free(feature.identifier)

    @torch.no_grad()
    def encode(self, request: Request) -> None:
        """Run the tower on every item that is not in the encoder cache yet."""
        waiting = [
            feature
            for feature in request.features
            if feature.data is not None and not self.encoder_cache.contains(feature.identifier)
        ]
        for _, run in groupby(waiting, key=lambda feature: feature.modality):
            self.encode_batch(list(run))

    @torch.no_grad()
    def encode_batch(self, features: Sequence[Feature]) -> None:
        """One call of `embed_multimodal`: items of one modality, batched as vLLM batches them."""
        kwargs: dict[str, Any] = {}
        items = [feature.data for feature in features if feature.data is not None]
        for name in items[0]:
            kwargs[name] = _joined([item[name] for item in items])
        keys = [feature.identifier for feature in features]
        buffer = self.encoder_cache.buffer
        before = buffer.clone()
        self.model.embed_multimodal(encoder_cache=self.encoder_cache, mm_hashes=keys, **kwargs)
        own = {self.encoder_cache.scratch_block_id}
        for key in keys:
            self.encoder_cache.mark_written(key)
            ids = self.encoder_cache.get_block_ids(key)
            if ids is None:
                raise RunnerContractError(f"embed_multimodal allocated nothing for item {key}")
            own.update(ids)
        others = [block for block in range(len(buffer)) if block not in own]
        if not torch.equal(buffer[others], before[others]):
            raise RunnerContractError(
                "embed_multimodal changed cache blocks of other items than its own"
            )

    def cached_rows(self, feature: Feature) -> torch.Tensor:
        """The rows of one item in the encoder cache, `[rows, W]`."""
        return self.encoder_cache.get(feature.identifier).clone()

    @torch.no_grad()
    def prefill(self, request: Request, rows: Sequence[int] | None = None) -> Any:
        """Encode what is missing and run the whole prompt.

        Args:
            request: A request that has not been computed.
            rows: Tokens whose logits are wanted; None is the last one, as in the runner.

        Returns:
            Logits `[rows, V]`, or what the model returns when it samples.
        """
        self.encode(request)
        tokens = len(request.token_ids)
        padded = self._bucket(tokens, self.token_buckets, "token_buckets")
        self._grow(request, tokens)
        padding = padded - tokens
        blocks, vision_positions = self._gather(request, padded)
        ids = torch.tensor(request.token_ids, dtype=torch.int32)
        place = torch.arange(tokens)
        slots = self._slots(request, place)
        rows = [tokens - 1] if rows is None else list(rows)
        with self._watch_kv([request]):
            output = self._call(
                ("prefill", padded, len(rows)),
                input_ids=torch.cat([ids, self._padding_ids(padding)]),
                positions=torch.cat([place, torch.full((padding,), tokens - 1)]),
                rotary_position_ids=self._rotary(request.positions, padding),
                table=self._table([request], 1),
                slots=torch.cat([slots, torch.full((padding,), self.padding_slot)]),
                max_query_len=padded,
                rows=torch.tensor(rows),
                vision_embedding_blocks=blocks,
                vision_positions=vision_positions,
            )
        request.num_computed = tokens
        return output

    @torch.no_grad()
    def decode(self, requests: Sequence[Request], token_ids: Sequence[int]) -> Any:
        """One step: append one token to each request and run it.

        Args:
            requests: Requests whose tokens so far are all computed.
            token_ids: The new token of each.

        Returns:
            Logits `[requests, V]`, or what the model returns when it samples, padding cut off.
        """
        count = len(requests)
        padded = self._bucket(count, self.seq_buckets, "seq_buckets")
        padding = padded - count
        for request, token in zip(requests, token_ids, strict=True):
            request.token_ids.append(int(token))
            self._grow(request, request.num_computed + 1)
        ids = torch.tensor([request.token_ids[-1] for request in requests], dtype=torch.int32)
        place = torch.tensor([request.num_computed for request in requests])
        delta = torch.tensor([request.delta for request in requests])
        slots = torch.cat(
            [self._slots(r, torch.tensor([r.num_computed])) for r in requests]
            + [torch.full((padding,), self.padding_slot)]
        )
        rows = torch.arange(padded).clamp(max=count - 1)
        with self._watch_kv(requests):
            output = self._call(
                ("decode", padded, padded),
                input_ids=torch.cat([ids, self._padding_ids(padding)]),
                positions=torch.cat([place, torch.zeros(padding, dtype=torch.int64)]),
                rotary_position_ids=self._rotary((place + delta).repeat(3, 1), padding),
                table=self._table(requests, padded),
                slots=slots,
                max_query_len=1,
                rows=rows,
            )
        for request in requests:
            request.num_computed += 1
        if isinstance(output, tuple):
            return tuple(None if part is None else part[:count] for part in output)
        return output[:count]

    def generate(
        self, requests: Sequence[Request], new_tokens: int
    ) -> tuple[list[list[int]], list[torch.Tensor]]:
        """Greedy tokens: one prefill per request, then decode steps of all requests together.

        Returns:
            The new tokens of each request, and the logits they came from, `[new_tokens, V]` each
            (empty when the model samples and returns no logits).
        """
        tokens: list[list[int]] = [[] for _ in requests]
        logits: list[list[torch.Tensor]] = [[] for _ in requests]
        for index, request in enumerate(requests):
            self._take(self.prefill(request), [index], tokens, logits)
        for _ in range(new_tokens - 1):
            output = self.decode(requests, [generated[-1] for generated in tokens])
            self._take(output, range(len(requests)), tokens, logits)
        return tokens, [torch.stack(rows) if rows else torch.empty(0) for rows in logits]

    def _take(
        self,
        output: Any,
        indexes: Sequence[int],
        tokens: list[list[int]],
        logits: list[list[torch.Tensor]],
    ) -> None:
        ids, rows = output if isinstance(output, tuple) else (output.argmax(-1), output)
        for line, index in enumerate(indexes):
            tokens[index].append(int(ids[line]))
            if rows is not None:
                logits[index].append(rows[line])

    # ------------------------------------------------------------------------------ runner's parts

    @staticmethod
    def _bucket(size: int, buckets: Sequence[int], name: str) -> int:
        for bucket in buckets:
            if bucket >= size:
                return bucket
        raise ValueError(f"{size} is above the largest of {name}, {buckets[-1]}")

    def _grow(self, request: Request, tokens: int) -> None:
        if tokens > self.max_model_len:
            raise ValueError(f"{tokens} tokens are above max_model_len {self.max_model_len}")
        while len(request.blocks) * self.kv_block_size < tokens:
            if not self._free_blocks:
                raise ValueError(
                    f"no KV block is free; the cache serves {max(self.seq_buckets)} requests of "
                    f"{self.max_model_len} tokens. Release finished requests"
                )
            request.blocks.append(self._free_blocks.pop())

    def _slots(self, request: Request, place: torch.Tensor) -> torch.Tensor:
        blocks = torch.tensor(request.blocks)[place // self.kv_block_size]
        return blocks * self.kv_block_size + place % self.kv_block_size

    def _table(self, requests: Sequence[Request], rows: int) -> torch.Tensor:
        table = torch.full((rows, self.max_blocks_per_seq), -1, dtype=torch.int32)
        for row, request in enumerate(requests):
            table[row, : len(request.blocks)] = torch.tensor(request.blocks, dtype=torch.int32)
        return table

    def _padding_ids(self, count: int) -> torch.Tensor:
        if self.noise is None:
            return torch.zeros(count, dtype=torch.int32)
        high = self.text_config.vocab_size
        return torch.randint(0, high, (count,), generator=self._random, dtype=torch.int32)

    def _rotary(self, positions: torch.Tensor | None, padding: int) -> torch.Tensor | None:
        """Positions `[3, n]` with padding; None without M-RoPE."""
        if positions is None or not self.uses_mrope:
            return None
        filling = torch.zeros(3, padding, dtype=torch.int64)
        if self.noise is not None:
            filling = torch.randint(0, self.max_model_len, (3, padding), generator=self._random)
        return torch.cat([positions, filling], dim=1)

    def _fill(self, tensor: torch.Tensor, blocks: Sequence[int] | None = None) -> None:
        """Noise into a whole tensor, or into some blocks of a KV cache `[2, blocks, ...]`."""
        noise = torch.randn(tensor.shape, generator=self._random) * (self.noise or 0.0)
        if blocks is None:
            tensor.copy_(noise)
        else:
            tensor[:, blocks] = noise[:, blocks].to(tensor.dtype)

    def _gather(
        self, request: Request, padded: int
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """Cache blocks of the request's items, and the token that each of their rows belongs to."""
        cache = self.encoder_cache
        if self.noise is not None:
            self._fill(cache.buffer[cache.scratch_block_id])
        positions = torch.full((self.max_vision_blocks, self.cache_block_rows), padded)
        views: list[torch.Tensor] = []
        for feature in request.features:
            if not cache.contains(feature.identifier):
                raise RunnerContractError(
                    f"{feature.modality} {feature.identifier} is not in the encoder cache; the "
                    "runner would go on without it"
                )
            span = feature.mm_position
            places = torch.arange(span.offset, span.offset + span.length)
            if span.is_embed is not None:
                places = places[span.is_embed]
            counts = cache.get_tokens_per_block(feature.identifier)
            if sum(counts) != len(places):
                raise RunnerContractError(
                    f"{feature.modality} at token {span.offset}: {sum(counts)} cached rows for "
                    f"{len(places)} placeholder tokens"
                )
            ids = cache.get_block_ids(feature.identifier)
            for block_id, own in zip(ids, places.split(list(counts)), strict=True):
                if len(views) == self.max_vision_blocks:
                    raise RuntimeError(
                        f"the request needs more than the {self.max_vision_blocks} cache blocks "
                        "that one prefill can read"
                    )
                positions[len(views), : len(own)] = own
                views.append(cache.buffer[block_id])
        while len(views) < self.max_vision_blocks:
            views.append(cache.buffer[cache.scratch_block_id])
        return tuple(views), positions

    def _call(
        self,
        graph: tuple[Any, ...],
        *,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        rotary_position_ids: torch.Tensor | None,
        table: torch.Tensor,
        slots: torch.Tensor,
        max_query_len: int,
        rows: torch.Tensor,
        **vision: Any,
    ) -> Any:
        layer_metadata = self._metadata(table, slots, max_query_len)
        params = torch.tensor(GREEDY).repeat(len(rows), 1) if self.on_device_sampling else None
        kwargs = {
            "input_ids": input_ids,
            "positions": positions,
            "attn_metadata": dict.fromkeys(self._kv, layer_metadata),
            "sampling_positions": rows,
            "sampling_params": params,
            "spec_decode_metadata": None,
            "rank": self.rank,
            "logit_mask": None,
            **vision,
        }
        if self.uses_mrope:
            kwargs["rotary_position_ids"] = rotary_position_ids
        self._check_signature(graph, kwargs)
        return self.model(**kwargs)

    def _metadata(
        self, table: torch.Tensor, slots: torch.Tensor, max_query_len: int
    ) -> dict[str, Any]:
        return {
            "block_table_tensor": table,
            "slot_mapping": slots,
            "max_query_len": max_query_len,
            "decode_token_threshold": 1,
            "block_size": self.kv_block_size,
            "max_blocks_per_seq": self.max_blocks_per_seq,
            "cached_seq_len": torch.zeros(1, 1, dtype=torch.int32),
            "kv_segment_size": 0,
            "full_block_table_tensor": table.clone(),
        }

    def attention_metadata(self, request: Request, first: int, count: int) -> dict[str, Any]:
        """Metadata of one layer for tokens `first .. first + count - 1` of a request, unpadded.

        For tests of single layers: the request gets the KV blocks that the tokens need.
        """
        self._grow(request, first + count)
        slots = self._slots(request, torch.arange(first, first + count))
        return self._metadata(self._table([request], 1), slots, count)

    # ------------------------------------------------------------------------------ what is checked

    def _check_signature(self, graph: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A graph is compiled once; a call that looks different from the first would recompile."""
        signature = {name: describe(value) for name, value in kwargs.items()}
        known = self._signatures.setdefault(graph, signature)
        for name in sorted({*known, *signature}):
            if known.get(name) != signature.get(name):
                raise RunnerContractError(
                    f"graph {graph}: argument {name!r} is {signature.get(name)}; when the graph "
                    f"was compiled it was {known.get(name)}"
                )

    def _before_tower(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[()], dict[str, Any]]:
        """Check a call of the vision tower, and put noise into padding patches."""
        bound = inspect.signature(module.forward).bind(*args, **kwargs).arguments
        kwargs = dict(bound)
        pixels = kwargs["pixel_values"]
        self._check_signature(("vision", pixels.shape[0]), kwargs)
        if self.noise is not None and not self._warming_up:
            padding = (pixels == 0).all(-1)
            noise = torch.randn(pixels.shape, generator=self._random) * self.noise
            noisy = torch.where(padding[..., None], noise.to(pixels.dtype), pixels)
            kwargs["pixel_values"] = noisy
        return (), kwargs

    @contextmanager
    def _watch_kv(self, requests: Sequence[Request]) -> Iterator[None]:
        """Nothing may be written outside the requests' own blocks and the null block."""
        own = {0, *(block for request in requests for block in request.blocks)}
        others = [b for b in range(next(iter(self._kv.values())).shape[1]) if b not in own]
        name, cache = next(iter(self._kv.items()))
        before = cache[:, others].clone()
        yield
        if not torch.equal(cache[:, others], before):
            raise RunnerContractError(f"{name}: KV blocks of other requests were changed")


def _joined(elements: Sequence[FieldElement]) -> Any:
    """One processor output of several items, as vLLM hands it to `embed_multimodal`."""
    values = [element.data for element in elements]
    if elements[0].kind == "shared":
        return values[0]
    if not torch.is_tensor(values[0]):
        return values
    if elements[0].kind == "flat":
        return torch.cat(values)
    same = all(value.shape == values[0].shape for value in values)
    return torch.stack(values) if same else values


def describe(value: Any) -> Any:
    """What a compiled graph is specialised on: kind, dtype, shape and, for containers, contents."""
    if torch.is_tensor(value):
        layout = "" if value.is_contiguous() else " strided"
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}{layout}"
    if isinstance(value, Mapping):
        return {key: describe(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [describe(item) for item in value]
    return repr(value)


def read_config(checkpoint_dir: str | Path, dtype: torch.dtype | None = None) -> Any:
    """The checkpoint's Hugging Face configuration, with another dtype if one is given."""
    config = AutoConfig.from_pretrained(checkpoint_dir)
    if dtype is not None:
        for part in (config, config.get_text_config(), config.vision_config):
            part.dtype = dtype
    return config
