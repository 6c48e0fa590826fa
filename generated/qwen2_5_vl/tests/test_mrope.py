"""Positions of prompts with images and videos, against vLLM's own."""

import random
from types import SimpleNamespace

import pytest
import torch
from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration as Upstream
from vllm_neuron_qwen2_5_vl.config import Qwen2_5_VLConfig
from vllm_neuron_qwen2_5_vl.utils.mrope import PlaceholderError, compute_mrope_positions

from .support import tiny_config

CONFIG = Qwen2_5_VLConfig.from_configs(tiny_config())
MERGE = CONFIG.vision_config.spatial_merge_size
START, END = CONFIG.vision_start_token_id, CONFIG.vision_end_token_id
PER_SECOND = CONFIG.vision_config.tokens_per_second


def feature(modality, grid, offset, length, seconds=1.0):
    data = {f"{modality}_grid_thw": SimpleNamespace(data=torch.tensor(grid))}
    if modality == "video":
        data["second_per_grid_ts"] = SimpleNamespace(data=torch.tensor(seconds))
    return SimpleNamespace(
        modality=modality, data=data, mm_position=SimpleNamespace(offset=offset, length=length)
    )


def prompt(parts):
    """Token ids, their types and features of ("text", n) and ("image" | "video", [t, h, w])
    parts.
    """
    tokens, types, features = [], [], []

    def put(*own, kind=0):
        tokens.extend(own)
        types.extend([kind] * len(own))

    for kind, value, *more in parts:
        if kind == "text":
            put(*[5] * value)
            continue
        t, h, w = value
        rows = h * w // MERGE**2
        begin = len(tokens)
        if kind == "image":
            put(START)
            put(*[CONFIG.image_token_id] * rows, kind=1)
            put(END)
            features.append(feature(kind, value, begin + 1, rows))
        else:
            put(START)
            put(*[CONFIG.video_token_id] * (t * rows), kind=2)
            put(END)
            features.append(feature(kind, value, begin + 1, t * rows, *more))
    return tokens, types, features


def expected_positions(_, tokens, types, features):
    model = Upstream.__new__(Upstream)
    model.config = tiny_config()
    return model.get_mrope_input_positions(tokens, features)


def check(reference, parts):
    tokens, types, features = prompt(parts)
    positions, delta = compute_mrope_positions(tokens, features, CONFIG)
    expected, expected_delta = expected_positions(reference, tokens, types, features)
    assert torch.equal(positions, expected) and delta == expected_delta


def test_worked_example():
    tokens, _, features = prompt([("text", 1), ("image", [1, 4, 6]), ("text", 1)])
    positions, delta = compute_mrope_positions(tokens, features, CONFIG)
    assert positions.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6],
    ]
    assert delta == -3


def test_published_example_of_the_plugin():
    grid, image = [1, 32, 32], CONFIG.image_token_id
    tokens = [5] * 12 + [image] * 256 + [5] * 12
    positions, delta = compute_mrope_positions(tokens, [feature("image", grid, 12, 256)], CONFIG)
    assert positions[0, 268:].tolist() == list(range(28, 40))
    assert delta == -240


def test_text_alone_counts_on_all_three_axes():
    positions, delta = compute_mrope_positions([5] * 9, [], CONFIG)
    assert positions.tolist() == [list(range(9))] * 3 and positions.dtype == torch.int64
    assert delta == 0


def test_after_a_long_video_the_largest_position_counts():
    """A video of 5 frames of 1 x 2 rows: time passes its sides."""
    tokens, _, features = prompt([("text", 1), ("video", [5, 2, 4], 1 / PER_SECOND), ("text", 1)])
    positions, delta = compute_mrope_positions(tokens, features, CONFIG)
    assert positions[:, 2:12].tolist() == [
        [2, 2, 3, 3, 4, 4, 5, 5, 6, 6],
        [2, 2, 2, 2, 2, 2, 2, 2, 2, 2],
        [2, 3, 2, 3, 2, 3, 2, 3, 2, 3],
    ]
    assert positions[:, 12:].tolist() == [[7, 8]] * 3 and delta == -5


def test_time_is_rounded_down():
    tokens, _, features = prompt([("video", [4, 2, 2], 0.7 / PER_SECOND)])
    positions, _ = compute_mrope_positions(tokens, features, CONFIG)
    assert positions[0, 1:5].tolist() == [1, 1, 2, 3]  # 0 0.7 1.4 2.1 after the marker


def test_without_seconds_a_frame_is_a_second(reference):
    tokens, types, features = prompt([("video", [3, 2, 2]), ("text", 1)])
    del features[0].data["second_per_grid_ts"]
    positions, delta = compute_mrope_positions(tokens, features, CONFIG)
    expected, expected_delta = expected_positions(reference, tokens, types, features)
    assert torch.equal(positions, expected) and delta == expected_delta


@pytest.mark.parametrize("order", [("image", "video"), ("video", "image")])
def test_image_and_video_in_either_order(reference, order):
    grids = {"image": [1, 4, 6], "video": [3, 4, 4]}
    check(reference, [("text", 3), *((kind, grids[kind]) for kind in order), ("text", 2)])


@pytest.mark.parametrize("seed", range(40))
def test_random_mixtures_equal_vllm(reference, seed):
    rng = random.Random(seed)

    def part():
        kind = rng.choice(["text", "image", "video"])
        if kind == "text":
            return kind, rng.randrange(1, 9)
        frames = 1 if kind == "image" else rng.randrange(1, 12)
        grid = [frames, MERGE * rng.randrange(1, 9), MERGE * rng.randrange(1, 9)]
        return kind, grid, rng.choice([0.1, 0.5, 0.7, 1.0, 2.0])

    check(reference, [part() for _ in range(rng.randrange(1, 9))] + [("text", 1)])


def test_a_run_of_the_wrong_length_is_refused():
    tokens, _, features = prompt([("image", [1, 4, 4])])
    features[0].data["image_grid_thw"] = torch.tensor([1, 4, 6])
    with pytest.raises(PlaceholderError, match="4 placeholders from .* asks for one run of 6"):
        compute_mrope_positions(tokens, features, CONFIG)


def test_a_run_with_a_gap_is_refused():
    tokens, _, features = prompt([("image", [1, 4, 4])])
    tokens[2:3] = [5, tokens[2]]
    features[0].mm_position.length += 1
    with pytest.raises(PlaceholderError, match="4 placeholders from .* asks for one run of 4"):
        compute_mrope_positions(tokens, features, CONFIG)
