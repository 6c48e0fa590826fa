"""The plugin's own parts of the golden vectors in ``tests/vectors/vlm``.

The rest of that index (``MODEL_TOPICS``) concerns code that a generated package brings and is
tested with it. No case of the plugin's topics is left out, and no tolerance is widened.
"""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.vectors.reader import Vector, compare, expect_raises, parametrize, read_index
from vlmgen import standin
from vlmgen.standin.ranks import one_rank

standin.activate()

from vllm_neuron.model.neuron_config import NeuronConfig, VisionNeuronConfig  # noqa: E402
from vllm_neuron.utils import weight_loader as wl  # noqa: E402
from vllm_neuron.utils.checkpoints import SafetensorsCheckpoint  # noqa: E402
from vllm_neuron.vllm.worker.encoder_cache_blocks import EncoderCacheBlocks  # noqa: E402
from vllm_neuron.vllm.worker.gather_mm_embeddings import gather_mm_embeddings  # noqa: E402
from vllm_neuron.vllm.worker.vision_sizes import (  # noqa: E402
    default_buckets,
    encoder_cache_sizes,
    resolve_vision_auto_config,
)

PLUGIN_TOPICS = {
    "auto_vision_buckets",
    "checkpoint",
    "construction_role",
    "default_buckets",
    "encoder_cache",
    "encoder_cache_sizing",
    "gather",
    "loaders",
    "neuron_config_from_dict",
    "resolve_tp_dp",
    "vision_neuron_config_from_dict",
}
MODEL_TOPICS = {
    "embed_errors",
    "kv_write",
    "max_pixels_token_count",
    "merge",
    "packing",
    "preprocessing",
    "select_vision_bucket",
    "text_mrope",
    "text_ops",
    "tower",
    "tower_errors",
    "tower_load",
    "warmup_inputs",
    "weight_names",
}
# Loaders of the model's own tower; the plugin's utils module does not have them.
MODEL_LOADERS = {"vis_qkv_weight_loader", "vis_qkv_bias_loader"}

pytestmark = pytest.mark.filterwarnings("ignore:.*ignores unknown keys")


def test_every_topic_has_an_owner() -> None:
    topics = {vector.topic for vector in read_index()}
    assert topics == PLUGIN_TOPICS | MODEL_TOPICS
    assert not PLUGIN_TOPICS & MODEL_TOPICS


# --- loaders -----------------------------------------------------------------------------------


def _stack(slices: Any, rank: int) -> torch.Tensor:
    return torch.stack([piece[:] for piece in slices])


def build_loader(spec: dict[str, Any]) -> wl.SafetensorsWeightLoader:
    spec = dict(spec)
    kind = spec.pop("loader")
    if kind == "default":
        return wl.SafetensorsWeightLoader()
    if kind == "stack":
        return wl.SafetensorsWeightLoader(_stack)
    if kind == "with_rank_override":
        return wl.with_rank_override(build_loader(spec["base"]), spec["rank"])
    if "original_loader" in spec:
        spec["original_loader"] = build_loader(spec["original_loader"])
    return getattr(wl, kind)(**spec)


def _index_element(element: Any) -> Any:
    if isinstance(element, list):
        return slice(*element)
    if isinstance(element, dict):
        kind, value = next(iter(element.items()))
        return slice(*value) if kind == "slice" else value
    return {"...": Ellipsis, "none": None}.get(element, element)


def _call_loader_case(vector: Vector) -> dict[str, Any]:
    args = vector.args
    if "spec" in args:
        return {"loaded": build_loader(args["spec"]).load(args["slices"], args["rank"])}
    if vector.function == "SliceView":
        index = args["index"] and [_index_element(element) for element in args["index"]]
        view = wl.SliceView(args["base"], index)
        if args["key"] is None:
            return {"shape": torch.tensor(view.get_shape())}
        return {"loaded": view[tuple(_index_element(element) for element in args["key"])]}
    result = getattr(wl, vector.function)(**args)
    if vector.function == "get_shard_deinterleaved":
        return {"gate": result[0], "up": result[1]}
    return {"loaded": result}


