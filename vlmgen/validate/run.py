"""`vlmgen validate`: every group of checks on one package, and the report."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

import torch

import vlmgen
from vlmgen import proofs, standin
from vlmgen.errors import CheckpointError, UsageError
from vlmgen.files import replace_file
from vlmgen.validate.fork_server import start_fork_server
from vlmgen.validate.report import Report, Row

if TYPE_CHECKING:
    from vlmgen.validate import parallel

GROUPS = ("vision modules", "text modules", "end to end", "positions", "parallel", "bfloat16")
Progress = Callable[[str], None]


def validate(
    package: Path,
    checkpoint: Path | None = None,
    tiny: bool = False,
    only: Sequence[str] | None = None,
    record: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Compare a generated package with Hugging Face, module by module and end to end.

    Args:
        package: Folder of the package.
        checkpoint: A checkpoint as published; or
        tiny: build a tiny one.
        only: What to run, each a group or `GROUP/CHECK`; None runs all of `GROUPS`.
        record: Store the figures in `specs/results/FAMILY.json`, for the package's README.
        progress: Called with what is being done.

    Returns:
        The report. A check that crashed is a failed row.

    Raises:
        UsageError: No such package or group, or figures that may not be recorded.
        CheckpointError: The checkpoint cannot be loaded, with the package's own message.
    """
    progress = progress or (lambda message: None)
    chosen = _chosen(only)
    if record and (only or not tiny):
        raise UsageError("only the figures of a complete run with --tiny can be recorded")
    if checkpoint is not None and not checkpoint.is_dir():
        raise UsageError(f"{checkpoint} is not a directory")
    _set_up_process()
    if "parallel" in chosen:  # first, for its imports take as long as those below
        start_fork_server()
    from vlmgen.standin.ranks import one_rank
    from vlmgen.tiny.build import quiet_transformers
    from vlmgen.validate.package import load_package_spec

    spec = load_package_spec(package)
    with ExitStack() as stack:
        stack.enter_context(one_thread())
        stack.enter_context(quiet_transformers())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vlmgen-validate-")))
        if not parallel_state_exists():  # a caller may have made one already
            stack.enter_context(one_rank())
        run = Run(package, spec, checkpoint, folder, progress)
        progress("loading")
        if run.load():
            stack.callback(run.stop)
            # The ranks begin first: they have the second core while the rest has this one.
            for group in sorted(chosen, key=lambda name: name != "parallel"):
                run.group(group, chosen[group])
            run.finish()
    if record:
        store_results(run.report, package, spec.family)
    return run.report


