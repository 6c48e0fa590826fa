"""The command line: parse, call one function, print.

Everything beyond typer is imported inside the command that needs it, so that `--help` and
`new` stay quick and nothing here ever imports torch on its own.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import shlex
import sys
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec, TypeVar

import typer

from vlmgen import __version__
from vlmgen.extras import needs_extra
from vlmgen.files import replace_file
from vlmgen.options import (
    ForceFlag,
    Format,
    FormatOption,
    JsonFlag,
    Layout,
    LayoutOption,
    OutOption,
    SpecArgument,
    TemplatesOption,
)
from vlmgen.terminal import console as _console
from vlmgen.terminal import print_json as _print_json
from vlmgen.terminal import progress

if TYPE_CHECKING:
    from vlmgen.check.parallel import ParallelTable, TextSplit, VisionSplit
    from vlmgen.families import Family
    from vlmgen.render.difference import PackageDifference
    from vlmgen.spec.memory import RankMemory

P = ParamSpec("P")
R = TypeVar("R")

EXIT_INTERRUPTED = 130

app = typer.Typer(
    name="vlmgen",
    help="Vision-language model packages for the vLLM Neuron plugin, generated from one YAML spec.",
    epilog="Exit codes: 0 fine, 2 usage, 3 bad spec, 4 check failed, 5 validation failed, "
    "6 conflict or server, 7 contradictory checkpoint or no Neuron compiler, "
    "8 not in the artifact cache.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Plugin(StrEnum):
    """Which signatures of the plugin to check against."""

    RECORDED = "recorded"
    INSTALLED = "installed"


def user_errors(command: Callable[P, R]) -> Callable[P, R]:
    """Turn what a user can cause into a message and an exit code; let real faults through."""

    @functools.wraps(command)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
        from vlmgen.errors import CheckFailed, SpecError, VlmgenError

        try:
            return command(*args, **kwargs)
        except VlmgenError as error:
            if isinstance(error, SpecError) and kwargs.get("as_json"):
                _print_json({"problems": [problem.to_dict() for problem in error.problems]})
            elif isinstance(error, SpecError) and kwargs.get("output_format") == Format.GITHUB:
                from vlmgen.annotations import problem_annotation

                print("\n".join(map(problem_annotation, error.problems)))
            print(error.render(), file=sys.stderr)
            # The findings and problems behind the other two bear codes of their own.
            if error.code and not isinstance(error, (SpecError, CheckFailed)):
                print(f"more: vlmgen explain {error.code}", file=sys.stderr)
            raise typer.Exit(error.exit_code) from None
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            raise typer.Exit(EXIT_INTERRUPTED) from None
        except BrokenPipeError:
            _close_stdout()
            raise typer.Exit(0) from None

    return guarded


def _version(wanted: bool) -> None:
    if wanted:
        print(f"vlmgen {__version__}")
        raise typer.Exit()


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Vision-language model packages for the vLLM Neuron plugin, generated from one YAML spec."""