def _is_plugin_loader(vector: Vector) -> bool:
    return vector.entry["args"].get("spec", {}).get("loader") not in MODEL_LOADERS


@parametrize("loaders", where=_is_plugin_loader)
def test_loaders(vector: Vector) -> None:
    if vector.raises:
        vector.expect_raises(lambda: _call_loader_case(vector))
        return
    vector.check(_call_loader_case(vector))


def test_a_wrong_shard_start_is_seen() -> None:
    """Seeded fault: the comparison is able to fail."""
    (vector,) = [v for v in read_index() if v.name == "loaders-shard_dim0_rank1of4"]
    args = vector.args
    wrong = build_loader(args["spec"]).load(args["slices"], args["rank"] + 1)
    with pytest.raises(AssertionError):
        vector.check({"loaded": wrong})


# --- checkpoint --------------------------------------------------------------------------------


class _Toy(torch.nn.Module):
    def __init__(self, parameters: dict[str, Any]) -> None:
        super().__init__()
        for name, spec in parameters.items():
            if isinstance(spec, str):
                size = int(re.findall(r"\[(\d+)\]", spec)[0])
                self.register_buffer(name, torch.zeros(size))
                continue
            value = torch.empty(spec["shape"], dtype=getattr(torch, spec["dtype"]), device="meta")
            parameter = torch.nn.Parameter(value, requires_grad=False)
            if isinstance(spec["loader"], dict):
                wl.set_weight_loader(parameter, build_loader(spec["loader"]))
            elif spec["loader"] != "default":
                assert spec["loader"] == "concatenate slices on dim 0"
                wl.set_weight_loader(
                    parameter,
                    wl.SafetensorsWeightLoader(lambda s, rank: torch.cat([x[:] for x in s])),
                )
            self.register_parameter(name, parameter)


