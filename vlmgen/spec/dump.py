"""A spec as plain data and as YAML."""

from __future__ import annotations

from typing import Any

import yaml

from vlmgen.spec.model import Spec


def spec_data(spec: Spec) -> dict[str, Any]:
    """The spec as nested dicts and lists in schema order; keys that are left out stay out."""
    return spec.model_dump(mode="json", exclude_defaults=True)


def spec_yaml(spec: Spec) -> str:
    """The resolved spec as YAML that `load_spec` reads back to an equal spec."""
    text: str = yaml.safe_dump(spec_data(spec), sort_keys=False, allow_unicode=True, width=100)
    return text
