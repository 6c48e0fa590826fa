"""The stand-in's parallel layers: alone, and over real process groups.

Expected values come from plain torch layers with the whole weights. The multi-rank tests run all
their checks in one set of gloo processes, which store what they computed.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F

os.environ.setdefault("VLLM_NEURON_CPU_MODE", "1")

from vlmgen import standin  # noqa: E402

standin.activate()

from vllm_neuron import nn as neuron_nn  # noqa: E402
from vllm_neuron.nn.rejection_sampler import rejection_sampler  # noqa: E402
from vllm_neuron.utils.weight_loader import get_weight_loader  # noqa: E402

RANKS = 2
VOCAB, WIDTH, INNER, TOKENS = 11, 8, 12, 6  # 11 rows over 2 ranks: 6 and 5, one row of zeros


class Slice:
    """A checkpoint tensor as safetensors opens it: shape first, data when indexed."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    def get_dtype(self) -> str:
        return "F32"

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.tensor[index]


def load(parameter: torch.nn.Parameter, whole: torch.Tensor, rank: int) -> None:
    """Fill a parameter by its own loader."""
    with torch.no_grad():
        parameter.copy_(get_weight_loader(parameter).load([Slice(whole)], rank))


def whole_weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "table": draw(VOCAB, WIDTH),
        "up": draw(INNER, WIDTH),
        "up_bias": draw(INNER),
        "down": draw(WIDTH, INNER),
        "down_bias": draw(WIDTH),
        "x": draw(TOKENS, WIDTH),
    }


IDS = torch.tensor([0, 5, 6, 10, 3, 6])


# --- one process ------------------------------------------------------------------------------


def test_without_distributed_every_layer_is_whole() -> None:
    assert not dist.is_initialized()
    w = whole_weights()
    column = neuron_nn.ColumnParallelLinear(WIDTH, INNER, gather_output=True)
    row = neuron_nn.RowParallelLinear(INNER, WIDTH)
    table = neuron_nn.VocabDimShardedEmbedding(VOCAB, WIDTH)
    columns = neuron_nn.EmbedDimShardedEmbedding(VOCAB, WIDTH)
    for parameter, whole in [
        (column.weight, w["up"]),
        (column.bias, w["up_bias"]),
        (row.weight, w["down"]),
        (row.bias, w["down_bias"]),
        (table.weight, w["table"]),
        (columns.weight, w["table"]),
    ]:
        load(parameter, whole, 0)
    assert (column.tp_size, column.tp_rank, column.out_features_per_rank) == (1, 0, INNER)
    assert (table.tp_size, table.vocab_size_per_rank, table.vocab_start_idx) == (1, VOCAB, 0)
    torch.testing.assert_close(column(w["x"]), F.linear(w["x"], w["up"], w["up_bias"]))
    inner = F.linear(w["x"], w["up"])
    torch.testing.assert_close(row(inner), F.linear(inner, w["down"]) + w["down_bias"])
    assert torch.equal(table(IDS), w["table"][IDS])
    assert torch.equal(table(IDS, scatter_tokens=False, rank=torch.tensor([0])), w["table"][IDS])
    assert torch.equal(columns(IDS), w["table"][IDS])


@pytest.mark.parametrize(
    ("build", "shapes"),
    [
        (lambda **k: neuron_nn.ColumnParallelLinear(8, 12, **k), {(12, 8), (12,)}),
        (lambda **k: neuron_nn.ColumnParallelLinear(8, 12, bias=False, **k), {(12, 8)}),
        (lambda **k: neuron_nn.RowParallelLinear(8, 12, **k), {(12, 8), (12,)}),
        (lambda **k: neuron_nn.VocabDimShardedEmbedding(11, 8, **k), {(11, 8)}),
        (lambda **k: neuron_nn.EmbedDimShardedEmbedding(11, 8, **k), {(11, 8)}),
    ],
)
def test_layers_are_built_on_the_meta_device(build: Any, shapes: set[tuple[int, ...]]) -> None:
    layer = build(device="meta", dtype=torch.bfloat16)
    parameters = list(layer.parameters())
    assert {tuple(p.shape) for p in parameters} == shapes
    assert all(p.is_meta and p.dtype == torch.bfloat16 for p in parameters)
    assert not list(layer.buffers())
    with torch.device("meta"):
        assert all(p.is_meta for p in build().parameters())


