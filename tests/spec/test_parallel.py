"""Which TP and DP are legal, and why the others are not."""

from __future__ import annotations

import pytest

from vlmgen.check.parallel import (
    legal_text_tp,
    legal_vision_tp,
    parallel_table,
    prefill_bucket_problems,
    require_text_tp,
    require_vision_split,
    text_split,
    text_splits,
    vision_split,
    vision_splits,
)
from vlmgen.errors import CheckFailed, UsageError


def resize_text(text, *, heads, kv_heads, inner, head_dim=128, vocab=151936):
    return text.model_copy(
        update={
            "vocab_size": vocab,
            "attention": text.attention.model_copy(
                update={"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim}
            ),
            "mlp": text.mlp.model_copy(update={"intermediate_size": inner}),
        }
    )


def resize_vision(vision, *, heads, inner, hidden):
    return vision.model_copy(
        update={
            "hidden_size": hidden,
            "attention": vision.attention.model_copy(update={"num_heads": heads}),
            "mlp": vision.mlp.model_copy(update={"intermediate_size": inner}),
        }
    )


@pytest.mark.parametrize(
    ("name", "text_tp", "vision_tp"),
    [
        ("Qwen3-VL-2B-Instruct", (1, 2, 4, 8), (1, 2, 4, 8, 16)),
        ("Qwen3-VL-4B-Instruct", (1, 2, 4, 8, 16), (1, 2, 4, 8, 16)),
        ("Qwen3-VL-8B-Instruct", (1, 2, 4, 8, 16), (1, 2, 4, 8, 16)),
        ("Qwen3-VL-32B-Instruct", (1, 2, 4, 8, 16, 32), (1, 2, 4, 8, 16)),
    ],
)
def test_legal_sizes_of_the_published_checkpoints(spec, name, text_tp, vision_tp):
    sizes = spec.checkpoint(name)
    assert legal_text_tp(sizes.text) == text_tp
    assert legal_vision_tp(sizes.vision) == vision_tp


@pytest.mark.parametrize(
    ("sizes", "tp", "problems"),
    [
        ({"heads": 16, "kv_heads": 8, "inner": 6144}, 16, ["heads per rank: 16 / 16 = 1 is odd"]),
        ({"heads": 16, "kv_heads": 16, "inner": 6144}, 3, ["heads: 16 / 3 leaves 1",
         "KV heads: neither 16 / 3 nor 3 / 16 is whole"]),
        ({"heads": 24, "kv_heads": 4, "inner": 6144}, 6,
         ["KV heads: neither 4 / 6 nor 6 / 4 is whole"]),
        ({"heads": 28, "kv_heads": 4, "inner": 18944}, 8, ["heads: 28 / 8 leaves 4"]),
        ({"heads": 16, "kv_heads": 8, "inner": 6145}, 2, ["intermediate size: 6145 / 2 leaves 1"]),
        ({"heads": 12, "kv_heads": 4, "inner": 6144}, 4, ["heads per rank: 12 / 4 = 3 is odd"]),
    ],
)  # fmt: skip
def test_reasons_of_an_illegal_text_tp(spec, sizes, tp, problems):
    split = text_split(resize_text(spec.text, **sizes), tp)
    assert not split.legal
    assert list(split.problems) == problems


def test_kv_heads_are_replicated_beyond_their_number(spec):
    split = text_split(spec.text, 16)
    assert split.legal
    assert (split.heads, split.kv_heads, split.kv_replicas) == (2, 1, 2)
    assert split.warnings == ("each KV head is on 2 ranks",)


def test_vocabulary_that_does_not_divide_is_padded_not_refused(spec):
    text = resize_text(spec.text, heads=16, kv_heads=8, inner=6144, vocab=151674)
    split = text_split(text, 4)
    assert split.legal
    assert split.padded_vocab == 151676
    assert split.warnings == ("vocabulary padded from 151674 to 151676",)


@pytest.mark.parametrize(
    ("head_dim", "suspect"),
    [(128, True), (149, True), (127, False), (150, False)],  # 24 x 128 = 3072, 24 x 149 = 3576
)
def test_warning_for_suspect_fused_widths(spec, head_dim, suspect):
    # TP 2 of the 8B sizes: 16 query heads and 2 x 4 KV heads per rank.
    text = resize_text(spec.text, heads=32, kv_heads=8, inner=12288, head_dim=head_dim)
    split = text_split(text, 2)
    assert split.qkv_width == 24 * head_dim
    assert any("wrong results were reported" in w for w in split.warnings) is suspect


def test_message_for_a_tp_that_does_not_divide_lists_the_legal_ones(spec):
    with pytest.raises(CheckFailed) as caught:
        require_text_tp(spec.text, 3, "Qwen3-VL-8B-Instruct")
    message = str(caught.value)
    assert "text TP 3 is illegal for Qwen3-VL-8B-Instruct: heads: 32 / 3 leaves 2" in message
    assert message.endswith("legal: 1, 2, 4, 8, 16")
    assert caught.value.exit_code == 4


def test_rows_are_powers_of_two_and_other_legal_sizes(spec):
    assert [row.tp for row in text_splits(spec.text)] == [1, 2, 4, 8, 16, 32, 64]
    text = resize_text(spec.text, heads=24, kv_heads=6, inner=6144)
    assert [row.tp for row in text_splits(text) if row.legal] == [1, 2, 3, 6, 12]


def test_vision_splits_cover_the_world(spec):
    splits = vision_splits(spec.vision, 32)
    assert [(s.tp, s.dp) for s in splits] == [(1, 32), (2, 16), (4, 8), (8, 4), (16, 2), (32, 1)]
    assert [s.legal for s in splits] == [True] * 5 + [False]
    assert splits[-1].problems == (
        "vision heads: 16 / 32 leaves 16",
        "vision intermediate size: 4304 / 32 leaves 16",
    )


def test_vision_tp_times_dp_is_the_world_size(spec):
    split = vision_split(spec.vision, 2, 2, 8)
    assert split.problems == ("TP x DP: 2 x 2 = 4, the world size is 8",)


def test_merger_width_divides_too(spec):
    vision = resize_vision(spec.vision, heads=12, inner=96, hidden=60)
    assert legal_vision_tp(vision) == (1, 2, 3, 4, 6, 12)
    narrow = resize_vision(spec.vision, heads=16, inner=96, hidden=10)
    assert vision_split(narrow, 16, 1, 16).problems == ("merger width: 40 / 16 leaves 8",)


def test_message_for_a_vision_split_lists_the_legal_ones(spec):
    with pytest.raises(CheckFailed) as caught:
        require_vision_split(spec.vision, 3, 1, 4, "Qwen3-VL-8B-Instruct")
    message = str(caught.value)
    assert "TP x DP: 3 x 1 = 3, the world size is 4" in message
    assert "vision heads: 16 / 3 leaves 1" in message
    assert message.endswith("legal: 1x4, 2x2, 4x1")


def test_legal_splits_are_returned(spec):
    assert require_text_tp(spec.text, 4, "x").heads == 8
    assert require_vision_split(spec.vision, 2, 2, 4, "x").heads == 8


@pytest.mark.parametrize(
    ("buckets", "tp", "problems"),
    [
        ((512, 2048), 8, ()),
        ((510,), 4, ("prefill bucket 510 is not divisible by text TP 4",)),
        ((8, 16), 8, ("prefill bucket 8 is not larger than text TP 8",)),
        ((1,), 1, ("prefill bucket 1 is not larger than text TP 1",)),
        ((), 4, ()),
    ],
)
def test_prefill_buckets(buckets, tp, problems):
    assert prefill_bucket_problems(buckets, tp) == problems


@pytest.mark.parametrize("size", [0, -1])
def test_sizes_below_one_are_usage_errors(spec, size):
    with pytest.raises(UsageError, match=f"is {size}; it is at least 1"):
        text_split(spec.text, size)
    with pytest.raises(UsageError):
        vision_split(spec.vision, size, 1, 1)
    with pytest.raises(UsageError):
        vision_splits(spec.vision, size)
    with pytest.raises(UsageError):
        prefill_bucket_problems([8], size)


def test_table_for_one_world_size(spec):
    table = parallel_table(spec.checkpoint("Qwen3-VL-2B-Instruct"), 6)
    assert [(row.tp, row.legal) for row in table.text] == [(6, False)]
    assert list(table.vision) == [6]
    assert [(s.tp, s.dp, s.legal) for s in table.vision[6]] == [
        (1, 6, True),
        (2, 3, True),
        (3, 2, False),
        (6, 1, False),
    ]
