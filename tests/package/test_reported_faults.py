"""Public reports about onboarding or running vision-language models, as tests with the right value.

     What goes wrong                                     Where it is tested
O1   Qwen2.5-VL scales time by seconds; Qwen3-VL         test_o1_* (Qwen3-VL's rule)
     lets it stand still within a frame
O2   contiguous instead of interleaved M-RoPE sections   test_o2_*
O3   text-only positions lose an axis                    test_o3_*
O4   placeholder runs and grid rows disagree             test_o4_*
O5   deepstack at the wrong layer or picture             test_o5_*
O6   pixel limit of the processor ignored                test_o6_*
O7   resize to a side of zero                            test_o7_*
O8   the largest picture sized as a video                test_o8_*
O9   time stamps and temporal patches disagree           test_o9_*
O10  picture and video in one message                    test_o10_*
O11  two namings of one checkpoint                       test_o11_*, and keys in neither naming in
                                                         test_bad_checkpoints.py
O12  untied head that no file holds                      test_o12_*
O13  two forms of the rotary settings                    test_o13_*
O14  vision heads that TP does not divide                test_o14_*
O15  fused QKV cut along the wrong layout                test_o15_*
O16  quantised vision tower behind a renamed prefix      test_o16_*; ignore lists are refused
O17  rotary tables cast with the module                  test_o17_*
O18  the wrong GELU                                      test_o18_*
O19  two pictures share one cache key                    test_o19_*; vLLM makes the key
O20  every rank holds the whole checkpoint               test_o20_*: values read per rank; resident
                                                         memory is measured in benchmarks/
"""

from __future__ import annotations

import itertools
import json
import math
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from vllm_neuron.model.neuron_config import NeuronConfig, VisionNeuronConfig
from vllm_neuron.vllm.worker.vision_sizes import resolve_vision_auto_config
from vllm_neuron_qwen3_vl import factory as package_factory
from vllm_neuron_qwen3_vl import model as package_model
from vllm_neuron_qwen3_vl import vision_encoder, weight_loaders
from vllm_neuron_qwen3_vl.config import (
    Qwen3VLConfig,
    Qwen3VLConfigError,
    Qwen3VLTextConfig,
    Qwen3VLVisionConfig,
    next_block_size,
)
from vllm_neuron_qwen3_vl.factory import Qwen3VLForConditionalGeneration
from vllm_neuron_qwen3_vl.model import Qwen3VLTextRotaryEmbedding
from vllm_neuron_qwen3_vl.utils.block_packing import VisionInputError
from vllm_neuron_qwen3_vl.utils.mrope import PlaceholderError, compute_mrope_positions
from vllm_neuron_qwen3_vl.utils.preprocessing import rotary_tables
from vllm_neuron_qwen3_vl.weight_loaders import CheckpointError

from vlmgen.tiny.build import build_tiny
from vlmgen.validate.driver import PackageDriver
from vlmgen.validate.features_per_frame_timestamp import features_of

IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"
LOGITS = 1e-4  # largest error end to end, by the largest value of the reference


# ---------------------------------------------------------------------------- package, reference


@pytest.fixture(scope="module")
def config(tiny: Path) -> transformers.PretrainedConfig:
    return transformers.AutoConfig.from_pretrained(tiny)


@pytest.fixture(scope="module")
def processor(tiny: Path) -> Any:
    from vlmgen.standin.torchvision_ops import declare_missing_ops

    declare_missing_ops()
    return transformers.AutoProcessor.from_pretrained(tiny)


