"""Comparing a model with references: two-way, three-way, and over generated tokens.

Three-way means a float32 reference (``baseline``), the same reference in the device's dtype
(``expected``), and the model under test (``actual``). The dtype reference's own error is the
yardstick.
"""

from vllm_neuron.accuracy.capture import ModelCapture
from vllm_neuron.accuracy.closeness import (
    AssertCloseResult,
    ThreeWayAssertResult,
    assert_close,
    assert_close_three_way,
)
from vllm_neuron.accuracy.logits import (
    LogitValidationReport,
    MultiPromptValidationResult,
    logit_validation,
    multi_prompt_logit_validation,
)
from vllm_neuron.accuracy.reference import generate_three_way_reference_logits, init_hf_model
from vllm_neuron.accuracy.statistics import (
    ThreeWayStatistics,
    bhattacharyya_coefficient,
    relative_error,
    three_way_statistics,
)

__all__ = [
    "AssertCloseResult",
    "LogitValidationReport",
    "ModelCapture",
    "MultiPromptValidationResult",
    "ThreeWayAssertResult",
    "ThreeWayStatistics",
    "assert_close",
    "assert_close_three_way",
    "bhattacharyya_coefficient",
    "generate_three_way_reference_logits",
    "init_hf_model",
    "logit_validation",
    "multi_prompt_logit_validation",
    "relative_error",
    "three_way_statistics",
]
