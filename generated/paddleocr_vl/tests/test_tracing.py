"""Both towers trace as whole graphs, and calls like the first never recompile."""

import pytest
import torch
from vllm_neuron_paddleocr_vl.factory import PaddleOCRVLForConditionalGeneration

from .driver import PackageDriver
from .support import relative_error


@pytest.fixture
def driver(checkpoint):
    torch._dynamo.reset()
    return PackageDriver(PaddleOCRVLForConditionalGeneration, checkpoint, warm_up=False)


def test_the_tower_is_one_graph_per_bucket(driver):
    compiled = torch.compile(driver.model.visual.forward, fullgraph=True, backend="eager")
    buffer = driver.encoder_cache.buffer
    for bucket in driver.vision_config.num_vision_tokens_buckets:
        inputs = driver.model.build_vision_synthetic_inputs(bucket, driver.vision_config, "cpu")
        blocks = torch.zeros(inputs["pixel_values"].shape[0], dtype=torch.int64)
        compiled(**inputs, encoder_cache_buffer=buffer, write_block_ids=blocks)
        with torch.compiler.set_stance("fail_on_recompile"):
            compiled(**inputs, encoder_cache_buffer=buffer, write_block_ids=blocks + 1)


def test_prefill_and_decode_are_one_graph_each_and_equal_eager(driver):
    tokens = [5, 6, 7, 8]
    request = driver.add_request(tokens)
    expected = [driver.prefill(request), *(driver.decode([request], [token]) for token in (1, 2))]
    driver.release(request)

    driver.model = torch.compile(driver.model, fullgraph=True, backend="eager")
    request = driver.add_request(tokens)
    actual = [driver.prefill(request), driver.decode([request], [1])]
    with torch.compiler.set_stance("fail_on_recompile"):
        actual.append(driver.decode([request], [2]))
        driver.prefill(driver.add_request(tokens * 20))
    for ours, theirs in zip(actual, expected, strict=True):
        assert relative_error(ours, theirs) <= 1e-6
