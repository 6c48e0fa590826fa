"""Wrong variants of the packages, and for each the generated test that must notice it.

One module per family, with a tuple `FAULTS`. A fault replaces text that occurs exactly once in one
generated file. If a template changes so that the text is gone, the suite says so: a fault that
cannot be seeded proves nothing.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Fault:
    """One wrong variant.

    Args:
        name: What is wrong, for the test's id.
        file: File of the package, below its module folder.
        old: Text that occurs exactly once.
        new: What stands there instead.
        caught_by: `file::test` of the generated tests that must fail; all its cases are run.
    """

    name: str
    file: str
    old: str
    new: str
    caught_by: str


LEAST = 5
"""Faults that a family has at least."""

CONFIG = "config.py"
MODEL = "model.py"
VISION = "vision_encoder.py"
LOADERS = "weight_loaders.py"
MAPPING = "weight_mapping.py"
PREPROCESSING = "utils/preprocessing.py"
PACKING = "utils/block_packing.py"
MERGE = "utils/merge_vision_embeds.py"
MROPE = "utils/mrope.py"


def families() -> list[str]:
    """Families that have a catalogue, sorted."""
    return sorted(path.stem for path in Path(__file__).parent.glob("[a-z]*.py"))


def faults_of(family: str) -> tuple[Fault, ...]:
    """The wrong variants of one family."""
    return importlib.import_module(f"{__name__}.{family}").FAULTS


def short_lists() -> dict[str, list[Fault]]:
    """For each family the faults that no family before it has, filled up to five.

    `make test` seeds these. `make test-all` seeds every fault in every family that has it.
    """
    lists, seen = {}, set()
    for family in families():
        faults = faults_of(family)
        fresh = [fault for fault in faults if fault not in seen]
        known = [fault for fault in faults if fault in seen]
        lists[family] = [*fresh, *known[: max(0, LEAST - len(fresh))]]
        seen.update(faults)
    return lists
