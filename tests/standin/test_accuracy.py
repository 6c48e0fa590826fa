"""The comparison functions: they pass what is right, and see each kind of error."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from vlmgen import standin

standin.activate()

from vllm_neuron.accuracy import (  # noqa: E402
    ModelCapture,
    assert_close,
    assert_close_three_way,
    bhattacharyya_coefficient,
    generate_three_way_reference_logits,
    init_hf_model,
    logit_validation,
    multi_prompt_logit_validation,
    relative_error,
    three_way_statistics,
)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


# --- numbers -----------------------------------------------------------------------------------


def test_relative_error_is_by_the_largest_expected_value() -> None:
    expected = torch.tensor([1.0, -4.0])
    assert relative_error(torch.tensor([1.5, -4.0]), expected) == 0.125
    assert relative_error(expected, expected) == 0.0
    assert relative_error(torch.ones(2), torch.zeros(2)) == math.inf
    assert relative_error(torch.tensor([math.nan, 1.0]), expected) == math.inf
    with pytest.raises(ValueError, match=r"\[1, 2\] and \[2\]"):
        relative_error(torch.ones(1, 2), torch.ones(2))


def test_bhattacharyya_against_two_normal_distributions() -> None:
    """Closed form for N(0, 1) and N(0, s): sqrt(2 s / (1 + s^2))."""
    one = torch.randn(200_000)
    for scale in (1.0, 1.5, 3.0):
        other = torch.randn(200_000) * scale
        expected = math.sqrt(2 * scale / (1 + scale**2))
        assert bhattacharyya_coefficient(one, other) == pytest.approx(expected, abs=0.01)


def test_bhattacharyya_of_a_shifted_distribution() -> None:
    """Closed form for N(0, 1) and N(d, 1): exp(-d^2 / 8)."""
    one, other = torch.randn(200_000), torch.randn(200_000) + 1.0
    assert bhattacharyya_coefficient(one, other) == pytest.approx(math.exp(-1 / 8), abs=0.01)


def test_bhattacharyya_at_the_edges() -> None:
    assert bhattacharyya_coefficient(torch.zeros(5), torch.zeros(9)) == 1.0
    assert bhattacharyya_coefficient(torch.zeros(50), torch.ones(50)) == 0.0
    assert bhattacharyya_coefficient(torch.tensor([math.nan]), torch.zeros(1)) == 0.0


def test_three_way_numbers_by_hand() -> None:
    baseline = [torch.zeros(2), torch.zeros(2)]
    expected = [torch.tensor([3.0, 4.0]), torch.tensor([1.0, 0.0])]
    actual = [torch.tensor([6.0, 8.0]), torch.tensor([0.0, 0.5])]
    found = three_way_statistics(baseline, expected, actual)
    assert found.linf_ratios == (2.0, 0.5)
    assert found.l2_ratios == (2.0, 0.5)
    assert found.sigma_ratio == pytest.approx(math.sqrt(100.25 / 26.0))
    assert (found.max_error, found.reference_max_error, found.num_elements) == (8.0, 4.0, 4)
    assert found.worst_linf_ratio == 2.0 and found.worst_l2_ratio == 2.0


def test_three_way_refuses_what_cannot_be_compared() -> None:
    with pytest.raises(ValueError, match="1 baseline, 2 expected and 1 actual"):
        three_way_statistics(torch.ones(1), [torch.ones(1)] * 2, torch.ones(1))
    with pytest.raises(ValueError, match="empty tensor"):
        three_way_statistics(torch.ones(0), torch.ones(0), torch.ones(0))


# --- two-way -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "rtol"), [(torch.float16, 1e-3), (torch.bfloat16, 1.6e-2), (torch.float32, 1.3e-6)]
)
def test_assert_close_default_tolerances(dtype: torch.dtype, rtol: float) -> None:
    expected = torch.tensor([1.0, 1024.0], dtype=dtype)
    step = 1024.0 * rtol
    near = torch.tensor([1.0 + 0.9 * step, 1024.0])
    result = assert_close(near, expected)
    assert result.passed and result.rtol == rtol and result.atol == 1e-5
    with pytest.raises(AssertionError, match="tensor: largest error"):
        assert_close(torch.tensor([1.0 + 1.1 * step, 1024.0]), expected)


def test_assert_close_subtracts_the_absolute_tolerance_once() -> None:
    result = assert_close(torch.tensor([1.5]), torch.tensor([1.0]), rtol=0.25, atol=0.25)
    assert result.relative_error == 0.25
    with pytest.raises(AssertionError):
        assert_close(torch.tensor([1.5]), torch.tensor([1.0]), rtol=0.25, atol=0.2)


def test_assert_close_and_values_that_are_not_finite() -> None:
    both = torch.tensor([1.0, math.nan, math.inf, -math.inf])
    with pytest.raises(AssertionError, match="not finite"):
        assert_close(both, both)
    assert assert_close(both, both, equal_nan_inf=True).passed
    with pytest.raises(AssertionError, match="not finite"):
        assert_close(both, both.flip(0), equal_nan_inf=True)


def test_assert_close_histogram_and_shapes() -> None:
    result = assert_close(
        torch.tensor([1.0, 1.1]), torch.tensor([1.0, 1.0]), rtol=1.0, enable_histograms=True
    )
    assert sum(result.histogram) == 2 and result.histogram[0] == result.histogram[-1] == 1
    with pytest.raises(AssertionError, match=r"rows: shape \[1\], not \[2\]"):
        assert_close(torch.ones(1), torch.ones(2), name="rows")
    with pytest.raises(ValueError, match="torch.float64"):
        assert_close(torch.ones(1), torch.ones(1, dtype=torch.float64))


# --- three-way ---------------------------------------------------------------------------------


def _matmul_inputs(count: int = 10) -> tuple[list[torch.Tensor], ...]:
    """A float32 product, the same in bf16, and in bf16 with the operands in another order."""
    baseline, expected, actual = [], [], []
    for _ in range(count):
        a, b = torch.randn(32, 64), torch.randn(64, 32)
        baseline.append(a @ b)
        expected.append(a.bfloat16() @ b.bfloat16())
        actual.append((b.bfloat16().t() @ a.bfloat16().t()).t())
    return baseline, expected, actual


def test_three_way_passes_an_equal_computation() -> None:
    result = assert_close_three_way(*_matmul_inputs())
    assert result.passed and not result.failures
    assert result.statistics.worst_linf_ratio < 2.0


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda t: t * 1.1, "RMS error ratio"),
        (lambda t: t + 0.2, "RMS error ratio"),
        (lambda t: t.flip(0), "L2 error ratio"),
        (lambda t: torch.cat([t[:1] + torch.eye(1, 32) * 30, t[1:]]), "L-infinity error ratio"),
        (lambda t: t * math.nan, "L-infinity error ratio inf"),
    ],
    ids=["scaled", "shifted", "reordered", "one-element", "nan"],
)
def test_three_way_sees_a_fault(fault: Any, message: str) -> None:
    baseline, expected, actual = _matmul_inputs()
    with pytest.raises(AssertionError, match=message):
        assert_close_three_way(baseline, expected, [fault(t) for t in actual])


def test_three_way_sees_a_fault_in_one_of_ten_inputs() -> None:
    baseline, expected, actual = _matmul_inputs()
    actual[7] = actual[7].flip(0)
    with pytest.raises(AssertionError, match="of input 7"):
        assert_close_three_way(baseline, expected, actual)


def test_three_way_writes_the_numbers_of_a_failure(tmp_path: Path) -> None:
    baseline, expected, actual = _matmul_inputs(2)
    with pytest.raises(AssertionError):
        assert_close_three_way(
            baseline,
            expected,
            [a * 2 for a in actual],
            "a/b",
            plot_on_failure=True,
            output_dir=tmp_path,
        )
    numbers = json.loads((tmp_path / "a_b_three_way.json").read_text())
    assert numbers["sigma_ratio"] > 10
    with pytest.raises(ValueError, match="output_dir"):
        assert_close_three_way(baseline, expected, actual, plot_on_failure=True)


# --- logits ------------------------------------------------------------------------------------

VOCABULARY, STEPS = 40, 6


class Bigram:
    """A language model whose logits depend on the last token only."""

    def __init__(self, table: torch.Tensor) -> None:
        self.table = table
        self.prompts: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor) -> torch.Tensor:
        self.prompts.append(input_ids)
        rows, last = [], input_ids[:, -1]
        for _ in range(STEPS):
            rows.append(self.table[last])
            last = rows[-1].argmax(dim=-1)
        return torch.stack(rows)


@pytest.fixture
def table() -> torch.Tensor:
    return torch.randn(VOCABULARY, VOCABULARY) * 4


PROMPT = torch.tensor([[3, 5], [7, 9]])


def test_logits_of_the_same_model_pass(table: torch.Tensor) -> None:
    model = Bigram(table)
    passed, report = logit_validation(PROMPT, model, Bigram(table)(PROMPT))
    assert passed and report.failures == [] and report.divergences == []
    assert report.errors == {"5": 0.0, "50": 0.0, "1000": 0.0, "all": 0.0}
    assert len(model.prompts) == 1


def test_logit_tolerances_by_rank(table: torch.Tensor) -> None:
    """An error among the small logits fails only the entries that look at them."""
    expected = Bigram(table)(PROMPT)
    wrong = table.clone()
    smallest = table.argmin(dim=-1, keepdim=True)
    wrong.scatter_add_(1, smallest, torch.full_like(smallest, 1, dtype=torch.float32))
    passed, report = logit_validation(PROMPT, Bigram(wrong), expected)
    assert not passed and report.errors["5"] == 0.0
    assert [failure.split()[2] for failure in report.failures] == ["50", "1000", "all"]


def _near_tie(table: torch.Tensor, gap: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Expected and actual tables whose leaders after token 5 are exchanged, ``gap`` apart."""
    expected, actual = table.clone(), table.clone()
    first, second = expected[5].topk(2).indices.tolist()
    expected[5, second] = expected[5, first] - gap
    actual[5] = expected[5]
    actual[5, [first, second]] = expected[5, [second, first]]
    return expected, actual


