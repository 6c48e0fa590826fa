"""What a client can ask of a live server: media, turns, options, aborts and mistakes."""

from __future__ import annotations

import base64
import json
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import openai
import pytest
from PIL import Image

from tests.serve.conftest import CONFIG, MAX_MODEL_LEN
from tests.serve.prompts import content_of, image, messages_of, parts_of, png, video
from vlmgen.validate.reference import Media

TOKENS = 8


def chat(client, parts, **options):
    extra = {"ignore_eos": True, "return_token_ids": True} | options.pop("extra_body", {})
    options = {"max_tokens": TOKENS, "temperature": 0} | options
    messages = parts if isinstance(parts[0], dict) else messages_of(parts)
    return client.chat.completions.create(
        model="tiny", messages=messages, extra_body=extra, **options
    )


def token_ids(answer, choice=0):
    return answer.choices[choice].model_extra["token_ids"]


def hugging_face(reference, *parts):
    return reference.greedy(reference.prompt("", *parts), TOKENS)


def test_text_only(client, reference):
    parts = ["The capital of France is"]
    assert token_ids(chat(client, parts)) == hugging_face(reference, *parts)


def test_one_picture(client, reference):
    parts = [image(0), "What is that?"]
    assert token_ids(chat(client, parts)) == hugging_face(reference, *parts)


def test_three_pictures_of_different_sizes(client, reference):
    parts = [image(0), "one", image(1), "two", image(4), "Which is the widest?"]
    assert token_ids(chat(client, parts)) == hugging_face(reference, *parts)


def test_video(client, reference):
    parts = [video(3), "What moves?"]
    assert token_ids(chat(client, parts)) == hugging_face(reference, *parts)


@pytest.mark.parametrize("order", ["picture first", "video first"])
def test_picture_and_video(client, reference, order):
    media = [image(1), "and", video(2)]
    parts = [*(media if order == "picture first" else media[::-1]), "Compare."]
    assert token_ids(chat(client, parts)) == hugging_face(reference, *parts)


def test_a_picture_of_one_pixel(client, reference):
    pixel, question = np.full((1, 1, 3), 200, dtype=np.uint8), "Which colour?"
    # As an array its channels would be ambiguous to Hugging Face.
    wanted = hugging_face(reference, Media("image", Image.fromarray(pixel)), question)
    assert token_ids(chat(client, [Media("image", pixel), question])) == wanted


def test_a_system_prompt_changes_the_prompt(client):
    question = {"role": "user", "content": "Who are you?"}
    system = {"role": "system", "content": "You are a parrot."}
    with_system, without = chat(client, [system, question]), chat(client, [question])
    assert with_system.usage.prompt_tokens > without.usage.prompt_tokens
    assert token_ids(with_system) != token_ids(without)


def test_a_later_turn_with_the_same_picture_encodes_nothing(client, server):
    picture = Media("image", image(2).pixels[::-1].copy())
    turns = messages_of([picture, "What is that?"])
    first = chat(client, turns)
    encoded = server.metrics()["neuron_encoder_items_encoded_total"]
    turns += [
        {"role": "assistant", "content": "A cat."},
        {"role": "user", "content": [content_of(picture), content_of("The same as before?")]},
    ]
    second = chat(client, turns)
    assert second.usage.prompt_tokens > first.usage.prompt_tokens
    assert server.metrics()["neuron_encoder_items_encoded_total"] == encoded


