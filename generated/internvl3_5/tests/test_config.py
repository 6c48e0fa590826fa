"""What the configuration accepts, and what it refuses with which words."""

import pytest
import torch
from vllm_neuron.model.neuron_config import NeuronConfig, VisionNeuronConfig
from vllm_neuron_internvl3_5.config import (
    ARCHITECTURE,
    InternVLConfig,
    InternVLConfigError,
    next_block_size,
)
from vllm_neuron_internvl3_5.factory import InternVLForConditionalGeneration

from .support import neuron_configs, tiny_config


def raw_config(**changes) -> dict:
    raw = tiny_config().to_dict()
    raw["architectures"] = [ARCHITECTURE]
    for path, value in changes.items():
        section, _, name = path.rpartition("__")
        target = raw[section] if section else raw
        if value is ...:
            target.pop(name, None)
        else:
            target[name] = value
    return raw


def refusal(raw, **neuron) -> str:
    with pytest.raises(InternVLConfigError) as caught:
        InternVLConfig.from_configs(raw, **neuron)
    return str(caught.value)


def test_defaults_are_those_of_a_published_checkpoint():
    text, vision = InternVLConfig().text_config, InternVLConfig().vision_config
    assert (text.hidden_size, text.num_hidden_layers) == (4096, 36)
    assert (vision.hidden_size, vision.depth) == (1024, 24)
    assert vision.fat_width == 4096


def test_both_call_forms_give_the_same_configuration():
    neuron = NeuronConfig()
    by_position = InternVLConfig.from_configs(tiny_config(), neuron)
    by_keyword = InternVLConfig.from_configs(
        hf_config=tiny_config(), text_neuron_config=neuron, vision_neuron_config=None
    )
    assert by_position == by_keyword
    assert by_position.text_config.neuron_config is neuron


def old_rope() -> dict:
    """The rotary settings as older files state them."""
    rope = dict(raw_config()["text_config"]["rope_parameters"])
    old = {name: rope.pop(name) for name in ["rope_theta"]}
    return {**old, "rope_scaling": None}


def test_old_and_new_rope_forms_parse_alike():
    new = InternVLConfig.from_configs(raw_config())
    old = {f"text_config__{name}": value for name, value in old_rope().items()}
    assert InternVLConfig.from_configs(raw_config(text_config__rope_parameters=..., **old)) == new
    assert new.text_config.rope_theta == old_rope()["rope_theta"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": [ARCHITECTURE.upper()]}, "case-sensitive"),
        ({"model_type": "llava"}, "model_type is 'llava'"),
        ({"text_config__model_type": "llama"}, "text.model_type"),
        ({"text_config__hidden_act": "gelu"}, "text.mlp.activation"),
        ({"text_config__attention_bias": True}, "text.attention.qkv_bias"),
        ({"text_config__use_sliding_window": True}, "use_sliding_window is True"),
        (
            {"text_config__layer_types": ["full_attention", "sliding_attention"]},
            "attends to the whole sequence",
        ),
        ({"text_config__hidden_size": "128"}, "positive integer"),
        ({"vision_config__hidden_act": "relu"}, "vision.mlp.activation"),
        ({"vision_config__attention_bias": False}, "vision.attention.qkv_bias"),
        ({"vision_config__use_qk_norm": True}, "vision.attention.qk_norm"),
        ({"vision_config__norm_type": "relu"}, "vision.norm.kind"),
        ({"vision_config__use_absolute_position_embeddings": False}, "vision.position"),
        ({"vision_config__use_mask_token": True}, "vision.patch_embed"),
        ({"vision_config__deepstack_visual_indexes": [7]}, "vision.deepstack"),
        ({"vision_config__fullatt_block_indexes": [7]}, "vision.attention.window"),
        ({"vision_config__window_size": [7]}, "vision.attention.window"),
        ({"vision_config__image_size": [84, 70]}, "vision_config.image_size is [84, 70]"),
        ({"vision_config__image_size": 42}, "a tile has 3 x 3 patches"),
        ({"downsample_ratio": 0.3}, "downsample_ratio is 0.3"),
        ({"projector_hidden_act": "relu"}, "vision.merger.activation"),
        ({"vision_feature_layer": -2}, "vision_feature_layer is -2"),
        ({"vision_feature_select_strategy": "full"}, "vision.class_token"),
    ],
)
def test_a_contradiction_names_the_field(changes, words):
    assert words in refusal(raw_config(**changes))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mrope_section": [12, 10, 9]}, "['mrope_section'] are not known"),
        ({"partial_rotary_factor": 0.75}, "partial_rotary_factor is 0.75"),
        ({"rope_type": "yarn"}, "['yarn'] is not implemented"),
        ({"factor": 4.0}, "['factor'] are not known"),
        ({"rope_theta": None}, "the base must be stated"),
    ],
)
def test_every_rope_setting_is_used_or_refused(change, words):
    rope = {**raw_config()["text_config"]["rope_parameters"], **change}
    rope = {name: value for name, value in rope.items() if value is not None}
    changes = {"text_config__rope_parameters": rope, "text_config__rope_theta": ...}
    assert words in refusal(raw_config(**changes))


