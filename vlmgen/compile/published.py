"""Programs of published checkpoints from their sizes alone: no weight is read or made.

A decoder or a tower repeats its layers, and a graph grows by the same operators with each. A few
layers of every structure are compiled (one, or as many as deepstack levels are taken from), then
one more; the difference is what a layer costs, and the rest of the model is that many times more.
With `whole` every layer is compiled.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vlmgen.compile import analytic, xla_cpu
from vlmgen.compile.calls import CallRecorder, shapes_only
from vlmgen.compile.census import census, denied, operators_of
from vlmgen.compile.findings import Finding, Sources
from vlmgen.compile.graphs import KINDS, Graph, deployment_of
from vlmgen.compile.layer_graphs import structure_of
from vlmgen.compile.lower import export, lower
from vlmgen.compile.sizes import sizes_of_checkpoint
from vlmgen.errors import UsageError
from vlmgen.serve.settings import settings_for
from vlmgen.terminal import SILENT, Steps
from vlmgen.validate.package import load_factory, load_package_spec
from vlmgen.weights.published import published_family

DTYPE = torch.bfloat16


@dataclass(frozen=True)
class PublishedReport:
    """One graph of one published checkpoint.

    Args:
        checkpoint: Its name.
        graph: Which.
        layers: Layers that were compiled, of those that there are: `1 of 36`, `36 of 36`.
        flops: By XLA, of all layers.
        analytic: By the spec, of all layers.
        weights: Bytes of all weights on one rank.
        caches: Bytes of all caches.
        temporary: Peak bytes of intermediate values.
        operators: In the program that was compiled.
        findings: Errors and warnings of the deny-list.
        seconds: For everything.
    """

    checkpoint: str
    graph: Graph
    layers: str
    flops: float
    analytic: float
    weights: int
    caches: int
    temporary: int
    operators: int
    findings: tuple[Finding, ...]
    seconds: float

    @property
    def ratio(self) -> float:
        """XLA's FLOPs over the spec's."""
        return self.flops / self.analytic

    @property
    def problem(self) -> str:
        """Why it did not pass; empty if it did."""
        errors = [str(finding) for finding in self.findings if finding.severity == "error"]
        if abs(self.ratio - 1) > 0.05:
            errors.append(f"XLA counts {self.ratio:.3f} times the operations that the spec gives")
        return "; ".join(errors)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            **{name: value for name, value in vars(self).items() if name != "graph"},
            "graph": self.graph.name,
            "findings": [finding.to_dict() for finding in self.findings],
            "ratio": self.ratio,
            "passed": not self.problem,
        }


def names_of(package: Path, names: Sequence[str]) -> list[str]:
    """Names of published checkpoints of a package; `all` stands for every one.

    Raises:
        UsageError: The family has no such checkpoint.
    """
    published = published_family(load_package_spec(package).family).checkpoints
    unknown = [name for name in names if name not in published and name != "all"]
    if unknown:
        raise UsageError(f"no checkpoint {', '.join(unknown)}; legal: all, {', '.join(published)}")
    return list(published) if "all" in names else list(names)


def compile_published(
    package: Path,
    name: str,
    *,
    whole: bool = False,
    steps: Steps = SILENT,
) -> Iterator[PublishedReport]:
    """Lower and compile one graph of each kind of a published checkpoint, the largest buckets.

    Reports come one by one, as the graphs are compiled.

    Args:
        package: Folder of the package.
        name: The checkpoint, one of :func:`names_of`.
        whole: Compile every layer.
        steps: Shows how far it is.

    Raises:
        UsageError: Its layers repeat in a way that only the whole depth shows.
    """
    from vlmgen.standin.ranks import one_rank
    from vlmgen.validate.run import one_thread, parallel_state_exists

    spec = load_package_spec(package)
    published = published_family(spec.family).checkpoints
    config = dict(published[name].config)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vlmgen-published-")))
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        stack.enter_context(one_thread())
        if not parallel_state_exists():
            stack.enter_context(one_rank())
        factory = load_factory(package)
        deployment = deployment_of(settings_for(factory, folder, spec=spec))
        text, vision = sizes_of_checkpoint(spec, config)
        recorders, depths = [], []
        for more in [None] if whole else [0, 1]:
            with _cut(factory, more) as (own, depth):
                recorders.append(CallRecorder(own, folder, deployment, DTYPE))
            depths.append(depth)
        steps.begin(name, len(recorders) * len(KINDS))
        for kind in KINDS:
            graph = max(graph for graph in recorders[0].calls if graph.kind == kind)
            measured = []
            for recorder in recorders:
                steps.say(f"{name} {graph.name}")
                measured.append(_measure(recorder.calls[graph], package))
                steps.done()
            counts = depths[0]["vision" if kind == "vision" else "text"]
            expected = analytic.count(text, vision, deployment, graph, narrow=True).total
            yield _report(name, measured, counts, expected)


@dataclass(frozen=True)
class _Measured:
    """What one program takes."""

    graph: Graph
    cost: xla_cpu.Cost
    operators: int
    findings: tuple[Finding, ...]
    seconds: float


def _measure(call: Any, package: Path) -> _Measured:
    started = time.perf_counter()
    program = export(call)
    lowered = lower(program)
    operators = operators_of(lowered)
    executable = xla_cpu.compile_lowered(lowered)
    # The CPU widens bfloat16 before a product, and XLA counts that too: the program as it was
    # lowered is what a device gets.
    flops = float(lowered.cost_analysis()["flops"])
    found = denied(operators, program, Sources(package))
    return _Measured(
        call.graph,
        replace(xla_cpu.cost_of(program.interface, executable), flops=flops),
        sum(census(operators).values()),
        tuple(finding for finding in found if finding.severity != "note"),
        time.perf_counter() - started,
    )


def _report(
    name: str,
    measured: Sequence[_Measured],
    counts: list[tuple[int, int]],
    expected: float,
) -> PublishedReport:
    """Add what the layers cost that were left out; the structure that repeats has one more."""
    first, *more = measured
    total, compiled = sum(there for there, _ in counts), sum(kept for _, kept in counts)
    seconds = sum(one.seconds for one in measured)
    cost = first.cost
    flops, weights, caches = cost.flops, cost.weights, cost.caches
    for one in more:
        left = total - compiled
        flops += left * (one.cost.flops - cost.flops)
        weights += left * (one.cost.weights - cost.weights)
        caches += left * (one.cost.caches - cost.caches)
    return PublishedReport(
        name, first.graph, f"{compiled} of {total}", flops, expected, weights, caches,
        cost.temporary, first.operators, first.findings, seconds,
    )  # fmt: skip


@contextmanager
def _cut(factory: Any, more: int | None) -> Iterator[tuple[Any, dict[str, list[tuple[int, int]]]]]:
    """A factory of models without values that keep some layers of every structure.

    Args:
        factory: The package's factory class.
        more: Layers beyond the least of the structure that repeats; None keeps all.
    """
    depth: dict[str, list[tuple[int, int]]] = {}

    class Shallow(factory):
        """Builds the whole model and keeps a part."""

        @classmethod
        def from_configs(cls, **kwargs: Any) -> nn.Module:
            model = factory.from_configs(**kwargs)
            depth["text"] = _keep(_longest(model.language_model), 1, more)
            levels = _levels(model.visual)
            least = max([1, *map(len, levels.values())])
            depth["vision"] = _keep(_longest(model.visual), least, more)
            for name, value in levels.items() if more is not None else ():
                setattr(model.visual, name, type(value)(range(len(value))))
            return model

    with shapes_only(Shallow) as own:
        yield own, depth


def _longest(module: nn.Module) -> nn.ModuleList:
    """The stack of layers of a tower: its longest list of modules."""
    return max((m for m in module.modules() if isinstance(m, nn.ModuleList)), key=len)


def _keep(layers: nn.ModuleList, least: int, more: int | None) -> list[tuple[int, int]]:
    """Shorten a stack; for every structure, how many layers there were and how many are left.

    Raises:
        UsageError: Several structures repeat, so that no difference tells what a layer costs.
    """
    kinds: dict[Any, list[nn.Module]] = {}
    for layer in layers:
        kinds.setdefault(structure_of(layer), []).append(layer)
    groups = list(kinds.values())
    if more is None:
        return [(len(same), len(same)) for same in groups]
    repeated = [same for same in groups if len(same) > least]
    if len(repeated) > 1:
        raise UsageError("several kinds of layers repeat: compile the whole depth with --whole")
    kept = [same[: least + more] if same in repeated else same for same in groups]
    del layers[:]
    layers.extend(layer for same in kept for layer in same)
    return [(len(there), len(left)) for there, left in zip(groups, kept, strict=True)]


def _levels(visual: nn.Module) -> dict[str, Any]:
    """The attribute that says from which blocks levels are taken, where there are levels."""
    return {
        name: value
        for name, value in vars(visual).items()
        if name.startswith("deepstack") and isinstance(value, (list, tuple))
    }
