"""The parts of the stand-in's engine alone: limits, cache account, signatures, graph record."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from vlmgen import standin

standin.activate()

from vllm.multimodal.inputs import PlaceholderRange  # noqa: E402
from vllm_neuron.vllm.core.encoder_cache_manager import BlockEncoderCacheManager  # noqa: E402
from vllm_neuron.vllm.limits import VisionLimits, frames_of  # noqa: E402
from vllm_neuron.vllm.requests import media_of  # noqa: E402
from vllm_neuron.vllm.worker.call_signatures import (  # noqa: E402
    CallSignatures,
    RunnerContractError,
)
from vllm_neuron.vllm.worker.graph_log import GraphRecorder  # noqa: E402

LIMITS = VisionLimits(
    rows_per_block=64, blocks_per_request=4, tokens_per_step=256, allocatable_blocks=4
)


def picture(tokens, offset=0):
    return PlaceholderRange(offset=offset, length=tokens)


def clip(frames, tokens, gap=3):
    mask = torch.tensor(([False] * gap + [True] * tokens) * frames)
    return PlaceholderRange(offset=0, length=len(mask), is_embed=mask)


def field(value):
    return SimpleNamespace(data=torch.tensor(value))


def test_frames_are_the_unbroken_runs_of_the_mask():
    assert frames_of(picture(7)) == [7]
    assert frames_of(clip(3, 5)) == [5, 5, 5]


def test_frames_of_one_run_are_counted_by_the_processors_outputs():
    assert frames_of(picture(24), {"video_grid_thw": field([4, 4, 6])}) == [6] * 4
    assert frames_of(clip(2, 9), {"video_num_patches": field(2)}) == [10, 10]  # and a class token
    assert frames_of(picture(27), {"image_num_patches": field(3)}) == [10] * 3


def test_items_of_a_request_are_in_prompt_order_with_the_frames_of_their_outputs():
    inputs = {
        "mm_placeholders": {"video": [picture(24, 30)], "image": [picture(4, 2)]},
        "mm_kwargs": {"video": [{"video_grid_thw": field([4, 4, 6])}], "image": [None]},
    }
    assert media_of(inputs) == [("image", [4]), ("video", [6] * 4)]


@pytest.mark.parametrize(
    ("item", "blocks"),
    # Frames of 24 rows: two fit a block of 64.
    [([1], 1), ([64], 1), ([24] * 4, 2), ([24] * 5, 3), ([64] * 2, 2), ([130], 3)],
)
def test_an_item_takes_whole_frames_per_block(item, blocks):
    assert LIMITS.blocks_of(item) == blocks


@pytest.mark.parametrize(
    ("items", "words"),
    [
        ([("image", [65])], "65 vision tokens"),
        ([("video", [65])], "video 0"),
        ([("image", [1])] * 5, "need 5 blocks"),
        ([("video", [40] * 5)], "need 5 blocks"),
    ],
)
def test_what_is_too_large_is_named(items, words):
    assert words in LIMITS.problem(items)


def test_what_fits_is_no_problem():
    assert LIMITS.problem([]) is None
    assert LIMITS.problem([("image", [64])] * 4) is None


def test_a_step_that_encodes_less_than_its_blocks_hold_is_a_limit_of_its_own():
    limits = VisionLimits(rows_per_block=64, blocks_per_request=2, tokens_per_step=100)
    assert "128 vision tokens" in limits.problem([("image", [64])] * 2)


class Request:
    def __init__(self, name, items):
        self.request_id = name
        self.mm_features = [
            SimpleNamespace(identifier=identifier, mm_position=position, data=None)
            for identifier, position in items
        ]

    def get_num_encoder_embeds(self, index):
        return self.mm_features[index].mm_position.get_num_embeds()


def schedule(manager, request):
    """What vLLM's scheduler does with the items of one prompt."""
    chosen, tokens = [], 0
    for index in range(len(request.mm_features)):
        if manager.check_and_update_cache(request, index):
            continue
        if not manager.can_allocate(request, index, 10**6, tokens):
            return None
        tokens += request.get_num_encoder_embeds(index)
        chosen.append(index)
    for index in chosen:
        manager.allocate(request, index)
    return chosen