def test_divergence_at_a_near_tie_is_forgiven_and_generation_goes_on(table: torch.Tensor) -> None:
    expected_table, actual_table = _near_tie(table, gap=0.01)
    expected = Bigram(expected_table)(PROMPT)
    model = Bigram(actual_table)
    passed, report = logit_validation(PROMPT, model, expected)
    assert passed, report.failures
    place, row, wanted, got, gap, allowed = report.divergences[0]
    assert (place, row) == (0, 0) and wanted != got and gap == pytest.approx(0.01, abs=1e-5)
    assert gap <= allowed
    # The second call starts from the expected token, not from the model's own.
    assert model.prompts[1][0].tolist() == [3, 5, wanted]
    assert report.logits.shape == expected.shape


def test_divergence_at_a_clear_leader_fails(table: torch.Tensor) -> None:
    expected_table, actual_table = _near_tie(table, gap=2.0)
    passed, report = logit_validation(
        PROMPT, Bigram(actual_table), Bigram(expected_table)(PROMPT), tol_map={"all": (0, 10.0)}
    )
    assert not passed
    assert "token 0 of row 0" in report.failures[0]


def test_logit_validation_refuses_what_it_lacks(table: torch.Tensor) -> None:
    expected = Bigram(table)(PROMPT)
    with pytest.raises(NotImplementedError, match="visualize"):
        logit_validation(PROMPT, Bigram(table), expected, visualize=True)
    with pytest.raises(ValueError, match=r"\[S, B, V\] with B = 2"):
        logit_validation(PROMPT, Bigram(table), expected[:, 0])
    with pytest.raises(ValueError, match="generate_fn returned"):
        logit_validation(PROMPT, lambda ids: expected[:2], expected)