def test_streaming_gives_the_same_tokens(client):
    parts = [image(0), "What is that?"]
    whole = chat(client, parts)
    chunks = list(chat(client, parts, stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert len(chunks) > 2


def test_logprobs_are_those_of_the_sampled_tokens(client):
    answer = chat(client, [image(0), "What?"], logprobs=True, top_logprobs=3)
    for entry in answer.choices[0].logprobs.content:
        best = max(candidate.logprob for candidate in entry.top_logprobs)
        assert entry.logprob == pytest.approx(best)
        assert len(entry.top_logprobs) == 3


def test_two_answers_to_one_question_differ_and_a_seed_repeats_them(client):
    options = {"n": 2, "temperature": 1.0, "seed": 7, "max_tokens": 16}
    first = chat(client, [image(0), "What?"], **options)
    again = chat(client, [image(0), "What?"], **options)
    assert token_ids(first, 0) != token_ids(first, 1)
    assert [token_ids(first, i) for i in (0, 1)] == [token_ids(again, i) for i in (0, 1)]


def test_a_stop_string_ends_the_answer(client):
    options = {"max_tokens": 32, "extra_body": {"ignore_eos": False}}
    parts = ["Say something."]
    text = chat(client, parts, max_tokens=32).choices[0].message.content
    stop = next(letter for letter in text[2:] if letter.isascii() and letter.isprintable())
    choice = chat(client, parts, stop=[stop], **options).choices[0]
    assert choice.finish_reason == "stop"
    assert choice.message.content == text[: text.index(stop)]


def test_a_json_schema_is_kept_to(client):
    schema = {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "green"]}, "count": {"type": "boolean"}},
        "required": ["colour", "count"],
        "additionalProperties": False,
    }
    answer = chat(
        client,
        [image(0), "Describe it."],
        max_tokens=64,
        response_format={"type": "json_schema", "json_schema": {"name": "d", "schema": schema}},
        extra_body={"ignore_eos": False},
    )
    value = json.loads(answer.choices[0].message.content)
    assert value["colour"] in ("red", "green") and isinstance(value["count"], bool)


def test_sixteen_mixed_requests_at_once_equal_one_by_one(client):
    mixes = ("text", "image", "video", "image and video")
    prompts = [parts_of(mixes[index % 4], index % 9) for index in range(16)]
    alone = [token_ids(chat(client, parts)) for parts in prompts]
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(lambda parts: token_ids(chat(client, parts)), prompts))
    assert together == alone


def test_an_abort_in_mid_stream_frees_its_blocks(client, server):
    stream = chat(client, [video(1), "Tell a long story."], max_tokens=600, stream=True)
    for _, _chunk in zip(range(3), stream, strict=False):
        pass
    assert server.metrics()["vllm:num_requests_running"] == 1
    stream.close()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and server.metrics()["vllm:num_requests_running"]:
        time.sleep(0.1)
    metrics = server.metrics()
    assert metrics["vllm:num_requests_running"] == 0
    assert metrics["vllm:kv_cache_usage_perc"] == 0
    assert len(token_ids(chat(client, ["Still there?"]))) == TOKENS


# ------------------------------------------------------------------------------------- mistakes


def refused(client, parts, **options) -> str:
    """The message of an HTTP 400; the server answers the next request."""
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, parts, **options)
    assert len(token_ids(chat(client, ["And now?"]))) == TOKENS
    return caught.value.message


def test_a_prompt_above_max_model_len_is_refused(client):
    assert str(MAX_MODEL_LEN) in refused(client, ["word " * MAX_MODEL_LEN])


def test_a_picture_larger_than_the_block_is_refused(client):
    # The processor of the checkpoint keeps pictures below 65536 pixels, but for thin strips.
    strip = Media("image", np.zeros((32, 6000, 3), dtype=np.uint8))
    message = refused(client, [strip, "What?"])
    block = CONFIG["vision_neuron_config"]["vision_attention_block_size"] // 4
    assert f"holds {block}" in message and "vision_attention_block_size" in message


def test_more_pictures_than_a_prompt_can_read_are_refused(client):
    message = refused(client, [*[image(index) for index in range(5)], "Which?"])
    assert "5 images" in message and "num_vision_tokens_buckets" in message


def test_a_picture_of_a_refused_prompt_can_be_sent_again(client, reference):
    # vLLM's own cache takes it for sent, and answers the next request with HTTP 500.
    pixels = np.random.default_rng(6).integers(0, 255, (5, 32, 32, 3), dtype=np.uint8)
    pictures = [Media("image", one) for one in pixels]
    assert "5 images" in refused(client, [*pictures, "Which?"])
    parts = [*pictures[:2], "Which?"]
    assert token_ids(chat(client, parts)) == hugging_face(reference, *parts)


