"""What the server generates is what Hugging Face generates, token by token."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from tests.serve.prompts import (
    MIXES,
    NEW_TOKENS,
    PER_MIX,
    VIDEO_OPTIONS,
    greedy,
    messages_of,
    parts_of,
)
from vlmgen.serve.stock import stock_server

LOGPROB_LIMIT = 1e-4


def complete(client, parts, **options):
    """A greedy answer with its token ids and log-probabilities."""
    answer = client.chat.completions.create(
        model="tiny",
        messages=messages_of(parts),
        temperature=0,
        max_tokens=NEW_TOKENS,
        logprobs=True,
        extra_body={"return_token_ids": True, "ignore_eos": True},
        **options,
    )
    choice = answer.choices[0]
    return choice.model_extra["token_ids"], [entry.logprob for entry in choice.logprobs.content]


def answers_of(client, prompts, at_once=1):
    """Answers to prompts, of which some are under way at one time."""
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(partial(complete, client), prompts))


def prompts_of(mixes=MIXES):
    """Name of a prompt -> its parts, ten of each mix."""
    return {f"{mix} {index}": parts_of(mix, index) for mix in mixes for index in range(PER_MIX)}


def check_answer(name, answer, wanted):
    """An answer's tokens are the same as those of another, its log-probabilities nearly."""
    (tokens, logprobs), (wanted_tokens, wanted_logprobs) = answer, wanted
    assert tokens == wanted_tokens, name
    worst = max(abs(a - b) for a, b in zip(logprobs, wanted_logprobs, strict=True))
    assert worst <= LOGPROB_LIMIT, f"{name}: {worst}"


def check_prompts(client, reference, mixes=MIXES, at_once=1):
    """Ten prompts of each mix: tokens and log-probabilities as Hugging Face has them."""
    prompts = prompts_of(mixes)
    answers = answers_of(client, prompts.values(), at_once)
    for (name, parts), answer in zip(prompts.items(), answers, strict=True):
        check_answer(name, answer, greedy(reference, reference.prompt(name, *parts)))


@pytest.mark.parametrize("mix", MIXES)
def test_greedy_tokens_and_logprobs_equal_hugging_face(client, reference, mix):
    check_prompts(client, reference, [mix])


@pytest.mark.slow
def test_stock_vllm_gives_the_same_tokens_and_logprobs(client, checkpoint, tmp_path):
    """vLLM's own class of the same checkpoint, on its own CPU platform."""
    options = (
        "--max-model-len", "1024", "--max-num-seqs", "4", "--enforce-eager",
        "--no-enable-prefix-caching", "--served-model-name", "tiny",
        "--media-io-kwargs", json.dumps(VIDEO_OPTIONS),
    )  # fmt: skip
    prompts = prompts_of()
    with stock_server(checkpoint, tmp_path, *options) as stock:
        theirs = answers_of(stock.client(), prompts.values(), at_once=4)
        ours = answers_of(client, prompts.values(), at_once=4)
    for name, answer, wanted in zip(prompts, ours, theirs, strict=True):
        check_answer(name, answer, wanted)
