"""Wrong variants of the GLM-4.5V package."""

from . import _prompt as prompt
from . import _text as text
from . import _vision as vision

FAULTS = (
    *text.BIAS,
    *text.CONTIGUOUS,
    *text.PARTIAL,
    *text.HALVES_OF_A_PART,
    *text.SIGMOID_ROUTER,
    *text.SHARED_EXPERTS,
    *text.PER_EXPERT,
    *text.EXPERT_SHARES,
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
