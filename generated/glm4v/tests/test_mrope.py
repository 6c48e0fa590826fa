"""Positions of prompts with images and videos, against Hugging Face's `get_rope_index`."""

import random
from types import SimpleNamespace

import pytest
import torch
from vllm_neuron_glm4v.config import Glm4vConfig
from vllm_neuron_glm4v.utils.mrope import PlaceholderError, compute_mrope_positions

from .support import tiny_config

CONFIG = Glm4vConfig.from_configs(tiny_config())
MERGE = CONFIG.vision_config.spatial_merge_size
START, END = CONFIG.vision_start_token_id, CONFIG.vision_end_token_id


def feature(modality, grid, offset, length):
    data = {f"{modality}_grid_thw": SimpleNamespace(data=torch.tensor(grid))}
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

    for kind, value in parts:
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
            put(CONFIG.video_start_token_id)
            for _ in range(t):
                put(START)
                put(*[CONFIG.image_token_id] * rows, kind=2)
                put(END, 7)
            put(CONFIG.video_end_token_id)
            features.append(feature(kind, value, begin, len(tokens) - begin))
    return tokens, types, features


def expected_positions(reference, tokens, types, features):
    if not features:
        return torch.arange(len(tokens)).expand(3, -1), 0
    grids = {
        kind: [f.data[f"{kind}_grid_thw"].data for f in features if f.modality == kind]
        for kind in ("image", "video")
    }
    stacked = [torch.stack(rows) if rows else None for rows in grids.values()]
    positions, delta = reference.model.get_rope_index(
        torch.tensor([tokens]), torch.tensor([types]), *stacked
    )
    return positions[:, 0], int(delta)


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


@pytest.mark.parametrize("order", [("image", "video"), ("video", "image")])
def test_image_and_video_in_either_order(reference, order):
    grids = {"image": [1, 4, 6], "video": [3, 4, 4]}
    check(reference, [("text", 3), *((kind, grids[kind]) for kind in order), ("text", 2)])


@pytest.mark.parametrize("seed", range(40))
def test_random_mixtures_equal_hugging_face(reference, seed):
    rng = random.Random(seed)

    def part():
        kind = rng.choice(["text", "image", "video"])
        if kind == "text":
            return kind, rng.randrange(1, 9)
        frames = 1 if kind == "image" else rng.randrange(1, 6)
        grid = [frames, MERGE * rng.randrange(1, 9), MERGE * rng.randrange(1, 9)]
        return kind, grid

    check(reference, [part() for _ in range(rng.randrange(1, 9))] + [("text", 1)])


def test_a_number_of_runs_that_differs_from_the_frames_is_refused():
    tokens, _, features = prompt([("video", [2, 4, 4])])
    features[0].data["video_grid_thw"] = torch.tensor([3, 4, 4])
    with pytest.raises(PlaceholderError, match="2 runs of placeholders for 3 frames"):
        compute_mrope_positions(tokens, features, CONFIG)


def test_a_run_of_the_wrong_length_is_refused():
    tokens, _, features = prompt([("image", [1, 4, 4])])
    features[0].data["image_grid_thw"] = torch.tensor([1, 4, 6])
    with pytest.raises(PlaceholderError, match="a run of 4 placeholders, .* has 6 merged rows"):
        compute_mrope_positions(tokens, features, CONFIG)
