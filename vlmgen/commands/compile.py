"""`vlmgen compile`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vlmgen.extras import needs_extra
from vlmgen.files import replace_file
from vlmgen.options import JsonFlag
from vlmgen.terminal import Steps, console, print_json, steps

if TYPE_CHECKING:
    from vlmgen.compile.graphs import Deployment, Graph
    from vlmgen.compile.neuron import NeuronResult
    from vlmgen.compile.published import PublishedReport
    from vlmgen.compile.report import CompileReport

NAME = "compile"
EXAMPLE = "Example: vlmgen compile generated/NAME --checkpoint build/tiny --only decode-1"

# What a kind of run takes beside PKG and --json; other options would do nothing and are refused.
DEPLOYMENT = frozenset(("checkpoint", "target", "buckets", "list_graphs"))
GRAPHS = DEPLOYMENT | {"only", "emit", "cache", "shared_cache", "offline"}
TAKES = {
    "--published": frozenset(("published", "whole", "target")),
    "--target neuron with the plugin": DEPLOYMENT,
    "--target neuron": GRAPHS,
    "--target xla-cpu": GRAPHS | {"run", "world_size", "workers", "notes", "html_file"},
}


class Target(StrEnum):
    """Which compiler takes the graphs."""

    XLA_CPU = "xla-cpu"
    NEURON = "neuron"


def command(
    context: typer.Context,
    package: Annotated[Path, typer.Argument(metavar="PKG", help="A generated package.")],
    checkpoint: Annotated[
        Path | None, typer.Option(help="A checkpoint directory as published.")
    ] = None,
    published: Annotated[
        list[str] | None,
        typer.Option(help="Instead: a published checkpoint, from its sizes alone; or all."),
    ] = None,
    whole: Annotated[
        bool, typer.Option("--whole", help="With --published: every layer, not a few of them.")
    ] = False,
    target: Annotated[
        Target, typer.Option(help="XLA for CPU, or the Neuron compiler that is installed.")
    ] = Target.XLA_CPU,
    buckets: Annotated[
        str,
        typer.Option(
            help="auto: those of `vlmgen serve`. Or a JSON file with other sizes; --list --json "
            "shows its fields."
        ),
    ] = "auto",
    list_graphs: Annotated[
        bool, typer.Option("--list", help="Only list the graphs, their inputs and why they exist.")
    ] = False,
    only: Annotated[
        list[str] | None, typer.Option(help="A graph, as --list names it; may be repeated.")
    ] = None,
    emit: Annotated[
        Path | None, typer.Option(help="Write StableHLO, optimised HLO and a record per graph.")
    ] = None,
    run: Annotated[
        bool, typer.Option("--run/--no-run", help="Run every graph and compare the results.")
    ] = True,
    world_size: Annotated[
        list[int] | None,
        typer.Option(
            min=2, max=8, help="Also run every legal split of this many ranks; may be repeated."
        ),
    ] = None,
    cache: Annotated[
        Path | None, typer.Option(help="Folder of the artifact cache, if not $VLMGEN_CACHE.")
    ] = None,
    shared_cache: Annotated[
        Path | None, typer.Option(help="A second folder, shared by machines that trust it.")
    ] = None,
    workers: Annotated[
        int, typer.Option(min=1, help="Processes that compile what is not in the cache.")
    ] = 1,
    offline: Annotated[
        bool, typer.Option("--offline", help="Compile nothing: what is not cached is an error.")
    ] = False,
    notes: Annotated[bool, typer.Option("--notes", help="Print findings that are notes.")] = False,
    html_file: Annotated[Path | None, typer.Option("--html", help="Write an HTML report.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Compile every graph of a package for XLA on a CPU, run it, and compare the results."""
    from vlmgen.errors import UsageError

    if (checkpoint is None) == (not published):
        raise UsageError("give --checkpoint DIR or --published NAME (and not both)")
    if checkpoint is None and target is not Target.XLA_CPU:
        raise UsageError("--published goes with --target xla-cpu alone")
    kind = f"--target {target}"
    if target is Target.NEURON and not list_graphs and _plugin_compiles():
        kind += " with the plugin"
    _refuse_others(context, "--published" if checkpoint is None else kind)
    if checkpoint is None:
        _compile_published(package, published or [], whole, as_json)
        return
    with _compiling() as shown:
        from vlmgen.compile import run as compiling
        from vlmgen.compile.artifacts import ArtifactCache, default_folder

        file = None if buckets == "auto" else Path(buckets)
        deployment = compiling.deployment_for(package, checkpoint, file)
        graphs = compiling.chosen(deployment, only or ())
        artifacts = ArtifactCache(cache or default_folder(), shared_cache)
        options: dict[str, Any] = {
            "only": graphs,
            "cache": artifacts,
            "offline": offline,
            "emit": emit,
            "steps": shown,
        }
        if list_graphs:
            shapes = compiling.input_shapes(package, checkpoint, deployment)
        elif target is Target.NEURON:
            results = compiling.compile_for_neuron(package, checkpoint, deployment, **options)
        else:
            report = compiling.compile_package(
                package,
                checkpoint,
                deployment,
                verify=run,
                world_sizes=world_size or (),
                workers=workers,
                **options,
            )
    if list_graphs:
        _print_graphs(deployment, graphs, shapes, as_json)
    elif target is Target.NEURON:
        _print_neuron(results, as_json)
    else:
        _print_report(report, html_file, as_json, notes)


