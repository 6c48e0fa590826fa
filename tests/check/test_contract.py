"""Every use of the plugin and of vLLM is checked against the recorded contract."""

from __future__ import annotations

import ast
import importlib.util
import json
from pathlib import Path

import pytest

from vlmgen.check.api import (
    DATA,
    Api,
    ApiModule,
    Param,
    Signature,
    differences,
    installed_api,
    recorded_api,
)
from vlmgen.check.contract import check_contract, check_drift, used_names
from vlmgen.check.source import read_package


def test_the_committed_package_fits(package: Path) -> None:
    assert check_contract(read_package(package), recorded_api()) == []


def test_the_check_sees_what_the_package_uses(package: Path) -> None:
    used = used_names(read_package(package), recorded_api())
    assert {
        ("vllm_neuron.functional", "attention_decode"),
        ("vllm_neuron.functional", "flash_attention"),
        ("vllm_neuron.functional", "mlp"),
        ("vllm_neuron.utils.weight_loader", "fused_qkv_weight_loader"),
        ("", "Sampler.forward"),
        ("", "ColumnParallelLinear.forward"),
        ("", "VocabDimShardedEmbedding.forward"),
        ("", "SafetensorsCheckpoint.load_sharded"),
        ("", "EncoderCacheBlocks.allocate"),
        ("", "GroupCoordinator.reduce_scatter"),
    } <= set(used)


# (file, text, seeded fault, code, what the message names)
FAULTS = [
    ("model.py", "softmax_scale=", "softmax_scaling=", "VG103", "'softmax_scaling'"),
    ("model.py", "causal_mask=True", "causal=True", "VG103", "'causal'"),
    ("model.py", "NF.mlp(", "NF.swiglu(", "VG102", "'swiglu'"),
    ("model.py", "up_w=self.up_proj_weight, ", "", "VG104", "'up_w'"),
    ("model.py", "hidden=hidden[None], qkv_weights=", "hidden[None], qkv_weights=", "VG105",
     "'hidden'"),
    ("model.py", "neuron_nn.Sampler(", "neuron_nn.GreedySampler(", "VG102", "'GreedySampler'"),
    ("model.py", "tp_rank=rank)", "rank=rank)", "VG103", "'rank'"),
    ("model.py", "self.sampler(logits, sampling_params=sampling_params, ",
     "self.sampler(logits, sampling_params, ", "VG105", "'sampling_params'"),
    ("model.py", "encoder_cache.scratch_block_id", "encoder_cache.scratch_block", "VG106",
     "'scratch_block'"),
    ("model.py", "self.tp_group.reduce_scatter(", "self.tp_group.scatter_reduce(", "VG106",
     "'scatter_reduce'"),
    ("model.py", "self.tp_group.all_gather(hidden, 0)", "self.tp_group.all_gather(hidden, axis=0)",
     "VG103", "'axis'"),
    ("model.py", "from vllm_neuron.nn.embedding import", "from vllm_neuron.nn import", "VG102",
     "VocabDimShardedEmbedding"),
    ("model.py", "from vllm_neuron.model.kv_cache import", "from vllm_neuron.model.cache import",
     "VG101", "vllm_neuron.model.cache"),
    ("model.py", "num_kv_heads=attention.num_kv_heads,", "kv_heads=attention.num_kv_heads,",
     "VG103", "'kv_heads'"),
    ("model.py", "set_weight_loader(param=", "set_weight_loader(parameter=", "VG103",
     "'parameter'"),
    ("weight_loaders.py", "num_kv_replicas=", "kv_replicas=", "VG103", "'kv_replicas'"),
    ("weight_loaders.py", "checkpoint.get_tensor_names()", "checkpoint.tensor_names()", "VG106",
     "'tensor_names'"),
    ("weight_loaders.py", "world_size=world_size, model", "model", "VG104", "'world_size'"),
    ("config.py", "neuron.quantization not in", "neuron.quantisation not in", "VG106",
     "'quantisation'"),
    ("__init__.py", "from vllm import ModelRegistry", "from vllm import Registry", "VG102",
     "'Registry'"),
    ("__init__.py", "ModelRegistry.register_model(ARCHITECTURE, ", "ModelRegistry.register_model(",
     "VG104", "'model_cls'"),
    ("factory.py", "from vllm.distributed.parallel_state import get_tp_group",
     "from vllm.distributed.parallel_state import get_tensor_group", "VG102", "get_tensor_group"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "old", "new", "code", "named"), FAULTS)
def test_a_seeded_fault_is_found(edited, name, old, new, code, named) -> None:
    root = edited(name, old, new)
    found = [f for f in check_contract(read_package(root), recorded_api()) if f.code == code]
    assert found and any(named in finding.message for finding in found)
    assert all(finding.path.endswith(name) and finding.line > 0 for finding in found)


def test_a_finding_is_one_line_with_place_rule_and_fix(edited) -> None:
    root = edited("model.py", "softmax_scale=", "softmax_scaling=")
    (finding,) = check_contract(read_package(root), recorded_api())
    line = str(finding)
    assert "\n" not in line
    assert line.startswith(
        f"{root.as_posix()}/vllm_neuron_qwen3_vl/model.py:{finding.line}: VG103 "
    )
    assert finding.rule in line and line.endswith(finding.fix) and "softmax_scale" in finding.fix


