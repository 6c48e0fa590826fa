"""bfloat16: is the package as close to the float32 reference as Hugging Face's own bfloat16?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from vlmgen.validate.checks import Check
from vlmgen.validate.driver import PackageDriver
from vlmgen.validate.modules import ModuleChecks
from vlmgen.validate.reference import Prompt, Reference
from vlmgen.validate.report import Report, Row

GROUP = "bfloat16"
RMS_LIMIT, OVERLAP, LINF_LIMIT, L2_LIMIT = 1.0, 0.99, 5.0, 3.0


class Precision:
    """Three-way comparisons: float32 reference, bfloat16 reference, bfloat16 package.

    Through a stack of layers with experts, rounding changes the choice of experts for some tokens,
    in Hugging Face's bfloat16 for others than in ours, and each time the error is that of a whole
    expert. Which prompt such a token falls into is chance, so results of whole stacks are judged
    over all prompts together; single layers are judged prompt by prompt, see `ModuleChecks.text`.

    Args:
        baseline: Hugging Face in float32, with the weights of the bfloat16 checkpoint.
        yardstick: Hugging Face in bfloat16.
        driver: The package in bfloat16.
        prompts: The prompts.
        report: Takes the rows.
    """

    def __init__(
        self,
        baseline: Reference,
        yardstick: Reference,
        driver: PackageDriver,
        prompts: Sequence[Prompt],
        report: Report,
    ) -> None:
        self.baseline, self.yardstick, self.driver = baseline, yardstick, driver
        self.prompts, self.report = prompts, report
        modules = ModuleChecks(baseline, driver, prompts, round_to=torch.bfloat16)
        self.parts = [("vision", check) for check in modules.vision()]
        self.parts += [("text", check) for check in modules.text()]
        has_experts = baseline.spec.text.moe is not None
        self.together = {"text full text tower", "logits"} if has_experts else set()

    def names(self) -> list[str]:
        """Names of the checks, `logits` last."""
        return [f"{tower} {check.name}" for tower, check in self.parts] + ["logits"]

    @torch.no_grad()
    def run(self, name: str) -> None:
        """Run one check and add its row."""
        if name == "logits":
            values = self._logits()
        else:
            check = next(check for tower, check in self.parts if f"{tower} {check.name}" == name)
            values = self._module(check)
        count = len(values[0])
        if name in self.together:
            values = tuple([torch.cat(results)] for results in values)
        self._judge(name, count, *values)

    def _module(self, check: Check) -> tuple[list[torch.Tensor], ...]:
        return (
            [check.reference(self.baseline, case).float() for case in check.cases],
            [check.reference(self.yardstick, case) for case in check.cases],
            [check.actual(self.driver, case) for case in check.cases],
        )

    def _logits(self) -> tuple[list[torch.Tensor], ...]:
        own = []
        for prompt in self.prompts:
            request = self.driver.add_request(prompt.token_ids, prompt.features)
            own.append(self.driver.prefill(request, rows=range(len(prompt.token_ids))))
            self.driver.release(request)
        return (
            [self.baseline.logits(prompt) for prompt in self.prompts],
            [self.yardstick.logits(prompt) for prompt in self.prompts],
            own,
        )

    def _judge(
        self,
        name: str,
        count: int,
        baseline: list[torch.Tensor],
        expected: list[torch.Tensor],
        actual: list[torch.Tensor],
    ) -> None:
        """The plugin's own verdict; the ratio of the RMS errors is the figure of the row."""
        from vllm_neuron.accuracy import assert_close_three_way

        ratio = rms_ratio(baseline, expected, actual)
        try:
            verdict = assert_close_three_way(
                baseline,
                expected,
                actual,
                name=name,
                bc_threshold=OVERLAP,
                max_linf_ratio=LINF_LIMIT,
                max_l2_ratio=L2_LIMIT,
            )
        except AssertionError as error:
            row = Row(GROUP, name, count, ratio, RMS_LIMIT, False, str(error))
        else:
            how = "RMS error ratio" if ratio <= RMS_LIMIT else f"passed by overlap >= {OVERLAP}"
            row = Row(GROUP, name, count, ratio, RMS_LIMIT, True, how + _figures(verdict))
        self.report.rows.append(row)


def _figures(verdict: Any) -> str:
    """The other figures of the verdict, where the plugin's helper hands them out."""
    figures = getattr(verdict, "statistics", None)
    if figures is None:
        return ""
    return (
        f"; overlap {figures.bhattacharyya:.4f}, worst L-inf ratio {figures.worst_linf_ratio:.3g}, "
        f"worst L2 ratio {figures.worst_l2_ratio:.3g}"
    )


def rms_ratio(
    baseline: Sequence[torch.Tensor],
    expected: Sequence[torch.Tensor],
    actual: Sequence[torch.Tensor],
) -> float:
    """RMS error of the package over that of the bfloat16 reference; 0 when neither errs."""

    def squares(values: Sequence[torch.Tensor]) -> float:
        pairs = zip(values, baseline, strict=True)
        return sum((a.double() - b.double()).square().sum().item() for a, b in pairs)

    own, theirs = squares(actual), squares(expected)
    if theirs == 0.0:
        return 0.0 if own == 0.0 else float("inf")
    return (own / theirs) ** 0.5