@contextmanager
def _compiling() -> Iterator[Steps]:
    """A bar in a process that is set up; what is not installed is named.

    Nothing is shown of what transformers says of a config.
    """
    with needs_extra("compile"):
        from vlmgen.compile.run import set_up_process
        from vlmgen.tiny.build import quiet_transformers

        set_up_process()
        with quiet_transformers(), steps("compiling") as shown:
            yield shown


def _refuse_others(context: typer.Context, kind: str) -> None:
    """Refuse options that a kind of run would not look at.

    Raises:
        UsageError: Some were given.
    """
    from vlmgen.errors import UsageError

    names = {option.name: option.opts[0] for option in context.command.params}
    takes = {"package", "as_json", *TAKES[kind]}
    others = [
        names[name]
        for name in context.params
        if name not in takes and _was_given(context, name)
    ]
    if others:
        legal = sorted(names[name] for name in takes - {"package"})
        raise UsageError(
            f"{', '.join(others)} means nothing with {kind}; legal: {', '.join(legal)}"
        )


def _was_given(context: typer.Context, name: str) -> bool:
    # typer has its own copy of click's enumeration, under a private name.
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _plugin_compiles() -> bool:
    """Whether the plugin is the Neuron compiler, found out before anything is imported or built.

    Raises:
        NoNeuronError: There is none.
    """
    from vlmgen import standin
    from vlmgen.compile.neuron import PLUGIN, installed

    standin.activate()
    return installed() == PLUGIN


def _print_graphs(
    deployment: Deployment, graphs: Sequence[Graph], shapes: dict[str, str], as_json: bool
) -> None:
    from vlmgen.compile.console import print_deployment

    if as_json:
        rows = [
            {"graph": g.name, "why": deployment.why(g), "inputs": shapes[g.name]} for g in graphs
        ]
        print_json({"deployment": deployment.to_dict(), "graphs": rows})
    else:
        print_deployment(deployment, graphs, shapes, console())


def _print_report(
    report: CompileReport, html_file: Path | None, as_json: bool, notes: bool
) -> None:
    from vlmgen.compile.console import print_report
    from vlmgen.compile.page import page
    from vlmgen.errors import CompileFailed

    if html_file is not None:
        replace_file(html_file, page(report).encode("utf-8"))
    if as_json:
        print_json(report.to_dict())
    else:
        print_report(report, console(), notes)
    if not report.passed:
        raise CompileFailed(report.problems)


def _compile_published(package: Path, names: list[str], whole: bool, as_json: bool) -> None:
    from vlmgen.errors import CompileFailed

    with _compiling() as shown:
        from vlmgen.compile.console import print_published
        from vlmgen.compile.published import compile_published, names_of

        reports: list[PublishedReport] = []
        for name in names_of(package, names):
            reports += compile_published(package, name, whole=whole, steps=shown)
    if as_json:
        print_json([report.to_dict() for report in reports])
    else:
        print_published(reports, console())
    failed = [f"{r.checkpoint} {r.graph.name}: {r.problem}" for r in reports if r.problem]
    if failed:
        raise CompileFailed(failed)


def _print_neuron(results: Sequence[NeuronResult], as_json: bool) -> None:
    from vlmgen.errors import CompileFailed

    if as_json:
        print_json([dataclasses.asdict(result) for result in results])
    else:
        for result in results:
            state = "cached" if result.cached else "ok" if result.passed else "FAILED"
            print(f"{result.name}: {state}, {result.seconds:.1f} s\n  {result.command}")
    failed = [f"{r.name}: {r.detail or 'left no output'}" for r in results if not r.passed]
    if failed:
        raise CompileFailed(failed)
