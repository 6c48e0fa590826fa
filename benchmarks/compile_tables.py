"""What `vlmgen compile` gives for every family, on ranks, and for every published checkpoint.

    python benchmarks/compile_tables.py families [NAME...]    a graph of each kind
    python benchmarks/compile_tables.py deployments [NAME...] every graph of `vlmgen serve`
    python benchmarks/compile_tables.py ranks [NAME...]       a graph of each kind, every split
    python benchmarks/compile_tables.py published [NAME...]   published sizes, some layers
    python benchmarks/compile_tables.py whole [NAME...]       published sizes, every layer
    python benchmarks/compile_tables.py write                 the tables of docs/compile.md

Figures are kept in specs/results/compile/, a file per table, entry by entry, so that a run that is
ended keeps what it has. A program of whole depth gets ten minutes and 24 GiB of this machine's
memory; where that is too little, the entry says so.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from package import ROOT

from vlmgen.compile.findings import SEVERITIES
from vlmgen.compile.graphs import KINDS, Deployment
from vlmgen.files import replace_file

STORE = ROOT / "specs" / "results" / "compile"
PAGE = ROOT / "docs" / "compile.md"
FAMILIES = sorted(path.stem for path in (ROOT / "specs").glob("*.yaml"))
WHOLE_SECONDS, WHOLE_BYTES, OVER_TIME = 600, 24 * 2**30, "over ten minutes"


def main() -> None:
    """Measure, or write the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("table", choices=(*MEASURES, "write"))
    parser.add_argument("names", nargs="*", help="some of them; none for all")
    parser.add_argument("--at-once", type=int, default=1, help="processes for `whole`")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_intermixed_args()
    if arguments.table == "write":
        page = PAGE.read_text(encoding="utf-8")
        for name in TABLES:
            page = written(page, name)
        replace_file(PAGE, page.encode())
        return
    if arguments.here:
        for own in published_reports(arguments.names[0], whole=True):
            print(json.dumps(graph_entry(own)), flush=True)
        return
    measure = MEASURES[arguments.table]

    def timed(name: str) -> dict[str, Any]:
        started = time.perf_counter()
        return measure(name) | {"seconds": round(time.perf_counter() - started, 1)}

    known = list(checkpoints()) if arguments.table in ("published", "whole") else FAMILIES
    names = arguments.names or known
    with ThreadPoolExecutor(arguments.at_once if arguments.table == "whole" else 1) as pool:
        tasks = {pool.submit(timed, name): name for name in names}
        for task in as_completed(tasks):
            name, entry = tasks[task], task.result()
            store(arguments.table, name, entry)
            print(name, f"{entry['seconds']:.0f} s", *entry["problems"], flush=True)


def checkpoints() -> dict[str, str]:
    """Name of every published checkpoint -> its family."""
    from vlmgen.weights.published import published_family

    return {name: family for family in FAMILIES for name in published_family(family).checkpoints}


# ------------------------------------------------------------------------------------- measuring


def compiled(family: str, deployment: Deployment | None = None, **options: Any) -> Any:
    """The report of a family's tiny checkpoint, from an empty cache.

    Args:
        family: Name of the family.
        deployment: Buckets and sizes; None takes those of `vlmgen serve`.
        options: Of the checkpoint; `world_sizes` of the run.
    """
    from vlmgen.compile import run
    from vlmgen.compile.artifacts import ArtifactCache
    from vlmgen.tiny.build import build_tiny

    run.set_up_process()
    world_sizes = options.pop("world_sizes", ())
    with tempfile.TemporaryDirectory(prefix="vlmgen-tables-") as name:
        spec, cache = ROOT / "specs" / f"{family}.yaml", ArtifactCache(Path(name) / "cache")
        checkpoint = build_tiny(spec, Path(name) / "tiny", seed=3, **options)
        package = ROOT / "generated" / family
        return run.compile_package(
            package, checkpoint, deployment, cache=cache, world_sizes=world_sizes
        )


