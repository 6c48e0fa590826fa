"""What the whole numeric proof of a family costs: `vlmgen validate PKG --tiny`, a whole process.

Every package of this repository is proved once. The ranks of the parallel group compute beside the
other groups; the peer, for one package, is the same checks one after the other, in two processes:
first all groups but that one, then that one.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

from measure import Row, finish, run_process
from package import ROOT

LIMIT = 90.0  # seconds, on two cores
WITH_PEER = "qwen3_vl"


def main() -> None:
    """Measure and print."""
    from vlmgen.validate.run import GROUPS

    packages = sorted(path.parent for path in (ROOT / "generated").glob("*/spec.yaml"))
    beside = [word for group in GROUPS if group != "parallel" for word in ("--only", group)]
    rows = []
    for package in packages:
        own = seconds(package)
        row = Row(package.name, own, "s", bound=f"<= {LIMIT:g} s", ok=own <= LIMIT)
        if package.name == WITH_PEER:
            peer = seconds(package, *beside) + seconds(package, "--only", "parallel")
            row = replace(row, peer="one after the other", peer_value=peer, ratio=own / peer)
        rows.append(row)
    finish(
        "bench_validate: vlmgen validate PKG --tiny, a whole process, wall clock",
        rows,
        ["one turn each; the first of all also reads the libraries from the disk"],
    )


def seconds(package: Path, *options: str) -> float:
    """Wall clock of one validation, which must pass."""
    command = [sys.executable, "-m", "vlmgen", "validate", str(package), "--tiny", *options]
    return run_process(command, os.environ).wall


if __name__ == "__main__":
    os.environ["PYTHONPATH"] = str(ROOT)
    os.environ.setdefault("VLLM_NEURON_CPU_MODE", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.path.insert(0, str(ROOT))
    main()