@app.command(epilog="Example: vlmgen new specs/NAME.yaml --out build/NAME")
@user_errors
def new(
    spec: SpecArgument,
    out: OutOption = None,
    layout: LayoutOption = Layout.OUT_OF_TREE,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only list what would change.")
    ] = False,
    diff: Annotated[bool, typer.Option("--diff", help="Only show the changes as a diff.")] = False,
    force: ForceFlag = False,
    output_format: FormatOption = Format.TEXT,
    templates: TemplatesOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Generate the package of a spec."""
    from vlmgen.render.generate import generate

    result = generate(
        spec,
        out=out,
        layout=layout.value,
        dry_run=dry_run,
        diff=diff,
        force=force,
        templates=templates,
    )
    if as_json:
        files = [{"path": str(path), "status": status} for path, status in result.files]
        data = {"target": str(result.target), "files": files, "written": result.written}
        _print_json({**data, "diff": result.diff} if diff else data)
        return
    if diff:
        print(result.diff, end="")
        return
    changed = [(path, status) for path, status in result.files if status != "unchanged"]
    for path, status in changed:
        print(f"{status:9} {path}")
    verb = "would write" if dry_run else "wrote" if changed else "unchanged:"
    same = len(result.files) - len(changed)
    print(f"{verb} {result.target}: {len(changed)} changed, {same} unchanged")


@app.command(epilog="Example: vlmgen diff --all --stat, or vlmgen diff generated/NAME")
@user_errors
def diff(
    packages: Annotated[
        list[Path] | None, typer.Argument(metavar="[PKG]...", help="Generated packages.")
    ] = None,
    diff_all: Annotated[bool, typer.Option("--all", help="Every spec and every package.")] = False,
    check_only: Annotated[
        bool,
        typer.Option("--check", help="Exit 4 and list the files if a package would change."),
    ] = False,
    stat: Annotated[bool, typer.Option("--stat", help="Counts of lines, no diff.")] = False,
    specs: Annotated[Path, typer.Option(help="Directory of the specs.")] = Path("specs"),
    generated: Annotated[Path, typer.Option(help="Directory of the packages.")] = Path("generated"),
    output_format: FormatOption = Format.TEXT,
    templates: TemplatesOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Show what a regeneration would change in packages, and which input is the cause."""
    from vlmgen.errors import CheckFailed, UsageError
    from vlmgen.render.difference import differences

    if diff_all and packages:
        raise UsageError("name packages, or give --all (and not both)")
    with progress("rendering"):
        found = differences(specs, generated, packages or (), templates=templates)
    if as_json:
        _print_json([difference.to_dict() for difference in found])
    elif output_format == Format.GITHUB:
        from vlmgen.annotations import difference_annotations

        for difference in found:
            for line in difference_annotations(difference):
                print(line)
    else:
        for difference in found:
            if not check_only or difference.state != "same":
                _print_difference(difference, stat or check_only)
    changed = [difference for difference in found if difference.state != "same"]
    if check_only and changed:
        names = ", ".join(difference.package.name for difference in changed)
        message = f"{len(changed)} of {len(found)} packages would change: {names}"
        raise CheckFailed(message, hint=_mend(changed, specs, generated, templates))


