"""Programs per rank on a mesh of virtual CPU devices, against the program of one rank.

Every rank's model is built and loaded in this process, one after another, as a rank of a world
that is not there. The programs of all ranks are one: what differs is in their inputs (weights,
caches, the rank's number) and in where a data-parallel tower cuts its blocks out. That one program
is run on as many virtual devices as there are ranks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vlmgen.check.parallel import text_split, vision_splits
from vlmgen.compile import torchax_import
from vlmgen.compile.calls import Call, CallRecorder
from vlmgen.compile.census import census, denied, operators_of
from vlmgen.compile.collectives import AXIS, Collectives, Groups, counted, differing_slices
from vlmgen.compile.fake_ranks import Layout, fake_rank, members
from vlmgen.compile.findings import Finding, Sources
from vlmgen.compile.graphs import Deployment, Graph
from vlmgen.compile.interface import Interface
from vlmgen.compile.lower import Program, abstract, export, jax_function
from vlmgen.compile.verify import LIMIT, RealCall
from vlmgen.compile.xla_cpu import FLAGS, to_torch
from vlmgen.errors import UsageError
from vlmgen.validate.compare import relative_error

if TYPE_CHECKING:
    from vlmgen.spec.text import TextSpec
    from vlmgen.spec.vision import VisionSpec


@dataclass
class RankReport:
    """One graph on the ranks of one layout.

    Args:
        layout: Which.
        graph: Which.
        difference: Largest relative difference from one rank, over all ranks and results.
        collectives: In one step of one rank.
        operators: Census of one rank's StableHLO.
        findings: Of the deny-list.
        flops: By XLA, of one rank.
        temporary: Peak bytes of intermediate values, of one rank.
        weights: Bytes of the weights of one rank.
        seconds: For everything.
    """

    layout: Layout
    graph: Graph
    difference: float
    collectives: list[Collectives] = field(default_factory=list)
    operators: dict[str, int] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    flops: float = 0.0
    temporary: int = 0
    weights: int = 0
    seconds: float = 0.0

    def problems(self) -> Iterator[str]:
        """Why it did not pass, nothing if it did."""
        if self.difference > LIMIT:
            yield (
                f"{self.graph.name} on {self.layout.name} differs by {self.difference:.2g} from "
                f"one rank; the limit is {LIMIT:g}"
            )
        for finding in self.findings:
            if finding.severity == "error":
                yield f"{self.layout.name}: {finding}"

    @property
    def passed(self) -> bool:
        """Equal to one rank, and nothing that a device would refuse."""
        return not list(self.problems())

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "layout": self.layout.name,
            "graph": self.graph.name,
            "passed": self.passed,
            "difference": self.difference,
            "collectives": [one.to_dict() for one in self.collectives],
            "operators": self.operators,
            "findings": [finding.to_dict() for finding in self.findings],
            "flops": self.flops,
            "temporary": self.temporary,
            "weights": self.weights,
            "seconds": round(self.seconds, 3),
        }


def legal_layouts(text: TextSpec, vision: VisionSpec, world_size: int) -> list[Layout]:
    """Every legal split of the tower over the ranks, and expert parallelism where there are any.

    Raises:
        UsageError: The decoder cannot be split over that many ranks.
    """
    split = text_split(text, world_size)
    if not split.legal:
        raise UsageError(f"text TP {world_size} is illegal: {'; '.join(split.problems)}")
    layouts = [
        Layout(world_size, own.tp, own.dp) for own in vision_splits(vision, world_size) if own.legal
    ]
    if text.moe is not None and layouts:
        first = layouts[-1]
        layouts += [
            Layout(world_size, first.vision_tp, first.vision_dp, degree)
            for degree in range(2, world_size + 1)
            if world_size % degree == 0 and text.moe.num_experts % degree == 0
        ]
    return layouts


class RankRuns:
    """Runs graphs on the ranks of layouts.

    Args:
        factory: The package's factory class.
        package: Its folder.
        checkpoint: The checkpoint.
        deployment: Buckets and sizes.
        dtype: As of the run on one rank.
    """

    def __init__(
        self,
        factory: Any,
        package: Path,
        checkpoint: Path,
        deployment: Deployment,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._factory, self._checkpoint = factory, checkpoint
        self._deployment, self._dtype = deployment, dtype
        self._sources = Sources(package)
        self._known: dict[tuple[str, Graph], RankReport] = {}

    def run(
        self, layout: Layout, singles: Sequence[tuple[Graph, Interface, RealCall]]
    ) -> Iterator[RankReport]:
        """Run graphs on a layout and compare every rank with one rank.

        Args:
            layout: The split.
            singles: Per graph, its interface and real call on one rank.
        """
        calls: list[dict[Graph, Call]] = []
        partitions: dict[str, list[list[int]]] = {}
        parts = {g: layout.vision_name if g.kind == "vision" else layout.text_name
                 for g, _, _ in singles}  # fmt: skip
        programs: dict[Graph, list[Program]] = {
            graph: [] for graph in parts if (parts[graph], graph) not in self._known
        }
        names: dict[str, str] = {}
        for rank in range(layout.world_size):
            with fake_rank(layout, rank) as groups:
                vision = {"tp_size": layout.vision_tp, "dp_size": layout.vision_dp}
                recorder = CallRecorder(
                    self._factory, self._checkpoint, self._deployment, self._dtype, vision
                )
                calls.append(recorder.calls)
                for name, (role, ranks) in members(groups).items():
                    if rank == 0:
                        names[name] = role
                    if ranks not in partitions.setdefault(role, []):
                        partitions[role].append(ranks)
                for graph in programs:
                    # Ranks of one copy of the tower have the same program.
                    if rank == 0 or (graph.kind == "vision" and rank % layout.vision_tp == 0):
                        programs[graph].append(export(recorder.calls[graph]))
        known = {name: partitions[role] for name, role in names.items()}
        for graph, interface, real in singles:
            part = parts[graph]
            if (part, graph) not in self._known:
                self._known[part, graph] = self._one(
                    layout, graph, interface, real, programs[graph], calls, known
                )
            yield replace(self._known[part, graph], layout=layout)

    def _one(
        self,
        layout: Layout,
        graph: Graph,
        single: Interface,
        real: RealCall,
        programs: Sequence[Program],
        calls: Sequence[dict[Graph, Call]],
        partitions: dict[str, list[list[int]]],
    ) -> RankReport:
        started = time.perf_counter()
        jax = torchax_import.load().jax
        program, *others = programs
        starts = differing_slices(program.nodes, [other.nodes for other in others])
        per_rank = {
            number: [own[rank // layout.vision_tp] for rank in range(layout.world_size)]
            for number, own in starts.items()
        }
        groups = Groups(layout.world_size, partitions, per_rank)
        interface = program.interface
        mesh = jax.sharding.Mesh(np.array(jax.devices()[: layout.world_size]), (AXIS,))
        function = _on_ranks(jax_function(program, groups), interface)
        part = jax.sharding.PartitionSpec(AXIS)
        mapped = jax.shard_map(function, mesh=mesh, in_specs=part, out_specs=part, check_vma=False)
        jitted = jax.jit(mapped, keep_unused=True, donate_argnums=interface.donated)
        shapes = [_joined_shape(one, layout.world_size) for one in abstract(interface)]
        lowered = jitted.lower(*shapes)
        operators = operators_of(lowered)
        compiled = lowered.compile(FLAGS)
        values = [
            _values(single, real, interface, own[graph], rank, layout)
            for rank, own in enumerate(calls)
        ]
        joined = [_joined([own[index] for own in values]) for index in range(len(values[0]))]
        results = [to_torch(result) for result in compiled(*joined)]
        difference = _worst(results, real, single, interface, layout)
        analysis, memory = compiled.cost_analysis(), compiled.memory_analysis()
        return RankReport(
            layout,
            graph,
            difference,
            counted(operators),
            census(operators),
            [f for f in denied(operators, program, self._sources) if f.rule != "dynamic-slice"],
            float(analysis.get("flops", 0.0)),
            int(memory.temp_size_in_bytes),
            interface.bytes_of("weight"),
            time.perf_counter() - started,
        )


def _on_ranks(function: Any, interface: Interface) -> Any:
    """Ranks' tensors are joined along their first dimension; a scalar gets one."""
    scalars = {index for index, a in enumerate(interface.arguments) if not a.shape}

    def on_rank(*tensors: Any) -> tuple[Any, ...]:
        own = [t.reshape(()) if index in scalars else t for index, t in enumerate(tensors)]
        return function(*own)

    return on_rank