def test_calls_of_recorded_names_without_signature_are_not_claimed_to_fit(snippet) -> None:
    source = snippet("def gather(x):\n    return NF.all_gather_v(x)\n")
    assert [f.code for f in check_contract(source, recorded_api())] == ["VG107"]


def test_nothing_is_missing_where_arguments_are_unpacked(snippet) -> None:
    source = snippet("def f(hidden, **more):\n    return NF.mlp(hidden=hidden, **more)\n")
    assert check_contract(source, recorded_api()) == []


def test_argument_given_twice(snippet) -> None:
    source = snippet("def f(x):\n    return NF.cumsum(x, tensor=x)\n")
    assert "VG103" in {f.code for f in check_contract(source, recorded_api())}


def test_enum_members(snippet) -> None:
    code = """
    from nkilib.core.utils.common_types import ActFnType

    def f(x, w):
        return NF.mlp(hidden=x, gate_w=w, up_w=w, down_w=w, act_fn=ActFnType.{member})
    """
    assert check_contract(snippet(code.format(member="GELU_Tanh_Approx")), recorded_api()) == []
    findings = check_contract(snippet(code.format(member="GELU_Tanh")), recorded_api())
    assert [f.code for f in findings] == ["VG106"]


def test_vllm_names_hold_in_both_releases() -> None:
    signature = recorded_api().modules["vllm.distributed.parallel_state"].functions["get_tp_group"]
    assert set(signature.releases) == {"0.24.0", "0.32.0"}


def test_a_call_must_fit_every_release() -> None:
    signature = Signature({"old": (Param("x"),), "new": (Param("x"), Param("y"))})
    problems = list(signature.problems(0, ["x"]))
    assert [(code, "new" in message) for code, message, _ in problems] == [("VG104", True)]


def test_recorded_vllm_signatures_are_those_of_the_installed_release() -> None:
    found = importlib.util.find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        pytest.skip("vLLM is not installed")
    root = Path(found.submodule_search_locations[0]).parent
    data = json.loads((DATA / "vllm_names.json").read_text())
    release = next((r for r in data["releases"] if any(root.glob(f"vllm*-{r}*.dist-info"))), None)
    if release is None:
        pytest.skip("the installed vLLM is none of the recorded releases")
    compared = 0
    for module in data["modules"].values():
        for name, entry in module.items():
            tree = ast.parse((root / entry["evidence"]).read_text())
            top = {getattr(node, "name", ""): node for node in tree.body}
            if entry["kind"] == "function":
                assert _parameters(top[name].args) == entry["params"][release], name
                compared += 1
                continue
            cls = top["_ModelRegistry" if name == "ModelRegistry" else name]
            methods = {getattr(node, "name", ""): node for node in cls.body}
            for method, params in entry["methods"].items():
                assert _parameters(methods[method].args)[1:] == params[release], method
                compared += 1
    assert compared > 5


def _parameters(arguments: ast.arguments) -> list[dict[str, object]]:
    positional = [*arguments.posonlyargs, *arguments.args]
    first_default = len(positional) - len(arguments.defaults)
    return [
        {"name": a.arg, "kind": "positional_or_keyword", "required": i < first_default}
        for i, a in enumerate(positional)
    ]


def test_installed_plugin_without_drift(package: Path) -> None:
    pytest.importorskip("vllm", reason="the stand-in's groups are vLLM's")
    recorded = recorded_api()
    live, trouble = installed_api(recorded)
    source = read_package(package)
    assert check_drift(source, recorded, live, trouble) == []
    assert check_contract(source, live) == []


def test_drift_of_the_installed_plugin_is_found(package: Path) -> None:
    recorded = recorded_api()
    functional = recorded.modules["vllm_neuron.functional"]
    changed = ApiModule(functional.name, dict(functional.functions), dict(functional.classes))
    old = functional.functions["mlp"]
    params = tuple(p for p in old.params if p.name != "down_w") + (Param("w_down"),)
    changed.functions["mlp"] = Signature({"installed": params})
    del changed.functions["o_proj"]
    live = Api({**recorded.modules, functional.name: changed}, recorded.model)
    findings = check_drift(read_package(package), recorded, live, {})
    messages = sorted(f.message for f in findings)
    assert [f.code for f in findings] == ["VG120", "VG120"]
    assert "lacks down_w" in messages[0] and "requires w_down" in messages[0]
    assert "o_proj: the installed one does not exist" in messages[1]


@pytest.mark.parametrize(
    ("live", "said"),
    [
        ((Param("a"), Param("b", required=False)), ""),
        ((Param("a"), Param("b", required=False), Param("c", required=False)), ""),
        ((Param("b", required=False), Param("a")), "another order"),
        ((Param("a"), Param("b")), "now requires b"),
        ((Param("a"),), "lacks b"),
    ],
)
def test_what_counts_as_drift(live: tuple[Param, ...], said: str) -> None:
    recorded = Signature({"x": (Param("a"), Param("b", required=False))})
    difference = differences(recorded, Signature({"installed": live}))
    assert said in difference and bool(said) == bool(difference)
