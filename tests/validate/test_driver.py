"""The driver notices what the plugin's runner would trip over."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vlmgen.validate.driver import PackageDriver, RunnerContractError
from vlmgen.validate.reference import Prompt

from .conftest import Workshop


@pytest.fixture(scope="module")
def picture(workshop: Workshop) -> Prompt:
    return next(p for p in workshop.run.prompts if p.name == "picture")


def make(workshop: Workshop, **changes: Any) -> PackageDriver:
    return workshop.run.make_driver(**{"token_buckets": (128,), "max_model_len": 256, **changes})


def test_a_video_spans_from_the_first_time_stamp_to_the_last_end_marker(
    workshop: Workshop,
) -> None:
    prompt = next(p for p in workshop.run.prompts if p.name == "video")
    config = workshop.run.reference.config
    (feature,) = prompt.features
    span = feature.mm_position
    tokens = prompt.token_ids[span.offset : span.offset + span.length]
    assert bytes(tokens[:1]) != bytes([config.vision_start_token_id % 256])
    assert prompt.token_ids[span.offset - 1] == config.vision_start_token_id
    assert tokens[-1] == config.vision_end_token_id
    assert prompt.token_ids[span.offset + span.length] == config.vision_end_token_id
    t, h, w = feature.data["video_grid_thw"].data.tolist()
    assert int(span.is_embed.sum()) == t * h * w // 4
    assert all(tokens[i] == config.video_token_id for i in span.is_embed.nonzero().flatten())


def test_an_argument_that_differs_from_warm_up_is_refused(
    workshop: Workshop, picture: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = make(workshop)
    request = driver.add_request(picture.token_ids, picture.features)
    monkeypatch.setattr(driver, "rank", torch.tensor(0))  # int64, warm-up had int32
    with pytest.raises(RunnerContractError, match="'rank' is int64.*was int32"):
        driver.prefill(request)


def test_tower_inputs_in_another_dtype_than_in_warm_up_are_refused(workshop: Workshop) -> None:
    package = workshop.variant(
        "float64_pixels",
        {
            "utils/preprocessing.py": [
                (
                    '    inputs["write_block_ids"] =',
                    '    inputs["pixel_values"] = inputs["pixel_values"].double()\n'
                    '    inputs["write_block_ids"] =',
                )
            ]
        },
    )
    rows = workshop.rows(package, "end to end", "prefill logits")
    assert "pixel_values" in rows["prefill logits"].detail
    assert "RunnerContractError" in rows["prefill logits"].detail


def test_a_parameter_left_on_the_meta_device_is_named(workshop: Workshop) -> None:
    package = workshop.variant(
        "stranded",
        {
            "model.py": [
                ("strict=True, assign=True", "strict=False, assign=True"),
                ("for (_, module, _, _), state in zip", "for (_, module, _, _), state in list(zip"),
                ("loaded, strict=True):", "loaded, strict=True))[1:]:"),
            ]
        },
    )
    from vlmgen.validate.package import load_factory

    with pytest.raises(RunnerContractError, match="meta device.*embed_tokens.weight"):
        PackageDriver(load_factory(package), workshop.run.checkpoint, warm_up=False)


def test_a_write_into_another_requests_blocks_is_noticed(
    workshop: Workshop, picture: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = make(workshop)
    request = driver.add_request(picture.token_ids, picture.features)
    slots = driver._slots
    monkeypatch.setattr(driver, "_slots", lambda r, place: slots(r, place) * 0 + foreign * 32)
    driver._grow(request, len(picture.token_ids))
    foreign = driver._free_blocks[0]
    with pytest.raises(RunnerContractError, match="KV blocks of other requests"):
        driver.prefill(request)


def test_an_item_that_is_not_cached_is_an_error(
    workshop: Workshop, picture: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = make(workshop)
    request = driver.add_request(picture.token_ids, picture.features)
    monkeypatch.setattr(driver, "encode", lambda request: None)
    with pytest.raises(RunnerContractError, match="not in the encoder cache"):
        driver.prefill(request)


def test_noise_really_reaches_the_caches_and_the_padding(
    workshop: Workshop, picture: Prompt
) -> None:
    driver = make(workshop, noise=100.0)
    seen: dict[str, Any] = {}
    driver.model.visual.register_forward_pre_hook(
        lambda module, args, kwargs: seen.update(kwargs), with_kwargs=True
    )
    request = driver.add_request(picture.token_ids, picture.features)
    driver.prefill(request)
    patches = len(picture.inputs["pixel_values"])
    assert seen["pixel_values"].flatten(0, 1)[patches:].std() > 50
    assert driver.encoder_cache.buffer[driver.encoder_cache.scratch_block_id].std() > 50
    free = driver._free_blocks
    assert all(cache[:, free].std() > 50 for cache in driver._kv.values())


def test_requests_beyond_the_cache_are_refused_with_numbers(workshop: Workshop) -> None:
    driver = make(workshop, seq_buckets=(1,))
    with pytest.raises(ValueError, match="300 is above the largest of token_buckets, 128"):
        driver.prefill(driver.add_request([65] * 300))
    with pytest.raises(ValueError, match="max_model_len 100 must be a multiple of 256"):
        make(workshop, max_model_len=100)
