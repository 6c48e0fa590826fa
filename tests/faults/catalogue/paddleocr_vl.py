"""Wrong variants of the PaddleOCR-VL package."""

from . import _prompt as prompt
from . import _text as text
from . import _vision as vision

FAULTS = (
    *text.NO_HEAD_NORM,
    *text.CONTIGUOUS,
    *text.FLAT_CONFIG,
    *prompt.RASTER,
    *prompt.ROWS,
    *vision.RASTER,
    *vision.BILINEAR,
    *vision.ROPE,
    *vision.SEPARATE_QKV,
    *vision.TANH_GELU,
    *vision.FINAL_NORM,
    vision.merger_epsilon("config.hidden_size", "1e-05", "1e-06"),
)
