"""Arguments of the text model, number by number, and the masks of allowed tokens."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vlmgen import standin

standin.activate()

from vllm.sampling_params import SamplingParams  # noqa: E402
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch  # noqa: E402
from vllm_neuron.vllm.worker.logit_masks import LogitMasks  # noqa: E402
from vllm_neuron.vllm.worker.text_inputs import TextInputs, bucket_of  # noqa: E402

BLOCK, WIDTH, VOCAB = 32, 4, 50


@pytest.fixture
def inputs():
    return TextInputs(
        layers=("layers.0.self_attn", "layers.1.self_attn"),
        block_size=BLOCK,
        num_blocks=9,
        table_width=WIDTH,
        vocab_size=VOCAB,
        uses_mrope=True,
        samples=True,
        rank=torch.tensor(0, dtype=torch.int32),
    )


def request(name, prompt, output, blocks, delta=0, **sampling):
    count = len(prompt)
    positions = torch.stack([torch.arange(count) * (axis + 1) for axis in range(3)])
    return CachedRequestState(
        req_id=name,
        prompt_token_ids=prompt,
        mm_features=[],
        sampling_params=SamplingParams(**sampling),
        generator=None,
        block_ids=(blocks,),
        num_computed_tokens=max(0, count + len(output) - 1) if output else 0,
        output_token_ids=output,
        mrope_positions=positions,
        mrope_position_delta=delta,
    )


def batch_of(*states):
    batch = InputBatch(
        max_num_reqs=4,
        max_model_len=128,
        max_num_batched_tokens=128,
        device=torch.device("cpu"),
        vocab_size=VOCAB,
        block_sizes=[BLOCK],
        max_num_blocks_per_req=[WIDTH],
    )
    for state in states:
        batch.add_request(state)
    return batch


def test_a_prefill_is_padded_as_the_runner_pads_it(inputs):
    prompt = list(range(10, 43))  # 33 tokens: one more than a block
    state = request("a", prompt, [], [5, 3], temperature=0.5, top_k=7, top_p=0.9)
    kwargs = inputs.prefill(batch_of(state), state, 33, 64)
    assert kwargs["input_ids"].tolist() == prompt + [0] * 31
    assert kwargs["input_ids"].dtype == torch.int32
    assert kwargs["positions"].tolist() == list(range(33)) + [32] * 31
    assert kwargs["rotary_position_ids"][:, 32].tolist() == [32, 64, 96]
    assert not kwargs["rotary_position_ids"][:, 33:].any()
    assert kwargs["sampling_positions"].tolist() == [32]
    assert kwargs["sampling_params"].tolist() == [pytest.approx([7, 0.9, 0.5])]
    metadata = kwargs["attn_metadata"]["layers.0.self_attn"]
    assert kwargs["attn_metadata"]["layers.1.self_attn"] is metadata
    assert metadata["block_table_tensor"].tolist() == [[5, 3, -1, -1]]
    slots = metadata["slot_mapping"].tolist()
    assert slots[:33] == [*range(5 * BLOCK, 6 * BLOCK), 3 * BLOCK]
    assert slots[33:] == [0] * 31
    assert metadata["max_query_len"] == 64 and metadata["decode_token_threshold"] == 1
    assert metadata["full_block_table_tensor"] is not metadata["block_table_tensor"]


def test_a_decode_takes_the_last_token_of_every_request(inputs):
    first = request("a", [1] * 32, [7], [2, 4], delta=-5, temperature=0)
    second = request("b", [1] * 3, [8, 9], [1], delta=2, temperature=0)
    kwargs = inputs.decode(batch_of(first, second), [first, second], 4)
    assert kwargs["input_ids"].tolist() == [7, 9, 0, 0]
    assert kwargs["positions"].tolist() == [32, 4, 0, 0]
    assert kwargs["rotary_position_ids"].tolist() == [[27, 6, 0, 0]] * 3
    assert kwargs["sampling_positions"].tolist() == [0, 1, 1, 1]
    assert kwargs["sampling_params"][:2].tolist() == [[-1, 1, 0]] * 2
    metadata = kwargs["attn_metadata"]["layers.0.self_attn"]
    assert metadata["slot_mapping"].tolist() == [4 * BLOCK, BLOCK + 4, 0, 0]
    assert metadata["block_table_tensor"].tolist() == [
        [2, 4, -1, -1], [1, -1, -1, -1], [-1] * 4, [-1] * 4,
    ]  # fmt: skip
    assert metadata["max_query_len"] == 1


def test_a_resumed_request_counts_its_answer_on_from_the_prompt(inputs):
    state = request("a", [1, 2, 3], [4, 5], [1], delta=10, temperature=0)
    state.num_computed_tokens = 0
    rotary = inputs.prefill(batch_of(state), state, 5, 8)["rotary_position_ids"]
    assert rotary[:, :3].tolist() == [[0, 1, 2], [0, 2, 4], [0, 3, 6]]
    assert rotary[:, 3:].tolist() == [[13, 14, 0, 0, 0]] * 3


def test_without_sampling_and_mrope_the_arguments_are_none_and_absent(inputs):
    from dataclasses import replace

    plain = replace(inputs, uses_mrope=False, samples=False)
    state = request("a", [1, 2], [], [1], temperature=0)
    for kwargs in (
        plain.prefill(batch_of(state), state, 2, 8),
        plain.decode(batch_of(state), [state], 1),
        plain.warm_up_prefill(8),
        plain.warm_up_decode(1),
    ):
        assert "rotary_position_ids" not in kwargs
        assert kwargs["sampling_params"] is None
        assert kwargs["logit_mask"] is None


def test_warm_up_reads_blocks_that_exist(inputs):
    from dataclasses import replace

    table = replace(inputs, num_blocks=3).warm_up_decode(2)["attn_metadata"]
    rows = table["layers.0.self_attn"]["block_table_tensor"]
    assert rows.tolist() == [[0, 1, 2, 0]] * 2


@pytest.mark.parametrize(("size", "bucket"), [(1, 4), (4, 4), (5, 16), (16, 16), (17, 16)])
def test_the_smallest_bucket_that_holds_it(size, bucket):
    assert bucket_of(size, [4, 16]) == bucket


def grammar(allowed, name="b"):
    bits = np.zeros(64, dtype=np.uint8)
    bits[list(allowed)] = 1
    words = np.packbits(bits, bitorder="little").view(np.int32)[None]
    return SimpleNamespace(structured_output_request_ids=[name], grammar_bitmask=words)


def test_a_grammar_masks_the_row_of_its_request():
    masks = LogitMasks(VOCAB, 1, 0)
    mask = masks.of_grammar(3, grammar({0, 33, 49}), {"a": 0, "b": 1})
    assert mask.shape == (3, VOCAB) and mask.dtype == torch.bool
    assert mask[1].nonzero().flatten().tolist() == [0, 33, 49]
    assert mask[0].all() and mask[2].all()
    assert masks.of_grammar(3, None, {}).all()


def test_ranks_that_sample_get_their_columns_of_the_mask():
    whole = LogitMasks(VOCAB, 1, 0).of_grammar(1, grammar({0, 33, 49}), {"b": 0})
    parts = [
        LogitMasks(VOCAB, 3, rank).of_grammar(1, grammar({0, 33, 49}), {"b": 0})
        for rank in range(3)
    ]
    assert [part.shape for part in parts] == [(1, 17)] * 3  # 50 tokens in three shards, padded
    joined = torch.cat(parts, 1)
    assert torch.equal(joined[:, :VOCAB], whole)
    assert not joined[:, VOCAB:].any()
