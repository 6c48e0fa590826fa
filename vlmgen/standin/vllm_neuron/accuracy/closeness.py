"""Assertions on tensors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from vllm_neuron.accuracy.statistics import ThreeWayStatistics, three_way_statistics

__all__ = [
    "AssertCloseResult",
    "ThreeWayAssertResult",
    "assert_close",
    "assert_close_three_way",
]

_DEFAULT_TOLERANCES = {  # (rtol, atol)
    torch.float16: (1e-3, 1e-5),
    torch.bfloat16: (1.6e-2, 1e-5),
    torch.float32: (1.3e-6, 1e-5),
}
_HISTOGRAM_BINS = 50


@dataclass(frozen=True)
class AssertCloseResult:
    """Outcome of :func:`assert_close`.

    Attributes:
        passed: the tolerance holds.
        name: name of the tensor.
        max_error: largest ``|actual - expected|``.
        relative_error: largest ``(|actual - expected| - atol) / max|expected|``.
        rtol: tolerance that was used.
        atol: tolerance that was used.
        histogram: with ``enable_histograms``, counts of the errors in 50 bins from 0 to
            ``max_error``.
    """

    passed: bool
    name: str
    max_error: float
    relative_error: float
    rtol: float
    atol: float
    histogram: tuple[int, ...] | None = None


@dataclass(frozen=True)
class ThreeWayAssertResult:
    """Outcome of :func:`assert_close_three_way`.

    Attributes:
        passed: nothing failed.
        name: name of the tensor.
        statistics: the numbers.
        failures: what is wrong, in words with numbers.
    """

    passed: bool
    name: str
    statistics: ThreeWayStatistics
    failures: tuple[str, ...]


def assert_close(
    actual: torch.Tensor,
    expected: torch.Tensor,
    rtol: float | None = None,
    atol: float | None = None,
    equal_nan_inf: bool = False,
    name: str = "tensor",
    enable_histograms: bool = False,
) -> AssertCloseResult:
    """Assert that errors are small against the largest expected value.

    The rule is ``(|actual - expected| - atol) / max|expected| <= rtol``.

    Args:
        actual: result.
        expected: reference of the same shape.
        rtol: by default 1e-3 for float16, 1.6e-2 for bfloat16, 1.3e-6 for float32, by the
            expected dtype.
        atol: by default 1e-5.
        equal_nan_inf: places where both hold NaN, or the same infinity, count as equal.
        name: name for the message.
        enable_histograms: count the errors by size.

    Raises:
        AssertionError: the rule does not hold, a value is not finite, or the shapes differ.
        ValueError: no default tolerance for the dtype.
    """
    if actual.shape != expected.shape:
        raise AssertionError(f"{name}: shape {list(actual.shape)}, not {list(expected.shape)}")
    if (rtol is None or atol is None) and expected.dtype not in _DEFAULT_TOLERANCES:
        raise ValueError(f"{name}: no default tolerance for {expected.dtype}; give rtol and atol")
    default_rtol, default_atol = _DEFAULT_TOLERANCES.get(expected.dtype, (0.0, 0.0))
    rtol = default_rtol if rtol is None else rtol
    atol = default_atol if atol is None else atol

    result, reference = actual.detach().double(), expected.detach().double()
    if equal_nan_inf:
        same = (result == reference) | (result.isnan() & reference.isnan())
        drop = same & ~reference.isfinite()
        result, reference = result[~drop], reference[~drop]
    error = (result - reference).abs()
    finite = bool(result.isfinite().all() and reference.isfinite().all())
    largest = reference.abs().max().item() if reference.numel() else 0.0
    max_error = error.max().item() if error.numel() else 0.0
    excess = max_error - atol
    relative = 0.0 if excess <= 0 else (excess / largest if largest else float("inf"))
    histogram = None
    if enable_histograms and finite:
        counts = torch.histc(error, _HISTOGRAM_BINS, 0.0, max_error or 1.0)
        histogram = tuple(int(count) for count in counts)
    outcome = AssertCloseResult(
        finite and relative <= rtol, name, max_error, relative, rtol, atol, histogram
    )
    if not outcome.passed:
        reason = (
            f"largest error {max_error:.4g} is {relative:.4g} of the largest expected value "
            f"{largest:.4g}, allowed is {rtol:g} after an absolute {atol:g}"
            if finite
            else "a value is not finite"
        )
        raise AssertionError(f"{name}: {reason}")
    return outcome


def assert_close_three_way(
    baseline: torch.Tensor | Sequence[torch.Tensor],
    expected: torch.Tensor | Sequence[torch.Tensor],
    actual: torch.Tensor | Sequence[torch.Tensor],
    name: str = "tensor",
    bc_threshold: float = 0.99,
    max_linf_ratio: float = 5.0,
    max_l2_ratio: float = 3.0,
    plot_on_failure: bool = False,
    output_dir: str | Path | None = None,
) -> ThreeWayAssertResult:
    """Assert that ``actual`` errs no more than the dtype reference does.

    It passes when the error distributions overlap enough or the RMS error ratio is at most 1, and
    the worst L-infinity and L2 ratios stay below their limits.

    Args:
        baseline: float32 reference, one tensor or one per input (ten are customary).
        expected: reference in the device's dtype.
        actual: model under test.
        name: name for the message.
        bc_threshold: smallest overlap.
        max_linf_ratio: limit for the worst L-infinity ratio.
        max_l2_ratio: limit for the worst L2 ratio.
        plot_on_failure: write the numbers of a failure to ``output_dir`` as JSON; the stand-in
            draws nothing.
        output_dir: folder for that file; needed with ``plot_on_failure``.

    Raises:
        AssertionError: it does not pass; the message holds every number.
        ValueError: see :func:`three_way_statistics`, or ``plot_on_failure`` without a folder.
    """
    if plot_on_failure and output_dir is None:
        raise ValueError("plot_on_failure needs an output_dir")
    statistics = three_way_statistics(baseline, expected, actual)
    failures = statistics.failures(bc_threshold, max_linf_ratio, max_l2_ratio)
    if failures:
        if plot_on_failure and output_dir is not None:
            folder = Path(output_dir)
            folder.mkdir(parents=True, exist_ok=True)
            file = folder / f"{name.replace('/', '_')}_three_way.json"
            file.write_text(json.dumps(asdict(statistics), indent=2) + "\n", encoding="utf-8")
        raise AssertionError(f"{name}: " + "; ".join(failures))
    return ThreeWayAssertResult(True, name, statistics, ())
