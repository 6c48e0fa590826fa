"""Wrong variants of the Qwen2.5-VL package."""

from . import _prompt as prompt
from . import _vision as vision

FAULTS = (
    *prompt.BLOCK,
    *prompt.SECONDS,
    *prompt.ROWS,
    *vision.WINDOWS,
    *vision.FRAMES,
    *vision.ROPE,
    *vision.RMS,
    *vision.GATED_WITH_BIAS,
    *vision.FUSED_QKV,
)
