"""Wrong variants of the GLM-4.1V package."""

from . import _prompt as prompt
from . import _text as text
from . import _vision as vision

FAULTS = (
    *text.BIAS,
    *text.CONTIGUOUS,
    *text.PARTIAL,
    *text.ADJACENT,
    *text.SANDWICH,
    *text.FUSED_GATE_UP,
    *prompt.IMAGE_TOKEN,
    *prompt.ROWS,
    *vision.GRID_SAMPLE,
    *vision.EMBED_NORM,
    *vision.CROSSED_WIDTHS,
    *vision.STRIDED_CONV,
    *vision.FINAL_NORM,
    *vision.SILU,
    *vision.RMS,
)
