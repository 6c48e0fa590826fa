"""Wrong variants of the InternVL3.5-MoE package."""

from . import _prompt as prompt
from . import _text as text
from . import _vision as vision

FAULTS = (
    *text.HEAD_NORM,
    *text.PLAIN_ROPE,
    *text.SOFTMAX_ROUTER,
    *text.PER_EXPERT,
    *text.EXPERT_SHARES,
    text.text_type("qwen3_moe"),
    *prompt.TILES,
    *prompt.ROWS,
    *vision.TILES,
    *vision.LAYER_SCALE,
    *vision.SEPARATE_QKV,
    *vision.EXACT_GELU,
    vision.merger_epsilon("joined", "1e-05", "1e-06"),
)
