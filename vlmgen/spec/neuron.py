"""Defaults of the plugin's additional_config."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from vlmgen.spec.types import Sequence, SpecModel

Patches = Annotated[int, Field(ge=1, le=1 << 24)]


class NeuronSpec(SpecModel):
    """Defaults for the plugin; every one can be set at serving time."""

    vision_attention_block_size: Patches = Field(
        description="Patches of one vision attention block: a multiple of 128 and of the merge "
        "area, at least the largest item."
    )
    num_vision_tokens_buckets: Annotated[Sequence[Patches], Field(min_length=1, max_length=32)] = (
        Field(description="Compiled patch counts, ascending multiples of the block size.")
    )
    quantization: Annotated[
        Sequence[Literal["none", "bf16"]], Field(min_length=1, max_length=8)
    ] = Field(description="Modes of neuron_config.quantization that the package accepts.")