def test_small_items_count_as_whole_blocks():
    manager = BlockEncoderCacheManager(LIMITS)
    four = Request("a", [(f"item {index}", picture(1)) for index in range(4)])
    assert schedule(manager, four) == [0, 1, 2, 3]
    assert manager.num_used_blocks == 4
    assert schedule(manager, Request("b", [("item 4", picture(1))])) is None
    manager.free(four)
    assert schedule(manager, Request("b", [("item 4", picture(1))])) == [0]
    assert manager.get_freed_mm_hashes() == ["item 0"]
    assert manager.num_used_blocks == 4


def test_items_of_one_prompt_count_together():
    manager = BlockEncoderCacheManager(LIMITS)
    many = Request("a", [(f"item {index}", picture(1)) for index in range(5)])
    assert schedule(manager, many) is None


def test_a_known_item_costs_nothing_and_keeps_its_real_size():
    manager = BlockEncoderCacheManager(LIMITS)
    request = Request("a", [("item", clip(3, 24))])
    assert schedule(manager, request) == [0]
    assert manager.num_used_blocks == 2
    again = Request("b", [("item", clip(3, 24))])
    assert schedule(manager, again) == []
    assert manager.get_cached_num_encoder_embeds(again, 0) == 72
    manager.reset()
    assert manager.num_used_blocks == 0
    assert manager.get_cached_num_encoder_embeds(again, 0) is None


def test_the_account_of_tokens_would_overbook_the_blocks():
    """What the test above guards against: vLLM's own manager takes a fifth item."""
    from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

    manager = EncoderCacheManager(cache_size=4 * 64)
    many = Request("a", [(f"item {index}", picture(1)) for index in range(5)])
    assert schedule(manager, many) == [0, 1, 2, 3, 4]


CALL = {
    "input_ids": torch.zeros(4, dtype=torch.int32),
    "mask": None,
    "blocks": (torch.ones(2),) * 2,
}


@pytest.mark.parametrize(
    "change",
    [
        {"input_ids": torch.zeros(4)},
        {"input_ids": torch.zeros(5, dtype=torch.int32)},
        {"input_ids": torch.zeros(8, dtype=torch.int32)[::2]},
        {"mask": torch.ones(1)},
        {"blocks": (torch.ones(2),)},
        {"new": None},
    ],
)
def test_a_call_unlike_the_warm_up_call_is_an_error(change):
    signatures = CallSignatures()
    signatures.learn("decode", CALL)
    signatures.check("decode", {**CALL, "input_ids": torch.ones(4, dtype=torch.int32)})
    (name,) = change
    with pytest.raises(RunnerContractError, match=f"argument '{name}'"):
        signatures.check("decode", {**CALL, **change})


def test_a_graph_that_was_not_warmed_up_is_an_error():
    with pytest.raises(RunnerContractError, match="was not warmed up"):
        CallSignatures().check("decode", CALL)


def test_a_graph_break_shows_as_a_second_graph():
    def broken(x):
        x = x + 1
        torch._dynamo.graph_break()
        return x * 2

    for function, graphs in ((lambda x: x * 2 + 1, 1), (broken, 2)):
        torch._dynamo.reset()
        recorder = GraphRecorder("eager")
        torch.compile(function, backend=recorder)(torch.ones(2))
        assert len(recorder.traced) == graphs
        if graphs == 1:
            assert recorder.record("prefill", 0.5).operators == 2
            assert recorder.record("again", 0.5) is None
        else:
            with pytest.raises(RuntimeError, match="2 graphs"):
                recorder.record("prefill", 0.5)
