"""Base model and constrained scalar types of the spec.

Every string of a spec has a pattern. None of the patterns admits a control character, a quote, a
backslash, a backtick or a brace (apart from the literal index markers of weight names), so no
value can leave the string, comment, identifier or path that a template puts it in.
"""

from __future__ import annotations

import keyword
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError, PydanticKnownError

from vlmgen.render.chain import TEMPLATES_FOLDER

PartT = TypeVar("PartT")


class SpecModel(BaseModel):
    """Strict base: unknown keys refused, no type coercion, frozen."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        protected_namespaces=(),
        # Only `Spec` is ever validated by itself; building the parts too would double start-up.
        defer_build=True,
    )


def stated(part: PartT | None) -> PartT:
    """A part that a spec may leave out, where what the spec states elsewhere asks for it.

    The rules of `vlmgen.spec.rules` demand it there, so no spec that was loaded gets an error.

    Args:
        part: The part, or None where the spec has none.

    Returns:
        The part.

    Raises:
        LookupError: The spec has none.
    """
    if part is None:
        raise LookupError("a part of the spec is missing that a rule demands")
    return part


def _no_keyword(value: str) -> str:
    for part in value.split("."):
        if keyword.iskeyword(part):
            raise PydanticCustomError(
                "python_keyword",
                "{part} is a Python keyword",
                {"part": repr(part)},
            )
    return value


def _boolean(value: Any) -> Any:
    # A Literal alone takes 1 for True, since the two are equal in Python.
    if not isinstance(value, bool):
        raise PydanticKnownError("bool_type")
    return value


def _integer(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int):
        raise PydanticKnownError("int_type")
    return value


# Pattern -> the rule in words, for messages. The JSON Schema carries the same patterns.
FAMILY = r"^[a-z][a-z0-9_]{0,40}$"
CLASS = r"^[A-Z][A-Za-z0-9_]{0,63}$"
MODEL_TYPE = r"^[a-z][a-z0-9_.-]{0,63}$"
KEY = r"^[A-Za-z_][A-Za-z0-9_]{0,63}$"
DOTTED = r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*$"
MODULE = r"^transformers(\.[a-z_][a-z0-9_]*)+$"
VLLM_MODULE = r"^vllm(\.[a-z_][a-z0-9_]*)+$"
TITLE = r"^[A-Za-z0-9][A-Za-z0-9 ._+()-]{0,79}$"
PROSE = r"^[A-Za-z0-9][A-Za-z0-9 ._,;:/+()*-]{0,199}$"
TOKEN = r"^[!#-&(-\[\]-_a-z|~]{1,64}$"
CHECKPOINT = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,95}$"
WEIGHT = r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z0-9_]+)*$"
PREFIX = r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z0-9_]+)*\.$"
LAYER_PREFIX = r"^([A-Za-z_][A-Za-z0-9_]*\.)+\{layer\}\.$"
BLOCK_PREFIX = r"^([A-Za-z_][A-Za-z0-9_]*\.)+\{block\}\.$"
LEVEL_PREFIX = r"^([A-Za-z_][A-Za-z0-9_]*\.)+\{level\}\.$"
EXPERT_PREFIX = r"^([A-Za-z_][A-Za-z0-9_]*\.)+\{expert\}\.$"
KEY_PATTERN = r"^[A-Za-z0-9_*][A-Za-z0-9_.*]{0,199}$"

PATTERN_RULES: dict[str, str] = {
    FAMILY: "a lower-case identifier: a letter, then at most 40 letters, digits or underscores",
    CLASS: "a class name: an upper-case letter, then at most 63 letters, digits or underscores",
    MODEL_TYPE: "a model type as in config.json: lower-case letters, digits and . _ -",
    KEY: "an identifier: letters, digits and underscores, not starting with a digit",
    DOTTED: "identifiers joined by dots, such as model.language_model",
    MODULE: "a module of transformers, such as transformers.models.llama.modeling_llama",
    VLLM_MODULE: "a module of vLLM, such as vllm.model_executor.models.llama",
    TITLE: "1 to 80 letters, digits, spaces and . _ + ( ) -",
    PROSE: "1 to 200 letters, digits, spaces and . _ , ; : / + ( ) * -",
    TOKEN: "1 to 64 visible ASCII characters without quotes, backslash, backtick or braces",
    CHECKPOINT: "a checkpoint name without the organisation: letters, digits and . _ -, no slash",
    WEIGHT: "names joined by dots without a dot at the end, such as self_attn.q_proj",
    PREFIX: "names joined by dots with a dot at the end, such as model.language_model.",
    LAYER_PREFIX: "names, the marker {layer} and a dot, such as layers.{layer}.",
    BLOCK_PREFIX: "names, the marker {block} and a dot, such as blocks.{block}.",
    LEVEL_PREFIX: "names, the marker {level} and a dot, such as deepstack_merger_list.{level}.",
    EXPERT_PREFIX: "names, the marker {expert} and a dot, such as mlp.experts.{expert}.",
    TEMPLATES_FOLDER: "a folder relative to the spec: names of letters, digits and . _ - joined by "
    "slashes",
    KEY_PATTERN: "a checkpoint key in which * stands for any characters, such as mtp.*",
}

MAX_NAME = 200

FamilyName = Annotated[str, Field(pattern=FAMILY), AfterValidator(_no_keyword)]
ClassName = Annotated[str, Field(pattern=CLASS), AfterValidator(_no_keyword)]
ModelType = Annotated[str, Field(pattern=MODEL_TYPE)]
ConfigKey = Annotated[str, Field(pattern=KEY), AfterValidator(_no_keyword)]
DottedPath = Annotated[str, Field(pattern=DOTTED, max_length=MAX_NAME), AfterValidator(_no_keyword)]
ModulePath = Annotated[str, Field(pattern=MODULE, max_length=MAX_NAME), AfterValidator(_no_keyword)]
VllmModule = Annotated[
    str, Field(pattern=VLLM_MODULE, max_length=MAX_NAME), AfterValidator(_no_keyword)
]
Title = Annotated[str, Field(pattern=TITLE)]
Prose = Annotated[str, Field(pattern=PROSE)]
TokenText = Annotated[str, Field(pattern=TOKEN)]
CheckpointName = Annotated[str, Field(pattern=CHECKPOINT)]
WeightName = Annotated[str, Field(pattern=WEIGHT, max_length=MAX_NAME)]
WeightPrefix = Annotated[str, Field(pattern=PREFIX, max_length=MAX_NAME)]
LayerPrefix = Annotated[str, Field(pattern=LAYER_PREFIX, max_length=MAX_NAME)]
BlockPrefix = Annotated[str, Field(pattern=BLOCK_PREFIX, max_length=MAX_NAME)]
LevelPrefix = Annotated[str, Field(pattern=LEVEL_PREFIX, max_length=MAX_NAME)]
ExpertPrefix = Annotated[str, Field(pattern=EXPERT_PREFIX, max_length=MAX_NAME)]
FolderPath = Annotated[str, Field(pattern=TEMPLATES_FOLDER, max_length=MAX_NAME)]
KeyPattern = Annotated[str, Field(pattern=KEY_PATTERN)]

# Axes that are a flag: the values that templates implement.
OnlyTrue = Annotated[Literal[True], BeforeValidator(_boolean)]
OnlyFalse = Annotated[Literal[False], BeforeValidator(_boolean)]
FormatVersion = Annotated[Literal[1], BeforeValidator(_integer)]

# No published model comes near these bounds; they keep a slip of the keyboard from becoming a
# list of a billion layers.
Count = Annotated[int, Field(ge=1, le=1_000_000)]
Layers = Annotated[int, Field(ge=1, le=4096)]
Index = Annotated[int, Field(ge=0, le=4095)]
TokenId = Annotated[int, Field(ge=0, le=100_000_000)]
Positions = Annotated[int, Field(ge=1, le=1_000_000_000)]
Epsilon = Annotated[float, Field(gt=0, lt=1)]
Theta = Annotated[float, Field(ge=1, le=1.0e12)]

_T = TypeVar("_T")

# A list of the YAML, kept as a tuple so that a spec is immutable all the way down.
Sequence = Annotated[tuple[_T, ...], Field(strict=False)]
