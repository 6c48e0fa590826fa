"""Errors of an actual result against a reference, collected over inputs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

LOWEST_DECADE, DECADES, BINS_PER_DECADE = -12, 12, 4
"""Error histograms run from 1e-12 to 1, a quarter of a decade per bin; smaller errors are zero."""


def relative_error(actual: torch.Tensor, reference: torch.Tensor) -> float:
    """Largest deviation over the largest reference value; infinite for anything not finite.

    Raises:
        ValueError: The shapes differ.
    """
    if actual.shape != reference.shape:
        raise ValueError(f"shape {list(actual.shape)}, the reference has {list(reference.shape)}")
    actual, reference = actual.double(), reference.double()
    if not (actual.isfinite().all() and reference.isfinite().all()):
        return math.inf
    scale = reference.abs().max().item() if reference.numel() else 0.0
    error = (actual - reference).abs().max().item() if reference.numel() else 0.0
    return error / scale if scale else (0.0 if error == 0.0 else math.inf)


@dataclass
class Comparison:
    """Worst relative error over inputs, and how all elements' errors are spread.

    Args:
        inputs: How many inputs were compared.
        worst: Largest `relative_error`.
        worst_input: Name of that input.
        zero: Elements without an error worth a bin.
        bins: Elements per error bin; an error is relative to its input's largest reference value.
    """

    inputs: int = 0
    worst: float = 0.0
    worst_input: str = ""
    zero: int = 0
    bins: list[int] = field(default_factory=lambda: [0] * (DECADES * BINS_PER_DECADE))

    def add(self, name: str, actual: torch.Tensor, reference: torch.Tensor) -> None:
        """Compare one input."""
        error = relative_error(actual, reference)
        self.inputs += 1
        if error >= self.worst:
            self.worst, self.worst_input = error, name
        if not math.isfinite(error) or not reference.numel():
            return
        scale = reference.double().abs().max().clamp(min=1e-300)
        errors = (actual.double() - reference.double()).abs().flatten() / scale
        exponents = (errors.clamp(min=1e-300).log10() - LOWEST_DECADE) * BINS_PER_DECADE
        self.zero += int((exponents < 0).sum())
        kept = exponents[exponents >= 0].floor().clamp(max=len(self.bins) - 1).long()
        for index, count in enumerate(kept.bincount(minlength=len(self.bins)).tolist()):
            self.bins[index] += count
