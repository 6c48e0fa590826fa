"""XLA for CPU: compile a lowered program, run it, and what XLA says of it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from vlmgen.compile import torchax_import
from vlmgen.compile.interface import Interface

FLAGS = {"xla_cpu_copy_insertion_use_region_analysis": True}
"""Without it XLA for CPU copies a whole cache that is read before it is written."""

_ALIAS = re.compile(r"\{(?P<result>\d*)\}: \((?P<argument>\d+), \{\}")


@dataclass(frozen=True)
class Cost:
    """XLA's own account of one program on one rank.

    Args:
        flops: Floating-point operations.
        transcendentals: Exponentials, square roots and the like.
        bytes: Bytes read and written by all operators.
        weights: Bytes of the weights.
        caches: Bytes of KV or encoder caches.
        inputs: Bytes of the other inputs.
        results: Bytes of results that are no caches.
        temporary: Peak bytes of intermediate values.
        aliased: Bytes of results that take the memory of an argument.
    """

    flops: float
    transcendentals: float
    bytes: float
    weights: int
    caches: int
    inputs: int
    results: int
    temporary: int
    aliased: int

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / self.bytes if self.bytes else 0.0

    @property
    def memory(self) -> int:
        """Bytes that a rank needs for this program."""
        return self.weights + self.caches + self.inputs + self.results + self.temporary

    def to_dict(self) -> dict[str, float]:
        """For JSON."""
        return {**asdict(self), "intensity": self.intensity, "memory": self.memory}


def compile_lowered(lowered: Any) -> Any:
    """The loaded executable of JAX's `Lowered`."""
    return lowered.compile(FLAGS).runtime_executable()


def serialized(executable: Any) -> bytes:
    """An executable as bytes."""
    return executable.serialize()


def deserialized(data: bytes, ranks: int = 1) -> Any:
    """An executable from bytes, on the first devices.

    The bytes hold machine code, so they must come from where code may come from.
    """
    from jax._src.lib import xla_client

    devices = torchax_import.devices(ranks)
    return devices[0].client.deserialize_executable(
        data, executable_devices=xla_client.DeviceList(tuple(devices)), compile_options=None
    )


def cost_of(interface: Interface, executable: Any) -> Cost:
    """XLA's cost and memory analysis."""
    analysis, memory = executable.cost_analysis(), executable.get_compiled_memory_stats()
    aliased = int(memory.alias_size_in_bytes)
    return Cost(
        flops=float(analysis.get("flops", 0.0)),
        transcendentals=float(analysis.get("transcendentals", 0.0)),
        bytes=float(analysis.get("bytes accessed", 0.0)),
        weights=interface.bytes_of("weight"),
        caches=interface.bytes_of("cache"),
        inputs=interface.bytes_of("input"),
        results=int(memory.output_size_in_bytes) - aliased,
        temporary=int(memory.temp_size_in_bytes),
        aliased=aliased,
    )


def aliased_arguments(hlo: str) -> set[int]:
    """Arguments whose memory a result takes, from the header of a compiled module."""
    header = hlo.partition("\n")[0]
    place = header.find("input_output_alias=")
    if place < 0:
        return set()
    part = header[place : header.find("entry_computation_layout", place)]
    return {int(match["argument"]) for match in _ALIAS.finditer(part)}


def to_jax(tensor: torch.Tensor) -> Any:
    """A copy of a tensor as a JAX array; a donated one is not torch's memory."""
    import jax.numpy as jnp

    loaded = torchax_import.load()
    if tensor.dtype == torch.bfloat16:
        wide = jnp.array(tensor.float().numpy(), copy=True)
        return wide.astype(loaded.t2j_dtype(tensor.dtype))
    return jnp.array(tensor.detach().contiguous().numpy(), copy=True)


def to_torch(array: Any) -> torch.Tensor:
    """A copy of a JAX array as a tensor; bfloat16 comes back as float32."""
    value = np.asarray(array)
    if value.dtype.name == "bfloat16":
        value = value.astype(np.float32)
    return torch.from_numpy(np.array(value))


def run(executable: Any, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Run an executable of one rank once; its results in order."""
    results = executable.execute_sharded([to_jax(value) for value in values])
    return [to_torch(result[0]) for result in results.disassemble_into_single_device_arrays()]


def over_ranks(ranks: int, axis: str) -> Any:
    """The sharding of a tensor whose first dimension is cut over the first devices."""
    jax = torchax_import.load().jax
    mesh = jax.sharding.Mesh(np.array(torchax_import.devices(ranks)), (axis,))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(axis))


def run_on_ranks(
    executable: Any, values: Sequence[Sequence[torch.Tensor]], axis: str
) -> list[list[torch.Tensor]]:
    """Run an executable of several ranks once.

    Args:
        executable: Its arguments are those of all ranks, joined along the first dimension.
        values: Per rank, its arguments; a scalar is joined as a vector.
        axis: Name of the mesh's axis.

    Returns:
        Per result, every rank's.
    """
    jax = torchax_import.load().jax
    sharding = over_ranks(len(values), axis)
    joined = [
        torch.cat([value.reshape(1) if not value.shape else value for value in of_ranks])
        for of_ranks in zip(*values, strict=True)
    ]
    results = executable.execute_sharded(
        [jax.device_put(to_jax(value), sharding) for value in joined]
    )
    return [
        [to_torch(own) for own in of_ranks]
        for of_ranks in results.disassemble_into_single_device_arrays()
    ]
