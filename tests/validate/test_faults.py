"""Every group of checks notices a fault in the package, in the row that is named after it."""

from __future__ import annotations

import pytest

from .conftest import Workshop

VISION, MODEL = "vision_encoder.py", "model.py"
PREPROCESSING, MROPE = "utils/preprocessing.py", "utils/mrope.py"

# group, row that must fail, file, old text, new text
FAULTS = [
    (
        "vision modules",
        "patch embed",
        VISION,
        "linear(pixel_values, self.proj_weight, self.proj_bias)",
        "linear(pixel_values, self.proj_weight, 2 * self.proj_bias)",
    ),
    (
        "vision modules",
        "position embedding",
        PREPROCESSING,
        "low_r * side + high_c, high_r * side + low_c",
        "high_r * side + low_c, low_r * side + high_c",
    ),
    (
        "vision modules",
        "rotary tables",
        PREPROCESSING,
        "rows, cols = order // width, order % width",
        "cols, rows = order // width, order % width",
    ),
    ("vision modules", "attention", VISION, "config.head_dim**-0.5", "config.head_dim**-0.499"),
    ("vision modules", "mlp", VISION, "gelu_tanh(linear(", "gelu(linear("),
    (
        "vision modules",
        "block",
        VISION,
        "self.mlp(self.norm2(hidden))",
        "self.mlp(self.norm1(hidden))",
    ),
    ("vision modules", "merger", VISION, " gelu(linear(", " gelu_tanh(linear("),
    ("vision modules", "deepstack merger 1", VISION, " gelu(linear(", " gelu_tanh(linear("),
    ("vision modules", "full tower", VISION, "features.append(", "features.insert(0, "),
    ("text modules", "rms norm", MODEL, "x = hidden.float()", "x = hidden.float() + 1e-3"),
    ("text modules", "rotary tables", MODEL, "index % 3 == 1", "index % 3 == 2"),
    ("text modules", "attention prefill", MODEL, "causal_mask=True", "causal_mask=False"),
    (
        "text modules",
        "attention decode",
        MODEL,
        "rmsnorm_QK_pre_rope_W_K=self.k_layernorm",
        "rmsnorm_QK_pre_rope_W_K=self.q_layernorm",
    ),
    ("text modules", "mlp", MODEL, "gate_w=self.gate_proj_weight", "gate_w=self.up_proj_weight"),
    (
        "text modules",
        "decoder layer",
        MODEL,
        "self.post_attention_layernorm(hidden)",
        "self.input_layernorm(hidden)",
    ),
    (
        "text modules",
        "full text tower",
        MODEL,
        "if index < len(deepstack):\n                hidden = hidden + deepstack[index]",
        "if 0 < index <= len(deepstack):\n                hidden = hidden + deepstack[index - 1]",
    ),
    ("end to end", "prefill logits", MODEL, "self.norm(hidden)\n", "hidden\n"),
    (
        "end to end",
        "decode logits",
        MROPE,
        "int(positions.max()) + 1 - len(tokens)",
        "0 * len(tokens)",
    ),
    (
        "end to end",
        "greedy tokens",
        MODEL,
        "softmax_scale=self.scale",
        "softmax_scale=2 * self.scale",
    ),
    (
        "end to end",
        "batched decode",
        MODEL,
        "positions.view(batch, steps).float()",
        "positions.view(batch, steps).float().amax(0, keepdim=True).expand(batch, steps)",
    ),
    (
        "end to end",
        "larger buckets",
        MODEL,
        "hidden = self.norm(hidden)\n",
        "hidden = self.norm(hidden) * (1 + 1e-4 * (input_ids.shape[0] > 800))\n",
    ),
    (
        "end to end",
        "noise in padding and caches",
        PREPROCESSING,
        '"bound_max"][block, start:end] = end',
        '"bound_max"][block, start:end] = batch.block_size',
    ),
    (
        "end to end",
        "on-device sampling",
        MODEL,
        "return token_ids, None",
        "return token_ids + 1, None",
    ),
    ("positions", "mixtures against vLLM", MROPE, "max(rows, cols)", "min(rows, cols)"),
    ("positions", "mixtures against transformers", MROPE, "max(rows, cols)", "min(rows, cols)"),
    (
        "bfloat16",
        "vision mlp",
        VISION,
        "return nn.functional.linear(x, weight.t(), bias)",
        "return x @ weight + bias",
    ),
    (
        "bfloat16",
        "text rotary tables",
        MODEL,
        "position_ids[:, :, None].float()",
        "position_ids[:, :, None].bfloat16().float()",
    ),
]


@pytest.mark.parametrize(
    ("group", "check", "file", "old", "new"), FAULTS, ids=[f"{f[0]}-{f[1]}" for f in FAULTS]
)
def test_a_seeded_fault_fails_the_row_that_names_it(
    workshop: Workshop, group: str, check: str, file: str, old: str, new: str
) -> None:
    package = workshop.variant(f"{group}-{check}".replace(" ", "_"), {file: [(old, new)]})
    rows = workshop.rows(package, group, check)
    assert check in rows, f"no such row; there are {sorted(rows)}"
    assert not rows[check].passed, f"the fault went unseen: {rows[check]}"


@pytest.mark.slow
def test_parallel_faults_fail_where_they_are(workshop: Workshop) -> None:
    """A bias summed over vision ranks, and padded vocabulary rows that can be sampled."""
    package = workshop.variant(
        "parallel_faults",
        {
            VISION: [
                ("group.all_reduce(x @ weight) + bias", "group.all_reduce(x @ weight + bias)")
            ],
            MODEL: [("columns >= text.vocab_size", "columns >= 2 * text.vocab_size")],
        },
    )
    rows = workshop.rows(package, "parallel")
    assert rows["tp 1 against Hugging Face"].passed
    splits = {name for name in rows if name.startswith("tp") and "vision" in name}
    sampling = {name for name in splits if name.endswith("on-device sampling")}
    assert len(sampling) == 5 and not any(rows[name].passed for name in sampling)
    passed = {name for name in splits - sampling if rows[name].passed}
    assert passed == {"tp 2, vision tp 1 x dp 2", "tp 4, vision tp 1 x dp 4"}


def test_a_package_that_crashes_is_a_failed_row_and_not_an_abort(workshop: Workshop) -> None:
    package = workshop.variant(
        "crash", {MROPE: [("place, position = 0, 0", 'raise KeyError("seeded")')]}
    )
    rows = workshop.rows(package, "positions")
    assert len(rows) == 2
    for row in rows.values():
        assert not row.passed and "KeyError" in row.detail and "seeded" in row.detail
