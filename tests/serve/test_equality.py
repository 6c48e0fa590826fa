"""What the server generates is what Hugging Face generates, token by token."""

from __future__ import annotations

import pytest

from tests.serve.prompts import (
    MIXES,
    NEW_TOKENS,
    PER_MIX,
    greedy,
    messages_of,
    parts_of,
)

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


@pytest.mark.parametrize("mix", MIXES)
def test_greedy_tokens_and_logprobs_equal_hugging_face(client, reference, mix):
    for index in range(PER_MIX):
        parts = parts_of(mix, index)
        prompt = reference.prompt(f"{mix} {index}", *parts)
        tokens, logprobs = complete(client, parts)
        wanted, wanted_logprobs = greedy(reference, prompt)
        assert tokens == wanted, prompt.name
        worst = max(abs(a - b) for a, b in zip(logprobs, wanted_logprobs, strict=True))
        assert worst <= LOGPROB_LIMIT, f"{prompt.name}: {worst}"
