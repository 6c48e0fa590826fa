"""Whole prompts through the runner's steps: encode, prefill, decode through the paged cache."""

import numpy as np
import pytest
import torch
from vllm_neuron_internvl3_5_moe.factory import InternVLForConditionalGeneration

from .driver import PackageDriver
from .features import features_of
from .support import relative_error

LIMIT = 1e-4
KINDS = ["text", "image", "three images", "video", "image and video", "video and image"]


def pictures() -> list[np.ndarray]:
    """Three crops of a photograph: landscape, portrait, and the smallest grid."""
    from skimage import data

    photo = data.astronaut()
    return [photo[50:178, 100:292], photo[30:254, 150:246], photo[200:232, 200:232]]


class Prompt:
    """Tokens and pixels of a prompt; pictures go through Hugging Face's own image processor."""

    def __init__(self, kind: str, config, image_processor) -> None:
        self.config, self.image_processor = config, image_processor
        self.tokens = []
        self.tiles, self.frames = [], []
        self.put(72, 101, 108)
        first, second, third = pictures()
        for part in kind.split(" and "):
            if part == "image":
                self.image(first if kind == "image" else second)
            elif part == "three images":
                for picture in (first, second, third):
                    self.image(picture)
            elif part == "video":
                self.video([np.roll(first[:96, :96], 9 * i, 1) for i in range(3)])
        self.put(87, 104, 97, 116, 63)

    def put(self, *tokens: int) -> None:
        self.tokens += tokens

    def image(self, picture: np.ndarray) -> None:
        tiles = self.image_processor(images=[picture], return_tensors="pt")["pixel_values"]
        self.tiles.append(tiles)
        self.frames.append(0)
        self.put(
            60, *[self.config.image_token_id] * (len(tiles) * self.config.image_seq_length), 62
        )

    def video(self, frames: list[np.ndarray]) -> None:
        batch = self.image_processor(images=frames, crop_to_patches=False, return_tensors="pt")
        self.tiles.append(batch["pixel_values"])
        self.frames.append(len(frames))
        for number in range(len(frames)):
            self.put(
                70,
                49 + number,
                60,
                *[self.config.image_token_id] * self.config.image_seq_length,
                62,
            )

    @property
    def inputs(self) -> dict:
        """Arguments of the model."""
        tokens = torch.tensor([self.tokens])
        inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        return {**inputs, "pixel_values": torch.cat(self.tiles)} if self.tiles else inputs

    @property
    def features(self) -> list:
        """Images and videos as vLLM describes them."""
        return features_of(self.inputs, self.config, self.frames)


@pytest.fixture(scope="module")
def image_processor():
    from transformers import GotOcr2ImageProcessor

    return GotOcr2ImageProcessor(
        **{
            "size": {"height": 84, "width": 84},
            "crop_to_patches": True,
            "min_patches": 1,
            "max_patches": 4,
            "image_mean": [0.485, 0.456, 0.406],
            "image_std": [0.229, 0.224, 0.225],
        }
    )


@pytest.fixture(scope="module")
def driver(checkpoint):
    return PackageDriver(InternVLForConditionalGeneration, checkpoint)


@pytest.mark.parametrize("kind", KINDS)
def test_prefill_logits_of_every_token(driver, reference, config, image_processor, kind):
    prompt = Prompt(kind, config, image_processor)
    request = driver.add_request(prompt.tokens, prompt.features)
    logits = driver.prefill(request, rows=range(len(prompt.tokens)))
    driver.release(request)
    assert relative_error(logits, reference(**prompt.inputs).logits[0]) <= LIMIT


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_through_the_paged_cache(driver, reference, config, image_processor, kind):
    prompt = Prompt(kind, config, image_processor)
    request = driver.add_request(prompt.tokens, prompt.features)
    tokens, _ = driver.generate([request], 32)
    driver.release(request)
    expected = reference.generate(
        **prompt.inputs, max_new_tokens=32, do_sample=False, eos_token_id=None
    )
    assert tokens[0] == expected[0, len(prompt.tokens) :].tolist()


def test_a_batch_of_requests_decodes_like_each_alone(driver, config, image_processor):
    def requests():
        prompts = [Prompt(kind, config, image_processor) for kind in ("text", "image", "video")]
        return [driver.add_request(prompt.tokens, prompt.features) for prompt in prompts]

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
    prompt = Prompt("three images", config, image_processor)
    noisy = PackageDriver(InternVLForConditionalGeneration, checkpoint, noise=50.0, padding_slot=-1)
    results = []
    for one in (driver, noisy):
        request = one.add_request(prompt.tokens, prompt.features)
        results.append(one.generate([request], 4)[1][0])
        one.release(request)
    assert relative_error(results[1], results[0]) <= 1e-5
