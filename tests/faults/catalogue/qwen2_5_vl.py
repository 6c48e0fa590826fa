"""Wrong variants of the Qwen2.5-VL package."""

from . import _prompt as prompt
from . import _text as text
from . import _vision as vision

FAULTS = (
    *text.BIAS,
    *text.NO_HEAD_NORM,
    *text.CONTIGUOUS,
    *text.FLAT_CONFIG,
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
