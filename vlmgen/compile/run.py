"""`vlmgen compile`: every graph of a deployment, compiled, run and compared."""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from vlmgen import standin
from vlmgen.compile import analytic, neuron, xla_cpu
from vlmgen.compile.artifacts import ArtifactCache
from vlmgen.compile.build import GraphBuilder
from vlmgen.compile.calls import CallRecorder, shapes_only
from vlmgen.compile.graphs import Deployment, Graph, deployment_of
from vlmgen.compile.ranks import RankRuns, legal_layouts
from vlmgen.compile.report import CompileReport, GraphReport
from vlmgen.compile.sizes import sizes_of_checkpoint
from vlmgen.compile.verify import RealCall, Verifier
from vlmgen.compile.workers import fill_cache
from vlmgen.errors import UsageError
from vlmgen.files import replace_file
from vlmgen.serve.settings import read_json, settings_for
from vlmgen.standin.ranks import one_rank
from vlmgen.terminal import SILENT, Steps
from vlmgen.validate.package import load_factory, load_package_spec
from vlmgen.validate.reference import Reference
from vlmgen.validate.run import one_thread, parallel_state_exists

DTYPE = torch.float32
"""In which results are compared with the references."""


def deployment_for(package: Path, checkpoint: Path, buckets: Path | None = None) -> Deployment:
    """The deployment that `vlmgen serve` starts for a checkpoint, or one that a file describes.

    Args:
        package: Folder of the package.
        checkpoint: Folder of the checkpoint.
        buckets: A JSON file with some of the fields of :class:`Deployment`.

    Raises:
        UsageError: The file has unknown fields or values of a wrong kind.
        CheckpointError: The checkpoint cannot be read.
    """
    deployment = deployment_of(serve_settings(package, checkpoint))
    if buckets is None:
        return deployment
    given = read_json(buckets)
    known = deployment.to_dict()
    if not isinstance(given, dict) or set(given) - set(known):
        unknown = sorted(set(given) - set(known)) if isinstance(given, dict) else given
        raise UsageError(
            f"{buckets}: unknown {unknown!r}; legal is an object with some of {', '.join(known)}"
        )
    for name, value in given.items():
        wants_list = isinstance(known[name], list)
        numbers = value if wants_list and isinstance(value, list) else [value]
        if wants_list != isinstance(value, list) or not numbers or not all(map(_positive, numbers)):
            kind = "a list of positive integers" if wants_list else "a positive integer"
            raise UsageError(f"{buckets}: {name} is {value!r}; legal is {kind}")
        known[name] = sorted(value) if wants_list else value
    fields: dict[str, Any] = {
        field: tuple(value) if isinstance(value, list) else value for field, value in known.items()
    }
    return Deployment(**fields)


def serve_settings(package: Path, checkpoint: Path) -> Any:
    """What `vlmgen serve` starts a checkpoint with."""
    spec = load_package_spec(package)
    return settings_for(load_factory(package), checkpoint, spec=spec)


