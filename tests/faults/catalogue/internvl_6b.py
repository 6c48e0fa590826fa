"""Wrong variants of the InternVL3 6B package."""

from . import _vision as vision

FAULTS = (
    *vision.FULL_WIDTH_NORM,
    *vision.TILES,
    *vision.LAYER_SCALE,
    *vision.RMS,
)
