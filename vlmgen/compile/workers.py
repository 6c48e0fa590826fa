"""Processes that fill the artifact cache side by side."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from vlmgen.compile.artifacts import ArtifactCache
from vlmgen.compile.graphs import Deployment, Graph
from vlmgen.terminal import Steps


def fill_cache(
    package: Path,
    checkpoint: Path,
    deployment: Deployment,
    graphs: Sequence[Graph],
    cache: ArtifactCache,
    workers: int,
    steps: Steps,
) -> None:
    """Compile graphs into the cache; what cannot be compiled is left for the caller to find.

    Args:
        package: Folder of the package.
        checkpoint: Folder of the checkpoint, read for its sizes alone.
        deployment: Buckets and sizes.
        graphs: What is missing.
        cache: Where it goes.
        workers: Processes.
        steps: Shows how far it is.
    """
    steps.begin(f"in {min(workers, len(graphs))} processes", len(graphs))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(workers, len(graphs)), mp_context=context) as pool:
        arguments = (package, checkpoint, deployment)
        folders = (cache.local, cache.shared)
        # One graph per task; a process keeps the package it has loaded.
        tasks = [pool.submit(_compile, *arguments, graph, *folders) for graph in graphs]
        for task in as_completed(tasks):
            task.result()
            steps.done()


_LOADED: dict[tuple[Path, Path, Deployment], object] = {}


def _compile(
    package: Path,
    checkpoint: Path,
    deployment: Deployment,
    graph: Graph,
    local: Path,
    shared: Path | None,
) -> None:
    """Runs in a worker: shapes are enough to compile, so no weight is read."""
    from vlmgen.compile.build import GraphBuilder
    from vlmgen.compile.calls import CallRecorder, shapes_only
    from vlmgen.compile.run import DTYPE, set_up_process
    from vlmgen.standin.ranks import one_rank
    from vlmgen.tiny.build import quiet_transformers
    from vlmgen.validate.package import load_factory
    from vlmgen.validate.run import one_thread

    set_up_process()
    key = (package, checkpoint, deployment)
    with one_thread(), one_rank(), quiet_transformers():
        recorder = _LOADED.get(key)
        if recorder is None:
            with shapes_only(load_factory(package)) as factory:
                recorder = CallRecorder(factory, checkpoint, deployment, DTYPE)
            _LOADED[key] = recorder
        assert isinstance(recorder, CallRecorder)
        builder = GraphBuilder(package, ArtifactCache(local, shared))
        builder.build(recorder.calls[graph])