def test_embedding_takes_flat_ids_only() -> None:
    table = neuron_nn.VocabDimShardedEmbedding(VOCAB, WIDTH)
    with pytest.raises(AssertionError, match=r"\[1, 6\]"):
        table(IDS.unsqueeze(0))


def test_a_coordinator_is_not_a_process_group() -> None:
    with pytest.raises(TypeError, match="device_group"):
        neuron_nn.ColumnParallelLinear(8, 12, tp_group=object())


def test_rejection_sampler_says_that_it_is_missing() -> None:
    with pytest.raises(NotImplementedError, match="speculative"):
        rejection_sampler(spec_decode_metadata=None, sampled_tokens=IDS)


# --- two processes ----------------------------------------------------------------------------


def compute(rank: int) -> dict[str, Any]:
    """Build every layer over the world group, load it and run it; return the results."""
    w = whole_weights()
    results: dict[str, Any] = {}
    column = neuron_nn.ColumnParallelLinear(WIDTH, INNER)
    gathering = neuron_nn.ColumnParallelLinear(WIDTH, INNER, gather_output=True)
    row = neuron_nn.RowParallelLinear(INNER, WIDTH)
    whole_row = neuron_nn.RowParallelLinear(INNER, WIDTH, bias=False, input_is_parallel=False)
    table = neuron_nn.VocabDimShardedEmbedding(VOCAB, WIDTH, tp_group=dist.group.WORLD)
    columns = neuron_nn.EmbedDimShardedEmbedding(VOCAB, WIDTH)
    for parameter, whole in [
        (column.weight, w["up"]),
        (column.bias, w["up_bias"]),
        (gathering.weight, w["up"]),
        (gathering.bias, w["up_bias"]),
        (row.weight, w["down"]),
        (row.bias, w["down_bias"]),
        (whole_row.weight, w["down"]),
        (table.weight, w["table"]),
        (columns.weight, w["table"]),
    ]:
        load(parameter, whole, rank)
    results["shapes"] = {
        "column": tuple(column.weight.shape),
        "row": tuple(row.weight.shape),
        "table": tuple(table.weight.shape),
        "columns": tuple(columns.weight.shape),
    }
    results["start"] = table.vocab_start_idx
    rank_tensor = torch.tensor([rank], dtype=torch.int32)
    results["column"] = column(w["x"])
    results["gathered"] = gathering(w["x"])
    results["mlp"] = row(F.relu(column(w["x"])))
    results["whole_row"] = whole_row(F.linear(w["x"], w["up"]))
    results["scattered"] = table(IDS)
    results["scattered_by_tensor"] = table(IDS, rank=rank_tensor)
    results["reduced"] = table(IDS, scatter_tokens=False, rank=rank_tensor)
    results["columns"] = columns(IDS)
    # A seeded fault: the rank that the table is told is the other one's.
    results["wrong_rank"] = table(IDS, scatter_tokens=False, rank=1 - rank_tensor)

    graphs: list[str] = []

    def record(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(graph.code)
        return graph

    class Start(torch.nn.Module):
        """The embedding and an MLP, as the start of a decoder uses them."""

        def __init__(self) -> None:
            super().__init__()
            self.table, self.column, self.row = table, column, row

        def forward(self, ids: torch.Tensor, rank: torch.Tensor) -> torch.Tensor:
            share = self.table(ids, scatter_tokens=True, rank=rank)
            everything = self.table(ids, scatter_tokens=False, rank=rank)
            return share.sum() + self.row(F.relu(self.column(everything)))

    start = Start()
    compiled = torch.compile(start, fullgraph=True, backend=record)
    results["compiled"] = compiled(IDS, rank_tensor)
    results["eager"] = start(IDS, rank_tensor)
    results["graphs"] = graphs

    sampler = neuron_nn.Sampler(SamplingConfig(), process_group=dist.group.WORLD)
    logits = torch.linspace(-1, 3, 2 * 10).reshape(2, 10)
    shard = logits[:, rank * 5 : rank * 5 + 5]
    traced = torch.compile(sampler, fullgraph=True, backend="eager")
    results["sampled"] = traced(shard, tp_rank=rank_tensor)

    for name, build in {
        "uneven column": lambda: neuron_nn.ColumnParallelLinear(WIDTH, 7),
        "uneven row": lambda: neuron_nn.RowParallelLinear(7, WIDTH),
        "uneven columns": lambda: neuron_nn.EmbedDimShardedEmbedding(VOCAB, 7),
        "bf16 bias": lambda: neuron_nn.RowParallelLinear(INNER, WIDTH, dtype=torch.bfloat16),
        "uneven tokens": lambda: table(IDS[:5]),
    }.items():
        try:
            build()
        except (AssertionError, NotImplementedError) as error:
            results[name] = f"{type(error).__name__}: {error}"
    return results


class SamplingConfig:
    """The settings that a sampler reads."""

    all_greedy = False
    max_top_k = 4
    deterministic = True
    capture_topk = False


def run_on_one_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    torch.save(compute(rank), f"{folder}/results.{rank}")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("two_ranks")
    mp.spawn(run_on_one_rank, args=(str(folder),), nprocs=RANKS)
    return [torch.load(folder / f"results.{rank}") for rank in range(RANKS)]


def test_shards_have_equal_shapes(two_ranks: list[dict[str, Any]]) -> None:
    for rank, results in enumerate(two_ranks):
        assert results["shapes"] == {
            "column": (INNER // 2, WIDTH),
            "row": (WIDTH, INNER // 2),
            "table": (6, WIDTH),
            "columns": (VOCAB, WIDTH // 2),
        }
        assert results["start"] == 6 * rank


def test_linear_layers_over_two_ranks(two_ranks: list[dict[str, Any]]) -> None:
    w = whole_weights()
    up = F.linear(w["x"], w["up"], w["up_bias"])
    mlp = F.linear(F.relu(up), w["down"], w["down_bias"])
    torch.testing.assert_close(torch.cat([r["column"] for r in two_ranks], dim=1), up)
    for results in two_ranks:
        torch.testing.assert_close(results["gathered"], up)
        torch.testing.assert_close(results["mlp"], mlp)  # the bias is added once, not per rank
        expected = F.linear(F.linear(w["x"], w["up"]), w["down"])
        torch.testing.assert_close(results["whole_row"], expected)


def test_embeddings_over_two_ranks(two_ranks: list[dict[str, Any]]) -> None:
    rows = whole_weights()["table"][IDS]
    for rank, results in enumerate(two_ranks):
        share = rows[3 * rank : 3 * rank + 3]
        assert torch.equal(results["scattered"], share)
        assert torch.equal(results["scattered_by_tensor"], share)
        assert torch.equal(results["reduced"], rows)
        assert torch.equal(results["columns"], rows)
        assert not torch.equal(results["wrong_rank"], rows)


def test_one_graph_serves_every_rank(two_ranks: list[dict[str, Any]]) -> None:
    first, second = two_ranks
    for results in two_ranks:
        torch.testing.assert_close(results["compiled"], results["eager"])
        assert len(results["graphs"]) == 1
    assert first["graphs"] == second["graphs"]
    assert "reduce_scatter_tensor" in first["graphs"][0]
    assert "all_reduce" in first["graphs"][0]


def test_sampler_over_two_ranks_traces(two_ranks: list[dict[str, Any]]) -> None:
    # Rows rise from left to right, so the best ids are 9, 8, 7, 6. Their shares with steps of
    # 4/19 are 0.34, 0.27, 0.22, 0.18: the sum passes 0.5 at the second.
    for results in two_ranks:
        assert results["sampled"].dtype == torch.int32
        assert results["sampled"].tolist() == [8, 8]


def test_sizes_that_do_not_divide_are_refused(two_ranks: list[dict[str, Any]]) -> None:
    for results in two_ranks:
        assert results["uneven column"].startswith("AssertionError: ColumnParallelLinear: 7 ")
        assert results["uneven row"].startswith("AssertionError: RowParallelLinear: 7 ")
        assert results["uneven columns"].startswith("AssertionError: EmbedDimShardedEmbedding")
        assert results["uneven tokens"].startswith("AssertionError: VocabDimShardedEmbedding: 5 ")
        assert results["bf16 bias"].startswith("NotImplementedError: RowParallelLinear")
