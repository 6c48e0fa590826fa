"""Where the stand-in is stricter than the plugin (design D3), by name, and small parts around it.

Stricter loading is in ``test_checkpoints.py``; the operators are nowhere stricter.
"""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vlmgen import standin

standin.activate()

from vllm_neuron import envs  # noqa: E402
from vllm_neuron.model import interfaces, registry  # noqa: E402
from vllm_neuron.model.neuron_config import (  # noqa: E402
    NeuronConfig,
    TensorReplacementConfig,
    VisionNeuronConfig,
)
from vllm_neuron.utils import vision_utils  # noqa: E402
from vllm_neuron.utils.neuron_utils import can_run_kernel, model_forward_context  # noqa: E402
from vllm_neuron.vllm.worker.encoder_cache_blocks import EncoderCacheBlocks  # noqa: E402
from vllm_neuron.vllm.worker.gather_mm_embeddings import gather_mm_embeddings  # noqa: E402
from vllm_neuron.vllm.worker.vision_sizes import default_buckets  # noqa: E402

# --- configuration -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config_class", "config", "said"),
    [
        (
            VisionNeuronConfig,
            {"num_vision_token_buckets": [4096]},
            "'num_vision_token_buckets' .did you mean 'num_vision_tokens_buckets'",
        ),
        (NeuronConfig, {"num_seq_buckets": [1]}, "did you mean 'num_seqs_buckets'"),
        (NeuronConfig, {"mm_language_model_only": True}, "neuron_config ignores unknown keys"),
        (VisionNeuronConfig, {"mm_encoder_only": True}, "'mm_encoder_only'"),
        (
            NeuronConfig,
            {"on_device_sampling_config": {"temperature": 1}},
            "on_device_sampling_config ignores unknown keys: 'temperature'",
        ),
    ],
)
def test_stricter_unknown_config_keys_are_named(
    config_class: Any, config: dict[str, Any], said: str
) -> None:
    """The plugin drops them without a word; a typing error would go unnoticed."""
    with pytest.warns(UserWarning, match=said):
        config_class.from_dict(config)


def test_known_config_keys_are_silent(recwarn: pytest.WarningsRecorder) -> None:
    VisionNeuronConfig.from_dict({"num_vision_tokens_buckets": [2048], "tp_size": 2})
    NeuronConfig.from_dict({"on_device_sampling_config": {"all_greedy": True}})
    assert not list(recwarn)


def test_both_roles_at_once_are_refused() -> None:
    config = VisionNeuronConfig()
    with pytest.raises(ValueError, match="exclude one another"):
        config.set_construction_role(
            SimpleNamespace(mm_encoder_only=True), {"mm_language_model_only": True}
        )
    assert config.encoder_cache_min_hold_time_ms is None and not config.mm_encoder_only


def test_tensor_replacement_reads_its_files(tmp_path: Any) -> None:
    (tmp_path / "t.json").write_text('[{"m": [1]}]')
    (tmp_path / "p.json").write_text("[[1, 2]]")
    config = TensorReplacementConfig(
        tensors_path=str(tmp_path / "t.json"), prompt_token_ids_path=str(tmp_path / "p.json")
    )
    assert config.resolve() == ([{"m": [1]}], [[1, 2]])
    assert TensorReplacementConfig(tensors=[{}], prompt_token_ids=[[3]]).resolve() == ([{}], [[3]])


@pytest.mark.parametrize(("kind", "maximum"), [("num_tokens", 4), ("num_seqs_buckets", 0)])
def test_default_buckets_refuse(kind: str, maximum: int) -> None:
    with pytest.raises(ValueError, match=kind):
        default_buckets(kind, maximum)


# --- encoder cache -----------------------------------------------------------------------------


def test_stricter_counts_above_the_block_size_are_refused_on_request() -> None:
    """Off by default: the plugin accepts them and reads back fewer rows."""
    cache = EncoderCacheBlocks(4, 8, 2)
    assert cache.allocate("a", [9]) == [0]
    cache.check_counts = True
    with pytest.raises(ValueError, match=r"must lie in 0\.\.8, got \[8, 9\]"):
        cache.allocate("b", [8, 9])
    assert cache.num_free_blocks == 2
    assert cache.allocate("b", [8, 0]) == [1, 2]


def _feature(identifier: str, offset: int, length: int, mask: Any = None) -> Any:
    position = SimpleNamespace(offset=offset, length=length, is_embed=mask)
    return SimpleNamespace(identifier=identifier, mm_position=position)


def _gather(cache: EncoderCacheBlocks, features: list[Any], strict: bool) -> Any:
    return gather_mm_embeddings(cache, features, 0, 8, 8, 2, strict=strict)


def test_stricter_missing_item_is_an_error_on_request() -> None:
    """Off by default: the plugin skips it, and its placeholders keep their token embeddings."""
    cache = EncoderCacheBlocks(4, 4, 2)
    assert _gather(cache, [_feature("a", 2, 3)], strict=False).block_ids == [3, 3]
    with pytest.raises(KeyError, match="'a' at prompt offset 2"):
        _gather(cache, [_feature("a", 2, 3)], strict=True)
    # Not wanted by this prefill: no error.
    assert _gather(cache, [_feature("a", 8, 3)], strict=True).block_ids == [3, 3]


