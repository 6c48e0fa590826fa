"""Other engine settings, the same tokens; and an encoder cache that is far too small."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.serve.conftest import JSON_WRITER
from tests.serve.prompts import VIDEO_OPTIONS, image
from tests.serve.test_equality import check_prompts
from tests.serve.test_requests import chat, hugging_face, refused, token_ids
from vlmgen.serve.launch import package_server

COMMON = (
    "--served-model-name", "tiny", "--media-io-kwargs", json.dumps(VIDEO_OPTIONS),
    "--structured-outputs-config", json.dumps(JSON_WRITER),
)  # fmt: skip


@pytest.mark.slow
def test_eager_on_device_sampling_one_request_and_other_buckets(
    package, checkpoint, reference, tmp_path
):
    config = {
        "neuron_config": {
            "num_batched_tokens_buckets": [128, 384, 1024],
            "on_device_sampling_config": {"max_top_k": 64},
            "max_logprobs": 3,
        },
        "vision_neuron_config": {
            "vision_attention_block_size": 512,
            "num_vision_tokens_buckets": [512, 3072],
        },
    }
    options = (*COMMON, "--enforce-eager", "--max-num-seqs", "1", "--max-model-len", "1024")
    with package_server(
        package, checkpoint, tmp_path, *options, "--additional-config", json.dumps(config)
    ) as server:
        client = server.client()
        check_prompts(client, reference)
        assert "no frequency_penalty=1.0" in refused(client, ["Hi"], frequency_penalty=1.0)
        assert "max_top_k 64" in refused(client, ["Hi"], temperature=1.0, extra_body={"top_k": 65})
        assert "max_logprobs" in refused(client, ["Hi"], logprobs=True, top_logprobs=4)
        varied = [token_ids(chat(client, ["Hi"], temperature=1.0, max_tokens=16)) for _ in range(4)]
        assert len({tuple(tokens) for tokens in varied}) > 1
        (state,) = server.worker_state()
        assert state["graphs"] == []


@pytest.mark.slow
def test_a_cache_of_four_items_survives_three_hundred_requests(
    package, checkpoint, reference, tmp_path
):
    """Twelve pictures of several sizes, most far smaller than the block that they take."""
    config = {
        "neuron_config": {"num_batched_tokens_buckets": [256]},
        "vision_neuron_config": {
            "vision_attention_block_size": 256,
            "num_vision_tokens_buckets": [256, 512],
            "encoder_cache_num_blocks": 5,
        },
    }
    options = (
        *COMMON, "--enforce-eager", "--max-model-len", "256",
        "--limit-mm-per-prompt", json.dumps({"image": 2, "video": 0}),
    )  # fmt: skip
    draw = random.Random(0)
    chosen = [sorted(draw.sample(range(12), draw.choice((1, 2)))) for _ in range(300)]
    wanted = {}
    for pictures in {tuple(pictures) for pictures in chosen}:
        wanted[pictures] = hugging_face(reference, *prompt_of(pictures))
    with package_server(
        package, checkpoint, tmp_path, *options, "--additional-config", json.dumps(config)
    ) as server:
        client = server.client()
        (state,) = server.worker_state()
        assert state["encoder_cache"]["blocks"] == 4
        with ThreadPoolExecutor(6) as pool:
            answers = pool.map(lambda p: token_ids(chat(client, prompt_of(p))), chosen)
            wrong = [
                pictures
                for pictures, answer in zip(chosen, answers, strict=True)
                if answer != wanted[tuple(pictures)]
            ]
        assert not wrong
        (state,) = server.worker_state()
        cache = state["encoder_cache"]
        assert cache["used"] + cache["free"] == 4
        encoded = server.metrics()["neuron_encoder_items_encoded_total"]
        hits = server.metrics()["neuron_encoder_cache_hits_total"]
        # An item that is evicted and wanted again in one step stays in the worker.
        assert 12 <= state["items_encoded"] <= encoded
        assert encoded + hits == sum(map(len, chosen))
        assert hits > 0


def prompt_of(pictures):
    """Pictures by number, then a question."""
    return [*[image(index) for index in pictures], "What?"]


@pytest.mark.slow
def test_requests_that_lose_their_blocks_go_on_where_they_were(
    package, checkpoint, reference, tmp_path
):
    """A KV cache for half of the requests: vLLM preempts, and prefills prompt and answer again."""
    config = {
        "vision_neuron_config": {
            "vision_attention_block_size": 256,
            "num_vision_tokens_buckets": [256, 512],
        }
    }
    options = (
        *COMMON, "--enforce-eager", "--max-model-len", "256", "--max-num-seqs", "4",
        "--num-gpu-blocks-override", "14", "--additional-config", json.dumps(config),
    )  # fmt: skip
    tokens = 140
    prompts = [[image(index), "What?"] for index in range(2)] + [["Hello"], ["Who are you?"]]
    wanted = [reference.greedy(reference.prompt("", *parts), tokens) for parts in prompts]
    with package_server(package, checkpoint, tmp_path, *options) as server:
        client = server.client()
        with ThreadPoolExecutor(4) as pool:
            answers = pool.map(lambda p: token_ids(chat(client, p, max_tokens=tokens)), prompts)
            assert list(answers) == wanted
        metrics = server.metrics()
        assert metrics["vllm:num_preemptions_total"] > 0
        assert metrics["vllm:kv_cache_usage_perc"] == 0
