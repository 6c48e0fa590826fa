"""Wrong variants of the InternVL3 6B package."""

from . import _prompt as prompt
from . import _text as text
from . import _vision as vision

FAULTS = (
    *text.BIAS,
    *text.PLAIN_ROPE,
    text.text_type("qwen2"),
    *prompt.TILES,
    *prompt.ROWS,
    *vision.FULL_WIDTH_NORM,
    *vision.TILES,
    *vision.LAYER_SCALE,
    *vision.RMS,
)
