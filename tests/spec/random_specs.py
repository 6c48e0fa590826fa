"""Random specs that are legal: of a family, with axes and parts of others where rules allow."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from pydantic import ValidationError

from vlmgen.render.escaping import to_yaml
from vlmgen.spec.axes import AXES
from vlmgen.spec.load import load_spec
from vlmgen.spec.model import Spec
from vlmgen.spec.rules import check_rules

SPECS = sorted((Path(__file__).resolve().parents[2] / "specs").glob("*.yaml"))
VALUES = [
    (path, value)
    for path, axis in AXES.items()
    if len(axis.implemented) > 1
    for value in axis.implemented
]
PARTS = [
    "tokens", "text.attention", "text.mlp", "text.moe", "text.norm", "text.rope",
    "vision.attention", "vision.deepstack", "vision.merger", "vision.mlp", "vision.norm",
    "vision.patch_embed", "vision.position",
]  # fmt: skip


@functools.cache
def family_data(index: int) -> dict[str, Any]:
    """The spec of a family as data."""
    return load_spec(SPECS[index]).model_dump(mode="json", exclude_none=True)


families = st.integers(0, len(SPECS) - 1)
changes = st.one_of(st.sampled_from(VALUES), st.tuples(st.sampled_from(PARTS), families))


def is_legal(data: dict[str, Any]) -> bool:
    """Whether loading would take this."""
    try:
        Spec.model_validate(data)
    except ValidationError:
        return False
    return not list(check_rules(data, set()))


def value_at(data: dict[str, Any], path: str) -> Any:
    for part in path.split("."):
        data = (data or {}).get(part)
    return data


def changed(data: dict[str, Any], wanted: list[tuple[str, Any]]) -> dict[str, Any]:
    """The data with every change that is legal after those before it."""
    for path, value in wanted:
        *parents, name = path.split(".")
        trial = copy.deepcopy(data)
        holder = value_at(trial, ".".join(parents)) if parents else trial
        if path in PARTS:
            value = value_at(family_data(value), path)
        if not isinstance(holder, dict):
            continue
        holder[name] = copy.deepcopy(value)
        if value is None:
            del holder[name]
        if is_legal(trial):
            data = trial
    return data


@st.composite
def spec_texts(draw: st.DrawFn, versions: int = 1) -> list[str]:
    """Texts of legal specs of one family, each made out of the one before."""
    data = family_data(draw(families))
    texts = []
    for _ in range(versions):
        data = changed(data, draw(st.lists(changes, max_size=6)))
        texts.append(to_yaml(data))
    return texts
