"""The whole spec, and a checkpoint's view of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import Field

from vlmgen.errors import UsageError
from vlmgen.spec.checkpoints import Checkpoint, Reference
from vlmgen.spec.neuron import NeuronSpec
from vlmgen.spec.text import TextSpec
from vlmgen.spec.tokens import InputsSpec, TokensSpec
from vlmgen.spec.types import (
    CheckpointName,
    ClassName,
    FamilyName,
    FolderPath,
    FormatVersion,
    ModelType,
    Sequence,
    SpecModel,
)
from vlmgen.spec.types import Title as TitleText
from vlmgen.spec.vision import VisionSpec
from vlmgen.spec.weights import WeightsSpec

ModelT = TypeVar("ModelT", bound=SpecModel)


@dataclass(frozen=True)
class ResolvedCheckpoint:
    """Both towers with the sizes of one checkpoint.

    Args:
        name: The checkpoint's published name.
        text: The text tower; the same class as `Spec.text`.
        vision: The vision tower; the same class as `Spec.vision`.
    """

    name: str
    text: TextSpec
    vision: VisionSpec


class Spec(SpecModel):
    """A vision-language model family."""

    vlmgen: FormatVersion = Field(description="Version of the spec format.")
    family: FamilyName = Field(description="Name of the package: vllm_neuron_<family>.")
    title: TitleText = Field(description="Name of the family for people.")
    architecture: ClassName = Field(
        description="config.json: architectures[0]; begins with class_prefix."
    )
    model_type: ModelType = Field(description="config.json: model_type.")
    class_prefix: ClassName = Field(description="Prefix of the generated class names.")
    defaults_from: CheckpointName = Field(
        description="The listed checkpoint whose sizes `text` and `vision` state."
    )
    text: TextSpec = Field(description="The text tower.")
    vision: VisionSpec = Field(description="The vision tower.")
    tokens: TokensSpec = Field(description="Placeholder tokens and prompt scheme.")
    inputs: InputsSpec = Field(description="Keywords of the processor.")
    weights: WeightsSpec = Field(description="Names and published layouts of the tensors.")
    neuron: NeuronSpec = Field(description="Defaults of additional_config.")
    checkpoints: Annotated[Sequence[Checkpoint], Field(min_length=1, max_length=64)] = Field(
        description="Published checkpoints."
    )
    reference: Reference = Field(description="The Hugging Face implementation.")
    tiny: FamilyName = Field(description="Name of the tiny checkpoint description.")
    templates: FolderPath | None = Field(
        default=None,
        description="Folder of template overrides, relative to the file that names it; searched "
        "before the templates that ship with vlmgen.",
    )

    @property
    def checkpoint_names(self) -> tuple[str, ...]:
        """Every published name, in the order of the spec, `also` names after their own."""
        return tuple(name for c in self.checkpoints for name in (c.name, *c.also))

    def checkpoint(self, name: str) -> ResolvedCheckpoint:
        """Both towers with the sizes of one published checkpoint.

        Args:
            name: A `name` or an `also` name of `checkpoints`.

        Raises:
            UsageError: No checkpoint of that name is listed.
        """
        for entry in self.checkpoints:
            if name == entry.name or name in entry.also:
                return ResolvedCheckpoint(name, self._text_of(entry), self._vision_of(entry))
        raise UsageError(
            f"{self.title} lists no checkpoint {name!r}; "
            f"legal: {', '.join(self.checkpoint_names)}"
        )

    def _text_of(self, entry: Checkpoint) -> TextSpec:
        sizes, text = entry.text, self.text
        parts = {
            "attention": _with(
                text.attention,
                num_heads=sizes.num_heads,
                num_kv_heads=sizes.num_kv_heads,
                head_dim=sizes.head_dim,
            ),
            "mlp": _with(text.mlp, intermediate_size=sizes.intermediate_size),
        }
        if text.moe is not None:
            parts["moe"] = _with(
                text.moe,
                num_experts=sizes.num_experts,
                intermediate_size=sizes.moe_intermediate_size,
            )
        return _with(
            text,
            hidden_size=sizes.hidden_size,
            num_layers=sizes.num_layers,
            tie_word_embeddings=sizes.tie_word_embeddings,
            vocab_size=sizes.vocab_size,
            max_position_embeddings=sizes.max_position_embeddings,
            **parts,
        )

    def _vision_of(self, entry: Checkpoint) -> VisionSpec:
        sizes, vision = entry.vision, self.vision
        parts = {
            "attention": _with(vision.attention, num_heads=sizes.num_heads),
            "mlp": _with(vision.mlp, intermediate_size=sizes.intermediate_size),
        }
        if vision.deepstack is not None:
            parts["deepstack"] = _with(vision.deepstack, indices=sizes.deepstack)
        return _with(
            vision,
            hidden_size=sizes.hidden_size,
            depth=sizes.depth,
            out_hidden_size=sizes.out_hidden_size,
            **parts,
        )


def _with(model: ModelT, **changes: Any) -> ModelT:
    """A copy with the values that are stated."""
    return model.model_copy(update={k: v for k, v in changes.items() if v is not None})