class Run:
    """What the groups share: models are built when the first check asks for them."""

    def __init__(
        self, package: Path, spec: Any, checkpoint: Path | None, folder: Path, progress: Progress
    ) -> None:
        self.package, self.spec, self.folder, self.progress = package, spec, folder, progress
        self.report = Report(spec.title, facts=_facts(spec, checkpoint))
        self._given = checkpoint
        self._checks: frozenset[str] = frozenset()
        self._ranks: tuple[parallel.ParallelRuns, Thread] | None = None

    # ------------------------------------------------------------------------------ shared models

    @cached_property
    def checkpoint(self) -> Path:
        """The checkpoint given, or a tiny one in float32."""
        from vlmgen.tiny.build import build_tiny

        return self._given or build_tiny(self.spec, self.folder / "tiny")

    @cached_property
    def bfloat16_checkpoint(self) -> Path:
        """The checkpoint given, or a tiny one in bfloat16."""
        from vlmgen.tiny.build import build_tiny

        return self._given or build_tiny(self.spec, self.folder / "tiny_bf16", dtype="bfloat16")

    @property
    def factory(self) -> type:
        """The package's class; looked up anew, for another package may have taken its name."""
        from vlmgen.validate.package import load_factory

        return load_factory(self.package)

    @cached_property
    def reference(self) -> Any:
        """Hugging Face in float32."""
        from vlmgen.validate.reference import Reference

        return Reference(self.checkpoint, self.spec)

    @cached_property
    def prompts(self) -> list[Any]:
        """The standard prompts."""
        from vlmgen.validate.reference import standard_prompts

        return standard_prompts(self.reference)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Arguments of `PackageDriver` that fit the prompts."""
        from vlmgen.validate.end_to_end import NEW_TOKENS
        from vlmgen.validate.reference import text_settings, vision_settings

        vision = vision_settings(self.reference, self.prompts)
        return {"vision_neuron_config": vision, **text_settings(self.prompts, NEW_TOKENS)}

    @cached_property
    def driver(self) -> Any:
        """The package in float32."""
        return self.make_driver()

    def make_driver(self, **changes: Any) -> Any:
        """Another driver of the package, in float32 unless told otherwise."""
        from vlmgen.validate.driver import PackageDriver

        arguments = {"dtype": torch.float32, **self.settings, **changes}
        return PackageDriver(self.factory, self.checkpoint, **arguments)

    # ------------------------------------------------------------------------------------ running

    def load(self) -> bool:
        """Load the checkpoint into the package first, whose messages are the clearest.

        Returns:
            Whether checks can run; if not, the report says why.

        Raises:
            CheckpointError: The checkpoint does not fit.
        """
        from vlmgen.validate.driver import PackageDriver

        check_files(self.checkpoint)
        try:
            PackageDriver(self.factory, self.checkpoint, dtype=torch.float32, warm_up=False)
        except Exception as error:
            if type(error).__module__.startswith(f"{self.factory.__module__.split('.')[0]}."):
                raise CheckpointError(f"{self.checkpoint}: {error}") from error
            self.report.crashed("load", "checkpoint", error)
            return False
        return True

    def group(self, name: str, checks: Iterable[str] = ()) -> None:
        """Run one group, or some of its checks; whatever goes wrong becomes a row.

        The worlds of ranks of `parallel` are only begun: `finish` waits for them.
        """
        self._checks = frozenset(checks)
        run = {
            "vision modules": self._modules,
            "text modules": self._modules,
            "end to end": self._end_to_end,
            "positions": self._positions,
            "parallel": self._parallel,
            "bfloat16": self._precision,
        }[name]
        self.progress(name)
        try:
            run(name)
        except CheckpointError:
            raise
        except Exception as error:
            self.report.crashed(name, "set-up", error)

    def finish(self) -> None:
        """Wait for the ranks, and put the rows into the order of `GROUPS`."""
        if self._ranks is not None:
            runs, thread = self._ranks
            thread.join()
            self._ranks = None
            self.report.add(runs.report)
        self.report.rows.sort(key=lambda row: GROUPS.index(row.group))

    def stop(self) -> None:
        """End what still runs, for whoever does not want to wait for it."""
        if self._ranks is not None:
            runs, thread = self._ranks
            runs.stop()
            thread.join()

    def wants(self, check: str) -> bool:
        """Whether a check of the running group was asked for."""
        return not self._checks or check in self._checks

    def attempt(self, group: str, check: str, function: Callable[[], None]) -> None:
        """Run one check; an exception is a failed row."""
        if self.wants(check):
            self.progress(f"{group}: {check}")
            _attempt(self.report, group, check, function)

    @cached_property
    def _module_checks(self) -> Any:
        from vlmgen.validate.modules import ModuleChecks

        with torch.no_grad():
            return ModuleChecks(self.reference, self.driver, self.prompts)

    def _modules(self, group: str) -> None:
        from vlmgen.validate.checks import run_checks
        from vlmgen.validate.modules import LIMIT

        checks = self._module_checks
        parts = checks.vision() if group == "vision modules" else checks.text()
        wanted = [part for part in parts if self.wants(part.name)]
        for name, outcome in run_checks(wanted, self.reference, self.driver):
            if isinstance(outcome, Exception):
                self.report.crashed(group, name, outcome)
            else:
                self.report.compared(group, name, outcome, LIMIT)

    def _end_to_end(self, group: str) -> None:
        from vlmgen.validate.end_to_end import EndToEnd

        checks = EndToEnd(self.reference, self.driver, self.make_driver, self.prompts, self.report)
        for name, function in checks.checks():
            self.attempt(group, name, function)

    def _positions(self, group: str) -> None:
        from vlmgen.validate.positions import position_checks

        for name, function in position_checks(self.reference, self.driver, self.report):
            self.attempt(group, name, function)

    def _precision(self, group: str) -> None:
        from vlmgen.validate.driver import PackageDriver
        from vlmgen.validate.precision import Precision
        from vlmgen.validate.reference import Reference

        checkpoint = self.bfloat16_checkpoint
        with torch.no_grad():
            checks = Precision(
                Reference(checkpoint, self.spec),
                Reference(checkpoint, self.spec, torch.bfloat16),
                PackageDriver(self.factory, checkpoint, dtype=torch.bfloat16, **self.settings),
                self.prompts,
                self.report,
            )
        for name in checks.names():
            self.attempt(group, name, partial(checks.run, name))

    def _parallel(self, group: str) -> None:
        from vlmgen.validate import parallel
        from vlmgen.validate.reference import (
            Reference,
            standard_prompts,
            text_settings,
            vision_settings,
        )

        checkpoint = parallel.build_parallel_checkpoint(self.spec, self.folder / "parallel")
        reference = Reference(checkpoint, self.spec)
        prompts = sorted(standard_prompts(reference), key=lambda p: p.name not in _PARALLEL_PROMPTS)
        prompts = prompts[: len(_PARALLEL_PROMPTS)]
        settings = {
            "vision_neuron_config": vision_settings(reference, prompts),
            "seq_buckets": (1, len(prompts)),
            **text_settings(prompts, parallel.NEW_TOKENS),
        }
        runs = parallel.ParallelRuns(
            self.package,
            checkpoint,
            prompts,
            settings,
            Report(group),
            has_experts=self.spec.text.moe is not None,
        )
        runs.run_one_rank()
        if self.wants("tp 1"):
            _attempt(runs.report, group, "tp 1", partial(runs.check_reference, reference))
        sizes = [size for size in parallel.WORLD_SIZES if self.wants(f"tp {size}")]

        def run_worlds() -> None:
            for size in sizes:
                check = partial(runs.check_world, size, self.progress)
                _attempt(runs.report, group, f"tp {size}", check)

        thread = Thread(target=run_worlds, name="ranks", daemon=True)
        self._ranks = runs, thread
        thread.start()


def _attempt(report: Report, group: str, check: str, function: Callable[[], None]) -> None:
    """Run one check; an exception is a failed row."""
    try:
        function()
    except Exception as error:
        report.crashed(group, check, error)


# Others take the place of those that a family has not.
_PARALLEL_PROMPTS = ("text", "three pictures", "long video", "video and picture", "mixture")


def check_files(checkpoint: Path) -> None:
    """Refuse a checkpoint whose files are missing or broken, before any model is built.

    Raises:
        CheckpointError: With the file and what is wrong with it.
    """
    from vllm_neuron.utils.checkpoints import SafetensorsCheckpoint

    from vlmgen.validate.driver import read_config

    if not (checkpoint / "config.json").is_file():
        raise CheckpointError(
            f"{checkpoint}: no config.json; a checkpoint is a directory with config.json and "
            "safetensors files"
        )
    try:
        read_config(checkpoint)
        SafetensorsCheckpoint(str(checkpoint))
    except (OSError, ValueError, RuntimeError, AttributeError) as error:
        raise CheckpointError(f"{checkpoint}: {error}") from error


def store_results(report: Report, package: Path, family: str) -> Path:
    """Write the figures that a generated README quotes; the same figures give the same bytes.

    Errors are rounded up to one digit, so that the last bits of a machine do not show.

    Raises:
        UsageError: The package does not lie in a checkout with `specs/`.
    """
    import transformers

    specs = package.resolve().parent.parent / "specs"
    if not (specs / f"{family}.yaml").is_file():
        raise UsageError(f"{specs} holds no {family}.yaml; figures are stored next to the spec")
    groups: list[dict[str, Any]] = []
    for name in dict.fromkeys(row.group for row in report.rows):
        rows = [row for row in report.rows if row.group == name]
        measured = [row for row in rows if row.value is not None and row.limit is not None]
        worst = max(measured, key=_used_share) if measured else None
        groups.append(
            {
                "name": name,
                "checks": len(rows),
                "worst": "" if worst is None else _quoted(worst),
                "limit": "" if worst is None else _quoted_limit(worst),
                "passed": all(row.passed for row in rows),
            }
        )
    data = {
        "vlmgen": vlmgen.__version__,
        "transformers": transformers.__version__,
        "torch": torch.__version__.partition("+")[0],
        "passed": report.passed,
        "groups": groups,
    }
    target = specs / "results" / f"{family}.json"
    target.parent.mkdir(exist_ok=True)
    replace_file(target, (json.dumps(data, indent=2) + "\n").encode("utf-8"))
    kept = ("checks", "worst", "limit", "passed")
    runs = {group["name"]: {key: group[key] for key in kept} for group in groups}
    proofs.record(package.resolve(), family, runs)
    return target


def parallel_state_exists() -> bool:
    """Whether this process has its process groups; they must be a world of one."""
    from vllm_neuron.parallel import neuron_parallel_state

    if not neuron_parallel_state.is_initialized():
        return False
    if torch.distributed.get_world_size() != 1:
        raise UsageError("validation starts its own ranks; call it from a single process")
    return True


def _used_share(row: Any) -> float:
    """How much of its limit a row uses; a row that must be zero uses all or nothing."""
    if row.limit:
        return row.value / row.limit
    return float("inf") if row.value else -1.0


def _quoted(row: Row) -> str:
    """A row's figure for the README: a ratio to two decimals, an error to one digit, upwards."""
    from vlmgen.validate import precision

    value = row.value or 0.0
    return f"{value:.2f}" if row.group == precision.GROUP else rounded_up(value)


