"""Enums that select layouts, norms, activations and quantisation in kernel calls.

Names and numbers are those of ``nkilib.core.utils.common_types``.
"""

from enum import Enum

__all__ = [
    "ActFnType",
    "ExpertAffinityScaleMode",
    "MoEAllToAllVStrategy",
    "NormType",
    "QKVOutputLayout",
    "QKVWeightLayout",
    "QuantizationType",
    "RouterActFnType",
]


class QKVOutputLayout(Enum):
    """Axis order of a fused QKV projection's result."""

    BSD = 0  # [batch, tokens, fused width]
    NBSd = 1  # [heads, batch, tokens, head width]
    NBdS = 2  # [heads, batch, head width, tokens]


class NormType(Enum):
    """Normalisation applied before a projection."""

    NO_NORM = 0
    RMS_NORM = 1
    LAYER_NORM = 2
    RMS_NORM_SKIP_GAMMA = 3


class ActFnType(Enum):
    """Activation of an MLP."""

    SiLU = 0
    GELU = 1  # the erf form
    GELU_Tanh_Approx = 2
    Swish = 3


class RouterActFnType(Enum):
    """Activation that turns router logits into affinities."""

    SIGMOID = 0
    SOFTMAX = 1


class ExpertAffinityScaleMode(Enum):
    """Where an expert's affinity enters its computation."""

    NO_SCALE = 0
    POST_SCALE = 1
    PRE_SCALE = 2
    PRE_SCALE_DELAYED = 3


class QuantizationType(Enum):
    """Weight and activation quantisation of a kernel."""

    NONE = 0
    STATIC = 1
    ROW = 2
    MX = 3
    STATIC_MX = 4
    ROW_MX = 5


class QKVWeightLayout(Enum):
    """Storage order of a fused QKV weight."""

    CONTIGUOUS = 0
    MX_CONTIGUOUS = 1
    MX_INTERLEAVED = 2


class MoEAllToAllVStrategy(Enum):
    """How an expert-parallel exchange packs its rows."""

    DISABLED = 0
    PRESERVE_ROW_ORDER = 1
    PACK_OUTPUT_ROWS = 2
