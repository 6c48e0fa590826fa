"""All proofs of a package, one after another."""

from __future__ import annotations

import importlib.util
import logging
import multiprocessing
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

from vlmgen.check.api import installed_api, recorded_api
from vlmgen.check.contract import check_contract, check_drift
from vlmgen.check.device_rules import check_device_rules
from vlmgen.check.finding import RULES, Finding
from vlmgen.check.integrity import check_integrity, check_overrides
from vlmgen.check.legality import check_legality
from vlmgen.check.model_class import absent_members, check_model_class, processor_keywords
from vlmgen.check.source import PackageSource, read_package
from vlmgen.errors import MissingDependencyError, UsageError, VlmgenError

__all__ = ["RULES", "Finding", "run_checks"]

logger = logging.getLogger(__name__)

COVERAGE_CODES = "VG3"  # findings of the weights' coverage
COVERAGE_NEEDS = ("torch", "transformers", "vllm")


def run_checks(
    packages: Iterable[Path],
    plugin: str = "recorded",
    progress: Callable[[str], None] | None = None,
    record: bool = False,
    templates: Path | None = None,
    processes: int = 1,
) -> list[Finding]:
    """Prove packages without weights.

    The plugin contract, device rules and parallel legality need no torch. The weight coverage
    does; where it is not installed, a warning says that this proof was not run.

    Args:
        packages: Directories of generated packages.
        plugin: `recorded` for the recorded signatures; `installed` to read them from the plugin
            that is importable here and to report where it differs from the recorded ones.
        progress: Told what is being checked.
        record: Store what was proven beside the specs, for `vlmgen families`.
        templates: Folder of template overrides; by default where a package says.
        processes: How many packages are checked at a time, each in a new interpreter if several.

    Returns:
        All findings, by package and then by file, line and code.

    Raises:
        UsageError: A directory is no generated package, or `plugin` is neither of the two.
        MissingDependencyError: `installed` was asked for and there is no plugin.
        SpecError: The spec of a package is faulty.
        OutputError: The manifest of a package cannot be read.
    """
    if plugin not in ("recorded", "installed"):
        raise UsageError(f"plugin is {plugin!r}; legal: recorded, installed")
    say = progress or (lambda message: None)
    check = partial(_check_package, plugin=plugin, templates=templates)
    findings: list[Finding] = []
    for root, found in _checked([Path(root) for root in packages], check, say, processes):
        findings += found
        if record:
            _record(root, found)
    return list(dict.fromkeys(findings))  # packages may share a folder of overrides


def _checked(
    roots: Sequence[Path],
    check: Callable[..., list[Finding]],
    say: Callable[[str], None],
    processes: int,
) -> Iterator[tuple[Path, list[Finding]]]:
    count = min(processes, len(roots))
    if count < 2:
        for root in roots:
            yield root, check(root, say=say)
        return
    context = multiprocessing.get_context("spawn")
    with context.Pool(count, signal.signal, (signal.SIGINT, signal.SIG_IGN)) as pool:
        say(f"{len(roots)} packages, {count} at a time")
        outcomes = pool.imap(partial(_outcome, check), roots)
        for number, (root, found) in enumerate(zip(roots, outcomes, strict=True), 1):
            say(f"{root} ({number} of {len(roots)})")
            # An error does not travel well between processes: it happens again here.
            yield root, check(root, say=say) if found is None else found


def _outcome(check: Callable[..., list[Finding]], root: Path) -> list[Finding] | None:
    try:
        return check(root)
    except VlmgenError:
        return None


def _check_package(
    root: Path, plugin: str, templates: Path | None, say: Callable[[str], None] = lambda _: None
) -> list[Finding]:
    """Every proof of one package; its findings by file, line and code."""
    source = read_package(root)
    found = list(source.findings)
    say(f"{root}: files")
    found += check_integrity(source.root) + check_overrides(source.root, templates)
    if source.findings:  # what does not parse proves nothing else
        marked = {finding.path for finding in found if finding.code == "VG006"}
        return sorted(f for f in found if f.code != "VG002" or f.path not in marked)
    say(f"{root}: plugin contract")
    found += _contract(source, plugin)
    say(f"{root}: device rules")
    found += check_device_rules(source, recorded_api())
    found += _spec_checks(source, say)
    return sorted(set(found))


def _record(root: Path, findings: Iterable[Finding]) -> None:
    """Store the outcome; the weights count once per published checkpoint."""
    source = read_package(root)
    if source.findings:
        raise UsageError(f"{root}: no package whose results could be stored")
    from vlmgen import proofs
    from vlmgen.spec.load import load_spec
    from vlmgen.weights.published import families, published_family

    found = set(findings)
    family = load_spec(source.root / "spec.yaml").family
    weights = {finding for finding in found if finding.code.startswith(COVERAGE_CODES)}
    rules = [code for code in RULES if not code.startswith(COVERAGE_CODES)]
    results = {"contract": {"checks": len(rules), "passed": not found - weights}}
    missing = [name for name in COVERAGE_NEEDS if importlib.util.find_spec(name) is None]
    if family in families() and not missing:
        count = len(published_family(family).checkpoints)
        results["coverage"] = {"checks": count, "passed": not weights}
    proofs.record(source.root, family, results)


def _contract(source: PackageSource, plugin: str) -> list[Finding]:
    recorded = recorded_api()
    if plugin == "recorded":
        return check_contract(source, recorded)
    from vlmgen import standin

    try:
        standin.require()
        live, trouble = installed_api(recorded)
    except ImportError as error:
        raise MissingDependencyError(
            f"the installed plugin cannot be read: {error}",
            hint="use --plugin recorded, or install the plugin",
        ) from error
    drifted = check_drift(source, recorded, live, trouble)
    # A call that breaks because of drift is one fault, and the drift says it better.
    places = {(finding.path, finding.line) for finding in drifted}
    calls = check_contract(source, live)
    return drifted + [finding for finding in calls if (finding.path, finding.line) not in places]


def _spec_checks(source: PackageSource, say: Callable[[str], None]) -> list[Finding]:
    """The proofs that compare a package with its spec."""
    path = source.root / "spec.yaml"
    if not path.is_file():
        return [Finding(path.as_posix(), 1, "VG001", "there is no spec.yaml", "generate anew")]
    from vlmgen.spec.load import load_spec

    spec = load_spec(path)
    found = check_model_class(
        source,
        recorded_api(),
        spec.architecture,
        processor_keywords(spec),
        absent_members(spec),
    )
    say(f"{source.root}: parallel legality")
    found += check_legality(source, spec)
    missing = [name for name in COVERAGE_NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        logger.warning(
            "%s: the weight coverage was not proven: %s not installed (extra `cpu`)",
            source.root,
            ", ".join(missing),
        )
        return found
    from vlmgen.weights.coverage import check_coverage

    return found + check_coverage(
        source, spec, lambda name: say(f"{source.root}: weights of {name}")
    )
