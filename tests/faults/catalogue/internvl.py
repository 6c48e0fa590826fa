"""Wrong variants of the InternVL3 package."""

from . import _prompt as prompt
from . import _text as text
from . import _vision as vision

FAULTS = (
    *text.BIAS,
    *text.NO_HEAD_NORM,
    *text.PLAIN_ROPE,
    text.text_type("qwen2"),
    *prompt.TILES,
    *prompt.ROWS,
    *vision.TILES,
    *vision.LAYER_SCALE,
    *vision.SEPARATE_QKV,
    *vision.EXACT_GELU,
    vision.merger_epsilon("joined", "1e-05", "1e-06"),
)