def test_multimodal_inputs_reach_the_model(table: torch.Tensor) -> None:
    seen = []

    def generate(input_ids: torch.Tensor, multimodal_inputs: Any) -> tuple[torch.Tensor, None]:
        seen.append(multimodal_inputs)
        return Bigram(table)(input_ids), None

    expected = Bigram(table)(PROMPT)
    result = multi_prompt_logit_validation(
        [PROMPT, PROMPT], generate, [expected] * 2, prompts_multimodal_inputs=["one", "two"]
    )
    assert result.passed and seen == ["one", "two"]


def test_multi_prompt_verdicts(table: torch.Tensor) -> None:
    baseline = Bigram(table)(PROMPT)
    rounded = table.bfloat16().float()
    expected = Bigram(rounded)(PROMPT)
    exact = {"all": (0.0, 0.0)}
    # Nearer to float32 than the reference: fails two-way at zero tolerance, passes three-way.
    closer = multi_prompt_logit_validation(
        [PROMPT], Bigram(table), [expected], [baseline], tol_map=exact
    )
    assert closer.passed and not closer.per_prompt_results[0].passed
    assert closer.aggregate_metrics["sigma_ratio"] == 0.0
    two_way = multi_prompt_logit_validation([PROMPT], Bigram(table), [expected], tol_map=exact)
    assert not two_way.passed
    # Ten times the reference's error: neither.
    worse = table + 10 * (rounded - table)
    far = multi_prompt_logit_validation(
        [PROMPT], Bigram(worse), [expected], [baseline], tol_map=exact
    )
    assert not far.passed and far.aggregate_metrics["sigma_ratio"] > 5
    with pytest.raises(ValueError, match="unknown keys"):
        multi_prompt_logit_validation(
            [PROMPT], Bigram(table), [expected], aggregate_config={"x": 1}
        )


