"""Programs per rank on a mesh of virtual CPU devices, against the program of one rank.

Every rank's model is built and loaded in this process, one after another, as a rank of a world
that is not there. The programs of all ranks are one: what differs is in their inputs (weights,
caches, the rank's number) and in where a data-parallel tower cuts its blocks out. That one program
is run on as many virtual devices as there are ranks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from vlmgen.check.parallel import text_split, vision_splits
from vlmgen.compile import artifacts, torchax_import, xla_cpu
from vlmgen.compile.build import GraphBuilder, executable_key
from vlmgen.compile.calls import Call, CallRecorder
from vlmgen.compile.census import census, denied, operators_of
from vlmgen.compile.collectives import AXIS, Collectives, Groups, counted, differing_slices
from vlmgen.compile.fake_ranks import Layout, fake_rank, members
from vlmgen.compile.findings import Finding
from vlmgen.compile.graphs import Deployment, Graph
from vlmgen.compile.interface import Interface
from vlmgen.compile.lower import Program, abstract, export, jax_function
from vlmgen.compile.verify import LIMIT, RealCall
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
        cost: XLA's account of one rank.
        cached: The program came from the cache.
        seconds: For everything.
    """

    layout: Layout
    graph: Graph
    difference: float
    collectives: list[Collectives]
    operators: dict[str, int]
    findings: list[Finding]
    cost: xla_cpu.Cost
    cached: bool = False
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
            "cost": self.cost.to_dict(),
            "cached": self.cached,
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
        builder: Knows the package and the cache.
        checkpoint: The checkpoint.
        deployment: Buckets and sizes.
        dtype: As of the run on one rank.
    """

    def __init__(
        self,
        factory: Any,
        builder: GraphBuilder,
        checkpoint: Path,
        deployment: Deployment,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._factory, self._builder, self._checkpoint = factory, builder, checkpoint
        self._deployment, self._dtype = deployment, dtype
        self._known: dict[tuple[str, Graph], RankReport] = {}

    def run(
        self, layout: Layout, singles: Sequence[tuple[Graph, Interface, RealCall]]
    ) -> Iterator[RankReport]:
        """Run graphs on a layout and compare every rank with one rank.

        Args:
            layout: The split.
            singles: Per graph, its interface and real call on one rank.

        Raises:
            CacheMissError: A program is not in the cache, and only that may be used.
        """
        parts = {graph: layout.part(graph.kind) for graph, _, _ in singles}
        new = [graph for graph in parts if (parts[graph], graph) not in self._known]
        started = time.perf_counter()
        split = self._split(layout, new) if new else None
        each = (time.perf_counter() - started) / max(len(new), 1)
        for graph, interface, real in singles:
            key = parts[graph], graph
            if split is not None and key not in self._known:
                self._known[key] = self._one(split, graph, interface, real)
                self._known[key].seconds += each
            yield replace(self._known[key], layout=layout)

    def _split(self, layout: Layout, graphs: Sequence[Graph]) -> _Split:
        """Every rank's model, one after another, and the programs that are not in the cache."""
        split = _Split(layout)
        partitions: dict[str, list[list[int]]] = {}
        roles: dict[str, str] = {}
        for rank in range(layout.world_size):
            with fake_rank(layout, rank) as groups:
                vision = {"tp_size": layout.vision_tp, "dp_size": layout.vision_dp}
                recorder = CallRecorder(
                    self._factory, self._checkpoint, self._deployment, self._dtype, vision
                )
                split.calls.append(recorder.calls)
                for name, (role, ranks) in members(groups).items():
                    if rank == 0:
                        roles[name] = role
                    if ranks not in partitions.setdefault(role, []):
                        partitions[role].append(ranks)
                for graph in graphs:
                    call = recorder.calls[graph]
                    if rank == 0:
                        self._look_up(split, call)
                    # Ranks of one copy of the tower have the same program.
                    own = rank == 0 or (graph.kind == "vision" and rank % layout.vision_tp == 0)
                    if own and split.stored[graph] is None:
                        split.programs.setdefault(graph, []).append(export(call))
        split.partitions = {name: partitions[role] for name, role in roles.items()}
        return split

    def _look_up(self, split: _Split, call: Call) -> None:
        """Take the program of a call's graph from the cache, if it is there."""
        graph, layout, cache = call.graph, split.layout, self._builder.cache
        name = f"{layout.world_size} ranks, {layout.part(graph.kind)}"
        key = split.keys[graph] = self._builder.request_key(call, name)
        split.stored[graph] = None
        request = cache.get("requests", key)
        program = None if request is None else cache.get("programs", request[0]["artifact"])
        if request is None or program is None:
            self._builder.missed(f"{graph.name} on {layout.name}")
            return
        split.stored[graph] = {**program[0], **request[0]}, program[1]
        cache.statistics.hits += 1

    def _one(self, split: _Split, graph: Graph, single: Interface, real: RealCall) -> RankReport:
        started = time.perf_counter()
        layout, stored = split.layout, split.stored[graph]
        record, payload = stored or self._compiled(split, graph)
        interface = Interface.from_dict(record["interface"])
        values = [
            _values(single, real, interface, own[graph], rank, layout)
            for rank, own in enumerate(split.calls)
        ]
        executable = xla_cpu.deserialized(payload, layout.world_size)
        results = xla_cpu.run_on_ranks(executable, values, AXIS)
        return RankReport(
            layout,
            graph,
            _worst(results, real, single, interface),
            [Collectives(**own) for own in record["collectives"]],
            record["operators"],
            [Finding.from_dict({**own, "graph": graph.name}) for own in record["findings"]],
            xla_cpu.Cost(**record["cost"]),
            stored is not None,
            time.perf_counter() - started,
        )

    def _compiled(self, split: _Split, graph: Graph) -> tuple[dict[str, Any], bytes]:
        """Lower and compile the one program of all ranks, and keep it."""
        layout = split.layout
        program, *others = split.programs[graph]
        starts = differing_slices(program.nodes, [other.nodes for other in others])
        per_rank = {
            number: [own[rank // layout.vision_tp] for rank in range(layout.world_size)]
            for number, own in starts.items()
        }
        groups = Groups(layout.world_size, split.partitions, per_rank)
        lowered = _lowered(program, groups)
        operators = operators_of(lowered)
        # The slice of a rank is at a place of its own because all ranks share one program here.
        package_own = [
            one for one in operators if not (one.name == "dynamic_slice" and one.node in starts)
        ]
        digest = artifacts.digest(lowered.as_text())
        artifact = executable_key(digest)
        request = {
            "program": digest,
            "interface": program.interface.to_dict(),
            "collectives": [asdict(own) for own in counted(operators)],
            "operators": census(operators),
            "findings": [
                finding.to_dict() for finding in denied(package_own, program, self._builder.sources)
            ],
            "artifact": artifact,
        }
        cache = self._builder.cache
        known = cache.get("programs", artifact)
        if known is None:
            executable = xla_cpu.compile_lowered(lowered)
            cost = {"cost": asdict(xla_cpu.cost_of(program.interface, executable))}
            known = cost, xla_cpu.serialized(executable)
            cache.put("programs", artifact, *known)
        cache.put("requests", split.keys[graph], request)
        return {**known[0], **request}, known[1]


@dataclass
class _Split:
    """A model on the ranks of one layout.

    Args:
        layout: The split.
        calls: Per rank, its warm-up calls.
        keys: Per graph, the name of its program in the cache.
        stored: Per graph, record and executable from the cache, or None.
        programs: Per graph that is not in the cache, what differs between ranks exported.
        partitions: Name of a process group -> the partition of all ranks into such groups.
    """

    layout: Layout
    calls: list[dict[Graph, Call]] = field(default_factory=list)
    keys: dict[Graph, str] = field(default_factory=dict)
    stored: dict[Graph, tuple[dict[str, Any], bytes] | None] = field(default_factory=dict)
    programs: dict[Graph, list[Program]] = field(default_factory=dict)
    partitions: dict[str, list[list[int]]] = field(default_factory=dict)


def _lowered(program: Program, groups: Groups) -> Any:
    """StableHLO of a program on all ranks, each tensor joined along its first dimension."""
    jax = torchax_import.load().jax
    interface = program.interface
    function = _on_ranks(jax_function(program, groups), interface)
    sharding = xla_cpu.over_ranks(groups.world_size, AXIS)
    mapped = jax.shard_map(
        function,
        mesh=sharding.mesh,
        in_specs=sharding.spec,
        out_specs=sharding.spec,
        check_vma=False,
    )
    jitted = jax.jit(
        mapped,
        keep_unused=True,
        donate_argnums=interface.donated,
        in_shardings=sharding,  # said, for what is unused would go to every rank whole
        out_shardings=sharding,
    )
    return jitted.lower(*(_joined_shape(one, groups.world_size) for one in abstract(interface)))


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
    results: Sequence[Sequence[torch.Tensor]],
    real: RealCall,
    single: Interface,
    interface: Interface,
) -> float:
    """Largest relative difference of any rank's result from one rank's.

    Args:
        results: Per result, every rank's.
        real: The call on one rank.
        single: Its program's interface.
        interface: That of a rank's program.
    """
    targets = [interface.changed_outputs[index] for index in interface.kept_outputs]
    wanted = {}
    for index, value in zip(single.kept_outputs, real.results, strict=True):
        target = single.changed_outputs[index]
        wanted["" if target is None else single.arguments[target].name] = value
    worst = 0.0
    for target, result in zip(targets, results, strict=True):
        argument = None if target is None else interface.arguments[target]
        expected = wanted["" if argument is None else argument.name]
        for rank, own in enumerate(result):
            theirs = expected
            if argument is not None and argument.leaf is None:
                theirs = _share(expected, own.shape[1], rank, len(result))
            elif argument is not None:
                # The last block takes padding rows, of which data parallelism has more.
                own, theirs = own[:-1], theirs[:-1]
            worst = max(worst, relative_error(own.float(), theirs.float()))
    return worst
