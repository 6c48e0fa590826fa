"""The kernels' size gates, as a switch that is off by default.

On a device an operator outside its kernel's size gate quietly takes the slow torch path. The
stand-in always computes, whatever the size. Code that wants to know whether a device would use
its kernels turns the switch on, for a block with :func:`enforce_kernel_sizes` or for a process
with ``VLMGEN_STANDIN_KERNEL_SIZES=1``; then a size outside the gate is an error.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["KernelSizeError", "check_kernel_sizes", "enforce_kernel_sizes", "kernel_sizes_enforced"]

_enforced = os.environ.get("VLMGEN_STANDIN_KERNEL_SIZES", "0") == "1"


class KernelSizeError(ValueError):
    """A size for which a device would leave the kernel and take the slow torch path."""


def kernel_sizes_enforced() -> bool:
    """Tell whether sizes outside a kernel's gate are errors at the moment."""
    return _enforced


@contextmanager
def enforce_kernel_sizes(enabled: bool = True) -> Iterator[None]:
    """Turn the kernels' size gates into errors inside a ``with`` block.

    Args:
        enabled: False switches the gates off inside the block.
    """
    global _enforced
    before = _enforced
    _enforced = enabled
    try:
        yield
    finally:
        _enforced = before


def check_kernel_sizes(operator: str, *rules: tuple[bool, str]) -> None:
    """Raise for the first broken rule when the switch is on; do nothing when it is off.

    Args:
        operator: name of the operator, for the message.
        rules: pairs of (holds, the rule with the number found).

    Raises:
        KernelSizeError: a rule does not hold and the switch is on.
    """
    if not _enforced:
        return
    for holds, rule in rules:
        if not holds:
            raise KernelSizeError(f"{operator}: outside the kernel's size gate, {rule}")