def sizes_for_eight_ranks(family: str) -> dict[str, dict[str, int]]:
    """A decoder of twice the heads and the width that it has for runs on ranks."""
    from vlmgen.compile.sizes import sizes_of_checkpoint
    from vlmgen.spec.load import load_spec
    from vlmgen.tiny.build import build_tiny

    spec = load_spec(ROOT / "specs" / f"{family}.yaml")
    with tempfile.TemporaryDirectory(prefix="vlmgen-tables-") as name:
        checkpoint = build_tiny(spec, Path(name) / "tiny", parallel=True)
        config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    text, _ = sizes_of_checkpoint(spec, config)
    width, key = 2 * text.hidden_size, spec.vision.keys.out_hidden_size
    heads = 2 * text.attention.num_heads
    wide = {"text": {"num_attention_heads": heads, "hidden_size": width}}
    # Where the tower states the width of its rows, it must be the decoder's.
    return wide if key == "text_hidden_size" else wide | {"vision": {key: width}}


def graphs_of(report: Any) -> dict[str, Any]:
    """What all graphs of a report took and gave."""
    return {
        "graphs": len(report.graphs),
        "graph_seconds": round(sum(sum(own.built.seconds.values()) for own in report.graphs), 1),
        "eager": max(own.difference.eager for own in report.graphs),
        "hugging_face": max(own.difference.hugging_face for own in report.graphs),
        "findings": dict(Counter(finding.severity for finding in report.findings)),
        "problems": report.problems,
    }


def family_entry(family: str) -> dict[str, Any]:
    """One graph of each kind on one rank."""
    report = compiled(family, Deployment(256, 32, (256,), (2,), (512,), 256), parallel=True)
    graphs = {own.graph.kind: own for own in report.graphs}
    return graphs_of(report) | {
        "flops": {kind: own.built.cost.flops for kind, own in graphs.items()},
        "spec": {kind: own.count.total for kind, own in graphs.items()},
    }


def deployment_entry(family: str) -> dict[str, Any]:
    """Every graph of the deployment that `vlmgen serve` starts."""
    report = compiled(family)
    ratios = [own.flops_ratio for own in report.graphs]
    kinds = Counter(own.graph.kind for own in report.graphs)
    return graphs_of(report) | {"kinds": dict(kinds), "ratios": [min(ratios), max(ratios)]}


def rank_entry(family: str) -> dict[str, Any]:
    """One graph of each kind on every legal split: 8 heads over 2 and 4 ranks, 16 over 8."""
    return of_both(
        rank_part(family, (2, 4), blocks=2),
        rank_part(family, (8,), blocks=8, **sizes_for_eight_ranks(family)),
    )


def rank_part(family: str, world_sizes: tuple[int, ...], blocks: int, **sizes: Any) -> Any:
    """Every legal split of some numbers of ranks.

    Args:
        family: Name of the family.
        world_sizes: Numbers of ranks.
        blocks: Attention blocks of the vision bucket.
        sizes: Of the checkpoint.
    """
    deployment = Deployment(256, 32, (256,), (2,), (256 * blocks,), 256, cache_blocks=blocks + 1)
    report = compiled(family, deployment, parallel=True, world_sizes=world_sizes, **sizes)
    last = report.ranks[-1].layout
    return {
        "world_sizes": sorted({own.layout.world_size for own in report.ranks}),
        "splits": list(dict.fromkeys(own.layout.name for own in report.ranks)),
        "difference": max(own.difference for own in report.ranks),
        "collectives": {
            own.graph.kind: [one.to_dict() for one in own.collectives]
            for own in report.ranks
            if own.layout == last
        },
        "problems": report.problems,
    }


def of_both(few: dict[str, Any], many: dict[str, Any]) -> dict[str, Any]:
    """What two parts found; the collectives are those of the last split."""
    lists = {name: few[name] + many[name] for name in ("world_sizes", "splits", "problems")}
    return many | lists | {"difference": max(few["difference"], many["difference"])}