def test_a_stream_and_answers_about_the_same_new_pictures(client):
    # A stream reaches the engine later than the answers that were asked for after it.
    def one(index):
        noise = np.random.default_rng(100 + index // 4).integers(0, 255, (64, 64, 3))
        parts = [Media("image", noise.astype(np.uint8)), "Who?"]
        if index % 4 == 3:
            return token_ids(chat(client, parts))
        tokens = []
        for chunk in chat(client, parts, stream=True):
            tokens += (chunk.choices[0].model_extra or {}).get("token_ids") or []
        return tokens

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(one, range(160)))
    for index in range(0, 160, 4):
        assert answers[index : index + 4] == [answers[index]] * 4


def test_a_corrupt_jpeg_is_refused(client):
    data = base64.b64encode(b"\xff\xd8\xff\xe0" + bytes(200)).decode()
    url = {"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{data}"}}
    messages = [{"role": "user", "content": [url, {"type": "text", "text": "What?"}]}]
    assert "image" in refused(client, messages).lower()


def test_a_truncated_png_is_refused(client):
    data = png(image(0).pixels)[:400]
    url = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    messages = [{"role": "user", "content": [url, {"type": "text", "text": "What?"}]}]
    refused(client, messages)


def test_no_picture_at_all_is_text(client, reference):
    messages = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    assert token_ids(chat(client, messages)) == hugging_face(reference, "Hello")


def test_an_empty_list_of_parts_is_an_empty_text(client, reference):
    message = [{"role": "user", "content": []}]
    assert token_ids(chat(client, message)) == hugging_face(reference)


def test_a_picture_without_an_address_is_refused(client):
    url = {"type": "image_url", "image_url": {"url": ""}}
    assert "empty" in refused(client, [{"role": "user", "content": [url]}])


def test_prompt_logprobs_are_refused(client):
    assert "prompt_logprobs" in refused(client, ["Hi"], extra_body={"prompt_logprobs": 1})


# -------------------------------------------------------------------------------- encoder cache


def test_a_repeated_picture_is_encoded_once(client, server):
    pixels = np.roll(image(0).pixels, 5, axis=0)
    parts = [Media("image", pixels), "and", Media("image", pixels), "Are they equal?"]
    before = server.metrics()
    first = token_ids(chat(client, parts))
    assert token_ids(chat(client, parts)) == first
    after = server.metrics()
    encoded = "neuron_encoder_items_encoded_total"
    hits = "neuron_encoder_cache_hits_total"
    assert after[encoded] - before[encoded] == 1
    assert after[hits] - before[hits] == 3


def test_equal_bytes_of_other_sizes_are_two_items(client, server, reference):
    pixels = np.full((64, 128, 3), 90, dtype=np.uint8)
    before = server.metrics()["neuron_encoder_items_encoded_total"]
    for shape in ((64, 128, 3), (128, 64, 3)):
        parts = [Media("image", pixels.reshape(shape)), "Which shape?"]
        assert token_ids(chat(client, parts)) == hugging_face(reference, *parts)
    assert server.metrics()["neuron_encoder_items_encoded_total"] - before == 2


def test_nothing_was_compiled_after_warm_up(server):
    """Runs last: over all these requests, the graphs are those of the start."""
    (state,) = server.worker_state()
    vision, text = CONFIG["vision_neuron_config"], CONFIG["neuron_config"]
    buckets = [
        *vision["num_vision_tokens_buckets"],
        *text["num_batched_tokens_buckets"],
        *text["num_seqs_buckets"],
    ]
    assert len(state["graphs"]) == len(buckets)
    assert state["late_graphs"] == 0
    assert state["requests"] <= 8
    cache = state["encoder_cache"]
    assert cache["used"] + cache["free"] == cache["blocks"]