def test_multi_prompt_replicates_the_batch(table: torch.Tensor) -> None:
    model = Bigram(table)
    result = multi_prompt_logit_validation(
        [PROMPT], model, [Bigram(table)(PROMPT)], replicate_to_batch_size=6
    )
    assert result.passed and model.prompts[0].shape == (6, 2)


# --- capture -----------------------------------------------------------------------------------


def test_model_capture() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU())
    x = torch.randn(2, 3)
    with ModelCapture(model, ["0"]) as captured:
        model(x)
        model(2 * x)
    model(x)
    assert [
        torch.equal(out, model[0](s * x))
        for s, out in zip((1, 2), captured.outputs["0"], strict=True)
    ] == [True, True]
    with pytest.raises(KeyError, match="no modules"):
        ModelCapture(model, ["2"])


# --- references --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
    )
    folder = tmp_path_factory.mktemp("tiny")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def test_three_way_references_are_greedy_and_over_the_same_tokens(tiny_checkpoint: Path) -> None:
    prompt = torch.tensor([[3, 1, 4]])
    references = generate_three_way_reference_logits(
        tiny_checkpoint, torch.bfloat16, 5, ["ignored"], lambda text, **_: {"input_ids": prompt}
    )
    (ids,), (fp32,), (half,) = (
        references[name] for name in ("input_ids", "fp32_logits", "dtype_logits")
    )
    assert ids.tolist() == prompt.tolist()
    assert fp32.shape == half.shape == (5, 1, 32)
    assert (fp32.dtype, half.dtype) == (torch.float32, torch.bfloat16)
    model = init_hf_model(tiny_checkpoint, torch.float32)
    generated = model.generate(prompt, max_new_tokens=5, do_sample=False)
    assert fp32.argmax(dim=-1)[:, 0].tolist() == generated[0, 3:].tolist()
    assert relative_error(half.float(), fp32) < 0.05
    with pytest.raises(NotImplementedError, match="quantised"):
        generate_three_way_reference_logits(
            tiny_checkpoint, torch.bfloat16, 1, [], None, kv_cache_dtype="fp8"
        )


def test_init_hf_model_by_architecture(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    model = init_hf_model(tiny_checkpoint, torch.bfloat16, attn_implementation="eager")
    assert not model.training and model.dtype == torch.bfloat16
    assert model.config._attn_implementation == "eager"

    tried = []

    class Auto:
        @staticmethod
        def from_pretrained(checkpoint: Any, **options: Any) -> Any:
            tried.append(options["attn_implementation"])
            if options["attn_implementation"] != "eager":
                raise ValueError("not supported")
            return torch.nn.Identity()

    monkeypatch.setattr(transformers, "AutoModelForImageTextToText", Auto)
    config = transformers.LlamaConfig(architectures=["SomeForConditionalGeneration"])
    with pytest.raises(ValueError, match="not supported"):
        init_hf_model(tiny_checkpoint, torch.float32, config=config)
    init_hf_model(tiny_checkpoint, torch.float32, config=config, eager_attn_fallback=True)
    assert tried == ["sdpa", "sdpa", "eager"]