def _joined_shape(shape: Any, ranks: int) -> Any:
    jax = torchax_import.load().jax
    first, *rest = shape.shape or (1,)
    return jax.ShapeDtypeStruct((first * ranks, *rest), shape.dtype)


def _joined(values: Sequence[torch.Tensor]) -> np.ndarray[Any, Any]:
    arrays = [np.array(value.detach().numpy()) for value in values]
    return np.concatenate([array.reshape(1) if not array.shape else array for array in arrays])


def _values(
    single: Interface,
    real: RealCall,
    interface: Interface,
    call: Call,
    rank: int,
    layout: Layout,
) -> list[torch.Tensor]:
    """A rank's arguments: its own weights, its share of the caches, everybody's inputs."""
    of_one = dict(zip((a.name for a in single.arguments), real.values, strict=True))
    own = interface.values(call.module, call.kwargs)
    values = []
    for argument, value in zip(interface.arguments, own, strict=True):
        if argument.kind == "weight" or argument.name == "rank":
            values.append(value)
        elif argument.leaf is None:
            values.append(_share(of_one[argument.name], value.shape[1], rank, layout.world_size))
        else:
            values.append(_padded(of_one[argument.name], value))
    return values


def _share(cache: torch.Tensor, heads: int, rank: int, ranks: int) -> torch.Tensor:
    """A rank's heads of a cache `[blocks, K, block size, D]`; several ranks may hold one head."""
    first = rank * cache.shape[1] // ranks
    return cache[:, first : first + heads]