@app.command(epilog="Example: vlmgen check generated/NAME, or vlmgen check --all")
@user_errors
def check(
    packages: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[PKG]...", help="Generated packages, or specs (*.yaml)."),
    ] = None,
    check_all: Annotated[
        bool,
        typer.Option("--all", help="Every package, and whether it is what its spec gives today."),
    ] = False,
    plugin: Annotated[
        Plugin, typer.Option(help="Signatures: the recorded ones, or an installed plugin's.")
    ] = Plugin.RECORDED,
    specs: Annotated[Path, typer.Option(help="Directory of the specs, for --all.")] = Path("specs"),
    generated: Annotated[Path, typer.Option(help="Directory of the packages, for --all.")] = Path(
        "generated"
    ),
    record: Annotated[
        bool, typer.Option("--record", help="Store the results for `vlmgen families`.")
    ] = False,
    output_format: FormatOption = Format.TEXT,
    templates: TemplatesOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Prove packages without weights: plugin contract, device rules, weights, parallelism."""
    from vlmgen.errors import CheckFailed, UsageError

    if check_all == bool(packages):
        raise UsageError("name packages, or give --all (and not both)")
    if record and plugin is not Plugin.RECORDED:
        raise UsageError("only checks against the recorded signatures can be recorded")
    spec_files = [path for path in packages or () if path.suffix in (".yaml", ".yml")]
    packages = [path for path in packages or () if path not in spec_files]
    if spec_files:
        from vlmgen.spec.load import check_specs

        check_specs(spec_files)
        if not packages:
            if as_json:
                _print_json({"findings": [], "drift": []})
            else:
                print(f"checked {len(spec_files)} spec(s): no problems")
            return
    differences: list[Any] = []
    if check_all:
        from vlmgen.render.drift import drift

        differences = drift(specs, generated, templates=templates)
        packages = sorted(p for p in generated.glob("*") if (p / "pyproject.toml").is_file())
    with needs_extra("cpu"), progress("checking") as report:
        from vlmgen.check.run import run_checks
        from vlmgen.processes import cores

        options: dict[str, Any] = {"record": True} if record else {}
        if templates:
            options["templates"] = templates
        if check_all:
            options["processes"] = cores()
        findings = run_checks(list(packages or ()), plugin=plugin.value, progress=report, **options)
    if as_json:
        keys = ("code", "path", "line", "rule", "message", "fix", "detail")
        rows = [{k: _plain(getattr(f, k)) for k in keys} for f in findings]
        drifted = [{k: getattr(d, k) for k in ("path", "kind", "message", "diff")}
                   for d in differences]  # fmt: skip
        _print_json({"findings": rows, "drift": drifted})
    elif output_format == Format.GITHUB:
        from vlmgen.annotations import annotation

        for difference in differences:
            place = (generated / difference.path).as_posix()
            print(annotation(place, 0, 0, "VG007", difference.message))
        for finding in findings:
            said = f"{finding.message} ({finding.rule}) -> {finding.fix}"
            print(annotation(finding.path, finding.line, 0, finding.code, said))
    else:
        for difference in differences:
            print(f"drift: VG007 {difference.message}")
            if difference.diff:
                print(difference.diff, end="")
        for finding in findings:
            print(finding)
            if finding.detail:
                print(finding.detail, end="")
    count = len(findings) + len(differences)
    if count:
        raise CheckFailed(f"{count} finding{'s' if count > 1 else ''}")
    if not as_json:
        print(f"checked {len(packages or ())} package(s): no findings")


@app.command(epilog="Example: vlmgen validate generated/NAME --tiny --html report.html")
@user_errors
def validate(
    package: Annotated[Path, typer.Argument(metavar="PKG", help="A generated package.")],
    checkpoint: Annotated[
        Path | None, typer.Option(help="A checkpoint directory as published.")
    ] = None,
    tiny: Annotated[bool, typer.Option("--tiny", help="Build and use a tiny checkpoint.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write JSON to a file.")] = None,
    html_file: Annotated[Path | None, typer.Option("--html", help="Write an HTML report.")] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Run only this validation; may be repeated.")
    ] = None,
    record: Annotated[
        bool, typer.Option("--record", help="Store the results for the package's README.")
    ] = False,
) -> None:
    """Compare a package with Hugging Face, module by module and end to end."""
    from vlmgen.errors import UsageError, ValidationFailed

    if tiny == (checkpoint is not None):
        raise UsageError("give --checkpoint DIR or --tiny (and not both)")
    with needs_extra("cpu"), progress("validating") as report_progress:
        from vlmgen.validate.run import validate as run_validation

        report = run_validation(
            package,
            checkpoint=checkpoint,
            tiny=tiny,
            only=only or None,
            record=record,
            progress=report_progress,
        )
    for target, content in ((json_file, report.to_json), (html_file, report.to_html)):
        if target is not None:
            replace_file(target, content().encode("utf-8"))
    _print_rows(report.rows)
    failed = sum(not row.passed for row in report.rows)
    if not report.passed:
        raise ValidationFailed(f"{failed} of {len(report.rows)} validations failed")


@app.command(epilog="Example: vlmgen tiny specs/NAME.yaml build/tiny")
@user_errors
def tiny(
    spec: Annotated[
        Path,
        typer.Argument(metavar="SPEC", help="A spec, or the name of a tiny checkpoint."),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Directory of the checkpoint.")],
    seed: Annotated[int, typer.Option(min=0, help="Seed of the weights.")] = 0,
    tied: Annotated[bool, typer.Option("--tied", help="Tie the head to the embedding.")] = False,
    as_saved: Annotated[
        bool, typer.Option("--as-saved", help="Keep the layout that transformers saves.")
    ] = False,
) -> None:
    """Build a tiny checkpoint with tokenizer and processor."""
    with needs_extra("cpu"), progress("building the checkpoint"):
        from vlmgen.tiny.build import build_tiny

        build_tiny(spec, out, seed=seed, tied=tied, as_saved=as_saved)
    print(f"wrote {out}")


@app.command(
    epilog="Example: vlmgen show specs/NAME.yaml --checkpoint CHECKPOINT, or "
    "vlmgen show specs/NAME.yaml --origin"
)
@user_errors
def show(
    spec: SpecArgument,
    checkpoint: Annotated[
        str | None, typer.Option(metavar="NAME", help="Whose sizes to show.")
    ] = None,
    origin: Annotated[
        bool, typer.Option("--origin", help="Show every value and the file:line it comes from.")
    ] = False,
    output_format: FormatOption = Format.TEXT,
    as_json: JsonFlag = False,
) -> None:
    """Show a spec: both towers, derived values, checkpoints, the weight table."""
    if origin:
        from vlmgen.spec.origin import print_origins, spec_origins

        origins = spec_origins(spec)
        if as_json:
            _print_json([row.to_dict() for row in origins])
        else:
            print_origins(origins, _console())
        return
    from vlmgen.spec.load import load_spec
    from vlmgen.spec.show import show_data, show_spec

    loaded = load_spec(spec)
    if checkpoint is not None:
        loaded.checkpoint(checkpoint)
    if as_json:
        _print_json(show_data(loaded))
    else:
        show_spec(loaded, _console(), checkpoint)


@app.command(epilog="Example: vlmgen parallel specs/NAME.yaml --world-size 8")
@user_errors
def parallel(
    spec: SpecArgument,
    checkpoint: Annotated[
        str | None, typer.Option(metavar="NAME", help="One checkpoint only.")
    ] = None,
    world_size: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Only this many ranks.")
    ] = None,
    output_format: FormatOption = Format.TEXT,
    as_json: JsonFlag = False,
) -> None:
    """List text TP and vision TP x DP, with the reason for each that is illegal, and memory."""
    from vlmgen.check.parallel import parallel_table
    from vlmgen.spec.load import load_spec
    from vlmgen.spec.memory import rank_memory

    loaded = load_spec(spec)
    names = [checkpoint] if checkpoint else [c.name for c in loaded.checkpoints]
    tables = []
    for name in names:
        resolved = loaded.checkpoint(name)
        table = parallel_table(resolved, world_size)
        memory = {row.tp: rank_memory(resolved, row.tp) for row in table.text if row.legal}
        tables.append((table, memory))
    if as_json:
        rows = [
            (table.to_dict(), [m.to_dict() for m in memory.values()]) for table, memory in tables
        ]
        _print_json([{**table, "memory": memory} for table, memory in rows])
        return
    for table, memory in tables:
        _print_parallel(table, memory)


@app.command("import", epilog="Example: vlmgen import checkpoints/my-vlm -o specs/my_vlm.yaml")
@user_errors
def import_(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="A checkpoint directory or a config.json.")
    ],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Where to write a spec, if one is needed.")
    ] = None,
    family: Annotated[
        str, typer.Option(help="Name of the new family; a spec is then written in any case.")
    ] = "",
    specs: Annotated[
        list[Path] | None,
        typer.Option(help="More specs to compare with; may be repeated.", show_default=False),
    ] = None,
    evidence: Annotated[
        bool, typer.Option("--evidence", help="Also show the axes that agree, with the evidence.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file of --out.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Find the family that serves a checkpoint, or write a spec with what differs."""
    from vlmgen.errors import CheckpointError
    from vlmgen.importer import ContradictionError, import_checkpoint
    from vlmgen.importer.report import print_import

    try:
        result = import_checkpoint(
            checkpoint, family=family, out=out, specs=specs or (), force=force
        )
    except ContradictionError as error:
        if as_json:
            _print_json({"contradictions": [dataclasses.asdict(c) for c in error.conflicts]})
        raise
    if as_json:
        _print_json(result.to_dict())
    else:
        print_import(result, _console(), evidence=evidence)
    if result.refused:
        raise CheckpointError(
            f"{len(result.refused)} thing(s) that no spec can state today; nothing was written"
        )


