"""Registration with vLLM and with the plugin's own table."""

import pytest
from vllm_neuron.model import registry
from vllm_neuron.model.interfaces import (
    SupportsMaxPixels,
    SupportsMRoPE,
    SupportsSpatialMerge,
    SupportsVisionWarmup,
)
from vllm_neuron.utils.vision_utils import get_vision_token_merge_factor
from vllm_neuron_glm4v_moe import ARCHITECTURE, register
from vllm_neuron_glm4v_moe.factory import Glm4vMoeForConditionalGeneration

from .support import tiny_config


@pytest.fixture
def plain_table(monkeypatch):
    """The plugin's table as it was, restored afterwards."""
    monkeypatch.setattr(registry, "get_models", registry.get_models)


def test_the_plugins_table_holds_the_factory_once(plain_table):
    register()
    register()
    assert [cls for name, cls in registry.get_models() if name == ARCHITECTURE] == [
        Glm4vMoeForConditionalGeneration
    ]


def test_the_plugin_finds_the_merge_factor(plain_table):
    register()
    assert get_vision_token_merge_factor(tiny_config()) == 4


def test_another_packages_entry_stays(plain_table, monkeypatch):
    monkeypatch.setattr(registry, "get_models", lambda: [("OtherModel", dict)])
    register()
    assert ("OtherModel", dict) in registry.get_models() and len(registry.get_models()) == 2


def test_vllm_takes_the_factory_for_a_generative_multimodal_model(plain_table):
    from vllm import ModelRegistry

    register()
    info = ModelRegistry.models[ARCHITECTURE].inspect_model_cls()
    assert info.is_text_generation_model and info.supports_multimodal
    assert ModelRegistry.models[ARCHITECTURE].load_model_cls() is Glm4vMoeForConditionalGeneration


def test_the_multimodal_processor_is_vllms_own():
    from vllm.model_executor.models.glm4_1v import Glm4vMoeForConditionalGeneration as Upstream

    assert Glm4vMoeForConditionalGeneration._processor_factory is Upstream._processor_factory


def test_a_missing_processor_is_an_error_and_not_text_only(monkeypatch):
    from vllm.model_executor.models.glm4_1v import Glm4vMoeForConditionalGeneration as Upstream

    monkeypatch.delattr(Upstream, "_processor_factory")
    with pytest.raises(RuntimeError, match="no multimodal processor"):
        hasattr(Glm4vMoeForConditionalGeneration, "_processor_factory")


def test_protocols_of_the_plugin(model):
    assert isinstance(model, SupportsVisionWarmup) and isinstance(model, SupportsMRoPE)
    assert issubclass(Glm4vMoeForConditionalGeneration, SupportsSpatialMerge)
    assert issubclass(Glm4vMoeForConditionalGeneration, SupportsMaxPixels)
