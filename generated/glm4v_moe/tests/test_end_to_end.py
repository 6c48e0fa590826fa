"""Whole prompts through the runner's steps: encode, prefill, decode through the paged cache."""

import numpy as np
import pytest
import torch
from vllm_neuron_glm4v_moe.factory import Glm4vMoeForConditionalGeneration

from .driver import PackageDriver
from .features import features_of
from .support import relative_error

LIMIT = 1e-4
KINDS = ["text", "image", "three images", "video"]


def pictures() -> list[np.ndarray]:
    """Three crops of a photograph: landscape, portrait, and the smallest grid."""
    from skimage import data

    photo = data.astronaut()
    return [photo[50:178, 100:292], photo[30:254, 150:246], photo[200:232, 200:232]]


class Prompt:
    """Tokens and pixels of a prompt; pictures go through Hugging Face's own image processor."""

    def __init__(self, kind: str, config, image_processor) -> None:
        self.config, self.image_processor = config, image_processor
        self.tokens, self.types = [], []
        self.pixels, self.grids = {"image": [], "video": []}, {"image": [], "video": []}
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

    def put(self, *tokens: int, kind: int = 0) -> None:
        self.tokens += tokens
        self.types += [kind] * len(tokens)

    def rows(self, token: int, modality: str, pictures: list[np.ndarray]) -> list[int]:
        """The placeholders of one picture or frame; its pixels are kept."""
        batch = self.image_processor(images=pictures, return_tensors="pt")
        self.pixels[modality].append(batch["pixel_values"])
        _, height, width = batch["image_grid_thw"][0].tolist()
        self.grids[modality].append([len(pictures), height, width])
        return [token] * (height * width // 4)

    def image(self, picture: np.ndarray) -> None:
        rows = self.rows(self.config.image_token_id, "image", [picture])
        self.put(self.config.image_start_token_id)
        self.put(*rows, kind=1)
        self.put(self.config.image_end_token_id, 32)

    def video(self, frames: list[np.ndarray]) -> None:
        start, end = self.config.image_start_token_id, self.config.image_end_token_id
        rows = self.rows(self.config.image_token_id, "video", frames)
        self.put(self.config.video_start_token_id)
        for number in range(len(frames)):
            self.put(start)
            self.put(*rows, kind=2)
            self.put(end, 48 + number)
        self.put(self.config.video_end_token_id)

    @property
    def inputs(self) -> dict:
        """Arguments of the model."""
        tokens = torch.tensor([self.tokens])
        inputs = {
            "input_ids": tokens,
            "attention_mask": torch.ones_like(tokens),
            "mm_token_type_ids": torch.tensor([self.types]),
        }
        if self.pixels["image"]:
            inputs["pixel_values"] = torch.cat(self.pixels["image"])
            inputs["image_grid_thw"] = torch.tensor(self.grids["image"])
        if self.pixels["video"]:
            inputs["pixel_values_videos"] = torch.cat(self.pixels["video"])
            inputs["video_grid_thw"] = torch.tensor(self.grids["video"])
        return inputs

    @property
    def features(self) -> list:
        """Images and videos as vLLM describes them."""
        return features_of(self.inputs, self.config)


@pytest.fixture(scope="module")
def image_processor():
    from transformers import Glm4vImageProcessor

    return Glm4vImageProcessor(
        **{
            "patch_size": 14,
            "merge_size": 2,
            "temporal_patch_size": 2,
            "size": {"shortest_edge": 1568, "longest_edge": 200000},
            "image_mean": [0.48145466, 0.4578275, 0.40821073],
            "image_std": [0.26862954, 0.26130258, 0.27577711],
        }
    )


@pytest.fixture(scope="module")
def driver(checkpoint):
    return PackageDriver(Glm4vMoeForConditionalGeneration, checkpoint)


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
    noisy = PackageDriver(Glm4vMoeForConditionalGeneration, checkpoint, noise=50.0, padding_slot=-1)
    results = []
    for one in (driver, noisy):
        request = one.add_request(prompt.tokens, prompt.features)
        results.append(one.generate([request], 4)[1][0])
        one.release(request)
    assert relative_error(results[1], results[0]) <= 1e-5