@pytest.fixture(scope="module")
def reference(tiny: Path) -> torch.nn.Module:
    """Hugging Face's model in float32."""
    cls = transformers.Qwen3VLForConditionalGeneration
    return cls.from_pretrained(tiny, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def driver(tiny: Path, one_rank: None) -> PackageDriver:
    """The package, driven as the plugin's runner does it."""
    return PackageDriver(
        Qwen3VLForConditionalGeneration, tiny, token_buckets=(128, 512), seq_buckets=(1, 2)
    )


def picture(height: int, width: int, seed: int = 0) -> Image.Image:
    """A picture with large and small structure."""
    rng = np.random.default_rng(seed)
    rows, cols = np.mgrid[:height, :width]
    waves = [np.sin(rows / a + cols / b) for a, b in rng.uniform(4, 40, (3, 2))]
    noise = rng.normal(0, 0.2, (height, width, 3))
    return Image.fromarray((127 + 80 * (np.stack(waves, -1) + noise)).clip(0, 255).astype("uint8"))


def clip(frames: int, height: int = 64, width: int = 96) -> np.ndarray:
    """A video of pictures that all differ."""
    return np.stack([np.asarray(picture(height, width, seed)) for seed in range(frames)])


def prepare(processor: Any, text: str, images: Any = None, videos: Any = None, **video: Any) -> Any:
    """The processor's output for one prompt."""
    settings: dict[str, Any] = {"do_sample_frames": False, **video}
    if videos:
        settings["video_metadata"] = [
            {
                "total_num_frames": len(frames),
                "fps": 24.0,
                "duration": len(frames) / 24.0,
                "frames_indices": np.arange(len(frames)),
            }
            for frames in videos
        ]
    return processor(
        text=[text],
        images=images,
        videos=videos,
        return_tensors="pt",
        videos_kwargs=settings if videos else {},
    )


def logits_of(driver: PackageDriver, inputs: Any, config: Any) -> torch.Tensor:
    """Logits of the last prompt token, with everything given back afterwards."""
    request = driver.add_request(inputs["input_ids"][0].tolist(), features_of(inputs, config))
    try:
        return driver.prefill(request)[0]
    finally:
        driver.release(request)


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference, by the largest value of the reference."""
    return float((actual - expected).abs().max() / expected.abs().max())


def feature(modality: str, grid: tuple[int, ...], offset: int, length: int) -> SimpleNamespace:
    """What vLLM hands over about one item: its grid, and where it stands in the prompt."""
    return SimpleNamespace(
        modality=modality,
        data={f"{modality}_grid_thw": torch.tensor(grid)},
        mm_position=SimpleNamespace(offset=offset, length=length),
    )


def test_every_report_has_a_test() -> None:
    numbers = {int(found[1]) for name in globals() if (found := re.match(r"test_o(\d+)_", name))}
    assert numbers == set(range(1, 21))
    assert [int(n) for n in re.findall(r"^O(\d+) ", __doc__, re.MULTILINE)] == sorted(numbers)


# ---------------------------------------------------------------------------------- O1 to O4: text


def test_o1_time_stands_still_within_a_frame_and_moves_on_with_the_next() -> None:
    """3 text, two frames of 4 x 4 with a stamp and markers each, 1 text; no scale of seconds."""
    config = Qwen3VLConfig()
    start, end, pad = 151652, 151653, config.video_token_id
    frame = [7, start, pad, pad, pad, pad, end]
    tokens = [1, 2, 3, *frame, *frame, 4]
    positions, delta = compute_mrope_positions(tokens, [feature("video", (2, 4, 4), 3, 14)], config)
    assert positions.tolist() == [
        [0, 1, 2, 3, 4, 5, 5, 5, 5, 7, 8, 9, 10, 10, 10, 10, 12, 13],
        [0, 1, 2, 3, 4, 5, 5, 6, 6, 7, 8, 9, 10, 10, 11, 11, 12, 13],
        [0, 1, 2, 3, 4, 5, 6, 5, 6, 7, 8, 9, 10, 11, 10, 11, 12, 13],
    ]
    assert delta == 14 - len(tokens)


def test_o2_sections_are_interleaved() -> None:
    rotary = Qwen3VLTextRotaryEmbedding(Qwen3VLTextConfig(dtype=torch.float32))
    masks = torch.stack(rotary._axis_masks(torch.device("cpu")))
    axis = masks.argmax(0).tolist()
    right = [{1: 1, 2: 2}.get(i % 3, 0) if i < 60 else 0 for i in range(64)]
    assert axis == right and [axis.count(a) for a in range(3)] == [24, 20, 20]
    contiguous = [0] * 24 + [1] * 20 + [2] * 20
    assert sum(a != b for a, b in zip(axis, contiguous, strict=True)) == 43

    text, image = torch.arange(9).repeat(3, 1), torch.tensor([[5], [6], [9]])
    for positions, shows in ((text, False), (image, True)):
        ours = rotary(positions)[0]
        angles = positions[contiguous, :].t().float() * rotary.inv_freq
        assert bool((angles.cos() - ours).abs().max() > 1e-3) is shows, "text cannot reveal it"


def test_o2_the_contiguous_order_is_refused() -> None:
    raw = json.loads(json.dumps(transformers.Qwen3VLConfig().to_dict()))
    raw["text_config"]["rope_parameters"] = {
        "rope_theta": 5e6,
        "mrope_section": [24, 20, 20],
        "mrope_interleaved": False,
    }
    with pytest.raises(Qwen3VLConfigError, match="mrope_interleaved is False"):
        Qwen3VLConfig.from_configs(raw)


def test_o3_text_positions_have_three_equal_rows() -> None:
    positions, delta = compute_mrope_positions([5] * 7, [], Qwen3VLConfig())
    assert positions.shape == (3, 7) and positions.dtype == torch.int64 and delta == 0
    assert positions.tolist() == [list(range(7))] * 3


def test_o3_text_alone_and_beside_a_picture(
    driver: PackageDriver, processor: Any, reference: torch.nn.Module, config: Any
) -> None:
    """The text request's tokens are the plain model's, in a batch of its own or with a picture."""
    text = prepare(processor, "Say what you see: nothing.")
    seen = prepare(processor, f"{IMAGE} and here?", images=[picture(64, 96)])
    n = text["input_ids"].shape[1]
    settings = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    expected = reference.generate(**text, **settings)[0, n:].tolist()
    eos = config.get_text_config().eos_token_id
    assert eos not in expected, "min_new_tokens would have changed the choice"
    for companions in ([], [seen]):
        requests = [
            driver.add_request(inputs["input_ids"][0].tolist(), features_of(inputs, config))
            for inputs in (text, *companions)
        ]
        assert requests[0].delta == 0 and torch.equal(
            requests[0].positions, torch.arange(n).repeat(3, 1)
        )
        tokens, logits = driver.generate(requests, 8)
        for request in requests:
            driver.release(request)
        assert _without(logits[0], eos) == expected, f"beside {len(companions)} other requests"
        assert tokens[0] == expected


def _without(logits: torch.Tensor, token: int) -> list[int]:
    """Greedy choice with one token forbidden."""
    logits = logits.clone()
    logits[:, token] = -math.inf
    return logits.argmax(-1).tolist()


def test_o4_runs_and_grid_rows_must_agree() -> None:
    config = Qwen3VLConfig()
    pad = config.video_token_id
    frame = [1, *[pad] * 240]  # 24 x 40 patches, merge 2: 240 rows
    right = frame * 15
    video = feature("video", (15, 24, 40), 0, len(right))
    positions, _ = compute_mrope_positions(right, [video], config)
    assert positions.shape == (3, 15 * 241)
    twice = frame * 29
    with pytest.raises(PlaceholderError, match="29 runs of placeholders for 15 frames") as refused:
        compute_mrope_positions(twice, [feature("video", (15, 24, 40), 0, len(twice))], config)
    assert "[15, 24, 40]" in str(refused.value)


@pytest.mark.parametrize("found", [239, 241, 0])
def test_o4_each_run_has_the_length_of_its_frame(found: int) -> None:
    config = Qwen3VLConfig()
    tokens = [1, *[config.image_token_id] * found, 1]
    said = "0 runs of placeholders for 1" if not found else f"run of {found} .* has 240 merged rows"
    with pytest.raises(PlaceholderError, match=said):
        compute_mrope_positions(tokens, [feature("image", (1, 24, 40), 1, max(found, 1))], config)


# ------------------------------------------------------------------------------- O5: deepstack


def _three_pictures(processor: Any) -> Any:
    images = [picture(64, 96, 1), picture(96, 64, 2), picture(32, 64, 3)]
    return prepare(processor, f"a {IMAGE} b {IMAGE} c {IMAGE} d", images=images)


def _levels_swapped(deepstack: list[torch.Tensor]) -> list[torch.Tensor]:
    return [deepstack[1], deepstack[0], deepstack[2]]


def _one_level_late(deepstack: list[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.zeros_like(deepstack[0]), *deepstack]


def _shifted_by_a_picture(deepstack: list[torch.Tensor]) -> list[torch.Tensor]:
    """Rows of all pictures in the order second, third, first."""
    shifted = []
    for level in deepstack:
        places = level.abs().sum(-1).nonzero().flatten()
        moved = level.clone()
        moved[places] = level[places].roll(-6, 0)  # the first picture has 2 x 3 rows
        shifted.append(moved)
    return shifted


def _on_text_too(deepstack: list[torch.Tensor]) -> list[torch.Tensor]:
    return [level + level.mean(0) for level in deepstack]


def test_o5_three_pictures_equal_hugging_face(
    driver: PackageDriver, processor: Any, reference: torch.nn.Module, config: Any
) -> None:
    inputs = _three_pictures(processor)
    expected = reference(**inputs).logits[0, -1]
    assert relative(logits_of(driver, inputs, config), expected) < LOGITS


@pytest.mark.parametrize(
    "fault", [_levels_swapped, _one_level_late, _shifted_by_a_picture, _on_text_too]
)
def test_o5_deepstack_in_the_wrong_place_shows(
    fault: Any,
    driver: PackageDriver,
    processor: Any,
    reference: torch.nn.Module,
    config: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inputs = _three_pictures(processor)
    merge = package_model.merge_vision_embeddings

    def wrong(*args: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
        hidden, deepstack = merge(*args)
        return hidden, fault(deepstack)

    monkeypatch.setattr(package_model, "merge_vision_embeddings", wrong)
    expected = reference(**inputs).logits[0, -1]
    assert relative(logits_of(driver, inputs, config), expected) > 10 * LOGITS


def test_o5_level_k_is_added_after_layer_k_at_the_visual_rows(
    driver: PackageDriver, processor: Any, config: Any
) -> None:
    """What enters layer k + 1 is layer k's output plus level k, and nothing else elsewhere."""
    inputs = _three_pictures(processor)
    tokens = inputs["input_ids"][0]
    visual = (tokens == config.image_token_id).nonzero().flatten()
    assert len(visual) == 6 + 6 + 2
    entered: dict[int, torch.Tensor] = {}
    left: dict[int, torch.Tensor] = {}
    hooks = []
    for index, layer in enumerate(driver.model.language_model.layers):

        def before(module: Any, args: tuple, index: int = index) -> None:
            entered[index] = args[0].clone()

        def after(module: Any, args: tuple, output: torch.Tensor, index: int = index) -> None:
            left[index] = output.clone()

        hooks += [layer.register_forward_pre_hook(before), layer.register_forward_hook(after)]
    features = features_of(inputs, config)
    request = driver.add_request(tokens.tolist(), features)
    driver.prefill(request)
    rows = torch.cat([driver.cached_rows(item) for item in features])  # in prompt order
    driver.release(request)
    for hook in hooks:
        hook.remove()
    width = config.get_text_config().hidden_size
    for level in range(3):
        added = entered[level + 1] - left[level]
        expected = torch.zeros_like(added)
        expected[visual] = rows[:, width * (level + 1) : width * (level + 2)]
        torch.testing.assert_close(added, expected, rtol=0, atol=1e-5)
        assert expected.abs().max() > 0.1


# -------------------------------------------------------------------------- O6 to O8: pixel limits


def test_o6_the_processors_limit_is_applied_and_estimated(processor: Any, config: Any) -> None:
    large = picture(1024, 1024)
    ask = {"shortest_edge": 1024, "longest_edge": 16_777_216}
    ignored = processor.image_processor(images=[large], size=ask, return_tensors="pt")
    assert ignored["image_grid_thw"].tolist() == [[1, 64, 64]]  # 1024 rows for the text
    limited = processor(
        text=[IMAGE],
        images=[large],
        return_tensors="pt",
        images_kwargs={"size": {"shortest_edge": 1024, "longest_edge": 200_000}},
    )
    assert limited["image_grid_thw"].tolist() == [[1, 26, 26]]  # 416 x 416 pixels
    assert (limited["input_ids"] == config.image_token_id).sum() == 169
    estimate = Qwen3VLForConditionalGeneration.get_max_pixels_token_count
    assert 26 * 26 <= estimate(config, 200_000) < 64 * 64 == estimate(config, 1024 * 1024)


def test_o6_no_picture_has_more_patches_than_estimated(config: Any) -> None:
    """Also not a strip, whose shorter side the processor keeps at one merge window."""
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

    estimate = Qwen3VLForConditionalGeneration.get_max_pixels_token_count
    rng = np.random.default_rng(0)
    strips = [(19, 3800), (3800, 19), (31, 639), (1, 200), (40, 8000)]
    sizes = [*strips, *rng.integers(20, 4000, (300, 2)).tolist()]
    reached = False
    for limit in (15_680, 65_536, 200_000, 1_003_520):
        most = estimate(config, limit)
        for height, width in sizes:
            if max(height, width) > 200 * min(height, width):
                continue
            h, w = smart_resize(height, width, 32, 1024, limit)
            assert h * w // 256 <= most, (height, width, limit)
            reached |= h * w // 256 == most
    assert reached, "the bound is sharp"


def test_o7_no_side_is_resized_to_nothing(processor: Any, driver: PackageDriver) -> None:
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

    assert smart_resize(639, 31, 28, 784, 15_680) == (560, 28)  # exactly the limit
    size = {"shortest_edge": 1024, "longest_edge": 15_680}
    thin = processor.image_processor(images=[picture(639, 31)], size=size, return_tensors="pt")
    (grid,) = thin["image_grid_thw"].tolist()
    assert grid == [1, 34, 2] and thin["pixel_values"].shape == (68, 1536)
    cache = driver.encoder_cache
    driver.model.embed_multimodal(encoder_cache=cache, mm_hashes=["thin"], **thin)
    assert cache.get("thin").shape[0] == 17 and bool(cache.get("thin").isfinite().all())
    cache.free("thin")


def test_o7_a_ratio_that_cannot_be_served_is_named(processor: Any) -> None:
    with pytest.raises(ValueError, match="aspect ratio must be smaller than 200"):
        processor.image_processor(images=[picture(1005, 5)], return_tensors="pt")


def test_o8_the_largest_picture_is_one_frame() -> None:
    """A page of 2968 x 1596, patch 14: 24,168 patches, 6042 rows, known before any request."""
    raw = transformers.Qwen3VLConfig().to_dict()
    raw["vision_config"] |= {"patch_size": 14, "out_hidden_size": 4096}
    # The frames of a video do not count: one picture, the processor's own limit.
    pixels = 2968 * 1596 // 28**2 * 28**2
    most = Qwen3VLForConditionalGeneration.get_max_pixels_token_count(raw, pixels)
    assert most == 24_168 and most // 4 == 6042
    assert next_block_size(24_168, 4) == 24_192

    settings: dict[str, Any] = {"vision_attention_block_size": 4800 * 4}
    resolve_vision_auto_config(settings, max_model_len=8192, merge_factor=4)
    assert settings["vision_attention_block_size"] < most, "sized without asking: too small"
    settings = {"vision_attention_block_size": 4800 * 4}
    resolve_vision_auto_config(settings, 8192, 4, max_pixels_token_count=most)
    assert settings["vision_attention_block_size"] >= most
    with pytest.raises(ValueError, match="below vision_attention_block_size"):
        resolve_vision_auto_config({"num_vision_tokens_buckets": [19_200]}, 8192, 4, most)


def test_o8_a_page_above_the_block_is_refused_with_the_legal_size(driver: PackageDriver) -> None:
    free = driver.encoder_cache.num_free_blocks
    grid = torch.tensor([[1, 18, 16]])  # 288 patches, blocks of 256
    with pytest.raises(VisionInputError, match="288 patches .* block of 256; .* it is 384"):
        driver.model.embed_multimodal(
            encoder_cache=driver.encoder_cache,
            mm_hashes=["page"],
            pixel_values=torch.zeros(288, 1536),
            image_grid_thw=grid,
        )
    assert driver.encoder_cache.num_free_blocks == free


# --------------------------------------------------------------------------- O9, O10: mixed media


@pytest.mark.parametrize(
    ("style", "frames"),
    [
        ({"num_frames": 10, "fps": None}, 5),
        ({"num_frames": 7, "fps": None}, 4),  # the last frame stands twice
        ({"fps": 8}, 4),
        ({"fps": 5}, 3),
    ],
)
def test_o9_one_time_stamp_per_temporal_patch(
    style: dict[str, Any], frames: int, processor: Any, config: Any
) -> None:
    inputs = prepare(processor, f"a{VIDEO}b", videos=[clip(24)], do_sample_frames=True, **style)
    tokens = inputs["input_ids"][0].tolist()
    assert inputs["video_grid_thw"].tolist() == [[frames, 4, 6]]
    assert processor.decode(tokens).count("seconds>") == frames
    positions, _ = compute_mrope_positions(
        tokens, features_of(inputs, config), Qwen3VLConfig.from_configs(config)
    )
    vision = positions[:, torch.tensor(tokens) == config.video_token_id]
    assert vision.shape == (3, frames * 6) and len(vision[0].unique()) == frames


@pytest.mark.parametrize(
    "order", [(IMAGE, VIDEO), (VIDEO, IMAGE)], ids=["image first", "video first"]
)
def test_o10_picture_and_video_in_one_message(
    order: tuple[str, str],
    driver: PackageDriver,
    processor: Any,
    reference: torch.nn.Module,
    config: Any,
) -> None:
    inputs = prepare(
        processor,
        f"first {order[0]} then {order[1]} end",
        images=[picture(96, 64)],
        videos=[clip(4)],
    )
    tokens = inputs["input_ids"][0].tolist()
    features = features_of(inputs, config)
    assert [f.modality for f in features] == ["image" if o == IMAGE else "video" for o in order]
    positions, delta = driver.model.get_mrope_input_positions(tokens, features)
    expected, expected_delta = reference.model.get_rope_index(
        inputs["input_ids"],
        inputs["mm_token_type_ids"],
        inputs["image_grid_thw"],
        inputs["video_grid_thw"],
    )
    assert torch.equal(positions, expected[:, 0]) and delta == int(expected_delta)
    request = driver.add_request(tokens, features)
    logits = driver.prefill(request)[0]
    assert all(driver.encoder_cache.contains(f.identifier) for f in features), "both are kept"
    driver.release(request)
    assert relative(logits, reference(**inputs).logits[0, -1]) < LOGITS


# --------------------------------------------------------------------- O11 to O13: configurations


def load(folder: Path, config: Any = None) -> torch.nn.Module:
    """A checkpoint, built on meta and loaded."""
    raw = config or json.loads((folder / "config.json").read_text())
    with torch.device("meta"):
        model = Qwen3VLForConditionalGeneration.from_configs(
            hf_config=raw,
            text_neuron_config=NeuronConfig(on_device_sampling_config=None),
            vision_neuron_config=VisionNeuronConfig(
                vision_attention_block_size=256, num_vision_tokens_buckets=[256]
            ),
        )
    model.load_weights(str(folder), torch.device("cpu"), None)
    return model


@pytest.mark.parametrize("tied", [False, True])
def test_o11_both_namings_load_to_the_same_parameters(tied: bool, tmp_path: Path) -> None:
    nested = build_tiny("qwen3_vl", tmp_path / "nested", tied=tied, layout="nested")
    flat = build_tiny("qwen3_vl", tmp_path / "flat", tied=tied, layout="flat")
    names = [set(load_file(folder / "model.safetensors")) for folder in (nested, flat)]
    assert names[0] & names[1] == ({"lm_head.weight"} if not tied else set())
    assert "model.language_model.embed_tokens.weight" in names[0]
    assert {"model.embed_tokens.weight", "visual.merger.norm.weight"} < names[1]
    ours, theirs = (dict(load(folder).named_parameters()) for folder in (nested, flat))
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_o12_an_untied_head_is_never_invented(tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "headless"
    shutil.copytree(tiny, folder)
    tensors = load_file(folder / "model.safetensors")
    embedding = tensors["model.language_model.embed_tokens.weight"]
    tensors.pop("lm_head.weight")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="tie_word_embeddings is false.*'lm_head.weight'"):
        load(folder)
    # The explicit way on: the flag says that the embedding is the head.
    raw = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": True}
    assert torch.equal(load(folder, raw).lm_head.weight, embedding)


def _forms(raw: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """One configuration with its rotary settings in every published form."""
    rope = {"mrope_section": [12, 10, 10], "mrope_interleaved": True}
    old = {"rope_theta": 5e6, "rope_scaling": {**rope, "rope_type": "default"}}
    older = {"rope_theta": 5e6, "rope_scaling": {**rope, "type": "mrope"}}
    new = {"rope_parameters": {**rope, "rope_theta": 5e6, "rope_type": "default"}}
    mixed = {"rope_theta": 5e6, "rope_parameters": rope}
    raw["text_config"].pop("rope_parameters")
    forms = {"old": old, "older": older, "new": new, "mixed": mixed}
    inside = {
        f"{name}, in text_config": {**raw, "text_config": {**raw["text_config"], **form}}
        for name, form in forms.items()
    }
    return inside | {f"{name}, at top level": {**raw, **form} for name, form in forms.items()}


def test_o13_both_forms_of_the_rotary_settings_parse_alike(tiny: Path) -> None:
    forms = _forms(json.loads((tiny / "config.json").read_text()))
    parsed = {name: Qwen3VLConfig.from_configs(raw) for name, raw in forms.items()}
    assert len(parsed) == 8
    first = next(iter(parsed.values()))
    assert first.text_config.rope_theta == 5e6
    assert first.text_config.mrope_section == (12, 10, 10)
    assert all(other == first for other in parsed.values())


def test_o13_an_absent_base_is_refused_and_never_ten_thousand(tiny: Path) -> None:
    raw = json.loads((tiny / "config.json").read_text())
    raw["text_config"]["rope_parameters"].pop("rope_theta")
    with pytest.raises(Qwen3VLConfigError, match="rope_theta is absent"):
        Qwen3VLConfig.from_configs(raw)


# ------------------------------------------------------------------------------ O14 to O16: ranks


def test_o14_vision_tp_is_decided_before_weights_load(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = json.loads((tiny / "config.json").read_text())
    raw["text_config"] |= {"num_attention_heads": 6, "num_key_value_heads": 3}
    raw["vision_config"] |= {"num_heads": 16, "intermediate_size": 192, "hidden_size": 192}
    monkeypatch.setattr(package_factory, "get_tp_group", lambda: SimpleNamespace(world_size=3))
    with pytest.raises(Qwen3VLConfigError) as refused:
        Qwen3VLForConditionalGeneration.from_configs(
            hf_config=raw,
            text_neuron_config=NeuronConfig(),
            vision_neuron_config=VisionNeuronConfig(tp_size=3, dp_size=1),
        )
    message = str(refused.value)
    assert "vision tensor-parallel size 3: vision num_heads 16 is not divisible by 3" in message
    assert "legal sizes: [1, 2, 4, 8, 16]" in message
    assert message.count("\n  - ") == 1, "text divides"
    # The legal way: every rank holds the whole tower.
    config = Qwen3VLConfig.from_configs(
        raw, vision_neuron_config=VisionNeuronConfig(tp_size=1, dp_size=3)
    )
    package_factory.check_parallel(config, 3)


class Slice:
    """A checkpoint tensor, read where it is indexed; counts what is read."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.largest, self.total = tensor, 0, 0

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def __getitem__(self, index: Any) -> torch.Tensor:
        piece = self.tensor[index].clone()
        self.largest = max(self.largest, piece.numel())
        self.total += piece.numel()
        return piece


TEXT = Qwen3VLTextConfig(
    hidden_size=24, num_attention_heads=8, num_key_value_heads=2, head_dim=4, vocab_size=37
)
VISION = Qwen3VLVisionConfig(hidden_size=32, num_heads=4, intermediate_size=48)


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_o15_shards_of_the_fused_text_matrix_reassemble(tp_size: int) -> None:
    """Layout of a rank: its query heads, its key heads, its value heads; 2 KV heads, so copies."""
    torch.manual_seed(0)
    query, key, value = torch.randn(32, 24), torch.randn(8, 24), torch.randn(8, 24)
    loader = weight_loaders.fused_qkv_loader(TEXT, tp_size)
    shards = [
        loader.load([Slice(query), Slice(key), Slice(value)], rank).t() for rank in range(tp_size)
    ]
    q, kv = 32 // tp_size, max(1, 2 // tp_size) * 4
    assert all(shard.shape == (q + 2 * kv, 24) for shard in shards)
    copies = max(1, tp_size // 2)
    parts = [shard.split([q, kv, kv]) for shard in shards]
    assert torch.equal(torch.cat([p[0] for p in parts]), query)
    assert torch.equal(torch.cat([p[1] for p in parts[::copies]]), key)
    assert torch.equal(torch.cat([p[2] for p in parts[::copies]]), value)
    for rank, part in enumerate(parts):
        assert torch.equal(part[1], parts[rank // copies * copies][1]), "copies are neighbours"


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_o15_shards_of_the_fused_vision_matrix_reassemble(tp_size: int) -> None:
    """Stored as thirds Q, K, V of all heads; a rank holds its heads out of each third."""
    torch.manual_seed(0)
    weight, bias = torch.randn(96, 32), torch.randn(96)
    matrices = [
        weight_loaders.vision_qkv_loader(VISION, tp_size).load([Slice(weight)], rank).t()
        for rank in range(tp_size)
    ]
    biases = [
        weight_loaders.vision_qkv_bias_loader(VISION, tp_size).load([Slice(bias)], rank)
        for rank in range(tp_size)
    ]
    for whole, shards in ((weight, matrices), (bias, biases)):
        thirds = [shard.chunk(3) for shard in shards]
        again = torch.cat([torch.cat([third[i] for third in thirds]) for i in range(3)])
        assert torch.equal(again, whole)
        naive = list(whole.chunk(tp_size))
        assert all(torch.equal(a, b) for a, b in zip(shards, naive, strict=True)) == (tp_size == 1)


def _vision_attention(tp_size: int, rank: int, tensors: dict[str, torch.Tensor]) -> Any:
    """One rank's attention module; its sum over ranks is left to the test."""
    group = SimpleNamespace(world_size=tp_size, rank_in_group=rank, all_reduce=lambda x: x)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vision_encoder, "get_neuron_vision_tp_group", lambda: group)
        vision = Qwen3VLVisionConfig(hidden_size=32, num_heads=4, dtype=torch.float32)
        attention = vision_encoder.Qwen3VLVisionAttention(vision)
    for name, loader, key in (
        ("qkv_weight", weight_loaders.vision_qkv_loader(VISION, tp_size), "qkv"),
        ("qkv_bias", weight_loaders.vision_qkv_bias_loader(VISION, tp_size), "qkv_bias"),
        ("proj_weight", weight_loaders.row_parallel_loader((32, 32), tp_size), "proj"),
        ("proj_bias", weight_loaders.whole_loader((32,)), "proj_bias"),
    ):
        getattr(attention, name).copy_(loader.load([Slice(tensors[key])], rank))
    return attention


@pytest.mark.parametrize("tp_size", [2, 4])
def test_o15_the_sum_over_ranks_equals_one_rank(tp_size: int) -> None:
    torch.manual_seed(0)
    tensors = {
        "qkv": torch.randn(96, 32) / 6,
        "qkv_bias": torch.randn(96),
        "proj": torch.randn(32, 32) / 6,
        "proj_bias": torch.randn(32),
    }
    hidden = torch.randn(1, 128, 32)
    cos, sin = rotary_tables(8, 16, 8, 2, 10000.0)
    low, high = torch.zeros(1, 128, 1, dtype=torch.int32), torch.full((1, 128, 1), 128)
    call = (hidden, cos[None], sin[None], low, high.int())
    whole = _vision_attention(1, 0, tensors)(*call)
    bias = tensors["proj_bias"]
    parts = [_vision_attention(tp_size, rank, tensors)(*call) - bias for rank in range(tp_size)]
    assert relative(sum(parts) + bias, whole) < 1e-5
    assert relative(sum(parts) + tp_size * bias, whole) > 1e-2, "a bias on every rank shows"


@pytest.mark.parametrize("layout", ["nested", "flat"])
def test_o16_quantised_vision_tensors_are_named_under_both_prefixes(
    layout: str, tmp_path: Path
) -> None:
    folder = build_tiny("qwen3_vl", tmp_path / layout, layout=layout)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    prefix = "model.visual." if layout == "nested" else "visual."
    key = f"{prefix}blocks.1.attn.proj.weight"
    save_file({**tensors, key: tensors[key].to(torch.float8_e4m3fn)}, path)
    with pytest.raises(CheckpointError) as refused:
        load(folder)
    assert key in str(refused.value) and "float8_e4m3fn" in str(refused.value)
    scale = f"{key}_scale_inv"
    save_file({**tensors, scale: torch.ones(1)}, path)
    with pytest.raises(CheckpointError, match=r"unknown \(1\)") as refused:
        load(folder)
    assert scale in str(refused.value)


def test_o16_an_ignore_list_that_matches_nothing_is_refused(tiny: Path) -> None:
    raw = json.loads((tiny / "config.json").read_text())
    neuron = NeuronConfig(modules_to_not_convert=["visual."])
    with pytest.raises(Qwen3VLConfigError, match=r"\['visual\.'\]; nothing is converted"):
        Qwen3VLConfig.from_configs(raw, neuron)


# ------------------------------------------------------------------------- O17, O18: arithmetic


def test_o17_rotary_tables_are_float32_whatever_the_module() -> None:
    rotary = Qwen3VLTextRotaryEmbedding(Qwen3VLTextConfig(dtype=torch.bfloat16))
    before = rotary.inv_freq.clone()
    rotary.to(torch.bfloat16)
    assert rotary.inv_freq.dtype == torch.float32 and torch.equal(rotary.inv_freq, before)
    rotary.half()
    assert torch.equal(rotary.inv_freq, before)
    # What a cast would have done to the vision tower's frequencies, head width 72.
    inv_freq = 1.0 / 10000.0 ** (torch.arange(0, 36, 2, dtype=torch.float64) / 36)
    assert float(inv_freq[1]) == pytest.approx(0.5994842, abs=1e-7)
    cast = inv_freq.to(torch.bfloat16).double()
    assert float(cast[1]) == 0.59765625
    assert float(100 * (inv_freq[1] - cast[1])) == pytest.approx(0.183, abs=5e-4)


def test_o17_the_vision_error_does_not_grow_with_the_coordinate() -> None:
    """One table for a column of 2000 patches, against float64; bf16 frequencies are radians off."""
    cos, sin = rotary_tables(2000, 2, 72, 2, 10000.0)
    rows = torch.arange(2000)
    first = cos.view(1000, 2, 2, 72)[:, :, 0].reshape(2000, 72)[:, :18]
    inv_freq = 1.0 / 10000.0 ** (torch.arange(0, 36, 2, dtype=torch.float64) / 36)
    error = (first.double() - (rows[:, None] * inv_freq).cos()).abs().amax(1)
    # An angle of float32 is off by half a step: 2^-25 of the angle, which is at most the row.
    assert bool((error <= rows * 2**-23 + 2**-23).all())
    assert float(error[100]) < 1e-5
    cast = inv_freq.to(torch.bfloat16).double()
    wrong = ((rows[:, None] * cast).cos() - (rows[:, None] * inv_freq).cos()).abs().amax(1)
    assert float(error.max()) < 3e-4 and float(wrong.max()) > 1.9
    assert cos.dtype == sin.dtype == torch.float32


@pytest.mark.parametrize("position", [1, 100, 10_000, 200_000])
def test_o17_text_angles_at_large_positions(position: int) -> None:
    rotary = Qwen3VLTextRotaryEmbedding(Qwen3VLTextConfig(dtype=torch.float32))
    cos, _ = rotary(torch.full((3, 1), position))
    exact = 1.0 / 5e6 ** (torch.arange(0, 128, 2, dtype=torch.float64) / 128)
    error = float((cos[0].double() - (position * exact).cos()).abs().max())
    assert error <= position * 2**-22 + 2**-23  # angle and frequency rounded once each


def test_o18_mlp_follows_hidden_act_and_mergers_are_exact(
    driver: PackageDriver, reference: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = driver.model.visual, reference.model.visual
    assert theirs.config.hidden_act == "gelu_pytorch_tanh"
    torch.manual_seed(0)
    hidden = torch.randn(1, 128, 64) * 2

    def errors() -> list[float]:
        mergers = [(ours.merger, theirs.merger)]
        mergers += zip(ours.deepstack_merger_list, theirs.deepstack_merger_list, strict=True)
        found = [relative(ours.blocks[0].mlp(hidden), theirs.blocks[0].mlp(hidden))]
        found += [relative(a(hidden)[0], b(hidden[0])) for a, b in mergers]
        return found

    assert max(errors()) < 1e-5, errors()
    tanh, exact = vision_encoder.gelu_tanh, vision_encoder.gelu
    monkeypatch.setattr(vision_encoder, "gelu_tanh", exact)
    monkeypatch.setattr(vision_encoder, "gelu", tanh)
    assert min(errors()) > 3e-5, "each swap shows"


# ------------------------------------------------------------------------- O19, O20: cache, memory


def test_o19_pictures_of_the_same_bytes_have_their_own_keys_and_answers(
    driver: PackageDriver, processor: Any, config: Any
) -> None:
    from vllm.multimodal.hasher import MultiModalHasher

    raw = np.random.default_rng(0).integers(0, 256, 13_500, dtype=np.uint8)
    tall = Image.fromarray(raw.reshape(150, 30, 3))
    wide = Image.fromarray(raw.reshape(30, 150, 3))
    assert tall.tobytes() == wide.tobytes() and len(tall.tobytes()) == 13_500
    grey = Image.fromarray(raw.reshape(150, 90))
    keys = [
        MultiModalHasher.hash_kwargs("sha256", model_id="tiny", image=image)
        for image in (tall, wide, grey)
    ]
    assert len(set(keys)) == 3, "the key covers width, height and mode"

    cache = driver.encoder_cache
    answers = []
    for key, image in zip(keys[:2], (tall, wide), strict=True):
        inputs = prepare(processor, f"What is {IMAGE}?", images=[image])
        call = {name: inputs[name] for name in ("pixel_values", "image_grid_thw")}
        driver.model.embed_multimodal(encoder_cache=cache, mm_hashes=[key], **call)
        answers.append(logits_of(driver, inputs, config))
    rows = [cache.get(key) for key in keys[:2]]
    for key in keys[:2]:
        cache.free(key)
    assert rows[0].shape == rows[1].shape and relative(rows[0], rows[1]) > 0.1
    assert relative(answers[0], answers[1]) > 1e-2


LOADERS = {
    "column": lambda tp: (weight_loaders.column_parallel_loader((64, 24), tp), [(64, 24)]),
    "row": lambda tp: (weight_loaders.row_parallel_loader((24, 64), tp), [(24, 64)]),
    "column bias": lambda tp: (weight_loaders.column_parallel_bias_loader(64, tp), [(64,)]),
    "vocabulary": lambda tp: (weight_loaders.vocabulary_loader(TEXT, tp), [(37, 24)]),
    "fused text": lambda tp: (
        weight_loaders.fused_qkv_loader(TEXT, tp),
        [(32, 24), (8, 24), (8, 24)],
    ),
    "fused vision": lambda tp: (weight_loaders.vision_qkv_loader(VISION, tp), [(96, 32)]),
    "fused vision bias": lambda tp: (weight_loaders.vision_qkv_bias_loader(VISION, tp), [(96,)]),
}


@pytest.mark.parametrize(("name", "tp_size"), list(itertools.product(LOADERS, [2, 4])))
def test_o20_a_rank_reads_its_own_share_only(name: str, tp_size: int) -> None:
    """No loader reads, clones or joins a whole matrix on the way to its shard."""
    loader, shapes = LOADERS[name](tp_size)
    whole = sum(math.prod(shape) for shape in shapes)
    for rank in range(tp_size):
        slices = [Slice(torch.zeros(shape)) for shape in shapes]
        shard = loader.load(slices, rank)
        looked_at = sum(math.prod(shape[1:]) for shape in shapes)  # one row, for the dtype
        assert sum(piece.total for piece in slices) <= shard.numel() + looked_at
        assert shard.numel() <= whole / tp_size + 2 * 4 * 24 * (name == "fused text") + 24
        assert shard.untyped_storage().nbytes() == shard.numel() * shard.element_size()


def test_o20_a_loader_that_reads_the_whole_matrix_is_noticed() -> None:
    piece = Slice(torch.zeros(64, 24))
    shard = piece[:][16:32]
    assert piece.total > shard.numel() + 24
    assert shard.untyped_storage().nbytes() > shard.numel() * shard.element_size()