def test_stricter_too_few_rows_are_an_error_on_request() -> None:
    cache = EncoderCacheBlocks(4, 4, 2)
    cache.allocate("a", [2])
    assert _gather(cache, [_feature("a", 2, 3)], strict=False).block_ids == [0, 3]
    with pytest.raises(ValueError, match="2 cached rows for 3 places"):
        _gather(cache, [_feature("a", 2, 3)], strict=True)
    mask = torch.tensor([True, False, True])
    assert _gather(cache, [_feature("a", 2, 3, mask)], strict=True).block_ids == [0, 3]


# --- registry and protocols --------------------------------------------------------------------


class Factory:
    @classmethod
    def get_vision_token_merge_factor(cls, hf_config: Any) -> int:
        return hf_config.merge**2

    @classmethod
    def get_max_pixels_token_count(cls, hf_config: Any, max_pixels: int) -> int:
        return max_pixels // 256


def _config(architecture: str | None) -> Any:
    return SimpleNamespace(architectures=architecture and [architecture], merge=2)


def test_the_standin_brings_no_models() -> None:
    # A fresh copy: a package that another test registered stays in the imported one.
    assert registry.__spec__ is not None
    untouched = importlib.util.module_from_spec(registry.__spec__)
    registry.__spec__.loader.exec_module(untouched)
    assert untouched.get_models() == []


def test_an_out_of_tree_package_extends_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replacing the module attribute is enough, although vision_utils was imported before."""
    known = registry.get_models
    monkeypatch.setattr(registry, "get_models", lambda: [*known(), ("New", Factory), ("Old", int)])
    assert vision_utils.get_vision_token_merge_factor(_config("New")) == 4
    assert vision_utils.get_max_pixels_token_count(_config("New"), 1024) == 4
    for architecture in ("Old", "Unknown", None):
        assert vision_utils.get_vision_token_merge_factor(_config(architecture)) == 1
        assert vision_utils.get_max_pixels_token_count(_config(architecture), 1024) is None


@pytest.mark.parametrize("name", interfaces.__all__)
def test_protocols_look_for_their_member(name: str) -> None:
    protocol = getattr(interfaces, name)
    member = {
        "SupportsDisaggEncoder": "get_epd_kwargs",
        "SupportsMRoPE": "get_mrope_input_positions",
        "SupportsMaxPixels": "get_max_pixels_token_count",
        "SupportsSpatialMerge": "get_vision_token_merge_factor",
        "SupportsVisionWarmup": "build_vision_synthetic_inputs",
    }[name]
    having = type("Having", (), {member: lambda self: None})
    assert isinstance(having(), protocol) and issubclass(having, protocol)
    assert not isinstance(object(), protocol) and not issubclass(object, protocol)


# --- environment -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variables", "device", "expected"),
    [
        ({"VLLM_NEURON_CPU_MODE": "1"}, "cpu", False),
        ({"VLLM_NEURON_CPU_MODE": "1"}, "neuron:0", False),
        ({"VLLM_NEURON_CPU_MODE": "1", "NKI_SIMULATOR": "1"}, "cpu", True),
        (
            {
                "VLLM_NEURON_CPU_MODE": "1",
                "NKI_SIMULATOR": "1",
                "VLLM_NEURON_DISABLE_NKI_KERNELS": "1",
            },
            "cpu",
            False,
        ),
        ({}, "cpu", False),
        ({}, "neuron:0", True),
        ({}, torch.zeros(1), False),
        ({}, torch.zeros(1, device="meta"), True),
    ],
)
def test_can_run_kernel(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], device: Any, expected: bool
) -> None:
    for name in ("VLLM_NEURON_CPU_MODE", "NKI_SIMULATOR", "VLLM_NEURON_DISABLE_NKI_KERNELS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert can_run_kernel(device) is expected


def test_compile_backend_traces_the_whole_graph() -> None:
    def branches_on_a_value(x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x

    backend = envs.get_compile_backend_name()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(branches_on_a_value, fullgraph=True, backend=backend)(torch.ones(2))


def test_recompiling_after_warm_up_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_NEURON_CPU_MODE", "1")
    compiled = torch.compile(
        lambda x: x + 1, fullgraph=True, backend=envs.get_compile_backend_name(), dynamic=False
    )
    compiled(torch.ones(2))
    eager = SimpleNamespace(model_config=SimpleNamespace(enforce_eager=True))
    graphs = SimpleNamespace(model_config=SimpleNamespace(enforce_eager=False))
    with model_forward_context(graphs):
        assert compiled(torch.ones(2)).tolist() == [2.0, 2.0]
        with pytest.raises(RuntimeError, match="recompil"):
            compiled(torch.ones(3))
    with model_forward_context(eager):
        assert compiled(torch.ones(3)).shape == (3,)


def test_environment_names() -> None:
    assert "VLLM_NEURON_CPU_MODE" in dir(envs)
    assert envs.VLLM_NEURON_BARRIER_TIMEOUT == 3600
    with pytest.raises(AttributeError, match="VLLM_NEURON_NOTHING"):
        _ = envs.VLLM_NEURON_NOTHING
