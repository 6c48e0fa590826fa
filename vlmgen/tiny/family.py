"""Descriptions of tiny checkpoints: `families/*.json`, one per family, as data.

A description names the Hugging Face classes and gives their arguments:

    config_class, model_class   classes that transformers exports
    config_kwargs               arguments of the config class
    tokenizer                   special tokens (the first has id 256), end, padding, named tokens
    token_ids                   config field -> special token; checked when the checkpoint is built
    never_said                  config fields of tokens whose row of the head is zero: a placeholder
                                that the model says cannot be read again
    processor                   classes and arguments of the processor and its parts
    chat                        turn markers, and the text that stands for one image or one video
    layouts, published_layout   rules that turn the saved tensors into each published naming
    configs                     layout -> rules that turn the saved config.json into its form there
    parallel                    other sizes, with 8 query and 2 key/value heads, for runs on ranks
    extends                     another family, of which this one states only the differences;
                                null takes an entry of the other one away
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from vlmgen.errors import UsageError


def family_names() -> list[str]:
    """Names of all families that have a tiny checkpoint, sorted."""
    folder = resources.files("vlmgen.tiny") / "families"
    return sorted(entry.name[:-5] for entry in folder.iterdir() if entry.name.endswith(".json"))


def load_family(name: str) -> dict[str, Any]:
    """Read one description, `extends` resolved.

    Raises:
        UsageError: No such family.
    """
    if name not in family_names():
        raise UsageError(
            f"there is no tiny checkpoint {name!r}; legal: {', '.join(family_names())}"
        )
    file = resources.files("vlmgen.tiny") / "families" / f"{name}.json"
    description = json.loads(file.read_text(encoding="utf-8"))
    base = description.pop("extends", None)
    return merge(load_family(base), description) if base else description


def family_of(spec_or_family: Any, *, tied: bool = False) -> str:
    """Name of the tiny family that a spec, a spec file or a name stands for.

    Args:
        spec_or_family: A loaded spec, the path of a YAML spec, or a family's name.
        tied: The variant whose head is the embedding.
    """
    name = spec_or_family
    if isinstance(name, Path) and str(name) in family_names():
        name = str(name)  # from a command line, where both are words
    if isinstance(name, Path) or (isinstance(name, str) and name.endswith((".yaml", ".yml"))):
        from vlmgen.spec.load import load_spec

        name = load_spec(Path(name))
    if not isinstance(name, str):
        name = name.tiny
    return f"{name}_tied" if tied and not name.endswith("_tied") else name


def merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `changes` laid over it, mappings merged at every depth; None removes an entry."""
    merged = copy.deepcopy(dict(base))
    for key, value in changes.items():
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, Mapping) and isinstance(merged.get(key), dict):
            merged[key] = merge(merged[key], value)
        else:
            merged[key] = copy.deepcopy(value)
    return merged