def _padded(value: torch.Tensor, shaped: torch.Tensor) -> torch.Tensor:
    """Values in a warm-up tensor that may be larger: data parallelism rounds blocks up."""
    if value.shape == shaped.shape:
        return value
    filled = shaped.clone()
    if shaped.dim() == 1:
        filled.fill_(value.flatten()[0])  # the scratch block of every vision block
    filled[tuple(slice(size) for size in value.shape)] = value
    return filled


def _worst(
    results: Sequence[torch.Tensor],
    real: RealCall,
    single: Interface,
    interface: Interface,
    layout: Layout,
) -> float:
    """Largest relative difference of any rank's result from one rank's."""
    targets = [interface.changed_outputs[index] for index in interface.kept_outputs]
    wanted = {}
    for index, value in zip(single.kept_outputs, real.results, strict=True):
        target = single.changed_outputs[index]
        wanted["" if target is None else single.arguments[target].name] = value
    worst = 0.0
    for target, result in zip(targets, results, strict=True):
        argument = None if target is None else interface.arguments[target]
        expected = wanted["" if argument is None else argument.name]
        for rank, own in enumerate(result.chunk(layout.world_size)):
            theirs = expected
            if argument is not None and argument.leaf is None:
                theirs = _share(expected, own.shape[1], rank, layout.world_size)
            elif argument is not None:
                # The last block takes padding rows, of which data parallelism has more.
                own, theirs = own[:-1], theirs[:-1]
            worst = max(worst, relative_error(own.float(), theirs.float()))
    return worst