def _quoted_limit(row: Row) -> str:
    from vlmgen.validate import precision

    limit = f"{row.limit:g}"
    return f"{limit}, or overlap {precision.OVERLAP}" if row.group == precision.GROUP else limit


def rounded_up(value: float) -> str:
    """One significant digit, upwards: `1.02e-06 -> 2e-06`, `0.0 -> 0`."""
    from decimal import ROUND_UP, Decimal

    if value == 0.0:
        return "0"
    exact = Decimal(repr(value))
    if not exact.is_finite():
        return str(value)
    return f"{float(exact.quantize(Decimal((0, (1,), exact.adjusted())), rounding=ROUND_UP)):g}"


def _chosen(only: Sequence[str] | None) -> dict[str, list[str]]:
    """Group -> checks of it, none for all; in the order of `GROUPS`."""
    if not only:
        return {name: [] for name in GROUPS}
    asked = [entry.partition("/") for entry in only]
    unknown = [group for group, _, _ in asked if group not in GROUPS]
    if unknown:
        raise UsageError(
            f"there is no validation {', '.join(map(repr, unknown))}; legal: "
            f"{', '.join(GROUPS)}, or GROUP/CHECK"
        )
    chosen = {}
    for name in GROUPS:
        checks = [check for group, _, check in asked if group == name]
        if checks:
            chosen[name] = [] if "" in checks else checks
    return chosen


def _facts(spec: Any, checkpoint: Path | None) -> dict[str, str]:
    import transformers

    plugin = {"plugin": "the installed plugin", "standin": "vlmgen's stand-in"}[standin.which()]
    return {
        "package": f"vllm_neuron_{spec.family}",
        "checkpoint": checkpoint.name if checkpoint else "tiny, random weights, published layout",
        "plugin": f"{plugin}, on the CPU",
        "versions": (
            f"vlmgen {vlmgen.__version__}, transformers {transformers.__version__}, "
            f"torch {torch.__version__}"
        ),
    }


def _set_up_process() -> None:
    """CPU mode, no network, and the plugin or its stand-in importable."""
    os.environ.setdefault(standin.CPU_MODE_VARIABLE, "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    standin.require()


@contextmanager
def one_thread() -> Iterator[None]:
    """Tiny matrices gain nothing from threads and lose a lot on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
