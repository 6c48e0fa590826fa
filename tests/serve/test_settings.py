"""Settings that the plugin refuses are refused when the engine is configured."""

from __future__ import annotations

import copy

import pytest

from vlmgen.standin.vllm_plugins import PLATFORM_CLASS

LENGTH, SEQS = 512, 4
GOOD = {
    "neuron_config": {"num_batched_tokens_buckets": [128, 512], "num_seqs_buckets": [1, 4]},
    "vision_neuron_config": {
        "vision_attention_block_size": 256,
        "num_vision_tokens_buckets": [256, 1024],
    },
}


@pytest.fixture(scope="module", autouse=True)
def registered(package):
    from vlmgen.validate.package import import_package

    import_package(package).register()


@pytest.fixture
def configure(checkpoint):
    from vllm.engine.arg_utils import EngineArgs

    def build(additional=GOOD, **changes):
        options = {
            "model": str(checkpoint),
            "dtype": "float32",
            "max_model_len": LENGTH,
            "max_num_batched_tokens": LENGTH,
            "max_num_seqs": SEQS,
            "enable_prefix_caching": False,
            "additional_config": copy.deepcopy(additional),
        }
        return EngineArgs(**{**options, **changes}).create_engine_config()

    return build


def edited(part, **changes):
    config = copy.deepcopy(GOOD)
    config[part].update(changes)
    return config


def test_the_platform_is_the_stand_ins():
    from vllm.platforms import current_platform

    assert PLATFORM_CLASS.endswith(type(current_platform).__name__)
    assert current_platform.device_name == "neuron-standin"


def test_good_settings_are_taken(configure):
    config = configure()
    assert config.scheduler_config.scheduler_cls.endswith("NeuronScheduler")
    assert config.parallel_config.worker_cls.endswith("NeuronWorker")
    assert config.cache_config.block_size == 32
    assert config.additional_config["neuron_config"]["num_seqs_buckets"] == [1, 4]


def test_buckets_are_filled_in_and_a_second_pass_changes_nothing(configure):
    from vllm.platforms import current_platform

    config = configure({"vision_neuron_config": {"vision_attention_block_size": 256}})
    first = copy.deepcopy(config.additional_config)
    assert first["neuron_config"]["num_batched_tokens_buckets"] == [128, 256, 512]
    assert first["vision_neuron_config"]["num_vision_tokens_buckets"] == [256]
    current_platform.check_and_update_config(config)
    assert config.additional_config == first


def test_a_derived_list_survives_the_second_pass(configure):
    from vllm.platforms import current_platform

    given = {"vision_attention_block_size": 256, "max_vision_seq_len": 1024}
    config = configure({"vision_neuron_config": given})
    first = copy.deepcopy(config.additional_config)
    assert first["vision_neuron_config"]["num_vision_tokens_buckets"] == [256, 512, 1024]
    current_platform.check_and_update_config(config)
    assert config.additional_config == first


def test_no_copy_of_an_item_is_in_the_engine(configure):
    from vllm.multimodal import cache

    config = configure()
    assert cache.engine_receiver_cache_from_config(config) is None
    kept = cache.processor_cache_from_config(config)
    assert type(kept).__name__ == "MultiModalProcessorOnlyCache"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"enable_prefix_caching": True}, ("prefix caching", "--no-enable-prefix-caching")),
        ({"max_num_batched_tokens": 256}, ("chunks", "--max-num-batched-tokens 512")),
        ({"scheduling_policy": "priority"}, ("priority", "fcfs")),
        ({"block_size": 48}, ("block_size 48", "[8, 16, 32, 64, 128]")),
        ({"kv_cache_dtype": "fp8"}, ("fp8", "auto")),
        ({"quantization": "fp8"}, ("quantization",)),
        ({"enable_prompt_embeds": True}, ("enable_prompt_embeds", "token ids")),
        ({"mm_processor_cache_type": "shm"}, ("mm_processor_cache_type 'shm'", "leave it out")),
        ({"long_prefill_token_threshold": 64}, ("long_prefill_token_threshold 64", "legal is 0")),
        ({"data_parallel_size": 2}, ("data_parallel_size 2", "legal is 1")),
        (
            {
                "max_model_len": 20000,
                "max_num_batched_tokens": 20000,
                "hf_overrides": {"text_config": {"max_position_embeddings": 20000}},
            },
            ("max_model_len 20000", "16384"),
        ),
    ],
)
def test_engine_settings_are_refused_with_the_legal_value(configure, changes, words):
    with pytest.raises(ValueError) as caught:
        configure(**changes)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("additional", "words"),
    [
        ({**GOOD, "neuron_confg": {}}, ("neuron_confg", "'neuron_config'")),
        (edited("neuron_config", num_seq_buckets=[4]), ("num_seq_buckets", "num_seqs_buckets")),
        (
            edited("vision_neuron_config", vision_block_size=256),
            ("vision_block_size", "vision_attention_block_size"),
        ),
        (edited("neuron_config", quantization="int3"), ("int3", "bf16")),
        (
            edited("neuron_config", num_batched_tokens_buckets=[512, 128]),
            ("ascending", "[128, 512]"),
        ),
        (edited("neuron_config", num_batched_tokens_buckets=[128, 256]), ("must end in 512",)),
        (edited("neuron_config", num_seqs_buckets=[1, 2]), ("must end in 4", "max_num_seqs")),
        (edited("neuron_config", num_seqs_buckets=[0, 4]), ("positive integers",)),
        (edited("neuron_config", num_seqs_buckets=["4"]), ("positive integers",)),
        (
            edited("vision_neuron_config", num_vision_tokens_buckets=[1024, 256]),
            ("ascending", "[256, 1024]"),
        ),
        (
            edited("vision_neuron_config", num_vision_tokens_buckets=[128]),
            ("below vision_attention_block_size", "at least 256"),
        ),
        (
            edited("vision_neuron_config", vision_attention_block_size=254),
            ("254", "merge area 4"),
        ),
        (edited("vision_neuron_config", tp_size=2), ("cannot be divided",)),
        (edited("neuron_config", kv_segment_size_buckets=[128]), ("kv_segment_size_buckets",)),
        (
            {**GOOD, "mm_language_model_only": True},
            ("disaggregated encoder", "both towers"),
        ),
    ],
)
def test_additional_config_is_refused_with_the_legal_value(configure, additional, words):
    with pytest.raises(ValueError) as caught:
        configure(additional)
    for word in words:
        assert word in str(caught.value)


def test_a_block_below_the_largest_item_is_refused(configure):
    # 1024 x 1024 pixels are 4096 patches; the block grows, and the explicit bucket is too small.
    with pytest.raises(ValueError, match="below vision_attention_block_size 4096"):
        configure(mm_processor_kwargs={"max_pixels": 1024 * 1024})


def test_the_v2_runner_is_refused(configure, monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    with pytest.raises(ValueError, match="VLLM_USE_V2_MODEL_RUNNER"):
        configure()


def test_an_architecture_without_a_package_is_refused(configure, monkeypatch):
    from vllm_neuron.model import registry

    monkeypatch.setattr(registry, "get_models", lambda: [])
    with pytest.raises(ValueError, match="no package serves it"):
        configure()
