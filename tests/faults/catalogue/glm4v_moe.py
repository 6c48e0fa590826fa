"""Wrong variants of the GLM-4.5V package."""

from . import _prompt as prompt
from . import _vision as vision

FAULTS = (
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
