"""Three-axis positions of random prompts against Hugging Face's own."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch

from vlmgen.validate.driver import GRIDS, Feature, FieldElement, PackageDriver, PlaceholderRange
from vlmgen.validate.reference import Reference
from vlmgen.validate.report import Report, Row

GROUP = "positions"
MIXTURES = 500


@dataclass(frozen=True)
class Mixture:
    """A random prompt of text, pictures and videos, in Hugging Face's form and in vLLM's."""

    token_ids: list[int]
    token_types: list[int]
    image_grids: list[list[int]]
    video_grids: list[list[int]]
    features: list[Feature]


def check_positions(reference: Reference, driver: PackageDriver, report: Report) -> None:
    """Compare positions and deltas of random mixtures, and of text alone, exactly."""
    generator = random.Random(0)
    wrong, example = 0, ""
    for number in range(MIXTURES):
        mixture = random_mixture(generator, reference.config, text_only=number % 50 == 0)
        positions, delta = driver.model.get_mrope_input_positions(
            mixture.token_ids, mixture.features
        )
        expected, expected_delta = reference_positions(reference, mixture)
        if torch.equal(positions, expected) and delta == expected_delta:
            continue
        wrong += 1
        example = example or (
            f"; first: mixture {number}, pictures {mixture.image_grids}, videos "
            f"{mixture.video_grids}, delta {delta} for {expected_delta}"
        )
    report.rows.append(
        Row(
            GROUP,
            "random mixtures",
            MIXTURES,
            float(wrong),
            0.0,
            wrong == 0,
            f"differing; positions and deltas{example}",
        )
    )


def reference_positions(reference: Reference, mixture: Mixture) -> tuple[torch.Tensor, int]:
    """Hugging Face's positions `[3, n]` and delta."""
    positions, delta = reference.model.model.get_rope_index(
        input_ids=torch.tensor([mixture.token_ids]),
        mm_token_type_ids=torch.tensor([mixture.token_types], dtype=torch.int32),
        image_grid_thw=torch.tensor(mixture.image_grids) if mixture.image_grids else None,
        video_grid_thw=torch.tensor(mixture.video_grids) if mixture.video_grids else None,
    )
    return positions[:, 0], int(delta)


def random_mixture(generator: random.Random, config: Any, *, text_only: bool = False) -> Mixture:
    """Draw a prompt whose media stand between markers, as the chat template writes them."""
    merge = config.vision_config.spatial_merge_size
    start, end = config.vision_start_token_id, config.vision_end_token_id
    tokens: list[int] = []
    types: list[int] = []
    grids: dict[str, list[list[int]]] = {"image": [], "video": []}
    features: list[Feature] = []

    def put(token: int, count: int = 1, kind: int = 0) -> None:
        tokens.extend([token] * count)
        types.extend([kind] * count)

    def text(shortest: int, longest: int) -> None:
        for _ in range(generator.randint(shortest, longest)):
            put(generator.randrange(0, 256))

    def frame(modality: str, rows: int) -> None:
        token = {"image": config.image_token_id, "video": config.video_token_id}[modality]
        put(token, rows, {"image": 1, "video": 2}[modality])

    text(1 if text_only else 0, 20)
    for _ in range(0 if text_only else generator.randint(1, 4)):
        modality = generator.choice(["image", "video"])
        t = generator.randint(1, 5) if modality == "video" else 1
        h, w = (merge * generator.randint(1, 9) for _ in range(2))
        rows = h * w // merge**2
        put(start)
        offset = len(tokens)
        if modality == "image":
            frame(modality, rows)
        for _ in range(t if modality == "video" else 0):
            text(1, 6)  # the time stamp
            put(start)
            frame(modality, rows)
            put(end)
        span = torch.tensor(types[offset:]) == {"image": 1, "video": 2}[modality]
        place = PlaceholderRange(offset, len(span), None if modality == "image" else span)
        put(end)
        text(0, 20)
        grid = [t, h, w]
        grids[modality].append(grid)
        data = {GRIDS[modality]: FieldElement(torch.tensor(grid))}
        features.append(Feature(modality, data, f"item {len(features)}", place))
    return Mixture(tokens, types, grids["image"], grids["video"], features)
