"""What was proven of each family, and when: the stored results of runs, none of them by hand.

`specs/results/FAMILY.json` holds the figures that the package's README quotes. Next to it,
`specs/results/runs/FAMILY.json` says when each proof was run and on which modules, so that a proof
of an earlier package is told from one of today's; a package does not depend on that file.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vlmgen.errors import OutputError
from vlmgen.files import replace_file

_NAME = re.compile(r"[a-z][a-z0-9_]{0,40}")
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}")


@dataclass(frozen=True)
class Kind:
    """A kind of proof that every family has.

    Args:
        name: Name in stored results; the group of `vlmgen validate` where it is one.
        title: Column of a table.
        command: What runs and records it.
    """

    name: str
    title: str
    command: str


_VALIDATE = "vlmgen validate generated/FAMILY --tiny --record"
_CHECK = "vlmgen check generated/FAMILY --record"
_TESTS = "pytest {} --record-proofs"

KINDS: tuple[Kind, ...] = (
    Kind("contract", "contract and device rules", _CHECK),
    Kind("coverage", "published weights", _CHECK),
    Kind("vision modules", "vision modules", _VALIDATE),
    Kind("text modules", "text modules", _VALIDATE),
    Kind("end to end", "end to end", _VALIDATE),
    Kind("positions", "positions", _VALIDATE),
    Kind("parallel", "parallel", _VALIDATE),
    Kind("bfloat16", "bfloat16", _VALIDATE),
    Kind("faults", "seeded faults", _TESTS.format("tests/faults")),
    Kind("served", "served by vLLM", _TESTS.format("tests/serve")),
)
NAMES = frozenset(kind.name for kind in KINDS)


@dataclass(frozen=True)
class Proof:
    """The last run of one kind.

    Args:
        date: Day of the run, UTC.
        modules: Hash of the package's modules then.
        checks: How many checks it was.
        passed: Whether all passed.
        worst: The worst figure, as a README quotes it, or empty.
        limit: Its limit, or empty.
    """

    date: str
    modules: str
    checks: int
    passed: bool
    worst: str = ""
    limit: str = ""


def modules_sha256(package: Path) -> str:
    """Hash of a package's modules; its README, which quotes results, is not among them."""
    digest = hashlib.sha256()
    for path in sorted(package.glob("vllm_neuron_*/**/*.py")):
        name = path.relative_to(package).as_posix()
        content = path.read_bytes().replace(b"\r\n", b"\n")
        digest.update(f"{name}\0{hashlib.sha256(content).hexdigest()}\n".encode())
    return digest.hexdigest()


def record(
    package: Path, family: str, proofs: Mapping[str, Mapping[str, Any]], specs: Path | None = None
) -> Path:
    """Store the results of a run, over those of earlier runs of the same kinds.

    Args:
        package: The package's folder, `generated/FAMILY` of a checkout.
        family: Name of the family.
        proofs: Kind -> `checks`, `passed`, and `worst` and `limit` where there are figures.
        specs: Directory of the specs; that beside `generated/` by default.

    Returns:
        The file.

    Raises:
        OutputError: The results cannot be written, or those there are none.
        ValueError: There is no such kind.
    """
    unknown = set(proofs) - NAMES
    if unknown:
        raise ValueError(f"no such proof: {', '.join(sorted(unknown))}")
    specs = specs or package.resolve().parent.parent / "specs"
    known = load(specs, family)
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    modules = modules_sha256(package)
    for name, result in proofs.items():
        known[name] = Proof(today, modules, **result)
    ordered = {kind.name: asdict(known[kind.name]) for kind in KINDS if kind.name in known}
    target = _file(specs, family)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{target}: cannot be written: {error.strerror}") from None
    replace_file(target, (json.dumps(ordered, indent=2) + "\n").encode("utf-8"))
    return target


def load(specs: Path, family: str) -> dict[str, Proof]:
    """Kind -> the last stored run.

    Args:
        specs: Directory of the specs.
        family: Name of the family.

    Raises:
        OutputError: What is stored is no record of runs.
    """
    path = _file(specs, family)
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise OutputError(f"{path}: cannot be read: {error}", hint="remove it") from None
    try:
        proofs = {name: Proof(**entry) for name, entry in stored.items()}
        right = all(
            name in NAMES
            and _DATE.fullmatch(proof.date)
            and type(proof.checks) is int
            and type(proof.passed) is bool
            for name, proof in proofs.items()
        )
    except (TypeError, AttributeError):
        right = False
    if not right:
        raise OutputError(f"{path}: is no record of runs", hint="remove it and run the proofs anew")
    return proofs


def _file(specs: Path, family: str) -> Path:
    if not _NAME.fullmatch(family):
        raise ValueError(f"{family!r} is no name of a family")
    return specs / "results" / "runs" / f"{family}.json"
