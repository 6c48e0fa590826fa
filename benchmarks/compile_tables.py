"""What `vlmgen compile` gives for every family, for ranks, and for every published checkpoint.

    python benchmarks/compile_tables.py families [NAME...]    a graph of each kind, and on ranks
    python benchmarks/compile_tables.py published [NAME...]   published sizes, some layers
    python benchmarks/compile_tables.py whole [NAME...]       published sizes, every layer
    python benchmarks/compile_tables.py write                 the tables of docs/compile.md

Figures are kept in specs/results/compile/, a file per table, entry by entry, so that a run that is
ended keeps what it has. A program of whole depth gets ten minutes and 24 GiB of this machine's
memory; where that is too little, the entry says so.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from package import ROOT

from vlmgen.files import replace_file

STORE = ROOT / "specs" / "results" / "compile"
PAGE = ROOT / "docs" / "compile.md"
FAMILIES = sorted(path.stem for path in (ROOT / "specs").glob("*.yaml"))
WHOLE_SECONDS, WHOLE_BYTES = 600, 24 * 2**30
KINDS = ("vision", "prefill", "decode")


def main() -> None:
    """Measure, or write the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("table", choices=("families", "published", "whole", "write"))
    parser.add_argument("names", nargs="*", help="some of them; none for all")
    parser.add_argument("--ranks", type=int, nargs="*", default=(2, 4, 8), help="2 4 8")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.table == "write":
        page = PAGE.read_text(encoding="utf-8")
        for name in TABLES:
            page = written(page, name)
        replace_file(PAGE, page.encode())
        return
    known = FAMILIES if arguments.table == "families" else list(checkpoints())
    for name in arguments.names or known:
        started = time.perf_counter()
        if arguments.table == "families":
            entry = family_entry(name, arguments.ranks)
        elif arguments.table == "whole" and not arguments.here:
            entry = whole_apart(name)
        else:
            entry = published_entry(name, whole=arguments.table == "whole")
        entry["seconds"] = round(time.perf_counter() - started, 1)
        if arguments.here:
            print(json.dumps(entry))
        else:
            store(arguments.table, name, entry)
            print(name, f"{entry['seconds']:.0f} s", *entry["problems"], flush=True)


def checkpoints() -> dict[str, str]:
    """Name of every published checkpoint -> its family."""
    from vlmgen.weights.published import published_family

    return {name: family for family in FAMILIES for name in published_family(family).checkpoints}


# ------------------------------------------------------------------------------------- measuring


def family_entry(family: str, world_sizes: Sequence[int]) -> dict[str, Any]:
    """One graph of each kind on one rank, and on every legal split of several."""
    from vlmgen.compile import run
    from vlmgen.compile.artifacts import ArtifactCache
    from vlmgen.compile.graphs import Deployment
    from vlmgen.tiny.build import build_tiny

    run.set_up_process()
    package, small = ROOT / "generated" / family, Deployment(256, 32, (256,), (2,), (512,), 256)
    with tempfile.TemporaryDirectory(prefix="vlmgen-tables-") as name:
        checkpoint = build_tiny(
            ROOT / "specs" / f"{family}.yaml", Path(name) / "tiny", seed=3, parallel=True
        )
        legal = legal_world_sizes(package, checkpoint, world_sizes)
        cache = ArtifactCache(Path(name) / "cache")
        report = run.compile_package(package, checkpoint, small, cache=cache, world_sizes=legal)
    graphs = {own.graph.kind: own for own in report.graphs}
    last = report.ranks[-1].layout if report.ranks else None
    return {
        "graphs": len(graphs),
        "graph_seconds": round(sum(sum(own.built.seconds.values()) for own in report.graphs), 1),
        "flops": {kind: own.built.cost.flops for kind, own in graphs.items()},
        "spec": {kind: own.count.total for kind, own in graphs.items()},
        "eager": max(own.difference.eager for own in report.graphs),
        "hugging_face": max(own.difference.hugging_face for own in report.graphs),
        "findings": dict(Counter(finding.severity for finding in report.findings)),
        "world_sizes": legal,
        "splits": list(dict.fromkeys(own.layout.name for own in report.ranks)),
        "rank_difference": max((own.difference for own in report.ranks), default=0.0),
        "collectives": {
            own.graph.kind: [one.to_dict() for one in own.collectives]
            for own in report.ranks
            if own.layout == last
        },
        "problems": report.problems,
    }


