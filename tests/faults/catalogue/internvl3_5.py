"""Wrong variants of the InternVL3.5 package."""

from . import _prompt as prompt
from . import _text as text
from . import _vision as vision

FAULTS = (
    *text.HEAD_NORM,
    *text.PLAIN_ROPE,
    text.text_type("qwen3"),
    *prompt.TILES,
    *prompt.ROWS,
    *vision.TILES,
    *vision.LAYER_SCALE,
    *vision.SEPARATE_QKV,
    *vision.EXACT_GELU,
    vision.merger_epsilon("joined", "1e-05", "1e-06"),
)
