"""Error statistics as plain numbers, all in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = [
    "ThreeWayStatistics",
    "bhattacharyya_coefficient",
    "relative_error",
    "three_way_statistics",
]

_MIN_BINS = 4
_MAX_BINS = 100


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest deviation divided by the largest expected value.

    Args:
        actual: any shape and floating dtype.
        expected: the same shape.

    Returns:
        ``max|a - e| / max|e|``; 0 for two empty or two zero tensors, infinity for a deviation
        from zero or a value that is not finite.

    Raises:
        ValueError: the shapes differ.
    """
    _same_shape(actual, expected)
    error = _max_abs(actual.double() - expected.double())
    return _ratio(error, _max_abs(expected.double()))


def bhattacharyya_coefficient(first: torch.Tensor, second: torch.Tensor) -> float:
    """Return how much two samples' distributions overlap.

    Both are binned over their common range, with as many bins as the Rice rule gives the smaller
    sample (4 to 100), and the coefficient is the sum of ``sqrt(p * q)`` over the bins
    (A. Bhattacharyya, 1943).

    Args:
        first: sample of any shape.
        second: sample of any shape.

    Returns:
        1 for equal distributions, 0 for disjoint ones or values that are not finite.
    """
    one, other = first.double().flatten(), second.double().flatten()
    if one.numel() == 0 or other.numel() == 0:
        return 1.0 if one.numel() == other.numel() else 0.0
    if not (one.isfinite().all() and other.isfinite().all()):
        return 0.0
    low = min(one.min().item(), other.min().item())
    high = max(one.max().item(), other.max().item())
    if low == high:
        return 1.0
    size = min(one.numel(), other.numel())
    bins = max(_MIN_BINS, min(_MAX_BINS, math.ceil(2 * size ** (1 / 3))))
    p = torch.histc(one, bins, low, high) / one.numel()
    q = torch.histc(other, bins, low, high) / other.numel()
    return min(1.0, (p * q).sqrt().sum().item())


@dataclass(frozen=True)
class ThreeWayStatistics:
    """How the error of ``actual`` compares with the dtype reference's own error.

    Attributes:
        bhattacharyya: overlap of the two error distributions, all inputs together.
        sigma_ratio: RMS error of ``actual`` over RMS error of ``expected``, all inputs together.
        linf_ratios: per input, largest error over largest error.
        l2_ratios: per input, error norm over error norm.
        max_error: largest error of ``actual``.
        reference_max_error: largest error of ``expected``.
        num_elements: elements compared.
    """

    bhattacharyya: float
    sigma_ratio: float
    linf_ratios: tuple[float, ...]
    l2_ratios: tuple[float, ...]
    max_error: float
    reference_max_error: float
    num_elements: int

    @property
    def worst_linf_ratio(self) -> float:
        """Largest of ``linf_ratios``."""
        return max(self.linf_ratios)

    @property
    def worst_l2_ratio(self) -> float:
        """Largest of ``l2_ratios``."""
        return max(self.l2_ratios)

    def failures(
        self,
        bc_threshold: float = 0.99,
        max_linf_ratio: float = 5.0,
        max_l2_ratio: float = 3.0,
    ) -> list[str]:
        """Return what is wrong, in words with numbers; empty when everything is in order.

        Args:
            bc_threshold: smallest overlap, unless the RMS ratio is at most 1.
            max_linf_ratio: the worst L-infinity ratio must be below it.
            max_l2_ratio: the worst L2 ratio must be below it.
        """
        found = []
        if not (self.bhattacharyya >= bc_threshold or self.sigma_ratio <= 1.0):
            found.append(
                f"error distributions overlap by {self.bhattacharyya:.4f} (at least "
                f"{bc_threshold:g}) and the RMS error ratio is {self.sigma_ratio:.4g} (at most 1); "
                "one of the two must hold"
            )
        for name, ratios, limit in (
            ("L-infinity", self.linf_ratios, max_linf_ratio),
            ("L2", self.l2_ratios, max_l2_ratio),
        ):
            worst = max(ratios)
            if not worst < limit:
                found.append(
                    f"{name} error ratio {worst:.4g} of input {ratios.index(worst)} is not below "
                    f"{limit:g}"
                )
        return found


def three_way_statistics(
    baseline: torch.Tensor | Sequence[torch.Tensor],
    expected: torch.Tensor | Sequence[torch.Tensor],
    actual: torch.Tensor | Sequence[torch.Tensor],
) -> ThreeWayStatistics:
    """Compare the errors of two computations against a float32 reference.

    Args:
        baseline: float32 reference, one tensor or one per input.
        expected: reference in the device's dtype, likewise.
        actual: model under test, likewise.

    Raises:
        ValueError: the numbers of inputs or the shapes differ, or there is no element.
    """
    references, yardsticks, results = (
        [value] if isinstance(value, torch.Tensor) else list(value)
        for value in (baseline, expected, actual)
    )
    if not len(references) == len(yardsticks) == len(results):
        raise ValueError(
            f"{len(references)} baseline, {len(yardsticks)} expected and {len(results)} actual "
            "tensors; there must be equally many"
        )
    own, theirs = [], []
    for reference, yardstick, result in zip(references, yardsticks, results, strict=True):
        _same_shape(yardstick, reference)
        _same_shape(result, reference)
        if reference.numel() == 0:
            raise ValueError("an empty tensor has no error statistics")
        own.append((result.double() - reference.double()).flatten())
        theirs.append((yardstick.double() - reference.double()).flatten())
    if not own:
        raise ValueError("there is nothing to compare")
    all_own, all_theirs = torch.cat(own), torch.cat(theirs)
    return ThreeWayStatistics(
        bhattacharyya=bhattacharyya_coefficient(all_own, all_theirs),
        sigma_ratio=_ratio(_rms(all_own), _rms(all_theirs)),
        linf_ratios=tuple(
            _ratio(_max_abs(a), _max_abs(b)) for a, b in zip(own, theirs, strict=True)
        ),
        l2_ratios=tuple(
            _ratio(a.norm().item(), b.norm().item()) for a, b in zip(own, theirs, strict=True)
        ),
        max_error=_max_abs(all_own),
        reference_max_error=_max_abs(all_theirs),
        num_elements=all_own.numel(),
    )


def _same_shape(one: torch.Tensor, other: torch.Tensor) -> None:
    if one.shape != other.shape:
        raise ValueError(f"shapes differ: {list(one.shape)} and {list(other.shape)}")


def _max_abs(tensor: torch.Tensor) -> float:
    return tensor.abs().max().item() if tensor.numel() else 0.0


def _rms(tensor: torch.Tensor) -> float:
    return tensor.square().mean().sqrt().item()


def _ratio(value: float, by: float) -> float:
    """0 / 0 is 0 (no error at all), anything that is not finite is infinite."""
    if not (math.isfinite(value) and math.isfinite(by)):
        return math.inf
    if by == 0.0:
        return 0.0 if value == 0.0 else math.inf
    return value / by
