"""The stand-in's operators against golden vectors of the plugin's own CPU code.

``tests/vectors/functional`` holds inputs and outputs, its README the format and the tolerances.
Cases over two ranks run in two processes over gloo, all of them in one go. No case is exempt and
no tolerance widened: the operators are nowhere stricter than the plugin's CPU code. The kernels'
size gates are a switch, which is off in these cases and tested at the end.
"""

import builtins
import functools
import importlib
import inspect
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file

os.environ.setdefault("VLLM_NEURON_CPU_MODE", "1")

from vlmgen import standin  # noqa: E402

standin.activate()

VECTORS = Path(__file__).resolve().parents[1] / "vectors" / "functional"

# Where a function lives when it is not in vllm_neuron.functional itself.
MODULES = {
    "argmax": "vllm_neuron.functional.argmax",
    "topk": "vllm_neuron.functional.topk",
    "packed_fp8_viable_for_bucket": "vllm_neuron.functional.attention.attention_decode",
    "scatter_packed_k": "vllm_neuron.functional.attention.attention_decode",
}
ENUM_MODULES = {
    "MoECTEImplementation": "nkilib.core.moe.moe_cte.moe_cte",
    "RouterComputationOrder": "vllm_neuron.functional.moe.router",
}

INDEX: list[dict[str, Any]] = json.loads((VECTORS / "index.json").read_text())


def case_name(case: dict[str, Any]) -> str:
    return f"{case['function']}-{case['case']}"


def case_of(function: str, name: str) -> dict[str, Any]:
    return next(c for c in INDEX if (c["function"], c["case"]) == (function, name))


SINGLE = [case for case in INDEX if case.get("world_size") != 2]
TWO_RANKS = [case for case in INDEX if case.get("world_size") == 2]


# --- reading a case ---------------------------------------------------------------------------


@functools.cache
def tensors_of(function: str) -> dict[str, torch.Tensor]:
    file = VECTORS / f"{function}.safetensors"
    return load_file(file) if file.exists() else {}  # a function on plain numbers has no file


class Coordinator:
    """What an operator uses of vLLM's group coordinator."""

    def __init__(self) -> None:
        self.device_group = dist.group.WORLD
        self.world_size = dist.get_world_size()
        self.rank_in_group = dist.get_rank()

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        parts = [torch.empty_like(x) for _ in range(self.world_size)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, dim=dim)


def read_value(function: str, value: Any, rank: int) -> Any:
    """Turn one entry of ``args`` into the Python value that the call gets."""
    if not isinstance(value, dict):
        return value
    (kind, content), *rest = value.items()
    assert not rest, f"unknown value {value}"
    if kind == "tensor":
        return tensors_of(function)[content].clone()
    if kind == "enum":
        class_name, member = content.split(".")
        module = ENUM_MODULES.get(class_name, "nkilib.core.utils.common_types")
        return getattr(importlib.import_module(module), class_name)[member]
    if kind == "dtype":
        return getattr(torch, content)
    if kind == "device":
        return torch.device(content)
    if kind == "group":
        return Coordinator() if content == "coordinator" else dist.group.WORLD
    if kind == "config":
        module = importlib.import_module("vllm_neuron.model.neuron_config")
        return module.OnDeviceSamplingConfig(**content)
    if kind == "per_rank":
        return read_value(function, content[rank], rank)
    raise AssertionError(f"unknown value {value}")


def operator(case: dict[str, Any], rank: int) -> Any:
    name = case["function"]
    if name == "Sampler":
        nn = importlib.import_module("vllm_neuron.nn")
        init = {key: read_value(name, value, rank) for key, value in case["init_args"].items()}
        return nn.Sampler(**init)
    return getattr(importlib.import_module(MODULES.get(name, "vllm_neuron.functional")), name)


def needs_group(case: dict[str, Any]) -> bool:
    values = [*case["args"].values(), *case.get("init_args", {}).values()]
    return any(isinstance(value, dict) and "group" in value for value in values)


# --- comparing --------------------------------------------------------------------------------