def set_up_process() -> None:
    """CPU mode, no network, and the plugin or its stand-in importable."""
    os.environ.setdefault(standin.CPU_MODE_VARIABLE, "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    standin.require()
    # torch tells that a class will be renamed whenever it copies an exported graph.
    warnings.filterwarnings("ignore", category=FutureWarning, module="copyreg|torch")


def chosen(deployment: Deployment, names: Sequence[str]) -> list[Graph]:
    """Graphs by name; all without names.

    Raises:
        UsageError: No graph of the deployment has that name.
    """
    graphs = {graph.name: graph for graph in deployment.graphs()}
    unknown = [name for name in names if name not in graphs]
    if unknown:
        raise UsageError(f"no graph {', '.join(unknown)}; legal: {', '.join(graphs)}")
    return [graphs[name] for name in names] or list(graphs.values())


def input_shapes(package: Path, checkpoint: Path, deployment: Deployment) -> dict[str, str]:
    """The inputs of every graph, from shapes alone: no weight is read."""
    with ExitStack() as stack:
        if not parallel_state_exists():
            stack.enter_context(one_rank())
        factory = stack.enter_context(shapes_only(load_factory(package)))
        recorder = CallRecorder(factory, checkpoint, deployment, DTYPE)
        return {graph.name: shapes_of(call.kwargs) for graph, call in recorder.calls.items()}


def shapes_of(kwargs: Mapping[str, Any]) -> str:
    """Tensors of a call in one line; what all layers are given stands once."""
    parts: dict[str, str] = {}
    for name, value in kwargs.items():
        if name == "attn_metadata":
            parts |= _named_shapes(next(iter(value.values())))
        elif isinstance(value, tuple):
            parts[name] = f"{len(value)} x {list(value[0].shape)}"
        else:
            parts |= _named_shapes({name: value})
    return ", ".join(f"{name} {shape}" for name, shape in parts.items())


def _named_shapes(values: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(list(v.shape)) for name, v in values.items() if torch.is_tensor(v)}


def _positive(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def compile_package(
    package: Path,
    checkpoint: Path,
    deployment: Deployment | None = None,
    *,
    only: Sequence[Graph] = (),
    cache: ArtifactCache,
    offline: bool = False,
    emit: Path | None = None,
    verify: bool = True,
    world_sizes: Sequence[int] = (),
    workers: int = 1,
    steps: Steps = SILENT,
) -> CompileReport:
    """Export, lower, compile and run every graph of a package, and compare the results.

    Args:
        package: Folder of the package.
        checkpoint: Folder of the checkpoint.
        deployment: Buckets and sizes; None takes those of `vlmgen serve`.
        only: Graphs to compile; none for all.
        cache: Where artifacts are kept.
        offline: Use the cache alone.
        emit: Folder for the programs' texts.
        verify: Run every graph and compare it with the eager package and Hugging Face.
        world_sizes: Also run the graphs on every legal split of so many ranks; needs `verify`.
        workers: Processes that compile what is not in the cache.
        steps: Shows how far it is.

    Raises:
        CacheMissError: Something is not in the cache, and only that may be used.
        CheckpointError: The checkpoint cannot be loaded.
    """
    if world_sizes and not verify:
        raise UsageError("ranks are compared with one rank, which must be run for that")
    deployment = deployment or deployment_for(package, checkpoint)
    spec = load_package_spec(package)
    text, vision = sizes_of_checkpoint(spec, read_json(checkpoint / "config.json"))
    report = CompileReport(spec.title, str(package), str(checkpoint), deployment)
    with ExitStack() as stack:
        stack.enter_context(one_thread())
        if not parallel_state_exists():
            stack.enter_context(one_rank())
        steps.say("loading the checkpoint")
        recorder = CallRecorder(load_factory(package), checkpoint, deployment, DTYPE)
        verifier = Verifier(recorder, Reference(checkpoint, spec)) if verify else None
        builder = GraphBuilder(package, cache, offline=offline, emit=emit)
        calls = [call for graph, call in recorder.calls.items() if not only or graph in only]
        missing = [call.graph for call in calls if builder.cached(call) is None]
        if workers > 1 and len(missing) > 1 and not offline:
            fill_cache(package, checkpoint, deployment, missing, cache, workers, steps)
            cache.statistics.misses += len(missing)
            cache.statistics.hits -= len(missing)  # they are found when it is their turn
        singles = []
        steps.begin("graphs", len(calls))
        for call in calls:
            graph = call.graph
            steps.say(graph.name)
            own = GraphReport(graph, deployment.why(graph), builder.build(call))
            own.count = analytic.count(text, vision, deployment, graph)
            if verifier is not None and own.built.executable is not None:
                real = _verify(own, verifier)
                singles.append((graph, own.built.interface, real))
            report.graphs.append(own)
            steps.done()
    layouts = [
        layout for world_size in world_sizes for layout in legal_layouts(text, vision, world_size)
    ]
    with one_thread():
        runs = RankRuns(load_factory(package), builder, checkpoint, deployment, DTYPE)
        steps.begin("ranks", len(layouts))
        for layout in layouts:
            steps.say(layout.name)
            report.ranks += runs.run(layout, _largest(singles))
            steps.done()
    report.hits, report.misses = cache.statistics.hits, cache.statistics.misses
    if emit is not None:
        for own in report.graphs:
            record = json.dumps(own.to_dict(), indent=2) + "\n"
            replace_file(emit / f"{own.graph.name}.json", record.encode(), parents=True)
    return report


def compile_for_neuron(
    package: Path,
    checkpoint: Path,
    deployment: Deployment,
    *,
    only: Sequence[Graph] = (),
    cache: ArtifactCache,
    offline: bool = False,
    emit: Path | None = None,
    steps: Steps = SILENT,
) -> list[neuron.NeuronResult]:
    """Every graph through the Neuron compiler that is installed; arguments as above.

    Raises:
        NoNeuronError: None is.
    """
    if neuron.installed() == neuron.PLUGIN:
        served = serve_settings(package, checkpoint).additional_config
        command = neuron.plugin_command(package, checkpoint, deployment, served)
        steps.say(f"an engine for {neuron.platform()}, which compiles all graphs")
        return [neuron.compile_with_plugin(command)]
    with ExitStack() as stack:
        if not parallel_state_exists():
            stack.enter_context(one_rank())
        with shapes_only(load_factory(package)) as factory:
            recorder = CallRecorder(factory, checkpoint, deployment, None)
        calls = [call for graph, call in recorder.calls.items() if not only or graph in only]
        steps.begin(f"graphs for {neuron.platform()}", len(calls))
        results = []
        for result in neuron.compile_calls(calls, cache, offline=offline, emit=emit):
            results.append(result)
            steps.done()
        return results


def _largest(singles: Sequence[Any]) -> list[Any]:
    """One graph of each kind, the one with the largest bucket."""
    return list({single[0].kind: single for single in singles}.values())


def _verify(own: GraphReport, verifier: Verifier) -> RealCall:
    started = time.perf_counter()
    assert own.built.interface is not None
    real = verifier.real_call(own.built.call, own.built.interface)
    results = xla_cpu.run(own.built.executable, real.values)
    own.difference = verifier.difference(real, results)
    own.run_seconds = time.perf_counter() - started
    return real