@parametrize("checkpoint")
@pytest.mark.filterwarnings("ignore:.*were cast while loading")
def test_checkpoint(vector: Vector, tmp_path: Any) -> None:
    args = vector.args
    tensors = {
        name: torch.zeros(spec["shape"], dtype=getattr(torch, spec["dtype"]))
        for name, spec in args["checkpoint"].items()
    }
    save_file(tensors, tmp_path / "model.safetensors")
    model = _Toy(args["model"])
    options = {"strict": args["strict"]}
    if args["dtype_override"]:
        options["dtype_override"] = {
            name: getattr(torch, dtype) for name, dtype in args["dtype_override"].items()
        }

    def load() -> Any:
        method = getattr(SafetensorsCheckpoint(str(tmp_path)), args["method"])
        return method(
            rank=args["rank"],
            world_size=args["world_size"],
            model=model,
            mappings=args["mappings"],
            device="cpu",
            **options,
        )

    if vector.raises:
        vector.expect_raises(load)
        return
    if args["method"] == "load_sharded_pipelined":
        with one_rank():
            result = load()
    else:
        result = load()
    state = {
        name: {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
        for name, tensor in result.state_dict.items()
    }
    vector.check(
        {
            "state": state,
            "missing_keys": result.missing_keys,
            "unexpected_keys": result.unexpected_keys,
        }
    )


# --- encoder cache -----------------------------------------------------------------------------


class _Clock:
    """The recording's clock: starts at 1000 s; sleeping and, by 1 ns, reading advance it."""

    def __init__(self, start_s: float) -> None:
        self.start_s = self.now = start_s

    def read(self) -> float:
        self.now += 1e-9
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    @property
    def elapsed_ms(self) -> float:
        return (self.now - self.start_s) * 1000.0


def _run_step(cache: EncoderCacheBlocks, clock: _Clock, op: str, args: list[Any]) -> Any:
    if op == "advance_ms":
        return clock.sleep(args[0] / 1000.0)
    if op == "state":
        return None
    if op == "buffer":
        return cache.buffer.clone()
    if op == "buffer_shape":
        return list(cache.buffer.shape)
    if op == "buffer_dtype":
        return str(cache.buffer.dtype).removeprefix("torch.")
    if op == "scratch_block_id":
        return cache.scratch_block_id
    if op == "fill_block":
        cache.buffer[args[0]] = args[1]
        return None
    if op == "fill_all":
        cache.buffer.fill_(args[0])
        return None
    if op == "items":
        return [[key, rows.clone()] for key, rows in cache.items()]
    if op == "ids_are_same_list":
        return cache.get_block_ids(args[0]) is cache.allocate(args[0], [])
    if op == "get_shares_buffer":
        rows = cache.get(args[0])
        storage = cache.buffer.untyped_storage()
        return rows.untyped_storage().data_ptr() == storage.data_ptr()
    return getattr(cache, op)(*args)


def _state(cache: EncoderCacheBlocks) -> dict[str, Any]:
    return {
        "num_free_blocks": cache.num_free_blocks,
        "free_order": list(cache._free),
        "active": {
            key: {"block_ids": item.block_ids, "tokens_per_block": item.tokens_per_block}
            for key, item in cache._active.items()
        },
        "held": {key: item.block_ids for key, item in cache._held.items()},
    }


@parametrize("encoder_cache")
def test_encoder_cache(vector: Vector) -> None:
    args = vector.args
    if "constructor" not in args:
        vector.check(EncoderCacheBlocks.dense_tokens_per_block(*args.values()))
        return
    clock = _Clock(args["clock_start_s"])
    options = dict(args["constructor"])
    options["dtype"] = getattr(torch, options["dtype"])
    cache = EncoderCacheBlocks(**options)
    cache.clock, cache.sleep = clock.read, clock.sleep
    for number, (step, expected) in enumerate(zip(args["steps"], vector.outputs, strict=True)):
        place = f"{vector.name} step {number} {step['op']}"
        before, result = clock.elapsed_ms, None
        if expected["raises"]:
            expect_raises(
                lambda step=step: _run_step(cache, clock, step["op"], step["args"]),
                expected["raises"],
                place,
            )
        else:
            result = _run_step(cache, clock, step["op"], step["args"])
        compare(result, expected["result"], None, place)
        assert clock.elapsed_ms == pytest.approx(expected["clock_ms"], abs=0.01), place
        if "waited_ms" in expected:
            waited = clock.elapsed_ms - before
            assert waited == pytest.approx(expected["waited_ms"], abs=0.01), place
        compare(_state(cache), expected["state"], None, place)


@parametrize("encoder_cache_sizing")
def test_encoder_cache_sizing(vector: Vector) -> None:
    args = vector.args

    def derive() -> Any:
        return encoder_cache_sizes(
            vision_config=args["vis_config"] and SimpleNamespace(**args["vis_config"]),
            model_hidden_size=args["model_hidden_size"],
            merge_factor=args["merge_factor"],
            vision_attention_block_size=args["vision_attention_block_size"],
            num_vision_tokens_buckets=args["num_vision_tokens_buckets"],
            scheduler_encoder_cache_size=args["scheduler_encoder_cache_size"],
            encoder_cache_num_blocks=args["encoder_cache_num_blocks"],
            encoder_cache_min_hold_time_ms=args["encoder_cache_min_hold_time_ms"],
        )

    if vector.raises:
        vector.expect_raises(derive)
        return
    sizes = derive()
    vector.check({name: getattr(sizes, name) for name in vector.outputs})


@parametrize("gather")
def test_gather(vector: Vector) -> None:
    args = vector.args
    cache = EncoderCacheBlocks(args["cache"]["num_blocks"], args["cache"]["block_size"], 2)
    for item in args["cache"]["allocated"]:
        cache.allocate(item["identifier"], item["tokens_per_block"])
    features = [
        SimpleNamespace(
            identifier=feature["identifier"],
            mm_position=SimpleNamespace(
                offset=feature["offset"],
                length=feature["length"],
                is_embed=feature.get("is_embed")
                and torch.tensor(feature["is_embed"], dtype=torch.bool),
            ),
        )
        for feature in args["features"]
    ]

    def gather() -> Any:
        return gather_mm_embeddings(
            cache,
            features,
            num_computed_tokens=args["num_computed_tokens"],
            num_scheduled_tokens=args["num_scheduled_tokens"],
            padded_num_tokens=args["padded_num_tokens"],
            max_vision_blocks=args["max_vision_blocks_per_request"],
        )

    if vector.raises:
        vector.expect_raises(gather)
        return
    got = gather()
    vector.check(
        {
            "block_ids_of_views": got.block_ids,
            "vision_positions": got.vision_positions.tolist(),
            "vision_positions_dtype": str(got.vision_positions.dtype).removeprefix("torch."),
        }
    )
    for view, block_id in zip(got.vision_embedding_blocks, got.block_ids, strict=True):
        assert view.data_ptr() == cache.buffer[block_id].data_ptr()


# --- configuration -----------------------------------------------------------------------------


def _fields(config: Any) -> Any:
    if isinstance(config, list):
        return [_fields(item) for item in config]
    if hasattr(config, "__dict__"):
        return {name: _fields(value) for name, value in vars(config).items()}
    return config


@parametrize("neuron_config_from_dict")
def test_neuron_config_from_dict(vector: Vector) -> None:
    config = vector.args["config_dict"]
    if vector.raises:
        vector.expect_raises(lambda: NeuronConfig.from_dict(config))
        return
    got = _fields(NeuronConfig.from_dict(config))
    if got["tensor_capture"]:
        # The recording leaves the folder out.
        assert got["tensor_capture"].pop("capture_dir") == "/tmp/vllm_neuron_tensor_captures"
    vector.check(got)


@parametrize("vision_neuron_config_from_dict")
def test_vision_neuron_config_from_dict(vector: Vector) -> None:
    config = vector.args["config_dict"]
    if vector.raises:
        vector.expect_raises(lambda: VisionNeuronConfig.from_dict(config))
        return
    vector.check(_fields(VisionNeuronConfig.from_dict(config)))


@parametrize("resolve_tp_dp")
def test_resolve_tp_dp(vector: Vector) -> None:
    args = vector.args
    config = VisionNeuronConfig(
        num_vision_tokens_buckets=args["num_vision_tokens_buckets"],
        vision_attention_block_size=args["vision_attention_block_size"],
        tp_size=args["tp_size"],
        dp_size=args["dp_size"],
    )
    if vector.raises:
        vector.expect_raises(lambda: config.resolve_tp_dp(args["world_size"]))
        return
    before = config.num_total_vision_attention_blocks
    returned = config.resolve_tp_dp(args["world_size"])
    vector.check(
        {
            "returned": list(returned),
            "tp_size": config.tp_size,
            "dp_size": config.dp_size,
            "num_total_vision_attention_blocks_before": before,
            "num_total_vision_attention_blocks": config.num_total_vision_attention_blocks,
        }
    )


@parametrize("construction_role")
def test_construction_role(vector: Vector) -> None:
    args = vector.args
    config = VisionNeuronConfig(
        encoder_cache_min_hold_time_ms=args["encoder_cache_min_hold_time_ms"]
    )
    multimodal = args["multimodal_config"] and SimpleNamespace(**args["multimodal_config"])
    config.set_construction_role(multimodal, args["additional_config"])
    vector.check({name: getattr(config, name) for name in vector.outputs})


@parametrize("auto_vision_buckets")
def test_auto_vision_buckets(vector: Vector) -> None:
    args = vector.args
    config = args["vision_neuron_config"] or {}
    # max_pixels reaches the hook only through the factory's helper.
    tokens = args["factory_max_pixels_token_count"] if args["max_pixels"] else None

    def resolve() -> int:
        for _ in range(args["passes"]):
            most = resolve_vision_auto_config(
                config, args["max_model_len"], args["merge_factor"], tokens
            )
        return most

    if vector.raises:
        vector.expect_raises(resolve)
        return
    most = resolve()
    vector.check({"vision_neuron_config": config, "max_embeds_per_item": most})


@parametrize("default_buckets")
def test_default_buckets(vector: Vector) -> None:
    vector.check(default_buckets(**vector.args))
