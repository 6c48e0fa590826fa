"""Imports torchax for its lowerings and sets JAX up, beside a newer torch than it was written for.

torchax looks operators with named dimensions up while it is imported; torch 2.13 has them no more.
It also registers a device of its own, after which `torch.export` looks for that device's streams;
nothing here needs the device, so it is left out.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

from vlmgen.errors import UsageError

_GONE = re.compile(r"dimname|(^|_)names")

DEVICES_VARIABLE = "VLMGEN_COMPILE_DEVICES"
DEFAULT_DEVICES = 8
"""Virtual CPU devices, as many as the most ranks of one program."""


@contextmanager
def _no_device_registered() -> Iterator[None]:
    """Within the block, registering a device does nothing; torch's own settings are put back."""
    import torch

    rename, register = torch.utils.rename_privateuse1_backend, torch._register_device_module
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.utils.rename_privateuse1_backend = lambda backend_name: None
    torch._register_device_module = lambda device_type, module: None
    try:
        yield
    finally:
        torch.utils.rename_privateuse1_backend = rename
        torch._register_device_module = register
        torch.backends.mha.set_fastpath_enabled(fast_path)


@contextmanager
def _gone_overloads_answered() -> Iterator[None]:
    """Within the block, an operator overload with named dimensions is a value nobody calls."""
    import torch

    packet: Any = torch._ops.OpOverloadPacket
    lookup = packet.__getattr__

    def answer(self: Any, name: str) -> Any:
        try:
            return lookup(self, name)
        except AttributeError:
            if not _GONE.search(name.lower()):
                raise
            return _GoneOverload(f"{self}.{name}")

    packet.__getattr__ = answer
    try:
        yield
    finally:
        packet.__getattr__ = lookup


@dataclass(frozen=True)
class _GoneOverload:
    """Stands in torchax's tables for an overload that no graph can hold."""

    name: str


@cache
def load() -> SimpleNamespace:
    """Import JAX and torchax once.

    64-bit types are on, for the graphs hold int64 and an accidental float64 must be seen; matrix
    products are not shortened.

    Returns:
        `jax`, `operators` (torchax's lowering of each ATen operator), `decompositions` (which
        operators to take apart first) and `t2j_dtype`.

    Raises:
        ModuleNotFoundError: The extra `compile` is not installed.
    """
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import jax

    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_default_matmul_precision", "highest")
    with suppress(RuntimeError):  # JAX has run in this process already; see `devices`
        jax.config.update("jax_num_cpu_devices", _devices_wanted())
    with _gone_overloads_answered(), _no_device_registered():
        import torchax  # noqa: F401
        import torchax.ops.jaten
        import torchax.ops.jc10d
        import torchax.ops.jtorch  # noqa: F401
        from torchax import decompositions
        from torchax.ops import mappings, ops_registry
    return SimpleNamespace(
        jax=jax,
        operators=ops_registry.all_aten_ops,
        decompositions={
            target: function
            for target, function in decompositions.DECOMPOSITIONS.items()
            if not isinstance(target, _GoneOverload)
        },
        t2j_dtype=mappings.t2j_dtype,
    )


def devices(ranks: int) -> list[Any]:
    """The virtual devices of a program's ranks.

    Raises:
        UsageError: There are fewer. How many there are is settled when JAX computes something for
            the first time in a process, be it for somebody else.
    """
    present: list[Any] = load().jax.devices("cpu")
    if len(present) < ranks:
        raise UsageError(
            f"a program of {ranks} ranks needs {ranks} virtual devices, and JAX has {len(present)}",
            hint=f"set {DEVICES_VARIABLE}={ranks} (default {DEFAULT_DEVICES})"
            if len(present) == _devices_wanted()
            else "JAX was used in this process before; compile in a process of its own",
        )
    return present[:ranks]


def _devices_wanted() -> int:
    """How many virtual devices to ask for.

    Raises:
        UsageError: The environment's number is none.
    """
    value = os.environ.get(DEVICES_VARIABLE, str(DEFAULT_DEVICES))
    if not value.isdecimal() or int(value) < 1:
        raise UsageError(f"{DEVICES_VARIABLE} must be a positive integer, got {value!r}")
    return int(value)
