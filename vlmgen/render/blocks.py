"""Which template block renders which axis value.

A template writes `{% include blocks.text_mlp %}`. Each name below is a file name in which the
fields in braces are read from the spec, so a new axis value needs a new file and nothing here.
"""

from __future__ import annotations

from typing import Any

BLOCKS: dict[str, str] = {
    # prompt
    "positions": "positions/{tokens.positions}",
    # text tower
    "config_rope": "text/config_rope",
    "text_attention": "text/attention_{text.attention.kind}",
    "text_layer": "text/layer",
    "text_loaders": "text/loaders",
    "text_mlp": "text/mlp_{text.mlp.kind}",
    "text_moe": "text/moe",
    "text_norm": "text/norm_{text.norm.kind}",
    "text_rope": "text/rope",
    # vision tower
    "vision_attention": "vision/attention",
    "vision_merger": "vision/merger_{vision.merger.op}",
    "vision_mlp": "vision/mlp_{vision.mlp.kind}",
    "vision_patch_embed": "vision/patch_embed",
    "vision_position": "vision/position_{vision.position.kind}",
    "vision_position_taps": "vision/taps_{vision.position.kind}",
}


# A template loops over these; equal choices are included once, what a spec has not is left out.
BLOCK_LISTS: dict[str, tuple[str, ...]] = {
    "vision_activations": (
        "vision/activation_{vision.mlp.activation}",
        "vision/activation_{vision.merger.activation}",
        "vision/activation_{vision.deepstack.merger.activation}",
    ),
    "vision_norms": (
        "vision/norm_{vision.norm.kind}",
        "vision/norm_{vision.embed_norm.kind}",
        "vision/norm_{vision.final_norm.kind}",
        "vision/norm_{vision.merger.norm}",
        "vision/norm_{vision.deepstack.merger.norm}",
    ),
}


def axis_fields(spec: Any) -> dict[str, Any]:
    """What fields in braces are read from."""
    return {"text": spec.text, "vision": spec.vision, "tokens": spec.tokens}


def chosen_blocks(spec: Any) -> dict[str, str | list[str] | None]:
    """Template name of every block for one spec, by the name that templates use.

    Args:
        spec: A `vlmgen.spec.Spec`.
    """
    fields = axis_fields(spec)

    def template(pattern: str) -> str | None:
        try:
            return f"blocks/{pattern.format_map(fields)}.py.j2"
        except AttributeError as error:
            if error.obj is not None:
                raise
            return None  # a part of a part that this spec has not

    chosen: dict[str, str | list[str] | None] = {n: template(p) for n, p in BLOCKS.items()}
    for name, patterns in BLOCK_LISTS.items():
        chosen[name] = list(filter(None, dict.fromkeys(template(p) for p in patterns)))
    return chosen
