"""Three-axis positions of random prompts, against vLLM's own function and Hugging Face's."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from vlmgen.validate.driver import Feature, PackageDriver
from vlmgen.validate.reference import Reference
from vlmgen.validate.report import Report, Row
from vlmgen.validate.upstream import upstream_positions

GROUP = "positions"
MIXTURES = 250
"""Random prompts per reference."""

Positions = tuple[torch.Tensor, int]

_EXACT_SECONDS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0)
_OTHER_SECONDS = (0.1, 1 / 3, 0.4, 0.7, 1.1, 5.0)  # products round differently in float32


@dataclass(frozen=True)
class Mixture:
    """A random prompt of text, pictures and videos, in Hugging Face's form and in vLLM's.

    Args:
        inputs: `input_ids` and `mm_token_type_ids` `[1, n]`, grids, and pixels of width 0.
        features: What vLLM makes of them.
    """

    inputs: dict[str, torch.Tensor]
    features: list[Feature]

    @property
    def token_ids(self) -> list[int]:
        """The tokens."""
        return self.inputs["input_ids"][0].tolist()


def position_checks(
    reference: Reference, driver: PackageDriver, report: Report
) -> list[tuple[str, Callable[[], None]]]:
    """Name and function of every check; a function adds its row.

    Where transformers and vLLM place what follows a long video differently, the package follows
    vLLM, and transformers is asked about videos on which both agree.
    """
    if not driver.uses_mrope:
        return [("one axis", partial(_check_one_axis, "one axis", driver, report))]
    block = reference.spec.tokens.positions == "mrope_block"
    detail = "; videos no longer than their sides" if block else ""
    compare = partial(_compare, reference, driver, report)
    checks: dict[str, Callable[..., None]] = {
        "mixtures against vLLM": partial(compare, vllm_positions, long_videos=True),
        "mixtures against transformers": partial(
            compare, reference_positions, long_videos=not block, detail=detail
        ),
    }
    return [(name, partial(check, name)) for name, check in checks.items()]


def _compare(
    reference: Reference,
    driver: PackageDriver,
    report: Report,
    expect: Callable[[Reference, Mixture], Positions],
    name: str,
    *,
    long_videos: bool,
    detail: str = "",
) -> None:
    """Positions and deltas of random mixtures, and of text alone, exactly."""
    generator = random.Random(name)
    wrong, example = 0, ""
    for number in range(MIXTURES):
        mixture = random_mixture(
            generator, reference, text_only=number % 50 == 0, long_videos=long_videos
        )
        positions, delta = driver.model.get_mrope_input_positions(
            mixture.token_ids, mixture.features
        )
        expected, expected_delta = expect(reference, mixture)
        if torch.equal(positions, expected) and delta == expected_delta:
            continue
        wrong += 1
        grids = [(feature.modality, reference.grid_of(feature)) for feature in mixture.features]
        example = example or f"; first: mixture {number}, {grids}, delta {delta}/{expected_delta}"
    detail = f"differing; positions and deltas{detail}{example}"
    report.rows.append(Row(GROUP, name, MIXTURES, float(wrong), 0.0, wrong == 0, detail))


def _check_one_axis(name: str, driver: PackageDriver, report: Report) -> None:
    """Without M-RoPE the runner gives places 0, 1, 2, ... and asks the package for nothing."""
    members = ("get_mrope_input_positions", "supports_mrope")
    present = [
        member
        for member in members
        for owner in (driver.model, driver.factory)
        if getattr(owner, member, False)
    ]
    detail = f"declares {present}" if present else "no M-RoPE; places count from 0"
    passed = not present
    report.rows.append(Row(GROUP, name, len(members), float(len(present)), 0.0, passed, detail))


def vllm_positions(reference: Reference, mixture: Mixture) -> Positions:
    """vLLM's positions `[3, n]` and delta."""
    return upstream_positions(reference.spec, reference.config, mixture.token_ids, mixture.features)


