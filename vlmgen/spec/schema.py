"""The spec's JSON Schema (2020-12), for editors and for anyone without vlmgen."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from vlmgen.spec.model import Spec


class _Schema(GenerateJsonSchema):
    """Without generated titles: an editor shows the key and its description."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def json_schema() -> dict[str, Any]:
    """The schema as nested dicts, in a fixed order."""
    body = Spec.model_json_schema(schema_generator=_Schema)
    for definition in body["$defs"].values():
        definition.pop("title", None)
    body.pop("title", None)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "vlmgen spec",
        **body,
    }


def schema_text() -> str:
    """The schema as the committed file holds it: JSON with two spaces and a final newline."""
    return json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n"


def committed_schema_text() -> str:
    """The file that ships with vlmgen and that the first line of every spec names."""
    return files("vlmgen.spec").joinpath("schema.json").read_text(encoding="utf-8")