@app.command(epilog="Example: vlmgen families --json")
@user_errors
def families(
    specs: Annotated[Path, typer.Option(help="Directory of the specs.")] = Path("specs"),
    generated: Annotated[Path, typer.Option(help="Directory of the packages.")] = Path("generated"),
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write the page for docs/ to a file.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """List the families: towers, checkpoints, what was proven when, what is refused."""
    from vlmgen.families import families as all_families
    from vlmgen.families import not_generated, page

    found = all_families(specs, generated)
    if out is not None:
        replace_file(out, page(found).encode("utf-8"))
    elif as_json:
        rows = [{"axis": a, "value": v, "needed_by": n} for a, v, n in not_generated()]
        _print_json({"families": [f.to_dict() for f in found], "not_generated": rows})
    else:
        _print_families(found)


@app.command(epilog="Example: vlmgen schema --out schema.json")
@user_errors
def schema(
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write to a file.")] = None,
) -> None:
    """Print the JSON Schema of specs, for editors."""
    from vlmgen.spec.schema import schema_text

    if out is None:
        print(schema_text(), end="")
    else:
        replace_file(out, schema_text().encode("utf-8"))


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    epilog="Example: vlmgen serve generated/NAME --checkpoint build/tiny --port 8000",
)
@user_errors
def serve(
    context: typer.Context,
    package: Annotated[Path, typer.Argument(metavar="PKG", help="A generated package.")],
    checkpoint: Annotated[Path, typer.Option(help="A checkpoint directory.")],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print the command of `vllm serve`.")
    ] = False,
) -> None:
    """Serve a package with vLLM; further options go to `vllm serve`."""
    with needs_extra("cpu"):
        from vlmgen.serve.command import serve_command

        command = serve_command(package, checkpoint, context.args)
    print(command.shell())
    if not dry_run:
        command.run()