def fp8_steps(x: torch.Tensor) -> torch.Tensor:
    """Number float8 values so that neighbours differ by one."""
    bits = x.contiguous().view(torch.uint8).to(torch.int32)
    return torch.where(bits >= 128, 128 - bits, bits)


def assert_same(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Compare with the tolerances of the vectors' README."""
    assert isinstance(actual, torch.Tensor), f"{what}: {type(actual).__name__}, not a tensor"
    assert actual.dtype == expected.dtype, f"{what}: dtype {actual.dtype}, not {expected.dtype}"
    assert actual.shape == expected.shape, f"{what}: {actual.shape}, not {expected.shape}"
    if expected.numel() == 0:
        return
    if expected.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        steps = (fp8_steps(actual) - fp8_steps(expected)).abs().max().item()
        assert steps <= 1, f"{what}: {steps} float8 steps apart"
        return
    if not expected.dtype.is_floating_point:
        assert torch.equal(actual, expected), f"{what}: integers differ"
        return
    limit = 1e-5 if expected.dtype == torch.float32 else 2**-7
    a, e = actual.double(), expected.double()
    assert torch.equal(a.isnan(), e.isnan()), f"{what}: NaN in other places"
    assert torch.equal(a.isinf(), e.isinf()), f"{what}: infinities in other places"
    finite = e.isfinite()
    assert torch.equal(a[e.isinf()], e[e.isinf()]), f"{what}: infinities of other sign"
    if finite.any():
        largest = e[finite].abs().max().item()
        error = (a[finite] - e[finite]).abs().max().item()
        assert error <= limit * largest, f"{what}: error {error}, largest {largest}"


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compare byte by byte, so that NaN equals the same NaN."""
    flat_a, flat_b = a.reshape(-1).contiguous(), b.reshape(-1).contiguous()
    return torch.equal(flat_a.view(torch.uint8), flat_b.view(torch.uint8))


def blank(x: torch.Tensor, pairs: list[list[int]]) -> torch.Tensor:
    """Zero the ``[block, offset]`` slots of a cache ``[blocks, n_kv, block, d]``."""
    x = x.clone()
    for block, offset in pairs:
        x[block, ..., offset, :] = 0
    return x


def expected_key(entry: Any, rank: int) -> Any:
    return entry["per_rank"][rank] if isinstance(entry, dict) and "per_rank" in entry else entry


def run_case(
    case: dict[str, Any],
    rank: int = 0,
    wrap: Callable[[Any], Any] = lambda call: call,
    **changes: Any,
) -> None:
    """Call the operator and compare everything that the case says about the call.

    Args:
        case: entry of the index.
        rank: this process's rank.
        wrap: applied to the operator before it is called.
        changes: arguments to override, for seeding faults.
    """
    function = case["function"]
    stored = tensors_of(function)
    call = wrap(operator(case, rank))
    arguments = {key: read_value(function, value, rank) for key, value in case["args"].items()}
    arguments |= changes
    before = {k: v.clone() for k, v in arguments.items() if isinstance(v, torch.Tensor)}

    if case.get("raises"):
        raised = case["raises"]
        wanted = getattr(builtins, raised["type"])
        with pytest.raises(Exception) as caught:  # noqa: B017, PT011
            call(**arguments)
        if raised["deliberate"]:
            assert caught.type is wanted, f"{caught.type}, not {wanted}: {caught.value}"
            assert str(caught.value).strip(), "an error without a message"
        return

    result = call(**arguments)
    if case["returns"] == "none":
        assert result is None
        outputs: tuple[Any, ...] = ()
    elif case["returns"] == "tuple":
        assert isinstance(result, tuple)
        outputs = result
    else:
        outputs = (result,)
    assert len(outputs) == len(case["outputs"])
    for number, (actual, entry) in enumerate(zip(outputs, case["outputs"], strict=True)):
        entry = expected_key(entry, rank)
        what = f"output {number}"
        if isinstance(entry, str):
            assert_same(actual, stored[entry], what)
        elif "argument" in entry:
            assert actual is arguments[entry["argument"]], f"{what} is another object"
        else:
            assert actual == entry["value"] and type(actual) is type(entry["value"]), what

    for name, tensor in before.items():
        after = case["mutated"].get(name)
        if after is None:
            assert same_bits(arguments[name], tensor), f"argument {name} was changed"
            continue
        expected = stored[expected_key(after, rank)]
        pairs = case.get("unspecified", {}).get(name, [])
        assert_same(blank(arguments[name], pairs), blank(expected, pairs), f"{name} afterwards")
        untouched = (expected == tensor).all(dim=-1, keepdim=True)
        kept = torch.where(untouched, tensor, torch.zeros_like(tensor))
        actual = torch.where(untouched, arguments[name], torch.zeros_like(tensor))
        assert torch.equal(
            blank(actual, pairs).float(), blank(kept, pairs).float()
        ), f"{name}: a slot that the call must not write has changed"


# --- one rank ---------------------------------------------------------------------------------


@pytest.fixture
def group_of_one(tmp_path: Path) -> Any:
    """A process group with this process alone."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("case", SINGLE, ids=case_name)
def test_vector(case: dict[str, Any], request: pytest.FixtureRequest) -> None:
    if needs_group(case):
        request.getfixturevalue("group_of_one")
    run_case(case)


# --- two ranks --------------------------------------------------------------------------------


def run_on_one_rank(rank: int, folder: str) -> None:
    """Run every two-rank case as one of the ranks and store the failures by name."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    failures = {}
    for case in TWO_RANKS:
        try:
            run_case(case, rank)
        except BaseException as error:
            failures[case_name(case)] = f"rank {rank}: {type(error).__name__}: {error}"
        dist.barrier()
    # The seeded fault: each rank gets the other one's shard, so every global id is wrong.
    case = case_of("argmax", "world2_sharded_dim_f32")
    try:
        run_case(case, rank, tensor=read_value("argmax", case["args"]["tensor"], 1 - rank))
    except AssertionError as error:
        failures["seeded"] = str(error)
    Path(folder, f"failures.{rank}").write_bytes(pickle.dumps(failures))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def two_rank_failures(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    folder = tmp_path_factory.mktemp("two_ranks")
    mp.spawn(run_on_one_rank, args=(str(folder),), nprocs=2)
    return [pickle.loads((folder / f"failures.{rank}").read_bytes()) for rank in range(2)]


@pytest.mark.parametrize("case", TWO_RANKS, ids=case_name)
def test_vector_over_two_ranks(
    case: dict[str, Any], two_rank_failures: list[dict[str, str]]
) -> None:
    messages = [failures.get(case_name(case)) for failures in two_rank_failures]
    assert messages == [None, None]


def test_swapped_shards_are_noticed(two_rank_failures: list[dict[str, str]]) -> None:
    assert all("integers differ" in failures["seeded"] for failures in two_rank_failures)


# --- the index and the comparison themselves --------------------------------------------------


def test_every_case_is_run() -> None:
    assert len(INDEX) == 712
    assert len(SINGLE) + len(TWO_RANKS) == len({case_name(case) for case in INDEX}) == len(INDEX)


@pytest.mark.parametrize(
    ("function", "name", "changes"),
    [
        ("flash_attention", "causal_bf16", {"causal_mask": False}),
        ("flash_attention", "bounds_two_images_f32", {"scale": 0.26}),
        ("flash_attention", "window_5_f32", {"sliding_window": 6}),
        ("qkv_proj", "rms_eps_f32", {"eps": 1e-6}),
        ("qkv_proj", "cache_write_f32", {"slot_mapping": torch.tensor([8, 9, 10, 11, 20, 21, 23])}),
        ("o_proj", "heads_4d_bias_f32", {"bias": None}),
        ("mlp", "gated_gelu_f32", {"act_fn": "GELU_Tanh_Approx"}),
        ("mlp", "gated_silu_f32", {"act_fn": "GELU"}),
        ("attention_decode", "qk_norm_pre_f32", {"rmsnorm_QK_pre_rope_eps": 1e-3}),
        ("attention_decode", "b3_kv1_rope_wout_f32", {"rope_contiguous_layout": False}),
        ("attention_decode", "window_16_f32", {"swa_start_pos_ids": None}),
        ("sample", "deterministic_f32", {"all_greedy": True}),
        ("router", "default_f32", {"top_k": 1}),
        ("moe_cte", "act_swish_f32", {"activation_function": "SiLU"}),
    ],
)
def test_wrong_call_is_noticed(function: str, name: str, changes: dict[str, Any]) -> None:
    """A seeded fault in a call makes its case fail."""
    changes = {
        key: (
            read_value(function, {"enum": f"ActFnType.{value}"}, 0)
            if isinstance(value, str)
            else value
        )
        for key, value in changes.items()
    }
    with pytest.raises(AssertionError):
        run_case(case_of(function, name), **changes)


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        (torch.tensor([1.0, 2.0 + 3e-5]), torch.tensor([1.0, 2.0])),
        (torch.tensor([1.0, 2.0]).bfloat16(), torch.tensor([1.0, 2.03125]).bfloat16()),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, float("nan")])),
        (torch.tensor([1.0, float("inf")]), torch.tensor([1.0, -float("inf")])),
        (torch.tensor([1.0]), torch.tensor([1.0]).double()),
        (torch.tensor([1.0]), torch.tensor([[1.0]])),
        (torch.tensor([3]), torch.tensor([4])),
        (torch.tensor([1.0]).to(torch.float8_e4m3fn), torch.tensor([1.25]).to(torch.float8_e4m3fn)),
        (torch.tensor([-0.5]).to(torch.float8_e4m3fn), torch.tensor([0.5]).to(torch.float8_e4m3fn)),
    ],
)
def test_comparison_notices_small_differences(actual: torch.Tensor, expected: torch.Tensor) -> None:
    with pytest.raises(AssertionError):
        assert_same(actual, expected, "seeded")
    assert_same(expected, expected, "same")


# --- tracing ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "name"),
    [
        ("flash_attention", "bounds_gqa_f32"),
        ("flash_attention", "sink_window_bf16"),
        ("qkv_proj", "all_together_f32"),
        ("qkv_proj", "cache_write_bf16"),
        ("attention_decode", "b3_kv2_full_bf16"),
        ("attention_decode", "b3_kv1_update3d_f32"),
        ("o_proj", "heads_4d_bias_f32"),
        ("mlp", "gated_silu_bf16"),
        ("sample", "top_k_top_p_temperature_f32"),
        ("sample", "all_greedy_bf16"),
        ("topk", "no_group_f32"),
        ("Sampler", "params_mask_f32"),
        ("segmented_attention", "window_8_f32"),
        ("router", "default_f32"),
        ("moe_cte", "post_scale_f32"),
        ("moe_block_tkg", "qwen3_form_f32"),
    ],
)
def test_traces_in_one_graph(function: str, name: str) -> None:
    """The operator compiles without a graph break and computes the same."""
    torch._dynamo.reset()
    run_case(
        case_of(function, name),
        wrap=lambda call: torch.compile(call, fullgraph=True, backend="eager"),
    )


def test_argmax_over_a_group_of_one_traces(group_of_one: None) -> None:
    torch._dynamo.reset()
    run_case(
        case_of("argmax", "world1_last_dim_f32"),
        wrap=lambda call: torch.compile(call, fullgraph=True, backend="eager"),
    )


# --- operators that have no vectors -----------------------------------------------------------


def test_embedding_picks_rows() -> None:
    functional = importlib.import_module("vllm_neuron.functional")
    table = torch.arange(12.0).reshape(4, 3)
    rows = functional.embedding(torch.tensor([[3, 0], [1, 1]]), table)
    expected = torch.stack([table[3], table[0], table[1], table[1]]).reshape(2, 2, 3)
    assert torch.equal(rows, expected)


def test_rmsnorm_router_topk_matches_its_parts() -> None:
    """The fused form equals the norm followed by ``router`` on the same tokens."""
    functional = importlib.import_module("vllm_neuron.functional")
    torch.manual_seed(0)
    hidden, gamma, weights = torch.randn(2, 3, 32), torch.rand(1, 32) + 0.5, torch.randn(32, 8)
    normed, selected, affinities = functional.rmsnorm_router_topk_tkg(
        hidden_states=hidden, gamma=gamma, router_weights=weights, top_k=2
    )
    reference = torch.nn.functional.rms_norm(hidden, (32,), gamma[0], 1e-6)
    torch.testing.assert_close(normed, reference)
    routed = functional.router(
        hidden_states=reference.reshape(6, 32),
        router_weights=weights,
        top_k=2,
        activation="sigmoid",
    )
    torch.testing.assert_close(affinities.float(), routed, rtol=2**-8, atol=0)
    assert affinities.dtype == torch.bfloat16 and selected.dtype == torch.int32
    chosen = routed.gather(1, selected.long())
    assert (chosen > 0).all() and (chosen[:, 0] >= chosen[:, 1]).all()


@pytest.mark.parametrize("name", ["moe_tkg", "segmented_attention_cp"])
def test_device_only_operators_say_so(name: str) -> None:
    function = getattr(importlib.import_module("vllm_neuron.functional"), name)
    required = {
        key: None
        for key, parameter in inspect.signature(function).parameters.items()
        if parameter.default is inspect.Parameter.empty
    }
    with pytest.raises(NotImplementedError, match=name):
        function(**required)


@pytest.mark.parametrize("operand", ["W_qkv", "K_cache", "V_cache", "active_blocks_table"])
def test_absent_operand_of_a_decode_step_is_named(operand: str) -> None:
    case = case_of("attention_decode", "b3_kv2_full_bf16")
    with pytest.raises(AssertionError, match=f"attention_decode: {operand} (is required|must be)"):
        run_case(case, **{operand: None, "pos_ids": None})


def test_absent_group_of_a_shared_count_is_named() -> None:
    blockwise = importlib.import_module("vllm_neuron.functional.moe.moe_blockwise")
    with pytest.raises(ValueError, match="tp_degree 2 needs a moe_group"):
        blockwise.build_blockwise_mapping(torch.ones(3, 4), 4, 4, 2, moe_group=None, tp_degree=2)


# --- the kernels' size gates ------------------------------------------------------------------

WIDE = {"hidden": torch.zeros(1, 4, 256), "qkv_weights": torch.zeros(256, 192)}


def test_kernel_sizes_are_not_enforced_by_default() -> None:
    functional = importlib.import_module("vllm_neuron.functional")
    odd = functional.qkv_proj(hidden=torch.zeros(1, 4, 24), qkv_weights=torch.zeros(24, 48))
    assert odd.shape == (1, 4, 48)


def test_enforced_kernel_sizes_name_the_rule() -> None:
    functional = importlib.import_module("vllm_neuron.functional")
    rule = importlib.import_module("vllm_neuron.functional._sizes_rule")
    with rule.enforce_kernel_sizes():
        assert functional.qkv_proj(**WIDE).shape == (1, 4, 192)
        with pytest.raises(rule.KernelSizeError, match=r"qkv_proj.*H % 128 == 0.*not 24"):
            functional.qkv_proj(hidden=torch.zeros(1, 4, 24), qkv_weights=torch.zeros(24, 24))
        with pytest.raises(rule.KernelSizeError, match=r"o_proj.*heads <= 17, not 18"):
            functional.o_proj(active=torch.zeros(1, 18, 2, 4), weight=torch.zeros(36, 8))
        with pytest.raises(rule.KernelSizeError, match=r"mlp.*I 4608"):
            functional.mlp(
                hidden=torch.zeros(129, 128),
                gate_w=torch.zeros(128, 4608),
                up_w=torch.zeros(128, 4608),
                down_w=torch.zeros(4608, 128),
            )
        with rule.enforce_kernel_sizes(False):
            functional.o_proj(active=torch.zeros(1, 18, 2, 4), weight=torch.zeros(36, 8))
    assert not rule.kernel_sizes_enforced()