def legal_world_sizes(package: Path, checkpoint: Path, wanted: Sequence[int]) -> list[int]:
    """Numbers of ranks over which a checkpoint can be split."""
    from vlmgen.compile.ranks import legal_layouts
    from vlmgen.compile.sizes import sizes_of_checkpoint
    from vlmgen.errors import UsageError
    from vlmgen.validate.package import load_package_spec

    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    sizes = sizes_of_checkpoint(load_package_spec(package), config)
    legal = []
    for world_size in wanted:
        with contextlib.suppress(UsageError):
            legal += [world_size] if legal_layouts(*sizes, world_size) else []
    return legal


def published_entry(name: str, whole: bool = False) -> dict[str, Any]:
    """One graph of each kind from sizes alone."""
    from vlmgen.compile.published import compile_published
    from vlmgen.compile.run import set_up_process

    set_up_process()
    reports = compile_published(ROOT / "generated" / checkpoints()[name], name, whole=whole)
    return {
        "graphs": {
            own.graph.kind: {
                "graph": own.graph.name,
                "layers": own.layers,
                "flops": own.flops,
                "spec": own.analytic,
                "weights": own.weights,
                "caches": own.caches,
                "temporary": own.temporary,
                "seconds": round(own.seconds, 1),
            }
            for own in reports
        },
        "problems": [f"{own.graph.name}: {own.problem}" for own in reports if own.problem],
    }


def whole_apart(name: str) -> dict[str, Any]:
    """Every layer, in a process that may be ended."""

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (WHOLE_BYTES, WHOLE_BYTES))

    command = [sys.executable, __file__, "whole", name, "--here"]
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=WHOLE_SECONDS, preexec_fn=limited
        )
    except subprocess.TimeoutExpired:
        return {"problems": ["over ten minutes"]}
    if result.returncode:
        last = (result.stderr.strip().splitlines() or ["ended without a word"])[-1]
        return {"problems": [last[:200]]}
    memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    return json.loads(result.stdout.splitlines()[-1]) | {"memory": memory}


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
            f"{own['eager']:.1e}",
            f"{own['hugging_face']:.1e}",
            ", ".join(str(own["findings"].get(s, 0)) for s in ("error", "warning", "note")),
        )


def rank_rows() -> Iterable[Sequence[str]]:
    """A row per family, on ranks."""
    yield ("family", "ranks", "splits", "one rank", "the last split", "its collectives")
    for name, own in stored("families").items():
        if not own["splits"]:
            yield (f"`{name}`", "not run", "", "", "", "")
            continue
        counts = (
            f"{kind} {sum(one['count'] for one in found)} "
            f"({sum(one['bytes_per_step'] for one in found) / 1024:,.0f} KiB)"
            for kind, found in own["collectives"].items()
        )
        yield (
            f"`{name}`",
            ", ".join(map(str, own["world_sizes"])),
            str(len(own["splits"])),
            f"{own['rank_difference']:.1e}",
            own["splits"][-1],
            "; ".join(counts),
        )


def published_rows() -> Iterable[Sequence[str]]:
    """A row per checkpoint; of those whose whole depth was compiled, those figures."""
    yield ("checkpoint", "layers", "GFLOP by XLA", "by the spec", "weights GiB", "caches GiB",
           "s")  # fmt: skip
    whole = stored("whole")
    some = stored("published")
    for name in checkpoints():
        own, deep = some.get(name), whole.get(name, {})
        if own is None:
            yield (name, "not run", "", "", "", "", "")
            continue
        graphs = deep.get("graphs") or own["graphs"]
        yield (
            name,
            f"{graphs['vision']['layers']}, {graphs['decode']['layers']}",
            " / ".join(f"{graphs[kind]['flops'] / 1e9:,.4g}" for kind in KINDS),
            " / ".join(f"{graphs[kind]['flops'] / graphs[kind]['spec']:.3f}" for kind in KINDS),
            f"{graphs['decode']['weights'] / 2**30:.2f}",
            f"{graphs['decode']['caches'] / 2**30:.2f}",
            f"{own['seconds']:.0f}" + (f", {deep['seconds']:.0f}" if deep.get("graphs") else ""),
        )


TABLES: dict[str, Callable[[], Iterable[Sequence[str]]]] = {
    "families": family_rows,
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
