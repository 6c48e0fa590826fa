"""Comparing the logits of generated tokens with a reference's.

Legend: ``S`` generated tokens, ``B`` batch, ``V`` vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm_neuron.accuracy.statistics import ThreeWayStatistics, three_way_statistics

__all__ = [
    "DEFAULT_TOL_MAP",
    "LogitValidationReport",
    "MultiPromptValidationResult",
    "logit_validation",
    "multi_prompt_logit_validation",
]

DEFAULT_TOL_MAP: dict[str, tuple[float, float]] = {
    "5": (1e-5, 0.011),
    "50": (1e-5, 0.02),
    "1000": (1e-5, 0.03),
    "all": (1e-5, 0.05),
}
"""How many of the largest expected logits are compared -> (atol, rtol)."""

DEFAULT_DIVERGENCE_DIFFERENCE_TOL = 0.001
_AGGREGATE_DEFAULTS = {"agg_bc": 0.99, "agg_sigma": 1.0}


@dataclass
class LogitValidationReport:
    """What :func:`logit_validation` found.

    Attributes:
        passed: the verdict.
        label: name of the prompt.
        errors: worst ``(|a - e| - atol) / max|e|`` by key of the tolerance map.
        limits: the tolerance map that was used.
        divergences: (token place, batch row, expected token, actual token, gap of the expected
            logits, allowed gap) where the greedy tokens differ.
        failures: what is wrong, in words with numbers.
        logits: actual logits ``[S, B, V]`` for the expected tokens' prefixes.
        three_way: statistics against a float32 baseline, when one was given.
    """

    passed: bool
    label: str
    errors: dict[str, float]
    limits: dict[str, tuple[float, float]]
    divergences: list[tuple[int, int, int, int, float, float]]
    failures: list[str]
    logits: torch.Tensor
    three_way: ThreeWayStatistics | None = None


@dataclass
class MultiPromptValidationResult:
    """What :func:`multi_prompt_logit_validation` found.

    Attributes:
        passed: the verdict.
        per_prompt_results: one report per prompt.
        aggregate_metrics: numbers over all prompts.
    """

    passed: bool
    per_prompt_results: list[LogitValidationReport]
    aggregate_metrics: dict[str, float] = field(default_factory=dict)


def _call(
    generate_fn: Callable[..., Any], input_ids: torch.Tensor, multimodal_inputs: Any
) -> torch.Tensor:
    extra = {} if multimodal_inputs is None else {"multimodal_inputs": multimodal_inputs}
    result = generate_fn(input_ids, **extra)
    logits = result[0] if isinstance(result, tuple | list) else result
    return logits.detach().cpu()


def _ulp(value: float, mantissa_bits: int) -> float:
    return 2.0 ** (math.floor(math.log2(abs(value))) - mantissa_bits) if value else 0.0


def logit_validation(
    input_ids: torch.Tensor,
    generate_fn: Callable[..., Any],
    expected_logits: torch.Tensor,
    tol_map: Mapping[str, tuple[float, float]] | None = None,
    divergence_difference_tol: float | None = None,
    suppress_passing: bool = True,
    colorize: bool = True,
    baseline_logits: torch.Tensor | None = None,
    dynamic_threshold_config: Mapping[str, float] | None = None,
    label: str | None = None,
    test_device: str = "cpu",
    output_dir: str | Path = "validation_output",
    visualize: bool = False,
    save_logits: bool = True,
    divergence_n_ulps: int = 1,
    mantissa_bits: int = 7,
    multimodal_inputs: Any = None,
    kv_extract_fn: Callable[..., Any] | None = None,
) -> tuple[bool, LogitValidationReport]:
    """Compare greedy generation with a reference, token by token.

    The expected tokens are the expected logits' maxima. Where the model's greedy token differs,
    the two leading expected logits must be close; generation then goes on from the expected token,
    so that every place is compared after the same prefix.

    Args:
        input_ids: prompt int64 ``[B, P]``.
        generate_fn: called with the prompt so far (and ``multimodal_inputs=``, if given); returns
            logits ``[S', B, V]`` or a tuple that starts with them, where ``S'`` is at least what
            is left to generate.
        expected_logits: ``[S, B, V]``.
        tol_map: how many of the largest expected logits are compared -> (atol, rtol).
        divergence_difference_tol: largest gap of two expected logits, as a share of the larger
            one, at which a differing token is forgiven; 0.001 by default.
        suppress_passing: kept for the plugin's signature; nothing is printed.
        colorize: likewise.
        baseline_logits: float32 reference ``[S, B, V]``, for three-way statistics in the report.
        dynamic_threshold_config: not supported, must be None.
        label: name of the prompt.
        test_device: must be ``"cpu"``.
        output_dir: not used; the stand-in writes no files.
        visualize: not supported, must be False.
        save_logits: not used.
        divergence_n_ulps: a gap of so many steps of the logit's magnitude is forgiven as well.
        mantissa_bits: mantissa bits of the device's dtype, 7 for bfloat16.
        multimodal_inputs: handed on to ``generate_fn``.
        kv_extract_fn: not supported, must be None.

    Returns:
        The verdict and the report.

    Raises:
        NotImplementedError: an option the stand-in does not have.
        ValueError: shapes that do not fit.
    """
    unsupported = {
        "dynamic_threshold_config": dynamic_threshold_config is not None,
        "visualize": visualize,
        "kv_extract_fn": kv_extract_fn is not None,
        f"test_device={test_device!r}": test_device != "cpu",
    }
    if any(unsupported.values()):
        names = ", ".join(name for name, used in unsupported.items() if used)
        raise NotImplementedError(f"the stand-in has no {names} for logit_validation")
    if expected_logits.dim() != 3 or expected_logits.shape[1] != input_ids.shape[0]:
        raise ValueError(
            f"expected_logits must be [S, B, V] with B = {input_ids.shape[0]}, got "
            f"{list(expected_logits.shape)}"
        )
    limits = dict(tol_map or DEFAULT_TOL_MAP)
    share = (
        DEFAULT_DIVERGENCE_DIFFERENCE_TOL
        if divergence_difference_tol is None
        else divergence_difference_tol
    )
    expected = expected_logits.detach().cpu()
    steps = expected.shape[0]
    expected_tokens = expected.argmax(dim=-1)  # [S, B]
    divergences: list[tuple[int, int, int, int, float, float]] = []
    failures: list[str] = []
    pieces: list[torch.Tensor] = []
    done, prompt = 0, input_ids
    while done < steps:
        logits = _call(generate_fn, prompt, multimodal_inputs)[: steps - done]
        if logits.shape[0] < steps - done or logits.shape[1:] != expected.shape[1:]:
            raise ValueError(
                f"generate_fn returned logits {list(logits.shape)}, needed are "
                f"{[steps - done, *expected.shape[1:]]}"
            )
        tokens = logits.argmax(dim=-1)
        differs = (tokens != expected_tokens[done:]).any(dim=1).nonzero().flatten()
        # Up to and including the first divergence the prefixes are the expected ones.
        valid = int(differs[0]) + 1 if differs.numel() else steps - done
        pieces.append(logits[:valid])
        if differs.numel():
            place = done + valid - 1
            for row in (tokens[valid - 1] != expected_tokens[place]).nonzero().flatten().tolist():
                wanted = int(expected_tokens[place, row])
                got = int(tokens[valid - 1, row])
                leading = expected[place, row, wanted].item()
                gap = leading - expected[place, row, got].item()
                allowed = max(
                    share * abs(leading), divergence_n_ulps * _ulp(leading, mantissa_bits)
                )
                divergences.append((place, row, wanted, got, gap, allowed))
                if not gap <= allowed:
                    failures.append(
                        f"token {place} of row {row} is {got} instead of {wanted}; their expected "
                        f"logits differ by {gap:.4g}, forgiven is {allowed:.4g}"
                    )
        prompt = torch.cat([prompt, expected_tokens[done : done + valid].t().to(prompt)], dim=1)
        done += valid
    actual = torch.cat(pieces)
    errors = {}
    for key, (atol, rtol) in limits.items():
        errors[key] = _top_error(actual, expected, key, atol)
        if not errors[key] <= rtol:
            failures.append(
                f"the largest {key} logits deviate by {errors[key]:.4g} of the largest, allowed is "
                f"{rtol:g}"
            )
    three_way = None
    if baseline_logits is not None:
        three_way = three_way_statistics(baseline_logits.detach().cpu(), expected, actual)
    report = LogitValidationReport(
        not failures,
        label or "prompt",
        errors,
        limits,
        divergences,
        failures,
        actual,
        three_way,
    )
    return report.passed, report


def _top_error(actual: torch.Tensor, expected: torch.Tensor, key: str, atol: float) -> float:
    """Worst ``(|a - e| - atol) / max|e|`` over places, among each place's largest logits."""
    vocabulary = expected.shape[-1]
    count = vocabulary if key == "all" else min(int(key), vocabulary)
    top = expected.double().topk(count, dim=-1)
    error = (actual.double().gather(-1, top.indices) - top.values).abs()
    excess = (error.amax(dim=-1) - atol).clamp(min=0.0)
    relative = (excess / top.values.abs().amax(dim=-1).clamp(min=1e-30)).max().item()
    return relative if math.isfinite(relative) else math.inf


def multi_prompt_logit_validation(
    prompts_input_ids: Sequence[torch.Tensor],
    generate_fn: Callable[..., Any],
    prompts_expected_logits: Sequence[torch.Tensor],
    prompts_baseline_logits: Sequence[torch.Tensor] | None = None,
    aggregate_config: Mapping[str, float] | None = None,
    tol_map: Mapping[str, tuple[float, float]] | None = None,
    divergence_difference_tol: float | None = None,
    suppress_passing: bool = True,
    colorize: bool = True,
    test_device: str = "cpu",
    replicate_to_batch_size: int | None = None,
    divergence_n_ulps: int = 1,
    mantissa_bits: int = 7,
    prompts_multimodal_inputs: Sequence[Any] | None = None,
) -> MultiPromptValidationResult:
    """Run :func:`logit_validation` over several prompts.

    It passes when every prompt passes. With float32 baselines it also passes when, over all
    prompts together, the RMS error ratio is at most 1 or the error distributions overlap by at
    least 0.99.

    Args:
        prompts_input_ids: prompts int64 ``[B, P]``.
        generate_fn: see :func:`logit_validation`.
        prompts_expected_logits: ``[S, B, V]`` per prompt.
        prompts_baseline_logits: float32 reference per prompt.
        aggregate_config: ``agg_bc`` (0.99) and ``agg_sigma`` (1.0).
        tol_map: see :func:`logit_validation`.
        divergence_difference_tol: see :func:`logit_validation`.
        suppress_passing: see :func:`logit_validation`.
        colorize: see :func:`logit_validation`.
        test_device: see :func:`logit_validation`.
        replicate_to_batch_size: repeat every prompt and its references to this batch size.
        divergence_n_ulps: see :func:`logit_validation`.
        mantissa_bits: see :func:`logit_validation`.
        prompts_multimodal_inputs: per prompt.

    Raises:
        ValueError: the lists differ in length, or a key of ``aggregate_config`` is unknown.
    """
    count = len(prompts_input_ids)
    baselines: Sequence[torch.Tensor | None] = prompts_baseline_logits or [None] * count
    multimodal = prompts_multimodal_inputs or [None] * count
    if not count == len(prompts_expected_logits) == len(baselines) == len(multimodal):
        raise ValueError(
            f"{count} prompts, {len(prompts_expected_logits)} expected, {len(baselines)} baseline "
            f"and {len(multimodal)} multimodal entries; there must be equally many"
        )
    thresholds = {**_AGGREGATE_DEFAULTS, **(aggregate_config or {})}
    unknown = sorted(set(thresholds) - set(_AGGREGATE_DEFAULTS))
    if unknown:
        raise ValueError(
            f"aggregate_config has unknown keys {unknown}; legal are {sorted(_AGGREGATE_DEFAULTS)}"
        )
    reports = []
    rows = zip(prompts_input_ids, prompts_expected_logits, baselines, multimodal, strict=True)
    for number, (prompt, expected, baseline, inputs) in enumerate(rows):
        if replicate_to_batch_size is not None:
            times = replicate_to_batch_size // prompt.shape[0]
            prompt = prompt.repeat(times, 1)
            expected = expected.repeat(1, times, 1)
            baseline = None if baseline is None else baseline.repeat(1, times, 1)
        _, report = logit_validation(
            prompt,
            generate_fn,
            expected,
            tol_map=tol_map,
            divergence_difference_tol=divergence_difference_tol,
            suppress_passing=suppress_passing,
            colorize=colorize,
            baseline_logits=baseline,
            label=f"prompt {number}",
            test_device=test_device,
            save_logits=False,
            divergence_n_ulps=divergence_n_ulps,
            mantissa_bits=mantissa_bits,
            multimodal_inputs=inputs,
        )
        reports.append(report)
    metrics = {"prompts": float(count), "passed": float(sum(report.passed for report in reports))}
    passed = bool(reports) and all(report.passed for report in reports)
    if prompts_baseline_logits:
        together = three_way_statistics(
            [value.detach().cpu().flatten() for value in prompts_baseline_logits],
            [value.detach().cpu().flatten() for value in prompts_expected_logits],
            [
                report.logits[:, : value.shape[1]].flatten()
                for report, value in zip(reports, prompts_expected_logits, strict=True)
            ],
        )
        metrics |= {
            "bhattacharyya": together.bhattacharyya,
            "sigma_ratio": together.sigma_ratio,
            "worst_linf_ratio": together.worst_linf_ratio,
            "worst_l2_ratio": together.worst_l2_ratio,
        }
        passed = (
            passed
            or together.sigma_ratio <= thresholds["agg_sigma"]
            or together.bhattacharyya >= thresholds["agg_bc"]
        )
    return MultiPromptValidationResult(passed, reports, metrics)
