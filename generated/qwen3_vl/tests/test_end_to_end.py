"""Whole prompts through the runner's steps: encode, prefill, decode through the paged cache."""

import numpy as np
import pytest
import torch
from vllm_neuron_qwen3_vl.factory import Qwen3VLForConditionalGeneration

from .driver import PackageDriver, features_of
from .support import relative_error

LIMIT = 1e-4
KINDS = ["text", "image", "three images", "video", "image and video", "video and image"]


def pictures() -> list[np.ndarray]:
    """Three crops of a photograph: landscape, portrait, and the smallest grid."""
    from skimage import data

    photo = data.astronaut()
    return [photo[50:178, 100:292], photo[30:254, 150:246], photo[200:232, 200:232]]


def prompt(kind: str, config, image_processor) -> dict:
    """Model inputs; pictures go through Hugging Face's own image processor."""
    image, video = config.image_token_id, config.video_token_id
    start, end = config.vision_start_token_id, config.vision_end_token_id
    ids, pixels, grids = [72, 101, 108], [], []

    def add_image(picture):
        batch = image_processor(images=[picture], return_tensors="pt")
        pixels.append(batch["pixel_values"])
        grids.append(batch["image_grid_thw"])
        ids.extend([start, *[image] * (int(batch["image_grid_thw"].prod()) // 4), end, 32])

    def add_video():
        frames = [picture[:96, :96] for picture in pictures()[:1] * 3]
        batch = image_processor(
            images=[np.roll(f, 9 * i, 1) for i, f in enumerate(frames)], return_tensors="pt"
        )
        grid = torch.tensor([[len(frames), *batch["image_grid_thw"][0, 1:].tolist()]])
        inputs["pixel_values_videos"], inputs["video_grid_thw"] = batch["pixel_values"], grid
        ids.append(start)
        for _ in frames:
            ids.extend([48, 46, start, *[video] * (int(grid[0, 1:].prod()) // 4), end])
        ids.append(end)

    inputs = {}
    steps = {
        "text": [],
        "image": [lambda: add_image(pictures()[0])],
        "three images": [lambda p=p: add_image(p) for p in pictures()],
        "video": [add_video],
        "image and video": [lambda: add_image(pictures()[1]), add_video],
        "video and image": [add_video, lambda: add_image(pictures()[1])],
    }
    for step in steps[kind]:
        step()
    ids.extend([87, 104, 97, 116, 63])
    if pixels:
        inputs["pixel_values"], inputs["image_grid_thw"] = torch.cat(pixels), torch.cat(grids)
    tokens = torch.tensor([ids])
    kinds = (tokens == image).int() + 2 * (tokens == video).int()
    return {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "mm_token_type_ids": kinds,
        **inputs,
    }


@pytest.fixture(scope="module")
def image_processor():
    from transformers import Qwen2VLImageProcessor

    return Qwen2VLImageProcessor(
        **{
            "patch_size": 16,
            "merge_size": 2,
            "temporal_patch_size": 2,
            "size": {"shortest_edge": 1024, "longest_edge": 65536},
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
        }
    )


@pytest.fixture(scope="module")
def driver(checkpoint):
    return PackageDriver(Qwen3VLForConditionalGeneration, checkpoint)


def hf_logits(reference, inputs):
    return reference(**inputs).logits[0]


@pytest.mark.parametrize("kind", KINDS)
def test_prefill_logits_of_every_token(driver, reference, config, image_processor, kind):
    inputs = prompt(kind, config, image_processor)
    request = driver.add_request(inputs["input_ids"][0].tolist(), features_of(inputs, config))
    logits = driver.prefill(request, rows=range(inputs["input_ids"].shape[1]))
    driver.release(request)
    assert relative_error(logits, hf_logits(reference, inputs)) <= LIMIT


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_through_the_paged_cache(driver, reference, config, image_processor, kind):
    inputs = prompt(kind, config, image_processor)
    request = driver.add_request(inputs["input_ids"][0].tolist(), features_of(inputs, config))
    tokens, _ = driver.generate([request], 32)
    driver.release(request)
    expected = reference.generate(**inputs, max_new_tokens=32, do_sample=False, eos_token_id=None)
    assert tokens[0] == expected[0, inputs["input_ids"].shape[1] :].tolist()


def test_a_batch_of_requests_decodes_like_each_alone(driver, config, image_processor):
    def requests():
        return [
            driver.add_request(inputs["input_ids"][0].tolist(), features_of(inputs, config))
            for inputs in (
                prompt(kind, config, image_processor) for kind in ("text", "image", "video")
            )
        ]

    together = requests()
    batched, _ = driver.generate(together, 8)
    for request in together:
        driver.release(request)
    for request, tokens in zip(requests(), batched, strict=True):
        assert driver.generate([request], 8)[0][0] == tokens
        driver.release(request)


def test_noise_in_padding_scratch_and_unused_blocks_has_no_effect(
    driver, checkpoint, config, image_processor
):
    inputs = prompt("three images", config, image_processor)
    noisy = PackageDriver(Qwen3VLForConditionalGeneration, checkpoint, noise=50.0, padding_slot=-1)
    results = []
    for one in (driver, noisy):
        request = one.add_request(inputs["input_ids"][0].tolist(), features_of(inputs, config))
        results.append(one.generate([request], 4)[1][0])
        one.release(request)
    assert relative_error(results[1], results[0]) <= 1e-5
