"""Sharded modules against the same modules on one rank. Ranks are threads that exchange tensors
in memory.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from vllm_neuron.utils.weight_loader import get_weight_loader
from vllm_neuron_qwen3_vl_moe import factory, vision_encoder, weight_loaders
from vllm_neuron_qwen3_vl_moe import model as text_module
from vllm_neuron_qwen3_vl_moe.config import Qwen3VLMoeConfig, Qwen3VLMoeConfigError
from vllm_neuron_qwen3_vl_moe.factory import check_parallel
from vllm_neuron_qwen3_vl_moe.utils.preprocessing import warmup_tower_inputs
from vllm_neuron_qwen3_vl_moe.weight_mapping import LAYOUTS, build_mappings

from .support import (
    BLOCK_SIZE,
    Slice,
    build_reference,
    metadata,
    neuron_configs,
    random_positions,
    relative_error,
    save_checkpoint,
    tiny_config,
)

LIMIT = 1e-5
SIZES = {
    "text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 323,
        "rope_parameters": {
            "rope_type": "default",
            "mrope_section": [6, 5, 5],
            "mrope_interleaved": True,
            "rope_theta": 5000000.0,
        },
    }
}


class Ranks:
    """As many threads as ranks; each call of a collective waits for all of them."""

    def __init__(self, size: int) -> None:
        self.size, self.barrier, self.parts = size, threading.Barrier(size), [None] * size

    def exchange(self, rank: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        self.parts[rank] = tensor.clone()
        self.barrier.wait(60)
        parts = list(self.parts)
        self.barrier.wait(60)
        return parts

    def run(self, work) -> list:
        def one(rank):
            CURRENT.group = Group(self, rank)
            with torch.no_grad():
                return work(rank)

        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(one, range(self.size)))


class Group:
    """One rank's view, with the members of vLLM's GroupCoordinator that models use."""

    device_group = None

    def __init__(self, ranks: Ranks, rank: int) -> None:
        self.ranks, self.rank_in_group, self.world_size = ranks, rank, ranks.size

    def all_reduce(self, x):
        return torch.stack(self.ranks.exchange(self.rank_in_group, x)).sum(0)

    def all_gather(self, x, dim):
        return torch.cat(self.ranks.exchange(self.rank_in_group, x), dim)

    def reduce_scatter(self, x, dim):
        return self.all_reduce(x).chunk(self.world_size, dim)[self.rank_in_group]


CURRENT = threading.local()


@pytest.fixture(autouse=True)
def thread_groups(monkeypatch, process_groups):
    """Modules built in a rank's thread see that rank's group; elsewhere the real, single one."""
    for module, name in (
        (text_module, "get_tp_group"),
        (vision_encoder, "get_neuron_vision_tp_group"),
    ):
        real = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda real=real: getattr(CURRENT, "group", None) or real()
        )


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """8 query and 2 KV heads, so that 4 ranks replicate KV heads; odd vocabulary."""
    config, folder = tiny_config(**SIZES), tmp_path_factory.mktemp("wide")
    save_checkpoint(build_reference(config), folder)
    return Qwen3VLMoeConfig.from_configs(config, **neuron_configs()), load_file(
        folder / "model.safetensors"
    )


def fill(module, mapping, tensors, rank):
    """Load one rank's share through the package's own loaders."""
    state = {
        name: get_weight_loader(parameter).load(
            [Slice(tensors[key]) for key in mapping[name]], rank
        )
        for name, parameter in module.named_parameters()
    }
    module.load_state_dict(state, assign=True)
    return module


def part(mapping, prefix):
    return {
        name.removeprefix(prefix): keys for name, keys in mapping.items() if name.startswith(prefix)
    }


def shard(wide, build, tower, prefix):
    """A function rank -> loaded module."""
    config, tensors = wide
    mapping = part(build_mappings(config, LAYOUTS["nested"])[tower], prefix)
    return lambda rank: fill(build(config), mapping, tensors, rank)


def alone(build):
    return Ranks(1).run(build)[0]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_text_layer(wide, ranks, kind, rng):
    """Sequence-parallel prefill, then a decode step; with 4 ranks each KV head is on 2 of them."""
    build = shard(
        wide, lambda c: text_module.Qwen3VLMoeTextDecoderLayer(c.text_config), "text", "layers.1."
    )
    tokens = 33
    hidden = torch.randn(tokens, wide[0].text_config.hidden_size, generator=rng)
    rotary = text_module.Qwen3VLMoeTextRotaryEmbedding(wide[0].text_config)
    cos, sin = rotary(random_positions(rng, tokens))
    places = torch.arange(tokens)

    def work(rank, size):
        layer = build(rank)
        attention = layer.self_attn
        attention.k_cache, attention.v_cache = torch.zeros(
            2, 10, attention.num_kv_heads, 32, attention.head_dim
        )
        first, last = slice(0, tokens - 1), slice(tokens - 1, tokens)
        own = hidden[first].chunk(size)[rank]
        shared = next(iter(metadata(FakeSpec(), places[first], True).values()))
        output = layer(own, cos[first], sin[first], places[first], shared)
        if kind == "prefill":
            return output
        shared = next(iter(metadata(FakeSpec(), places[last], False).values()))
        return layer(hidden[last], cos[last], sin[last], places[last], shared)

    expected = Ranks(1).run(lambda rank: work(rank, 1))[0]
    parts = Ranks(ranks).run(lambda rank: work(rank, ranks))
    if kind == "prefill":
        assert relative_error(torch.cat(parts), expected) <= LIMIT
    else:
        for output in parts:
            assert relative_error(output, expected) <= LIMIT


@pytest.mark.parametrize(("ranks", "degree"), [(2, 2), (4, 2), (4, 4)])
def test_experts_shared_out_over_ranks(wide, ranks, degree, rng, monkeypatch):
    """Shares of the experts, and within a share of ranks their width, add up to all of them."""
    config, share = wide[0].text_config, ranks // degree
    build = shard(
        wide,
        lambda c: text_module.Qwen3VLMoeTextMoE(c.text_config),
        "text",
        f"layers.{config.num_hidden_layers - 1}.mlp.",
    )
    hidden = torch.randn(7, config.hidden_size, generator=rng)
    expected = alone(lambda rank: build(rank)(hidden))
    place = {
        "get_neuron_ep_degree": lambda: degree,
        "get_neuron_ep_rank": lambda: CURRENT.group.rank_in_group // share,
        "get_neuron_ep_tp_group": lambda: SimpleNamespace(
            rank_in_group=CURRENT.group.rank_in_group % share
        ),
    }
    for name, getter in place.items():
        monkeypatch.setattr(weight_loaders, name, getter)
        monkeypatch.setattr(text_module, name, getter, raising=False)
    parts = Ranks(ranks).run(lambda rank: build(rank)(hidden))
    assert relative_error(sum(parts), expected) <= LIMIT
    norm = text_module.Qwen3VLMoeTextRMSNorm(config.hidden_size, config.rms_norm_eps, config.dtype)
    norm.weight.fill_(1.0)
    parts = Ranks(ranks).run(lambda rank: build(rank).decode(hidden, norm))
    monkeypatch.undo()
    assert relative_error(sum(parts), alone(lambda rank: build(rank).decode(hidden, norm))) <= LIMIT


def test_shares_of_the_experts_must_be_whole(wide, monkeypatch):
    monkeypatch.setattr(factory, "get_neuron_ep_degree", lambda: 3)
    with pytest.raises(Qwen3VLMoeConfigError, match="is not divisible by ep_degree 3"):
        check_parallel(wide[0], 3)


class FakeSpec:
    """Stands for a model of one layer where only its cache name is asked for."""

    @staticmethod
    def get_kv_spec():
        return type("Spec", (), {"layers": [type("Layer", (), {"name": "only"})]})


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    ("name", "prefix"),
    [
        ("VisionAttention", "blocks.0.attn."),
        ("VisionMLP", "blocks.0.mlp."),
        ("VisionPatchMerger", "merger."),
    ],
)
def test_vision_module(wide, ranks, name, prefix, rng):
    cls = getattr(vision_encoder, f"Qwen3VLMoe{name}")
    extra = (False,) if name == "VisionPatchMerger" else ()
    build = shard(wide, lambda c: cls(c.vision_config, *extra), "vision", prefix)
    config = wide[0].vision_config
    hidden = torch.randn(2, 32, config.hidden_size, generator=rng)
    arguments = ()
    if name == "VisionAttention":
        bounds = torch.zeros(2, 32, 1, dtype=torch.int32)
        tables = (torch.rand(2, 32, config.head_dim, generator=rng) for _ in range(2))
        arguments = (*tables, bounds, bounds + 32)
    expected = alone(lambda rank: build(rank)(hidden, *arguments))
    for output in Ranks(ranks).run(lambda rank: build(rank)(hidden, *arguments)):
        assert relative_error(output, expected) <= LIMIT


@pytest.mark.parametrize(("tp", "dp"), [(2, 1), (1, 2), (2, 2)])
def test_whole_tower_under_tensor_and_data_parallelism(wide, tp, dp, rng, monkeypatch):
    config = wide[0].vision_config
    inputs = warmup_tower_inputs(4, BLOCK_SIZE, config, "cpu")
    inputs["pixel_values"] = torch.randn(inputs["pixel_values"].shape, generator=rng)
    rows, shape = config.num_position_embeddings, inputs["pos_emb_idx"].shape
    inputs["pos_emb_idx"] = torch.randint(0, rows, shape, generator=rng, dtype=torch.int32)
    inputs["pos_emb_weight"] = torch.rand(inputs["pos_emb_weight"].shape, generator=rng)
    inputs["cos"], inputs["sin"] = (
        torch.rand(inputs["cos"].shape, generator=rng) for _ in range(2)
    )
    inputs["bound_max"] = torch.full_like(inputs["bound_max"], BLOCK_SIZE)
    inputs["row_block_ids"] = torch.arange(4).view(4, 1).expand(4, BLOCK_SIZE // 4).contiguous()
    inputs["write_block_ids"] = torch.full((4,), 4)

    def run(data_ranks):
        build = shard(
            wide, lambda c: vision_encoder.Qwen3VLMoeVisionModel(c.vision_config), "vision", ""
        )

        def work(rank):
            CURRENT.data_group = (
                None if data_ranks is None else Group(data_ranks[rank % tp], rank // tp)
            )
            CURRENT.group = Group(tensor_ranks[rank // tp], rank % tp)
            buffer = torch.zeros(5, BLOCK_SIZE // 4, config.fat_width)
            return build(rank % tp)(**inputs, encoder_cache_buffer=buffer)

        return work

    monkeypatch.setattr(
        vision_encoder, "get_neuron_vision_dp_group", lambda: getattr(CURRENT, "data_group", None)
    )
    tensor_ranks = [Ranks(1)]
    expected = Ranks(1).run(run(None))[0]
    tensor_ranks = [Ranks(tp) for _ in range(dp)]
    data_ranks = [Ranks(dp) for _ in range(tp)] if dp > 1 else None
    for output in Ranks(tp * dp).run(run(data_ranks)):
        assert relative_error(output[:4], expected[:4]) <= LIMIT


def test_an_illegal_size_names_the_legal_ones(wide):
    config, _ = wide
    with pytest.raises(
        Qwen3VLMoeConfigError,
        match=r"(?s)size 3: num_attention_heads 8 .* legal sizes: \[1, 2, 4\]",
    ):
        check_parallel(config, 3)


def test_the_padded_tail_of_the_vocabulary_is_never_sampled(model, monkeypatch):
    monkeypatch.setattr(model, "tp_size", 7)
    text = model.config.text_config
    padded = text.padded_vocab_size(7)
    last, first = (
        model._mask_padded_vocabulary(torch.zeros(2, padded // 7), torch.tensor(rank))
        for rank in (6, 0)
    )
    tail = padded - text.vocab_size
    assert 0 < tail < padded // 7
    assert torch.isneginf(last[:, -tail:]).all() and not torch.isinf(last[:, :-tail]).any()
    assert not torch.isinf(first).any()
