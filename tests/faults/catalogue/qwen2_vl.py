"""Wrong variants of the Qwen2-VL package."""

from . import _prompt as prompt
from . import _text as text
from . import _vision as vision

FAULTS = (
    *text.BIAS,
    *text.NO_HEAD_NORM,
    *text.CONTIGUOUS,
    *text.FLAT_CONFIG,
    *prompt.BLOCK,
    *prompt.ROWS,
    *vision.FRAMES,
    *vision.ROPE,
    *vision.QUICK_GELU,
    *vision.FUSED_QKV,
    vision.merger_epsilon("config.hidden_size", "1e-06", "1e-05"),
)
