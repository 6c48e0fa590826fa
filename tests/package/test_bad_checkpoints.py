"""Configurations, checkpoints and vision inputs that the generated Qwen3-VL package refuses.

Every case ends in a message that says what is wrong, where, and what would be legal, with nothing
loaded (the model is still on meta) and nothing allocated (the encoder cache is as it was).
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from vllm_neuron.model.neuron_config import NeuronConfig, VisionNeuronConfig
from vllm_neuron.vllm.worker.encoder_cache_blocks import EncoderCacheBlocks
from vllm_neuron_qwen3_vl import factory as package_factory
from vllm_neuron_qwen3_vl.config import PUBLISHED_SIZES, Qwen3VLConfig, Qwen3VLConfigError
from vllm_neuron_qwen3_vl.factory import Qwen3VLForConditionalGeneration
from vllm_neuron_qwen3_vl.utils.block_packing import VisionInputError
from vllm_neuron_qwen3_vl.weight_loaders import CheckpointError

Change = Callable[[dict[str, Any]], Any]


def config_of(folder: Path) -> dict[str, Any]:
    """A checkpoint's config.json."""
    return json.loads((folder / "config.json").read_text())


def build(config: Any, block: int = 256, buckets: tuple[int, ...] = (256, 1024)) -> torch.nn.Module:
    """The model on the meta device, as the runner builds it."""
    with torch.device("meta"):
        return Qwen3VLForConditionalGeneration.from_configs(
            hf_config=config,
            text_neuron_config=NeuronConfig(on_device_sampling_config=None),
            vision_neuron_config=VisionNeuronConfig(
                vision_attention_block_size=block, num_vision_tokens_buckets=list(buckets)
            ),
        )


def refusal(call: Callable[[], Any], error: type[Exception]) -> str:
    """The message of a refusal; everything the package raises on purpose is of one of its types."""
    with pytest.raises(error) as caught:
        call()
    return str(caught.value)


# --------------------------------------------------------------------------------- configuration


def _text(**changes: Any) -> Change:
    return lambda raw: raw["text_config"].update(changes)


def _vision(**changes: Any) -> Change:
    return lambda raw: raw["vision_config"].update(changes)


def _rope(**changes: Any) -> Change:
    return lambda raw: raw["text_config"]["rope_parameters"].update(changes)