def reference_positions(reference: Reference, mixture: Mixture) -> Positions:
    """Hugging Face's positions `[3, n]` and delta."""
    named = {name: mixture.inputs.get(name) for name in ("image_grid_thw", "video_grid_thw")}
    if "second_per_grid_ts" in mixture.inputs:
        named["second_per_grid_ts"] = mixture.inputs["second_per_grid_ts"]
    positions, delta = reference.model.model.get_rope_index(
        input_ids=mixture.inputs["input_ids"],
        mm_token_type_ids=mixture.inputs["mm_token_type_ids"],
        **named,
    )
    return positions[:, 0], int(delta)


class _Writer:
    """Writes tokens and their types as the chat template and the processor of a family do."""

    def __init__(self, generator: random.Random, reference: Reference) -> None:
        self.generator, self.spec = generator, reference.spec
        self.tokens: list[int] = []
        self.types: list[int] = []
        config, tokens = reference.config, reference.spec.tokens
        self.ids = {
            name: getattr(config, getattr(tokens, name).config_key)
            for name in ("image", "video", "vision_start", "vision_end", "video_start", "video_end")
            if getattr(tokens, name) is not None
        }

    def put(self, name: str, count: int = 1, kind: int = 0) -> None:
        """Special tokens."""
        self.tokens += [self.ids[name]] * count
        self.types += [kind] * count

    def text(self, shortest: int, longest: int) -> None:
        """Bytes."""
        count = self.generator.randint(shortest, longest)
        self.tokens += [self.generator.randrange(0, 256) for _ in range(count)]
        self.types += [0] * count

    def image(self, rows: int) -> None:
        """A picture."""
        self.put("vision_start")
        self.put("image", rows, 1)
        self.put("vision_end")

    def video(self, frames: int, rows: int) -> None:
        """A video of the family's prompt scheme."""
        scheme = self.spec.tokens.video_prompt
        if scheme == "one_run":
            self.put("vision_start")
            self.put("video", frames * rows, 2)
            self.put("vision_end")
            return
        before = scheme == "per_frame_timestamp"
        self.put("vision_start" if before else "video_start")
        for _ in range(frames):
            if before:
                self.text(1, 6)
            self.put("vision_start")
            self.put("video" if before else "image", rows, 2)
            self.put("vision_end")
            if not before:
                self.text(1, 3)
        self.put("vision_end" if before else "video_end")


def random_mixture(
    generator: random.Random,
    reference: Reference,
    *,
    text_only: bool = False,
    long_videos: bool = True,
) -> Mixture:
    """Draw a prompt whose media stand between markers.

    Args:
        generator: Where chance comes from.
        reference: The family.
        text_only: No media.
        long_videos: Videos may have more temporal positions than their longer side.
    """
    spec, merge = reference.spec, reference.config.vision_config.spatial_merge_size
    writer = _Writer(generator, reference)
    grids: dict[str, list[list[int]]] = {"image": [], "video": []}
    seconds: list[float] = []
    kinds = ["image"] if spec.inputs.video is None else ["image", "video"]
    writer.text(1, 20)
    for _ in range(0 if text_only else generator.randint(1, 4)):
        kind = generator.choice(kinds)
        h, w = (merge * generator.randint(1, 9) for _ in range(2))
        rows, t = h * w // merge**2, 1
        if kind == "image":
            writer.image(rows)
        else:
            t = generator.randint(1, 5 if h * w > 200 else 12)
            step = 1.0
            if spec.tokens.seconds:
                seconds.append(generator.choice(_OTHER_SECONDS if long_videos else _EXACT_SECONDS))
                key = spec.tokens.seconds.config_key
                step = seconds[-1] * getattr(reference.config.vision_config, key)
            if not long_videos:
                longest = max(h, w) // merge - 1
                t = max(n for n in range(1, t + 1) if int((n - 1) * step) <= longest)
            writer.video(t, rows)
        grids[kind].append([t, h, w])
        writer.text(0, 20)
    inputs = {
        "input_ids": torch.tensor([writer.tokens]),
        "mm_token_type_ids": torch.tensor([writer.types], dtype=torch.int32),
    }
    for kind, pixels in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        if grids[kind]:
            inputs[f"{kind}_grid_thw"] = torch.tensor(grids[kind])
            inputs[pixels] = torch.empty(int(inputs[f"{kind}_grid_thw"].prod(-1).sum()), 0)
    if seconds:
        inputs["second_per_grid_ts"] = torch.tensor(seconds)
    return Mixture(inputs, reference.features_of(inputs))
