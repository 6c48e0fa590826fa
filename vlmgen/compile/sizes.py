"""A spec with the sizes of a checkpoint's own config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vlmgen.spec import Spec
    from vlmgen.spec.text import TextSpec
    from vlmgen.spec.vision import VisionSpec


def sizes_of_checkpoint(spec: Spec, config: Mapping[str, Any]) -> tuple[TextSpec, VisionSpec]:
    """The two towers of a spec, every value that config.json states taken from there.

    Args:
        spec: The family.
        config: The JSON object of a checkpoint of that family.
    """
    from vlmgen.importer.from_config import config_readings
    from vlmgen.importer.reading import Readings

    readings = Readings()
    config_readings(config, spec, readings)
    towers = {"text": spec.text, "vision": spec.vision}
    for reading in readings:
        tower, _, path = reading.path.partition(".")
        if tower in towers and path and not path.startswith("config_keys"):
            towers[tower] = _replaced(towers[tower], path.split("."), reading.value)
    return towers["text"], towers["vision"]  # type: ignore[return-value]


def _replaced(model: Any, path: list[str], value: Any) -> Any:
    """A copy with another value at a path; the same where the spec has nothing there."""
    first, *rest = path
    if first not in type(model).model_fields:
        return model
    if rest:
        part = getattr(model, first)
        if part is None:
            return model
        value = _replaced(part, rest, value)
    return model.model_copy(update={first: value})