@app.command(epilog='Example: vlmgen ask --image picture.jpg "What is in the picture?"')
@user_errors
def ask(
    question: Annotated[str, typer.Argument(help="The question.")],
    image: Annotated[list[Path] | None, typer.Option(help="A picture; may be repeated.")] = None,
    video: Annotated[list[Path] | None, typer.Option(help="A video; may be repeated.")] = None,
    url: Annotated[
        str, typer.Option(help="Address of the server's OpenAI API.")
    ] = "http://127.0.0.1:8000/v1",
    model: Annotated[
        str | None, typer.Option(help="Served model.", show_default="the only one")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
) -> None:
    """Ask a running server about pictures and videos."""
    with needs_extra("cpu"):
        from vlmgen.serve.client import ask as ask_server

        for text in ask_server(
            question,
            image or (),
            video or (),
            url=url,
            model=model,
            system=system,
            max_tokens=max_tokens,
            temperature=temperature,
        ):
            print(text, end="", flush=True)
        print()


@app.command(epilog="Example: vlmgen doctor --json")
@user_errors
def doctor(as_json: JsonFlag = False) -> None:
    """Say what is installed for validating and serving, and how to get what is missing."""
    from vlmgen.errors import CheckFailed
    from vlmgen.serve.doctor import diagnose

    diagnosis = diagnose()
    if as_json:
        _print_json(diagnosis.to_dict())
    else:
        _print_rows(diagnosis.lines)
    if not diagnosis.healthy:
        raise CheckFailed("something that serving needs is missing")


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def _print_parallel(table: ParallelTable, memory: Mapping[int, RankMemory]) -> None:
    from rich.table import Table

    def notes(split: TextSplit | VisionSplit) -> tuple[str, str]:
        warnings = [f"warning: {text}" for text in split.warnings]
        why = [*split.facts, *warnings] if split.legal else list(split.problems)
        return "yes" if split.legal else "no", "\n".join(why)

    console = _console()
    columns = ("TP", "legal", "weights", "KV of a token", "why")
    text = Table(*columns, title=f"{table.name}: text", title_justify="left")
    for row in table.text:
        legal, why = notes(row)
        held = memory.get(row.tp)
        sizes = (
            (f"{held.weights / 2**30:.2f} GiB", f"{held.kv_per_token / 2**10:.0f} KiB")
            if held
            else ("", "")
        )
        text.add_row(str(row.tp), legal, *sizes, why)
    console.print(text)
    title = f"{table.name}: vision"
    vision = Table("ranks", "TP x DP", "legal", "why", title=title, title_justify="left")
    for ranks, splits in table.vision.items():
        vision.add_section()
        for index, split in enumerate(splits):
            size = f"{split.tp} x {split.dp}"
            vision.add_row("" if index else str(ranks), size, *notes(split))
    console.print(vision)


def _mend(
    changed: list[PackageDifference], specs: Path, generated: Path, templates: Path | None
) -> str:
    """The command that makes packages what their specs give; empty where none does."""
    present = [difference for difference in changed if difference.state == "changed"]
    if not present:
        return ""
    words = ["vlmgen", "update"]
    if len(present) == 1:
        words.append(str(present[0].package))
    else:
        words.append("--all")
        named = (("--specs", specs, "specs"), ("--generated", generated, "generated"))
        for option, path, default in named:
            words += [option, str(path)] if path != Path(default) else []
    words += ["--templates", str(templates)] if templates else []
    return f"run `{shlex.join(words)}`"


def _print_difference(difference: PackageDifference, stat: bool) -> None:
    if difference.state in ("no package", "no spec"):
        mend = f": run `vlmgen new {difference.spec}`" if difference.spec else ""
        print(f"{difference.package}: {difference.state}{mend}")
        return
    if difference.state == "same":
        print(f"{difference.package}: nothing would change")
        return
    files = difference.files
    what = f"{len(files)} file{'' if len(files) == 1 else 's'}" if files else "only its records"
    print(f"{difference.package}: {what} would change")
    for cause in difference.causes:
        print(f"  because of {cause.text()}")
    for file in files:
        notes = "; ".join(cause.short() for cause in file.causes)
        print(f"  {file.status:8} {file.path}  +{file.added} -{file.removed}"
              + (f"  ({notes})" if notes else ""))  # fmt: skip
    if not stat:
        for file in files:
            print(file.diff, end="")


def _print_families(found: list[Family]) -> None:
    from rich.table import Table
    from rich.text import Text

    from vlmgen.families import EVERY_PACKAGE_REFUSES, not_generated
    from vlmgen.proofs import KINDS

    console = _console()
    table = Table("family", "text", "vision", "prompt", "checkpoints", "refused", title="Families",
                  title_justify="left", show_lines=True)  # fmt: skip
    for family in found:
        names = "\n".join(family.spec.checkpoint_names)
        traits = ("; ".join(part) for part in (family.text, family.vision, family.prompt))
        cells = (family.spec.family, *traits, names, "; ".join(family.refused))
        table.add_row(*map(Text, cells))
    console.print(table)
    proofs = Table("family", "proof", "last run", title="Proofs", title_justify="left")
    for family in found:
        proofs.add_section()
        name = family.spec.family
        if not family.package:
            proofs.add_row(name, "all", f"no package: run `vlmgen new {family.path}`")
            continue
        for kind, cell in zip(KINDS, family.cells, strict=True):
            proofs.add_row(name, kind.title, Text(cell.text_today()))
            name = ""
    console.print(proofs)
    axes = Table("axis", "value", "needed by", title="Not generated by this version",
                 title_justify="left")  # fmt: skip
    for row in not_generated():
        axes.add_row(*map(Text, row))
    console.print(axes)
    console.print("every package refuses " + ";\n  ".join(EVERY_PACKAGE_REFUSES), highlight=False)


def _print_rows(rows: list[Any]) -> None:
    """Rows of a report, whatever their fields are."""
    from rich.table import Table
    from rich.text import Text

    if not rows:
        return
    names = [field.name for field in dataclasses.fields(rows[0])]
    table = Table(*(name.replace("_", " ") for name in names))
    for row in rows:
        table.add_row(*(Text(_cell(getattr(row, name))) for name in names))
    _console().print(table)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "ok" if value else "FAIL"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _close_stdout() -> None:
    """Send what is left in the buffer nowhere, so that the interpreter's exit stays quiet too."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())
    os.close(devnull)


def _register_commands() -> None:
    from vlmgen.commands import (
        adopt,
        compare,
        compile,
        explain,
        migrate,
        templates,
        update,
        watch,
    )

    for module in (adopt, compare, compile, explain, migrate, update, watch):
        app.command(module.NAME, epilog=module.EXAMPLE)(user_errors(module.command))
    group = typer.Typer(help=templates.HELP, no_args_is_help=True)
    for name, command, example in templates.COMMANDS:
        group.command(name, epilog=example)(user_errors(command))
    app.add_typer(group, name=templates.NAME, epilog=templates.COMMANDS[0][2])


_register_commands()


def main() -> None:
    """Entry point of `vlmgen` and of `python -m vlmgen`."""
    try:
        try:
            app(prog_name="vlmgen")
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        _close_stdout()
        sys.exit(0)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)