# What is changed in a good config.json, and what the message says.
CONFIGS: dict[str, tuple[Change, list[str]]] = {
    "architecture differs in case": (
        lambda raw: raw.update(architectures=["Qwen3vlForConditionalGeneration"]),
        ["Qwen3vlForConditionalGeneration", "'Qwen3VLForConditionalGeneration'", "case-sensitive"],
    ),
    "other architecture": (
        lambda raw: raw.update(architectures=["Qwen3VLMoeForConditionalGeneration"]),
        ["Qwen3VLMoeForConditionalGeneration", "this package implements"],
    ),
    "other model type": (
        lambda raw: raw.update(model_type="qwen2_5_vl"),
        ["model_type is 'qwen2_5_vl'", "'qwen3_vl'"],
    ),
    "no text tower": (lambda raw: raw.pop("text_config"), ["text_config is missing"]),
    "no vision tower": (lambda raw: raw.pop("vision_config"), ["vision_config is missing"]),
    "sections of another sum": (
        _rope(mrope_section=[12, 10, 8]),
        ["[12, 10, 8]", "sum 30", "head_dim 64, that is 32"],
    ),
    "two sections": (_rope(mrope_section=[16, 16]), ["[16, 16]", "three sections"]),
    "contiguous sections": (
        _rope(mrope_interleaved=False),
        ["mrope_interleaved is False", "text.rope.order", "interleaved"],
    ),
    "unknown rope key": (_rope(factor=4.0), ["rope settings ['factor']", "not known"]),
    "yarn": (_rope(rope_type="yarn"), ["'yarn'", "legal: 'default', 'mrope'"]),
    "partial rotation": (
        _rope(partial_rotary_factor=0.5),
        ["partial_rotary_factor is 0.5", "says 1.0"],
    ),
    "no rotary base": (
        lambda raw: raw["text_config"]["rope_parameters"].pop("rope_theta"),
        ["text_config.rope_theta is absent", "must be stated"],
    ),
    "two rotary bases": (
        lambda raw: raw.update(rope_theta=10000.0),
        ["contradict", "10000.0", "5000000.0", "state them once"],
    ),
    "deepstack beyond the depth": (
        _vision(deepstack_visual_indexes=[0, 1, 4]),
        ["[0, 1, 4]", "0 .. 3", "depth 4"],
    ),
    "deepstack not rising": (
        _vision(deepstack_visual_indexes=[2, 0, 1]),
        ["[2, 0, 1]", "must rise"],
    ),
    "no deepstack": (_vision(deepstack_visual_indexes=[]), ["is empty", "vision.deepstack"]),
    "more levels than layers": (
        _text(num_hidden_layers=2),
        ["3 deepstack levels", "num_hidden_layers is 2"],
    ),
    "another text activation": (
        _text(hidden_act="gelu"),
        ["text_config.hidden_act is 'gelu'", "text.mlp.activation", "'silu'"],
    ),
    "another vision activation": (
        _vision(hidden_act="gelu"),
        ["vision_config.hidden_act is 'gelu'", "'gelu_pytorch_tanh'"],
    ),
    "attention bias": (_text(attention_bias=True), ["attention_bias is True", "False"]),
    "widths that do not meet": (
        _vision(out_hidden_size=64),
        ["out_hidden_size is 64", "text_config.hidden_size 128"],
    ),
    "KV heads that do not divide": (
        _text(num_key_value_heads=3),
        ["num_attention_heads 4", "num_key_value_heads 3"],
    ),
    "table that is no square": (
        _vision(num_position_embeddings=65),
        ["num_position_embeddings 65", "square"],
    ),
    "size that is no number": (
        _text(intermediate_size="192"),
        ["text_config.intermediate_size is '192'", "positive integer"],
    ),
    "quantised checkpoint": (
        lambda raw: raw.update(quantization_config={"quant_method": "fp8"}),
        ["quantization_config", "'fp8'", "unquantised"],
    ),
    "quantised vision tower": (
        _vision(quantization_config={"quant_method": "awq"}),
        ["quantization_config", "'awq'"],
    ),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_configurations_that_are_refused(case: str, tiny: Path) -> None:
    change, said = CONFIGS[case]
    raw = config_of(tiny)
    Qwen3VLConfig.from_configs(copy.deepcopy(raw))  # as it was, it is accepted
    change(raw)
    message = refusal(lambda: build(raw), Qwen3VLConfigError)
    assert all(part in message for part in said), message
    assert message.count("\n  - ") == 1, f"one fault, one line:\n{message}"


def test_all_faults_of_a_configuration_are_told_at_once(tiny: Path) -> None:
    raw = config_of(tiny)
    _rope(mrope_section=[1, 2, 3])(raw)
    _vision(deepstack_visual_indexes=[9])(raw)
    _text(hidden_act="relu")(raw)
    message = refusal(lambda: build(raw), Qwen3VLConfigError)
    assert message.count("\n  - ") == 3
    assert all(part in message for part in ("[1, 2, 3]", "[9]", "'relu'"))


@pytest.mark.parametrize(
    "name", ["Qwen2_5_VLConfig", "Qwen2VLConfig", "Qwen3VLMoeConfig", "Qwen3Config", "LlamaConfig"]
)
def test_configurations_of_other_families_are_refused(name: str) -> None:
    other = getattr(transformers, name)()
    message = refusal(lambda: build(other), Qwen3VLConfigError)
    assert f"model_type is {other.model_type!r}" in message and "'qwen3_vl'" in message
    assert "mrope_section" not in message, "the other fields would only add noise"


def test_a_configuration_that_was_never_published_is_noted(
    tiny: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="vllm_neuron_qwen3_vl.config"):
        Qwen3VLConfig.from_configs(config_of(tiny))
        assert "equals no published checkpoint" in caplog.text
        caplog.clear()
        raw = config_of(tiny)
        hidden, layers, width, depth = next(iter(PUBLISHED_SIZES))
        raw["text_config"] |= {"hidden_size": hidden, "num_hidden_layers": layers}
        raw["vision_config"] |= {
            "hidden_size": width,
            "depth": depth,
            "out_hidden_size": hidden,
        }
        Qwen3VLConfig.from_configs(raw)
        assert not caplog.text


# ----------------------------------------------------------------------- Neuron configuration, TP


def test_unsupported_quantization_names_the_legal_values(tiny: Path) -> None:
    neuron = NeuronConfig(quantization="fp8")
    message = refusal(
        lambda: Qwen3VLForConditionalGeneration.from_configs(config_of(tiny), neuron),
        Qwen3VLConfigError,
    )
    assert "neuron_config.quantization is 'fp8'" in message
    assert "only None and 'bf16' are legal" in message
    Qwen3VLConfig.from_configs(config_of(tiny), NeuronConfig(quantization="bf16"))


@pytest.mark.parametrize(("block", "legal"), [(100, 128), (200, 256), (2047, 2048)])
def test_block_sizes_are_multiples_of_128(block: int, legal: int, tiny: Path) -> None:
    message = refusal(
        lambda: build(config_of(tiny), block=block, buckets=(4096,)), Qwen3VLConfigError
    )
    assert f"vision_attention_block_size is {block}" in message
    assert "multiple of 128" in message and f"next legal value is {legal}" in message
    build(config_of(tiny), block=legal, buckets=(4096,))


def test_buckets_are_whole_merge_windows(tiny: Path) -> None:
    message = refusal(
        lambda: build(config_of(tiny), block=256, buckets=(256, 1022)), Qwen3VLConfigError
    )
    assert "num_vision_tokens_buckets: 1022" in message and "merge area 4" in message


# Text sizes of the tiny family: 4 heads, 2 KV heads, MLP 192. Of vision: 4 heads, MLP 96.
TP = {
    3: ["num_attention_heads 4 is not divisible by 3", "legal sizes: [1, 2]"],
    4: ["1 attention heads per rank: the number must be even", "legal sizes: [1, 2]"],
    5: ["4 is not divisible by 5", "2: neither divides 5", "192 is not divisible by 5"],
}


@pytest.mark.parametrize("tp_size", TP)
def test_tensor_parallel_sizes_that_do_not_divide(
    tp_size: int, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = SimpleNamespace(world_size=tp_size)
    monkeypatch.setattr(package_factory, "get_tp_group", lambda: group)
    message = refusal(
        lambda: Qwen3VLForConditionalGeneration.from_configs(config_of(tiny), NeuronConfig()),
        Qwen3VLConfigError,
    )
    assert f"tensor-parallel size {tp_size}" in message
    assert all(part in message for part in TP[tp_size]), message


def test_vision_split_must_divide_and_fill_the_world(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(package_factory, "get_tp_group", lambda: SimpleNamespace(world_size=2))
    vision = VisionNeuronConfig(tp_size=3, dp_size=1)
    message = refusal(
        lambda: Qwen3VLForConditionalGeneration.from_configs(
            hf_config=config_of(tiny),
            text_neuron_config=NeuronConfig(),
            vision_neuron_config=vision,
        ),
        Qwen3VLConfigError,
    )
    assert "vision tensor-parallel size 3" in message
    assert "vision num_heads 4 is not divisible by 3" in message
    assert "legal sizes: [1, 2, 4]" in message
    assert "tp_size 3 x dp_size 1 = 3" in message and "world size 2" in message


def test_prefill_buckets_must_be_shared_by_the_ranks(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(package_factory, "get_tp_group", lambda: SimpleNamespace(world_size=2))
    neuron = NeuronConfig(num_batched_tokens_buckets=[128, 255])
    message = refusal(
        lambda: Qwen3VLForConditionalGeneration.from_configs(config_of(tiny), neuron),
        Qwen3VLConfigError,
    )
    assert "num_batched_tokens_buckets: 255" in message and "size 2" in message
    assert "128" not in message


# ----------------------------------------------------------------------------------- checkpoints

MERGER = "model.visual.merger.linear_fc1.weight"
QUERY = "model.language_model.layers.3.self_attn.q_proj.weight"


def _tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def _missing(folder: Path) -> None:
    _tensors(folder, lambda tensors: [tensors.pop(key) for key in (MERGER, QUERY)])


def _extra(folder: Path) -> None:
    _tensors(folder, lambda tensors: tensors.update({"model.visual.extra.weight": torch.ones(1)}))


def _misnamed(folder: Path) -> None:
    _tensors(folder, lambda tensors: tensors.update({"visual.oops": tensors.pop(MERGER)}))


def _narrow_query(folder: Path) -> None:
    _tensors(folder, lambda tensors: tensors.update({QUERY: tensors[QUERY][:-64].clone()}))


def _long_vocabulary(folder: Path) -> None:
    key = "model.language_model.embed_tokens.weight"
    _tensors(folder, lambda tensors: tensors.update({key: torch.ones(330, 128)}))


def _wide_merger(folder: Path) -> None:
    _tensors(folder, lambda tensors: tensors.update({MERGER: torch.ones(256, 260)}))


def _truncated(folder: Path) -> None:
    path = folder / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def _empty_file(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def _pointer(folder: Path) -> None:
    text = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"
    (folder / "model.safetensors").write_bytes(text)


def _no_file(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def _no_head(folder: Path) -> None:
    _tensors(folder, lambda tensors: tensors.pop("lm_head.weight"))


def _float8(folder: Path) -> None:
    _tensors(folder, lambda t: t.update({MERGER: t[MERGER].to(torch.float8_e4m3fn)}))


def _int8(folder: Path) -> None:
    _tensors(folder, lambda t: t.update({QUERY: t[QUERY].to(torch.int8)}))


CHECKPOINTS: dict[str, tuple[Callable[[Path], None], type[Exception], list[str]]] = {
    "missing keys": (_missing, CheckpointError, ["missing (2)", MERGER, QUERY, "unknown (0)"]),
    "extra key": (
        _extra,
        CheckpointError,
        ["missing (0): none", "unknown (1): model.visual.extra.weight"],
    ),
    "misnamed key": (
        _misnamed,
        CheckpointError,
        [f"missing (1): {MERGER}", "unknown (1): visual.oops", "'nested'"],
    ),
    "text matrix too short": (_narrow_query, CheckpointError, [QUERY, "(192, 128)", "(256, 128)"]),
    "vocabulary too long": (
        _long_vocabulary,
        CheckpointError,
        ["embed_tokens.weight", "(330, 128)", "(320, 128)"],
    ),
    "vision matrix too wide": (_wide_merger, CheckpointError, [MERGER, "(256, 260)", "(256, 256)"]),
    "truncated file": (_truncated, RuntimeError, ["model.safetensors", "cut short"]),
    "empty file": (_empty_file, RuntimeError, ["model.safetensors", "0 bytes"]),
    "pointer instead of a file": (_pointer, RuntimeError, ["model.safetensors", "Git LFS"]),
    "no file": (_no_file, FileNotFoundError, ["safetensors"]),
    "untied head that is not there": (
        _no_head,
        CheckpointError,
        ["tie_word_embeddings is false", "'lm_head.weight'", "config.json"],
    ),
    "vision tensor in float8": (_float8, CheckpointError, [MERGER, "float8_e4m3fn", "quantised"]),
    "one of three fused tensors in int8": (_int8, CheckpointError, [QUERY, "int8", "quantised"]),
}


def assert_not_loaded(model: torch.nn.Module) -> None:
    """Every parameter is still on the meta device: nothing was loaded, not even in part."""
    loaded = [name for name, parameter in model.named_parameters() if not parameter.is_meta]
    assert not loaded, f"{len(loaded)} parameters were loaded, first {loaded[0]}"


@pytest.mark.parametrize("case", CHECKPOINTS)
def test_checkpoints_that_are_refused(case: str, tiny: Path, tmp_path: Path) -> None:
    spoil, error, said = CHECKPOINTS[case]
    folder = tmp_path / "checkpoint"
    shutil.copytree(tiny, folder)
    spoil(folder)
    model = build(config_of(folder))
    message = refusal(lambda: model.load_weights(str(folder), torch.device("cpu"), None), error)
    assert all(part in message for part in said), message
    assert_not_loaded(model)


def test_a_refused_model_can_still_be_loaded(tiny: Path, tmp_path: Path) -> None:
    """Loaders are as they were after a refusal in the middle of a tower."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(tiny, folder)
    _wide_merger(folder)
    model = build(config_of(folder))
    refusal(lambda: model.load_weights(str(folder), torch.device("cpu"), None), CheckpointError)
    model.load_weights(str(tiny), torch.device("cpu"), None)
    assert not any(parameter.is_meta for parameter in model.parameters())


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    from vlmgen.tiny.build import build_tiny

    folder = build_tiny("qwen3_vl", tmp_path / "sharded", max_shard_size=1_000_000)
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 1
    shards[1].unlink()
    model = build(config_of(folder))
    message = refusal(
        lambda: model.load_weights(str(folder), torch.device("cpu"), None), FileNotFoundError
    )
    assert shards[1].name in message and "index" in message
    assert_not_loaded(model)


def test_a_checkpoint_of_another_depth_lists_what_is_left_over(tiny: Path) -> None:
    raw = config_of(tiny)
    raw["text_config"]["num_hidden_layers"] = 3
    model = build(raw)
    message = refusal(
        lambda: model.load_weights(str(tiny), torch.device("cpu"), None), CheckpointError
    )
    assert "missing (0): none" in message and "unknown (11)" in message
    assert "model.language_model.layers.3.input_layernorm.weight" in message
    assert "and 3 more" in message
    assert_not_loaded(model)


def test_a_folder_that_is_not_there(tiny: Path, tmp_path: Path) -> None:
    model = build(config_of(tiny))
    message = refusal(
        lambda: model.load_weights(str(tmp_path / "nowhere"), torch.device("cpu"), None),
        FileNotFoundError,
    )
    assert "nowhere" in message
    assert_not_loaded(model)


# ---------------------------------------------------------------------------------- vision inputs


@pytest.fixture(scope="module")
def loaded(tiny: Path) -> torch.nn.Module:
    """A loaded model with blocks of 128 patches, of which one request can read two."""
    model = build(config_of(tiny), block=128, buckets=(128, 256))
    model.load_weights(str(tiny), torch.device("cpu"), None)
    return model


def cache_of(blocks: int = 8) -> EncoderCacheBlocks:
    """Cache blocks of 32 rows; noise, so that a write anywhere shows."""
    cache = EncoderCacheBlocks(blocks, 32, 128 * 4, dtype=torch.float32, min_hold_time_ms=0)
    cache.buffer.normal_(generator=torch.Generator().manual_seed(0))
    return cache


def pictures(*grids: tuple[int, int, int], width: int = 1536) -> dict[str, Any]:
    """Arguments of a call with pictures of these grids."""
    return {
        "pixel_values": torch.ones(sum(t * h * w for t, h, w in grids), width),
        "image_grid_thw": torch.tensor(grids),
        "mm_hashes": [f"picture {i}" for i in range(len(grids))],
    }


def _with(call: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**call, **changes}


SMALL = (1, 4, 4)
INPUTS: dict[str, tuple[dict[str, Any], int, list[str]]] = {
    "picture above the block": (
        pictures(SMALL, (1, 12, 14)),
        8,
        ["12 x 14 = 168 patches", "block of 128", "vision_attention_block_size for it is 256"],
    ),
    "frame above the block": (
        {
            "pixel_values_videos": torch.ones(2 * 192, 1536),
            "video_grid_thw": torch.tensor([[2, 12, 16]]),
            "mm_hashes": ["video"],
        },
        8,
        ["12 x 16 = 192 patches", "block of 128", "256"],
    ),
    "more pictures than readable blocks": (
        pictures(SMALL, SMALL, SMALL),
        8,
        ["3 items need 3", "one request can read 2", "largest vision bucket 256", "least 384"],
    ),
    "more pictures than the cache has blocks": (
        pictures(SMALL, SMALL),
        2,
        ["2 items need 2", "the cache has 1", "encoder_cache_num_blocks to at least 3"],
    ),
    "rows that do not fit the grids": (
        _with(pictures(SMALL), pixel_values=torch.ones(15, 1536)),
        8,
        ["[15, 1536]", "[16, 1536]"],
    ),
    "patches of another size": (pictures(SMALL, width=1176), 8, ["[16, 1176]", "[16, 1536]"]),
    "grid that the merge size does not divide": (
        pictures((1, 3, 4)),
        8,
        ["grid [1, 3, 4]", "merge size 2"],
    ),
    "grid without a frame": (pictures((0, 4, 4)), 8, ["grid [0, 4, 4]"]),
    "fewer keys than pictures": (
        _with(pictures(SMALL, SMALL), mm_hashes=["one"]),
        8,
        ["2 grids but 1 cache keys"],
    ),
    "no picture": (
        {
            "pixel_values": torch.ones(0, 1536),
            "image_grid_thw": torch.empty(0, 3, dtype=torch.int64),
            "mm_hashes": [],
        },
        8,
        ["no image or video"],
    ),
    "pictures and videos in one call": (
        _with(pictures(SMALL), pixel_values_videos=torch.ones(16, 1536)),
        8,
        ["exactly one of pixel_values and pixel_values_videos"],
    ),
}


@pytest.mark.parametrize("case", INPUTS)
def test_vision_inputs_that_are_refused(case: str, loaded: torch.nn.Module) -> None:
    call, blocks, said = INPUTS[case]
    cache = cache_of(blocks)
    before, free = cache.buffer.clone(), cache.num_free_blocks
    message = refusal(
        lambda: loaded.embed_multimodal(encoder_cache=cache, **call), VisionInputError
    )
    assert all(part in message for part in said), message
    assert cache.num_free_blocks == free, "blocks were taken"
    assert not any(cache.contains(key) for key in call["mm_hashes"])
    assert torch.equal(cache.buffer, before), "rows were written"


def test_what_is_not_refused_is_written(loaded: torch.nn.Module) -> None:
    cache = cache_of()
    before = cache.buffer.clone()
    loaded.embed_multimodal(encoder_cache=cache, **pictures(SMALL, (1, 8, 16)))
    assert cache.get("picture 0").shape == (4, 512) and cache.get("picture 1").shape == (32, 512)
    assert cache.num_free_blocks == 5
    changed = [block for block in range(8) if not torch.equal(cache.buffer[block], before[block])]
    written = [*cache.get_block_ids("picture 0"), *cache.get_block_ids("picture 1")]
    assert set(changed) == {*written, cache.scratch_block_id}


@pytest.mark.parametrize(
    ("patches", "legal"), [(129, 256), (256, 256), (257, 384), (2048, 2048), (24_168, 24_192)]
)
def test_the_named_block_size_is_the_smallest_legal_one(patches: int, legal: int) -> None:
    from vllm_neuron_qwen3_vl.config import next_block_size

    assert next_block_size(patches, 4) == legal
    assert legal % 128 == 0 and patches <= legal < patches + 128