def published_reports(name: str, whole: bool) -> Iterable[Any]:
    """A :class:`PublishedReport` of one graph of each kind, from sizes alone."""
    from vlmgen.compile.published import compile_published
    from vlmgen.compile.run import set_up_process

    set_up_process()
    return compile_published(ROOT / "generated" / checkpoints()[name], name, whole=whole)


def graph_entry(report: Any) -> dict[str, Any]:
    """What is kept of a graph, and the most memory that this process has had so far."""
    return {
        "kind": report.graph.kind,
        "graph": report.graph.name,
        "layers": report.layers,
        "flops": report.flops,
        "spec": report.analytic,
        "weights": report.weights,
        "caches": report.caches,
        "temporary": report.temporary,
        "seconds": round(report.seconds, 1),
        "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "problem": report.problem,
    }


def entry_of(graphs: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Graphs by kind, and their problems."""
    kept = {graph.pop("kind"): graph for graph in graphs}
    problems = [(graph["graph"], graph.pop("problem")) for graph in kept.values()]
    return {"graphs": kept, "problems": [f"{name}: {text}" for name, text in problems if text]}


def published_entry(name: str) -> dict[str, Any]:
    """Some layers, and from them all."""
    return entry_of(map(graph_entry, published_reports(name, whole=False)))


def whole_entry(name: str) -> dict[str, Any]:
    """Every layer, in a process that may be ended; graphs that it got done before count."""

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (WHOLE_BYTES, WHOLE_BYTES))

    command = [sys.executable, __file__, "whole", name, "--here"]
    problem = ""
    try:
        result = subprocess.run(
            command, capture_output=True, timeout=WHOLE_SECONDS, preexec_fn=limited
        )
        output = result.stdout
        if result.returncode:
            words = result.stderr.decode(errors="replace").strip().splitlines()
            problem = (words or [f"ended by {result.returncode}"])[-1][:200]
    except subprocess.TimeoutExpired as late:
        output, problem = late.stdout or b"", OVER_TIME
    entry = entry_of(json.loads(line) for line in output.splitlines())
    return entry | {"problems": entry["problems"] + ([problem] if problem else [])}


MEASURES: dict[str, Callable[[str], dict[str, Any]]] = {
    "families": family_entry,
    "deployments": deployment_entry,
    "ranks": rank_entry,
    "published": published_entry,
    "whole": whole_entry,
}


def stored(table: str) -> dict[str, Any]:
    """Entries of a table, in the order of their names."""
    path = STORE / f"{table}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def store(table: str, name: str, entry: dict[str, Any]) -> None:
    """Add one entry."""
    entries = dict(sorted((stored(table) | {name: entry}).items()))
    text = json.dumps(entries, indent=1, sort_keys=True) + "\n"
    replace_file(STORE / f"{table}.json", text.encode(), parents=True)


# ---------------------------------------------------------------------------------------- tables


def family_rows() -> Iterable[Sequence[str]]:
    """A row per family, on one rank."""
    yield ("family", "graphs", "s", "MFLOP by XLA", "by the spec", "eager", "Hugging Face",
           "errors, warnings, notes")  # fmt: skip
    for name, own in stored("families").items():
        yield (
            f"`{name}`",
            str(own["graphs"]),
            f"{own['graph_seconds']:.0f}",
            " / ".join(f"{own['flops'][kind] / 1e6:,.1f}" for kind in KINDS),
            " / ".join(f"{own['spec'][kind] / 1e6:,.1f}" for kind in KINDS),
            *compared(own),
        )


def compared(entry: dict[str, Any]) -> tuple[str, ...]:
    """The last cells of a row about graphs on one rank."""
    return (
        f"{entry['eager']:.1e}",
        f"{entry['hugging_face']:.1e}",
        ", ".join(str(entry["findings"].get(severity, 0)) for severity in SEVERITIES),
    )


def deployment_rows() -> Iterable[Sequence[str]]:
    """A row per family, all graphs of a deployment."""
    yield ("family", "vision, prefill, decode graphs", "s", "XLA over the spec", "eager",
           "Hugging Face", "errors, warnings, notes")  # fmt: skip
    for name, own in stored("deployments").items():
        yield (
            f"`{name}`",
            ", ".join(str(own["kinds"][kind]) for kind in KINDS),
            f"{own['graph_seconds']:.0f}",
            " to ".join(f"{ratio:.3f}" for ratio in own["ratios"]),
            *compared(own),
        )


def rank_rows() -> Iterable[Sequence[str]]:
    """A row per family, on ranks."""
    yield ("family", "ranks", "splits", "one rank", "the last split", "its collectives")
    for name, own in stored("ranks").items():
        counts = (
            f"{kind} {sum(one['count'] for one in found)} "
            f"({sum(one['bytes_per_step'] for one in found) / 1024:,.0f} KiB)"
            for kind, found in own["collectives"].items()
        )
        yield (
            f"`{name}`",
            ", ".join(map(str, own["world_sizes"])),
            str(len(own["splits"])),
            f"{own['difference']:.1e}",
            own["splits"][-1],
            "; ".join(counts),
        )


def published_rows() -> Iterable[Sequence[str]]:
    """A row per checkpoint: from some layers, and what its whole depth took."""
    yield ("checkpoint", "layers", "GFLOP by XLA", "by the spec", "weights GiB", "caches GiB",
           "s", "whole depth")  # fmt: skip
    some, whole = stored("published"), stored("whole")
    for name in checkpoints():
        if name not in some:
            yield (name, "not run", *[""] * 6)
            continue
        graphs = some[name]["graphs"]
        yield (
            name,
            f"{graphs['vision']['layers']}, {graphs['decode']['layers']}",
            " / ".join(f"{graphs[kind]['flops'] / 1e9:,.4g}" for kind in KINDS),
            " / ".join(f"{graphs[kind]['flops'] / graphs[kind]['spec']:.3f}" for kind in KINDS),
            f"{graphs['decode']['weights'] / 2**30:.2f}",
            f"{graphs['decode']['caches'] / 2**30:.2f}",
            f"{some[name]['seconds']:.0f}",
            whole_depth(graphs, whole.get(name)),
        )


def whole_depth(some: dict[str, Any], entry: dict[str, Any] | None) -> str:
    """Which graphs were compiled whole, in which time and memory, and how far the sum was off."""
    if entry is None:
        return "not run"
    whole = entry["graphs"]
    said = "; ".join(entry["problems"])
    if not whole:
        return f"none: {said}"
    off = max(abs(some[kind]["flops"] / whole[kind]["flops"] - 1) for kind in whole)
    memory = max(graph["memory"] for graph in whole.values()) / 2**30
    done = "all" if len(whole) == len(KINDS) else ", ".join(kind for kind in KINDS if kind in whole)
    figures = f"{done}: {entry['seconds']:.0f} s, {memory:.1f} GiB, {off:.0e}"
    return f"{figures}; then {said}" if said else figures


TABLES: dict[str, Callable[[], Iterable[Sequence[str]]]] = {
    "families": family_rows,
    "deployments": deployment_rows,
    "ranks": rank_rows,
    "published": published_rows,
}


def written(page: str, name: str) -> str:
    """A page with a table between its two marks."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    head, _, rest = page.partition(begin)
    _, _, tail = rest.partition(end)
    first, *rows = TABLES[name]()
    lines = ["| " + " | ".join(row) + " |" for row in (first, ["---"] * len(first), *rows)]
    return f"{head}{begin}\n" + "\n".join(lines) + f"\n{end}{tail}"


if __name__ == "__main__":
    main()