def test_all_problems_are_reported_at_once():
    message = refusal(raw_config(text_config__hidden_act="gelu", vision_config__hidden_act="relu"))
    assert "text.mlp.activation" in message and "vision.mlp.activation" in message


def test_the_towers_sizes_are_read_where_the_checkpoint_states_them():
    raw = tiny_config().to_dict()
    stated, vision = raw["vision_config"], InternVLConfig.from_configs(raw).vision_config
    assert vision.hidden_size == stated["hidden_size"]
    assert vision.depth == stated["num_hidden_layers"]
    assert vision.num_heads == stated["num_attention_heads"]
    assert vision.intermediate_size == stated["intermediate_size"]
    assert vision.out_hidden_size == raw["text_config"]["hidden_size"]
    side = tiny_config().vision_config.image_size[0] // vision.patch_size
    assert vision.position_grid_side == side and vision.num_position_embeddings == side**2 + 1
    other = InternVLConfig.from_configs(raw_config(vision_config__layer_norm_eps=0.5)).vision_config
    assert other.layer_norm_eps == 0.5


@pytest.mark.parametrize(("block", "legal"), [(100, 128), (130, 256), (2047, 2048)])
def test_block_size_must_be_a_multiple_of_128(block, legal):
    vision = VisionNeuronConfig(vision_attention_block_size=block)
    message = refusal(raw_config(), vision_neuron_config=vision)
    assert str(block) in message and f"next legal value is {legal}" in message
    assert next_block_size(block, 4) == legal


def test_quantization_is_refused():
    message = refusal(raw_config(), neuron_config=NeuronConfig(quantization="mxfp8"))
    assert "'mxfp8'" in message and "'bf16'" in message


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
def test_dtype_is_read_under_either_name(name):
    raw = raw_config(dtype=..., torch_dtype=..., text_config__dtype=..., vision_config__dtype=...)
    raw[name] = "float32"
    config = InternVLConfig.from_configs(raw)
    assert config.text_config.dtype == config.vision_config.dtype == torch.float32


def test_illegal_tensor_parallel_sizes_name_the_legal_ones():
    text = InternVLConfig().text_config
    assert text.tp_problems(3) and not text.tp_problems(2)
    assert text.legal_tp_sizes() == [1, 2, 4, 8, 16]
    assert InternVLConfig().vision_config.legal_tp_sizes() == [1, 2, 4, 8, 16]


def test_vision_split_must_fill_the_world():
    neuron = neuron_configs()
    neuron["vision_neuron_config"].dp_size = 3
    with pytest.raises(InternVLConfigError, match="must equal the world size 1"):
        InternVLForConditionalGeneration.from_configs(hf_config=tiny_config(), **neuron)


def test_factory_answers_what_the_platform_asks():
    config = tiny_config()
    assert InternVLForConditionalGeneration.get_vision_token_merge_factor(config) == 4
    assert InternVLForConditionalGeneration.get_epd_kwargs(
        {"video_num_patches": 1, "other": 2}
    ) == {"video_num_patches": 1}
