"""What templates say about a spec in the words of Python, Hugging Face and English."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vlmgen.render.escaping import Rendered, identifier
from vlmgen.render.vision_words import HIDDEN_ACT, vision_words
from vlmgen.tiny.family import load_family, merge

if TYPE_CHECKING:
    from vlmgen.spec import Spec

TOKENS = ("image", "video", "vision_start", "vision_end", "video_start", "video_end")

# Activation in the spec -> what a docstring calls it.
ACTIVATION_NAME = {
    "silu": "SiLU",
    "gelu": "exact GELU",
    "gelu_tanh": "tanh GELU",
    "quick_gelu": "quick GELU",
}


def words(spec: Spec) -> dict[str, Any]:
    """Values for templates that follow from the spec but are no numbers.

    Args:
        spec: The spec.
    """
    from vlmgen.spec.derive import derive

    quantization = tuple(None if mode == "none" else mode for mode in spec.neuron.quantization)
    vision = spec.vision
    tiny = load_family(spec.tiny)
    image_processor, image_processor_arguments = tiny["processor"]["image_processor"]
    return {
        "checkpoint_names": spec.checkpoint_names,
        "token_names": [name for name in TOKENS if getattr(spec.tokens, name) is not None],
        "tiny_config": tiny["config_kwargs"],
        "tiny_parallel": _changed_sizes(tiny),
        "image_processor": identifier(image_processor),
        "image_processor_arguments": image_processor_arguments,
        "checkpoints": [
            _checkpoint(spec, entry.name, derive(spec, entry.name)) for entry in spec.checkpoints
        ],
        "text_hidden_act": HIDDEN_ACT[spec.text.mlp.activation],
        "vision_hidden_act": HIDDEN_ACT[vision.mlp.activation],
        "vision_mlp_activation": identifier(vision.mlp.activation),
        "vision_mlp_activation_name": Rendered(ACTIVATION_NAME[vision.mlp.activation]),
        "merger_activation": identifier(vision.merger.activation),
        **vision_words(spec),
        "tiny_depth": tiny["config_kwargs"][spec.vision.config_key][vision.keys.depth],
        "quantization_values": quantization,
        # Elements of a head that belong to one rotated pair are not half a head apart.
        "rope_reordered": spec.text.rope.pairing == "adjacent" or spec.text.rope.partial < 1,
        "quantization_legal": _enumerated(
            ["None" if mode is None else f"'{identifier(mode)}'" for mode in quantization], "and"
        ),
    }


def _changed_sizes(tiny: dict[str, Any]) -> dict[str, Any]:
    """Sizes of a tiny checkpoint for runs on ranks: tower -> the entries that differ, complete."""
    whole = {
        tower: merge(tiny["config_kwargs"][f"{tower}_config"], sizes)
        for tower, sizes in tiny["parallel"].items()
    }
    return {
        tower: {name: whole[tower][name] for name in sizes}
        for tower, sizes in tiny["parallel"].items()
    }


def _checkpoint(spec: Spec, name: str, derived: Any) -> dict[str, Any]:
    """Both towers of a checkpoint and the tensor-parallel sizes at which each is legal."""
    resolved = spec.checkpoint(name)
    return {
        "name": name,
        "text": resolved.text,
        "vision": resolved.vision,
        "text_tp": derived.text_tp,
        "vision_tp": derived.vision_tp,
    }


def _enumerated(items: list[str], conjunction: str) -> Rendered:
    """`a`, `a and b`, `a, b and c`; the items are safe where they go."""
    head, last = items[:-1], items[-1]
    return Rendered(f"{', '.join(head)} {conjunction} {last}" if head else last)
