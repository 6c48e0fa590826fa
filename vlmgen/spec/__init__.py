"""The spec: its schema, its loading with positions, its derived values."""

from vlmgen.spec.load import load_spec
from vlmgen.spec.model import ResolvedCheckpoint, Spec
from vlmgen.spec.text import TextSpec
from vlmgen.spec.vision import VisionSpec

__all__ = ["ResolvedCheckpoint", "Spec", "TextSpec", "VisionSpec", "load_spec"]
