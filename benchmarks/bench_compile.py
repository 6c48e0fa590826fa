"""How compile time grows with depth, and what many buckets cost when the cache is warm.

The peer of a deep model is a shallow one of the same sizes; the peer of many buckets is one.
Needs the extra `compile`.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from measure import Row, finish
from package import ROOT

FAMILY = "qwen3_vl"
DEPTHS = (3, 6, 12)
BUCKETS = (1, 4, 16)
LINEAR = 1.5  # seconds per layer at one depth over those at another
WARM = 0.1  # seconds per graph from a warm cache


def main() -> None:
    """Measure and print."""
    from vlmgen.compile.run import one_thread, set_up_process
    from vlmgen.standin.ranks import one_rank

    set_up_process()
    with tempfile.TemporaryDirectory(prefix="vlmgen-bench-") as name, one_thread(), one_rank():
        rows = [*depth(Path(name)), *warm(Path(name))]
    finish("Compiling graphs", rows)


def depth(folder: Path) -> list[Row]:
    """Export, lower and compile a decode step at several depths, in processor seconds."""
    seconds = {}
    for layers in DEPTHS:
        recorder, builder, graph = prepared(folder, layers, (2,))
        if not seconds:  # imports and caches inside torch are not what is measured
            builder.build(recorder.calls[graph])
            recorder, builder, graph = prepared(folder / "again", layers, (2,))
        started = time.process_time()
        builder.build(recorder.calls[graph])
        seconds[layers] = time.process_time() - started
    small, middle, large = DEPTHS
    first = (seconds[middle] - seconds[small]) / (middle - small)
    second = (seconds[large] - seconds[middle]) / (large - middle)
    rows = [
        Row(f"decode step, {layers} layers", value, "s", f"{small} layers", seconds[small],
            value / seconds[small])
        for layers, value in seconds.items()
    ]  # fmt: skip
    rows.append(
        Row("  one layer more, deep", second, "s", "one layer more, shallow", first,
            second / first, f"<= {LINEAR}", second / first <= LINEAR)
    )  # fmt: skip
    return rows


def warm(folder: Path) -> list[Row]:
    """Every decode bucket from a warm cache, in seconds per graph."""
    rows, one = [], 0.0
    for count in BUCKETS:
        sizes = tuple(range(1, count + 1))
        recorder, builder, _ = prepared(folder / "warm", 3, sizes)
        calls = [call for graph, call in recorder.calls.items() if graph.kind == "decode"]
        for call in calls:
            builder.build(call)
        recorder, builder, _ = prepared(folder / "warm", 3, sizes)
        calls = [call for graph, call in recorder.calls.items() if graph.kind == "decode"]
        builder.request_key(calls[0])  # the sources are read once, however many graphs there are
        started = time.perf_counter()
        built = [builder.build(call) for call in calls]
        seconds = (time.perf_counter() - started) / count
        assert all(graph.hit for graph in built)
        one = one or seconds
        rows.append(
            Row(f"a graph of {count} from a warm cache", seconds, "s", "of 1", one,
                seconds / one, f"<= {WARM} s", seconds <= WARM)
        )  # fmt: skip
    return rows


def prepared(folder: Path, layers: int, seqs: tuple[int, ...]):
    """A recorder, a builder and the graph of the first batch size."""
    from vlmgen.compile.artifacts import ArtifactCache
    from vlmgen.compile.build import GraphBuilder
    from vlmgen.compile.calls import CallRecorder, shapes_only
    from vlmgen.compile.graphs import Deployment, Graph
    from vlmgen.tiny.build import build_tiny
    from vlmgen.validate.package import load_factory

    checkpoint = folder / f"tiny-{layers}"
    if not checkpoint.exists():
        folder.mkdir(parents=True, exist_ok=True)
        spec = ROOT / "specs" / f"{FAMILY}.yaml"
        build_tiny(spec, checkpoint, text={"num_hidden_layers": layers})
    package = ROOT / "generated" / FAMILY
    deployment = Deployment(256, 32, (256,), seqs, (256,), 256)
    with shapes_only(load_factory(package)) as factory:
        recorder = CallRecorder(factory, checkpoint, deployment)
    builder = GraphBuilder(package, ArtifactCache(folder / "cache"))
    return recorder, builder, Graph("decode", seqs[0])


if __name__ == "__main__":
    main()
