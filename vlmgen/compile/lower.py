"""From a call to a program: `torch.export`, strictly, then StableHLO.

Every node of the exported graph is lowered under a name scope `n<index>` of its own, so that each
StableHLO operator leads back to the line of the package that it came from.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch.export.graph_signature import InputKind, OutputKind

from vlmgen.compile import torchax_import
from vlmgen.compile.calls import Call
from vlmgen.compile.collectives import CollectiveLowering, Groups
from vlmgen.compile.interface import Argument, Interface
from vlmgen.compile.operators import OWN

SCOPE = "n"
IN_PLACE = frozenset((torch.ops.aten.index_put.default,))
"""Operators that write some rows of their first argument."""

_CHANGES = (OutputKind.BUFFER_MUTATION, OutputKind.USER_INPUT_MUTATION)


class NoLoweringError(NotImplementedError):
    """torchax knows no StableHLO for an operator.

    Args:
        operator: Its name.
        trace: Stack trace of the node.
    """

    def __init__(self, operator: str, trace: str) -> None:
        super().__init__(f"{operator} has no lowering to StableHLO")
        self.operator, self.trace = operator, trace


@dataclass
class Program:
    """An exported graph, ready to be lowered.

    Args:
        call: Where it comes from.
        exported: Core ATen operators, functional.
        interface: What it takes and gives.
        fixed: Values of graph inputs that are no arguments: Python values and constant tensors.
        raw_nodes: The nodes before anything that has no effect was left out.
        seconds: Time taken by each step.
    """

    call: Call
    exported: torch.export.ExportedProgram
    interface: Interface
    fixed: dict[int, Any]
    raw_nodes: list[torch.fx.Node]
    seconds: dict[str, float] = field(default_factory=dict)

    @cached_property
    def nodes(self) -> list[torch.fx.Node]:
        """All nodes; the number in a name scope is the place in here."""
        return list(self.exported.graph.nodes)

    def trace_of(self, index: int) -> str:
        """Stack trace of a node."""
        return self.nodes[index].meta.get("stack_trace") or ""

    @contextmanager
    def timed(self, step: str) -> Iterator[None]:
        """Add what the block takes to `seconds`."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[step] = self.seconds.get(step, 0.0) + time.perf_counter() - started


def export(call: Call) -> Program:
    """Export a call strictly: no graph break, shapes fixed, tensors only.

    Raises:
        Exception: What `torch.export` raises; :mod:`vlmgen.compile.export_faults` explains it.
    """
    started = time.perf_counter()
    with torch.no_grad(), _caches_apart(call.module):
        raw = torch.export.export(call.module, (), kwargs=call.kwargs, strict=True)
        exported_at = time.perf_counter()
        exported = raw.run_decompositions(_decompositions())
    ended = time.perf_counter()
    interface, fixed = _interface(exported)
    seconds = {"export": exported_at - started, "decompose": ended - exported_at}
    return Program(call, exported, interface, fixed, list(raw.graph.nodes), seconds)


@contextmanager
def _caches_apart(module: torch.nn.Module) -> Iterator[None]:
    """Give buffers that share memory memory of their own: keys and values are two arguments.

    The runner's KV cache of a layer is one tensor, of which the package gets two halves; an export
    of halves of which one is written would be about their common base.
    """
    owners = [
        (owner, name, buffer)
        for owner in module.modules()
        for name, buffer in owner.named_buffers(recurse=False)
        if buffer.dim() and buffer.untyped_storage().nbytes() > buffer.numel() * buffer.itemsize
    ]
    for owner, name, buffer in owners:
        setattr(owner, name, torch.empty_like(buffer))
    try:
        yield
    finally:
        for owner, name, buffer in owners:
            setattr(owner, name, buffer)


def _decompositions() -> dict[Any, Any]:
    """torch's own way to core operators, and torchax's list for what it has no lowering of."""
    table = dict(torch.export.default_decompositions())
    table.update(torchax_import.load().decompositions)
    return table


def _interface(exported: torch.export.ExportedProgram) -> tuple[Interface, dict[int, Any]]:
    signature = exported.graph_signature
    targets = [s.target if s.kind in _CHANGES else None for s in signature.output_specs]
    keywords = tuple(exported.call_spec.in_spec.child(1).context)
    arguments: list[Argument] = []
    fixed: dict[int, Any] = {}
    leaf = 0
    pairs = zip(_inputs(exported), signature.input_specs, strict=True)
    for index, (node, spec) in enumerate(pairs):
        is_input = spec.kind == InputKind.USER_INPUT
        value, own_leaf = node.meta.get("val"), leaf if is_input else None
        leaf += is_input
        if not torch.is_tensor(value):
            fixed[index] = getattr(spec.arg, "value", value)
            continue
        if spec.kind not in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.USER_INPUT):
            fixed[index] = exported.constants[spec.target]
            continue
        name = spec.target or node.name
        kind = "cache" if name in targets else "input" if is_input else "weight"
        arguments.append(
            Argument(
                name,
                kind,
                tuple(value.shape),
                str(value.dtype).removeprefix("torch."),
                own_leaf,
                name in targets,
            )
        )
    places = {argument.name: place for place, argument in enumerate(arguments)}
    outputs = tuple(None if target is None else places[target] for target in targets)
    (results,) = next(node for node in exported.graph.nodes if node.op == "output").args
    kept = tuple(index for index, node in enumerate(results) if node not in results[:index])
    return Interface(tuple(arguments), keywords, outputs, kept), fixed


