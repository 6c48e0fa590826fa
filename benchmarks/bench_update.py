"""What `vlmgen update --all` costs, and that it grows with the number of packages only.

One package is copied 1, 10 and 100 times, each with a spec of its own, and updated by a fresh
process where nothing changed; 1 and 4 of them also where every spec changed. The peer is the same
command on one package. The packages of this repository are measured too.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from measure import ProcessCost, Row, finish, median, run_process
from package import ROOT

COUNTS = (1, 10, 100)
CHANGED = (1, 4)
REPETITIONS = 5
SHIPPED_LIMIT = 5.0  # seconds
LINEAR = 1.3  # what one more of 100 may cost, in units of one more of 10


def main() -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory(prefix="vlmgen-bench-") as name:
        folder = Path(name)
        cost, count = shipped(folder / "shipped")
        one = folder / "one"
        make_one(one)
        same = {n: costs(make_copies(one, folder / f"same{n}", n)) for n in COUNTS}
        anew = {n: costs(make_copies(one, folder / f"anew{n}", n), change=True) for n in CHANGED}
    rows = [
        Row(
            f"nothing changed, {count} packages of this repository",
            cost.wall,
            "s",
            bound=f"<= {SHIPPED_LIMIT:g} s",
            ok=cost.wall <= SHIPPED_LIMIT,
        )
    ]
    for what, found in (("nothing changed", same), ("every spec changed", anew)):
        peer = found[1]
        for n, value in found.items():
            label = f"{what}, {n} package{'s' if n > 1 else ''}"
            rows += [
                against(label, value.wall, "s", "1 package", peer.wall),
                against("  its user + system time", value.cpu, "s", "1 package", peer.cpu),
            ]
    ten = (same[10].cpu - same[1].cpu) / 9
    hundred = (same[100].cpu - same[10].cpu) / 90
    row = against("one more of 100, processor time", hundred, "s", "one more of 10", ten)
    rows.append(replace(row, bound=f"<= {LINEAR:g}", ok=hundred <= LINEAR * ten))
    finish(
        "bench_update: vlmgen update --all, a whole process, median wall clock",
        rows,
        [
            f"{REPETITIONS} turns after one warm-up; 1 where specs changed",
            "one package is formatted in two processes, several are rendered one per core",
        ],
    )


def against(what: str, value: float, unit: str, peer: str, peer_value: float) -> Row:
    """A row with its ratio to a peer."""
    return Row(what, value, unit, peer, peer_value, value / peer_value)


def shipped(folder: Path) -> tuple[ProcessCost, int]:
    """The cost for the specs of this repository, and how many of them have a package."""
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("specs", "generated"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    run_process(update_all(folder), os.environ)
    return costs(folder), len(list(folder.glob("generated/*/.vlmgen")))


def make_one(folder: Path) -> None:
    """A project of one package."""
    (folder / "specs").mkdir(parents=True)
    spec = folder / "specs" / "family_000.yaml"
    text = (ROOT / "specs" / "qwen3_vl.yaml").read_text(encoding="utf-8")
    spec.write_text(re.sub("(?m)^family: .*", "family: family_000", text), encoding="utf-8")
    run_process(vlmgen("new", str(spec), "--out", str(folder / "generated/family_000")), os.environ)


def make_copies(one: Path, folder: Path, count: int) -> Path:
    """A project of packages like the one; names of one length, so black breaks no line anew."""
    from vlmgen.render.manifest import (
        ATTRIBUTES,
        ATTRIBUTES_PATH,
        MANIFEST_PATH,
        Manifest,
        base_path,
        read_manifest,
        sha256,
        text_sha256,
    )
    from vlmgen.render.publish import publish

    source = one / "generated" / "family_000"
    old = read_manifest(source)
    assert old is not None
    (folder / "specs").mkdir(parents=True)
    for number in range(count):
        family = f"family_{number:03d}"

        def renamed(content: bytes, family: str = family) -> bytes:
            return content.replace(b"family_000", family.encode())

        spec = renamed((one / "specs" / "family_000.yaml").read_bytes())
        (folder / "specs" / f"{family}.yaml").write_bytes(spec)
        files = {
            path.replace("family_000", family): renamed((source / path).read_bytes())
            for path in old.files
        }
        hashes = {path: sha256(content) for path, content in files.items()}
        origin = old.origin.replace("family_000", family)
        new = Manifest(
            **{**vars(old), "origin": origin, "spec": text_sha256(spec), "files": hashes}
        )
        bases = {base_path(hashes[path]): content for path, content in files.items()}
        records = {ATTRIBUTES_PATH: ATTRIBUTES, MANIFEST_PATH: new.to_bytes()}
        publish(folder / "generated" / family, {**files, **bases, **records})
    return folder


def costs(folder: Path, change: bool = False) -> ProcessCost:
    """Medians of the costs of `vlmgen update --all` in a project."""
    found = []
    for turn in range((1 if change else REPETITIONS) + 1):
        for spec in folder.glob("specs/*.yaml") if change else ():
            text = spec.read_text(encoding="utf-8")
            spec.write_text(re.sub("(?m)^title: .*", f"title: Turn {turn}", text), "utf-8")
        cost = run_process(update_all(folder), os.environ)
        if turn:
            found.append(cost)
    return ProcessCost(median(c.wall for c in found), median(c.cpu for c in found))


def update_all(folder: Path) -> list[str]:
    """`vlmgen update --all` for a project."""
    directories = ("--specs", str(folder / "specs"), "--generated", str(folder / "generated"))
    return vlmgen("update", "--all", *directories)


def vlmgen(*arguments: str) -> list[str]:
    """A command of vlmgen as a process of this interpreter."""
    return [sys.executable, "-m", "vlmgen", *arguments]


if __name__ == "__main__":
    os.environ["PYTHONPATH"] = str(ROOT)
    sys.path.insert(0, str(ROOT))
    main()
