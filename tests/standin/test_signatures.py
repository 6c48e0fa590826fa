"""Every name of the recorded plugin API against the stand-in: presence, parameters, defaults."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import vlmgen
from vlmgen import standin

standin.activate()

API: dict[str, Any] = json.loads(
    (Path(vlmgen.__file__).parent / "contract" / "vllm_neuron_api.json").read_text("utf-8")
)["modules"]

# Sections of the record that are no modules of the plugin, or not ones a package may import.
NOT_MODULES = {
    "model_class_contract": "what a model package implements, not what it imports",
    "vllm_neuron.model.qwen3_vl (reference helpers, not a public API)": "the plugin's own model",
    "vllm.distributed.parallel_state": "vLLM itself, used unmodified",
    "libtorch_neuronx_lite": "compiler; a package must not import it (kernels hide behind NF)",
}

UNREAD = "its signature is not public, so it could only be guessed"
# Names the stand-in leaves out on purpose. A package that uses one fails `vlmgen check`.
LEFT_OUT = {
    "vllm_neuron.functional.all_gather_v": UNREAD,
    "vllm_neuron.functional.all_to_all": UNREAD,
    "vllm_neuron.functional.all_to_all_v": UNREAD,
    "vllm_neuron.functional.argsort_unstable": UNREAD,
    "vllm_neuron.functional.build_all2all_combine_metadata": UNREAD,
    "vllm_neuron.functional.build_all2all_dispatch_metadata": UNREAD,
    "vllm_neuron.functional.build_all_gatherv_metadata": UNREAD,
    "vllm_neuron.functional.create_row_col_groups": UNREAD,
    "vllm_neuron.functional.get_group_slice_indices": UNREAD,
    "vllm_neuron.functional.hierarchical_all2all_combine_reduce": UNREAD,
    "vllm_neuron.functional.hierarchical_all2all_dispatch_permute": UNREAD,
    "vllm_neuron.functional.pack_tokens": UNREAD,
    "vllm_neuron.functional.permute_routed_tokens": UNREAD,
    "vllm_neuron.functional.reduce_scatter_v": UNREAD,
    "vllm_neuron.functional.topk_reduce": UNREAD,
    "vllm_neuron.accuracy.assert_pooling_close_three_way": UNREAD,
    "vllm_neuron.accuracy.generate_reference_logits": UNREAD,
    "vllm_neuron.accuracy.generate_teacher_forced_logits": UNREAD,
    "vllm_neuron.accuracy.generate_teacher_forced_logits_fp8": UNREAD,
    "vllm_neuron.accuracy.capture_tensor": UNREAD,
    "vllm_neuron.accuracy.compare_tensors": UNREAD,
    "vllm_neuron.accuracy.compare_tensors_three_way": UNREAD,
    "vllm_neuron.accuracy.create_offline_vllm_generate_fn": "it needs the serving engine",
    "vllm_neuron.accuracy.get_cached_reference_goldens": "a cache the validator does not need",
    "vllm_neuron.parallel.neuron_parallel_state.is_internode_group": UNREAD,
    "vllm_neuron.parallel.neuron_parallel_state.rank_to_col": UNREAD,
    "vllm_neuron.parallel.neuron_parallel_state.rank_to_row": UNREAD,
}


def _modules() -> list[str]:
    return [name for name in API if name not in NOT_MODULES]


def _names() -> list[tuple[str, str, str, dict[str, Any]]]:
    return [
        (module, kind, name, record)
        for module in _modules()
        for kind in ("functions", "classes")
        for name, record in (API[module].get(kind) or {}).items()
    ]


PRESENT = [entry for entry in _names() if f"{entry[0]}.{entry[2]}" not in LEFT_OUT]
IDS = [f"{module}.{name}" for module, _, name, _ in PRESENT]


def _default(text: str, module: Any) -> Any:
    """The value a recorded default stands for, with the names of the defining module."""
    # `nl` is the kernel language's dtype module; in a signature it stands for torch's dtypes.
    scope = {**_enum_members(), **vars(module), "torch": torch, "nl": torch}
    return eval(text, scope)  # noqa: S307, the record is part of this repository


def _enum_members() -> dict[str, Any]:
    scope: dict[str, Any] = {}
    for name in ("nkilib.core.utils.common_types", "nkilib.core.moe.moe_cte.moe_cte"):
        for attribute, value in vars(importlib.import_module(name)).items():
            if isinstance(value, type) and issubclass(value, enum.Enum):
                scope[attribute] = value
    return scope


def _parameters(target: Any, drop_self: bool) -> list[inspect.Parameter]:
    parameters = list(inspect.signature(target).parameters.values())
    return parameters[1:] if drop_self else parameters


def _actual_default(parameter: inspect.Parameter, owner: Any) -> Any:
    if dataclasses.is_dataclass(owner):
        for field in dataclasses.fields(owner):
            if field.name == parameter.name and field.default_factory is not dataclasses.MISSING:
                return field.default_factory()
    return parameter.default


def compare_parameters(
    actual: list[inspect.Parameter], recorded: list[dict[str, Any]], module: Any, owner: Any = None
) -> None:
    """Names, order, kinds and defaults."""
    assert [p.name for p in actual] == [r["name"] for r in recorded]
    for parameter, record in zip(actual, recorded, strict=True):
        where = parameter.name
        assert parameter.kind.name.lower() == record["kind"], where
        if record["kind"] in ("var_keyword", "var_positional"):
            continue
        has_default = parameter.default is not inspect.Parameter.empty
        assert has_default == (not record["required"]), where
        if has_default:
            expected = _default(record["default"], module)
            got = _actual_default(parameter, owner)
            assert type(got) is type(expected) and got == expected, f"{where}: {got!r}"


@pytest.mark.parametrize(("module_name", "kind", "name", "record"), PRESENT, ids=IDS)
def test_name(module_name: str, kind: str, name: str, record: dict[str, Any]) -> None:
    module = importlib.import_module(module_name)
    target = getattr(module, name)
    if kind == "functions":
        if record["signature_known"]:
            defining = importlib.import_module(target.__module__)
            compare_parameters(_parameters(target, drop_self=False), record["params"], defining)
        else:
            assert callable(target)
        return
    assert isinstance(target, type)
    if record.get("init_known"):
        compare_parameters(_parameters(target, False), record["init"], module, target)
    for method, method_record in (record.get("methods") or {}).items():
        static = inspect.getattr_static(target, method)
        binding = method_record.get("binding", "")
        assert isinstance(static, classmethod) == binding.startswith("classmethod"), method
        assert isinstance(static, staticmethod) == binding.startswith("staticmethod"), method
        function = static.__func__ if isinstance(static, classmethod | staticmethod) else static
        bound = not isinstance(static, staticmethod)
        recorded = method_record["params"]
        compare_parameters(_parameters(function, bound), recorded, module, target)
    for attribute in record.get("attributes") or []:
        member, _, value = attribute.partition("=")
        if issubclass(target, enum.Enum):
            assert member in target.__members__
            if value:
                assert target[member].value == int(value)


@pytest.mark.parametrize(
    ("constant", "module_name"),
    [(name, module) for module in _modules() for name in (API[module].get("constants") or [])],
)
def test_constant(constant: str, module_name: str) -> None:
    assert hasattr(importlib.import_module(module_name), constant.partition("=")[0].strip())


def test_left_out_names_are_recorded_and_absent() -> None:
    """A name that has been added since must leave the list."""
    recorded = {f"{module}.{name}" for module, _, name, _ in _names()}
    assert set(LEFT_OUT) <= recorded
    for qualified in LEFT_OUT:
        module, _, name = qualified.rpartition(".")
        assert not hasattr(importlib.import_module(module), name), qualified


def test_every_section_is_a_module_or_named() -> None:
    for module in _modules():
        importlib.import_module(module)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda r: r.update(name="renamed"), "name"),
        (lambda r: r.update(kind="keyword_only"), "kind"),
        (lambda r: r.update(default="7"), "default"),
        (lambda r: r.update(required=True, default=None), "required"),
    ],
    ids=["name", "kind", "default", "required"],
)
def test_a_deviation_is_seen(change: Any, what: str) -> None:
    """Seeded fault: each kind of deviation fails the comparison."""
    module = importlib.import_module("vllm_neuron.utils.weight_loader")
    recorded = API["vllm_neuron.utils.weight_loader"]["functions"]["sharding_weight_loader"]
    records = [dict(record) for record in recorded["params"]]
    change(records[-1])
    with pytest.raises(AssertionError):
        compare_parameters(
            _parameters(module.sharding_weight_loader, drop_self=False), records, module
        )
