"""Seeds faults into copies of a package and runs its own tests on each, in one process.

    python tests/faults/seed.py generated/FAMILY WORKDIR [FAULT ...] > outcomes.json

torch, transformers and vLLM are imported once; the package and its tests are imported anew for
each fault. Prints a JSON object: fault name -> test file::test -> "passed" or "failed". The name ""
is the package as it is.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from catalogue import Fault, faults_of  # beside this script


class Outcomes:
    """Collects whether each test function passed in all its cases."""

    def __init__(self) -> None:
        self.failed: dict[str, bool] = defaultdict(bool)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.split("[")[0].rsplit("/", 1)[-1]
        self.failed[name] |= report.failed


def seed(package: Path, workdir: Path, fault: Fault | None, number: int = 0) -> Path:
    """A copy of the package with the fault in it.

    Raises:
        ValueError: The text to be replaced does not occur exactly once.
    """
    copy = workdir / ("as_it_is" if fault is None else f"fault_{number:02d}")
    shutil.copytree(package, copy, ignore=shutil.ignore_patterns("__pycache__", ".pytest_cache"))
    if fault is not None:
        (module,) = copy.glob("vllm_neuron_*")
        file = module / fault.file
        text = file.read_text(encoding="utf-8")
        if text.count(fault.old) != 1:
            times = text.count(fault.old)
            raise ValueError(f"{fault.name}: {fault.file} holds its text {times} times")
        file.write_text(text.replace(fault.old, fault.new), encoding="utf-8")
    return copy


def forget(folder: Path) -> None:
    """Drop every module that was imported from below a folder."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        ours = name.split(".")[0] == "tests" or name.startswith("vllm_neuron_")
        if ours or (file and Path(file).is_relative_to(folder)):
            del sys.modules[name]


def run_tests(package: Path, tests: list[str]) -> dict[str, str]:
    """Run some of a package's own tests; `file::test` -> outcome."""
    outcomes = Outcomes()
    sys.path.insert(0, str(package))
    here = Path.cwd()
    try:
        os.chdir(package)
        with contextlib.redirect_stdout(io.StringIO()):
            pytest.main(
                ["-q", "-p", "no:cacheprovider", *(f"tests/{test}" for test in tests)],
                plugins=[outcomes],
            )
    finally:
        os.chdir(here)
        sys.path.remove(str(package))
        forget(package)
    return {name: "failed" if failed else "passed" for name, failed in outcomes.failed.items()}


def main() -> None:
    """Run the named faults, or all, and the package as it is."""
    package, workdir, *names = sys.argv[1:]
    package, workdir = Path(package).resolve(), Path(workdir).resolve()
    faults = [fault for fault in faults_of(package.name) if not names or fault.name in names]
    named = sorted({fault.caught_by for fault in faults})
    results = {"": run_tests(seed(package, workdir, None), named)}
    for number, fault in enumerate(faults):
        results[fault.name] = run_tests(seed(package, workdir, fault, number), [fault.caught_by])
        print(f"{results[fault.name]}  {fault.name}", file=sys.stderr, flush=True)
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
