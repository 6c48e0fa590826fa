"""The merge of cached vision rows into the token sequence."""

import pytest
import torch
from vllm_neuron_qwen2_5_vl.utils.merge_vision_embeds import local_rows, merge_vision_embeddings

TOKENS, WIDTH, BLOCKS, CAPACITY = 16, 8, 3, 4


@pytest.fixture
def case(rng):
    """Embeddings, blocks and positions; 5 rows have a place, in mixed order, the others the
    sentinel T.
    """
    hidden = torch.randn(TOKENS, WIDTH, generator=rng)
    blocks = [torch.randn(CAPACITY, WIDTH, generator=rng) for _ in range(BLOCKS)]
    positions = torch.full((BLOCKS, CAPACITY), TOKENS)
    positions[0, :3] = torch.tensor([9, 10, 11])
    positions[1, :2] = torch.tensor([2, 3])
    return hidden, blocks, positions


def expected_merge(hidden, blocks, positions):
    merged = hidden.clone()
    for block, places in zip(blocks, positions.tolist(), strict=True):
        for row, place in zip(block, places, strict=True):
            if place < TOKENS:
                merged[place] = row
    return merged


def test_rows_replace_placeholders(case):
    assert torch.equal(merge_vision_embeddings(*case, rank=None), expected_merge(*case))


def test_rows_of_another_width_are_refused(case):
    hidden, blocks, positions = case
    with pytest.raises(ValueError, match="have width 16; the hidden size is 8"):
        merge_vision_embeddings(hidden, [block.repeat(1, 2) for block in blocks], positions, None)


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_together_hold_the_whole_result(case, ranks):
    hidden, blocks, positions = case
    length = TOKENS // ranks
    parts = [
        merge_vision_embeddings(
            hidden[r * length : (r + 1) * length], blocks, positions, torch.tensor(r)
        )
        for r in range(ranks)
    ]
    assert torch.equal(torch.cat(parts), expected_merge(*case))


def test_rows_without_a_place_have_no_effect(case):
    hidden, blocks, positions = case
    before = merge_vision_embeddings(hidden, blocks, positions, None)
    for block, places in zip(blocks, positions, strict=True):
        block[places == TOKENS] = 1e6
    after = merge_vision_embeddings(hidden, blocks, positions, None)
    assert torch.equal(before, after)


def test_local_rows_of_a_rank():
    assert local_rows(torch.tensor([2, 5, 7, 16]), 4, torch.tensor(1)).tolist() == [4, 1, 3, 4]