def _inputs(exported: torch.export.ExportedProgram) -> list[torch.fx.Node]:
    return [node for node in exported.graph.nodes if node.op == "placeholder"]


class _Lowering(torch.fx.Interpreter):
    """Runs an exported graph with JAX values."""

    def __init__(
        self, program: Program, loaded: Any, collectives: CollectiveLowering | None
    ) -> None:
        super().__init__(program.exported.graph_module, garbage_collect_values=False)
        self._loaded = loaded
        self._collectives = collectives
        self._program = program
        self._numbers = {node: index for index, node in enumerate(program.nodes)}
        self._number = 0

    def run_node(self, n: torch.fx.Node) -> Any:
        self._number = self._numbers[n]
        if n.op != "call_function":
            return super().run_node(n)
        with self._loaded.jax.named_scope(f"{SCOPE}{self._number}"):
            if n.target in IN_PLACE:
                self._read_before_write(n)
            return self._of_torch_dtype(n, super().run_node(n))

    def _of_torch_dtype(self, node: torch.fx.Node, value: Any) -> Any:
        """The value in the dtype that torch gives it: a scalar tensor widens nothing there."""
        expected = node.meta.get("val")
        if not torch.is_tensor(expected) or not hasattr(value, "astype"):
            return value
        dtype = self._loaded.t2j_dtype(expected.dtype)
        return value if value.dtype == dtype else value.astype(dtype)

    def _read_before_write(self, write: torch.fx.Node) -> None:
        """Keep the program's order: what was read from a cache is read before it is written.

        Without it XLA may read later, and copies the whole cache to make that possible.
        """
        target: Any = write.args[0]
        readers = [user for user in target.users if self._numbers[user] < self._number]
        values = [self.env[target], *(self.env[reader] for reader in readers)]
        if readers:
            self.env[target] = self._loaded.jax.lax.optimization_barrier(values)[0]

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is torch.ops.aten._assert_tensor_metadata.default:
            return None
        if not isinstance(target, torch._ops.OpOverload):
            return super().call_function(target, args, kwargs)
        if self._collectives is not None:
            taken, value = self._collectives.lower(self._number, target, args, kwargs)
            if taken:
                return value
        if target in OWN:
            return OWN[target](*args, **kwargs)
        operators = self._loaded.operators
        operator = operators.get(target) or operators.get(target.overloadpacket)
        if operator is None or not operator.is_jax_function:
            raise NoLoweringError(str(target), self._program.trace_of(self._number))
        return operator.func(*args, **kwargs)


def jax_function(program: Program, groups: Groups | None = None) -> Callable[..., tuple[Any, ...]]:
    """The program as a JAX function of its arguments, in their order.

    Args:
        program: The exported graph.
        groups: Process groups of the ranks, where there are several.
    """
    from vlmgen.compile.xla_cpu import to_jax

    loaded = torchax_import.load()
    collectives = None if groups is None else CollectiveLowering(groups)
    interface = program.interface
    total = len(interface.arguments) + len(program.fixed)

    def function(*tensors: Any) -> tuple[Any, ...]:
        given = iter(tensors)
        inputs = [program.fixed.get(i) if i in program.fixed else next(given) for i in range(total)]
        inputs = [to_jax(value) if torch.is_tensor(value) else value for value in inputs]
        lowering = _Lowering(program, loaded, collectives)
        results = lowering.run(*inputs, enable_io_processing=False)
        return tuple(results[index] for index in interface.kept_outputs)

    return function


def abstract(interface: Interface) -> list[Any]:
    """Shapes and dtypes of the arguments as JAX describes them."""
    loaded = torchax_import.load()
    return [
        loaded.jax.ShapeDtypeStruct(argument.shape, loaded.t2j_dtype(argument.torch_dtype))
        for argument in interface.arguments
    ]


def lower(program: Program) -> Any:
    """StableHLO of a program on one rank, as JAX's `Lowered`; changed arguments are donated."""
    loaded = torchax_import.load()
    with program.timed("lower"):
        jitted = loaded.jax.jit(
            jax_function(program), keep_unused=True, donate_argnums=program.interface.donated
        )
        return jitted.lower(*abstract(program.interface))
