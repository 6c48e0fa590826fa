"""The whole model on real prompts: logits, greedy tokens, and what must not matter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from vlmgen.validate.compare import Comparison
from vlmgen.validate.driver import PackageDriver
from vlmgen.validate.reference import (
    Prompt,
    Reference,
    continued,
    text_settings,
    vision_settings,
)
from vlmgen.validate.report import Report, Row

GROUP = "end to end"
LOGITS_LIMIT = 1e-4
SAME_LIMIT = 1e-5
"""Limit for two runs of the package that should not differ at all."""

NEW_TOKENS = 32
_FEW_TOKENS = 8
_NOISE = 1e3

MakeDriver = Callable[..., PackageDriver]


@dataclass(frozen=True)
class Answer:
    """What a driver makes of one prompt.

    Args:
        logits: Of every prompt token, `[n, V]`.
        tokens: Greedy tokens.
        step_logits: Logits they came from, `[tokens, V]`.
    """

    logits: torch.Tensor
    tokens: list[int]
    step_logits: torch.Tensor


class EndToEnd:
    """All end-to-end checks of one package.

    Args:
        reference: Float32 reference.
        driver: The package in float32, warmed up.
        make_driver: Builds another driver of the same package, by `PackageDriver`'s keywords.
        prompts: The prompts.
        report: Takes the rows.
    """

    def __init__(
        self,
        reference: Reference,
        driver: PackageDriver,
        make_driver: MakeDriver,
        prompts: Sequence[Prompt],
        report: Report,
    ) -> None:
        self.reference, self.driver, self.make_driver = reference, driver, make_driver
        self.prompts, self.report = prompts, report
        self._own: dict[str, Answer] = {}

    def checks(self) -> list[tuple[str, Callable[[], None]]]:
        """Name and function of every check; a function adds its row."""
        composed = [("composed reference", self.composed_reference)]
        return [
            *(composed if any(prompt.composed for prompt in self.prompts) else []),
            ("prefill logits", self.prefill_logits),
            ("greedy tokens", self.greedy_tokens),
            ("decode logits", self.decode_logits),
            ("batched decode", self.batched_decode),
            ("larger buckets", self.larger_buckets),
            ("noise in padding and caches", self.noise),
            ("on-device sampling", self.on_device_sampling),
        ]

    # ------------------------------------------------------------------- against Hugging Face

    def composed_reference(self) -> None:
        """Where transformers takes a prompt whole: its own logits, and those of its parts.

        The other prompts are compared with transformers' parts alone, see `Prompt.composed`.
        """
        comparison = Comparison()
        for prompt in self.prompts:
            if prompt.features and not prompt.composed:
                parts = self.reference.logits(replace(prompt, composed=True))
                comparison.add(prompt.name, parts, self.reference.logits(prompt))
        names = ", ".join(prompt.name for prompt in self.prompts if prompt.composed)
        self._compared("composed reference", comparison, LOGITS_LIMIT, f"for: {names}")

    def prefill_logits(self) -> None:
        """Logits of every prompt token."""
        comparison = Comparison()
        for prompt in self.prompts:
            comparison.add(prompt.name, self.own(prompt).logits, self.reference.logits(prompt))
        self._compared("prefill logits", comparison, LOGITS_LIMIT)

    def greedy_tokens(self) -> None:
        """Generated tokens, one by one."""
        differing, first = 0, ""
        for prompt in self.prompts:
            ours = self.own(prompt).tokens
            theirs = self.reference.greedy(prompt, NEW_TOKENS)
            wrong = sum(a != b for a, b in zip(ours, theirs, strict=True))
            if wrong and not first:
                place = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
                first = f"; {prompt.name}: token {place} is {ours[place]}, not {theirs[place]}"
            differing += wrong
        self._counted(
            "greedy tokens", len(self.prompts), differing, f"{NEW_TOKENS} tokens each{first}"
        )

    def decode_logits(self) -> None:
        """Logits of every decode step, against one Hugging Face pass over prompt and answer."""
        comparison = Comparison()
        for prompt in self.prompts:
            own = self.own(prompt)
            longer = continued(prompt, own.tokens[:-1])
            expected = self.reference.logits(longer)[len(prompt.token_ids) :]
            comparison.add(prompt.name, own.step_logits[1:], expected)
        self._compared("decode logits", comparison, LOGITS_LIMIT)

    # ------------------------------------------------------------------ what must not matter

    def batched_decode(self) -> None:
        """Several requests of different length decoded together, full batch and padded batch."""
        comparison, wrong = Comparison(), 0
        size = max(self.driver.seq_buckets)
        groups = [self.prompts[i : i + size] for i in range(0, len(self.prompts), size)]
        groups.append(self.prompts[-(size - 1) :])  # one row of padding
        for group in groups:
            requests = [self.driver.add_request(p.token_ids, p.features) for p in group]
            tokens, logits = self.driver.generate(requests, _FEW_TOKENS)
            for prompt, own, rows in zip(group, tokens, logits, strict=True):
                alone = self.own(prompt)
                wrong += own != alone.tokens[:_FEW_TOKENS]
                comparison.add(prompt.name, rows, alone.step_logits[:_FEW_TOKENS])
            for request in requests:
                self.driver.release(request)
        self._same("batched decode", comparison, wrong)

    def larger_buckets(self) -> None:
        """The same prompts in larger text buckets, vision blocks and vision buckets."""
        texts = text_settings(self.prompts, NEW_TOKENS)
        longest = texts["max_model_len"] + 256
        other = self.make_driver(
            vision_neuron_config=vision_settings(self.reference, self.prompts, scale=2),
            max_model_len=longest,
            token_buckets=(longest,),
            seq_buckets=(2,),
        )
        self._compare_with("larger buckets", other)

    def noise(self) -> None:
        """Noise in padding, the scratch block and unowned cache; padding slot -1."""
        other = self.make_driver(noise=_NOISE, padding_slot=-1, seed=1)
        self._compare_with("noise in padding and caches", other)

    def on_device_sampling(self) -> None:
        """Tokens picked by the model itself are the greedy ones."""
        other = self.make_driver(on_device_sampling=True, seed=2)
        wrong = 0
        for prompt in self.prompts:
            request = other.add_request(prompt.token_ids, prompt.features)
            tokens, _ = other.generate([request], _FEW_TOKENS)
            other.release(request)
            wrong += sum(
                a != b
                for a, b in zip(tokens[0], self.own(prompt).tokens[:_FEW_TOKENS], strict=True)
            )
        self._counted("on-device sampling", len(self.prompts), wrong, f"{_FEW_TOKENS} tokens each")

    # ---------------------------------------------------------------------------------- parts

    def own(self, prompt: Prompt) -> Answer:
        """What the main driver makes of one prompt alone; computed once."""
        if prompt.name not in self._own:
            self._own[prompt.name] = answer(self.driver, prompt, NEW_TOKENS)
        return self._own[prompt.name]

    def _compare_with(self, check: str, other: PackageDriver) -> None:
        """Prefill and a few decode steps of another driver against the main one's."""
        comparison, wrong, steps = Comparison(), 0, 4
        for prompt in self.prompts:
            ours, alone = answer(other, prompt, steps), self.own(prompt)
            wrong += ours.tokens != alone.tokens[:steps]
            comparison.add(prompt.name, ours.logits, alone.logits)
            comparison.add(f"{prompt.name}, decode", ours.step_logits, alone.step_logits[:steps])
        self._same(check, comparison, wrong)

    def _compared(self, check: str, comparison: Comparison, limit: float, detail: str = "") -> None:
        self.report.compared(GROUP, check, comparison, limit, detail)

    def _same(self, check: str, comparison: Comparison, wrong: int) -> None:
        detail = f"{wrong} prompts with other tokens" if wrong else "same tokens"
        if wrong:
            comparison.worst = max(comparison.worst, 1.0)
        self.report.compared(GROUP, check, comparison, SAME_LIMIT, detail)

    def _counted(self, check: str, inputs: int, wrong: int, detail: str) -> None:
        row = Row(GROUP, check, inputs, float(wrong), 0.0, wrong == 0, f"differing; {detail}")
        self.report.rows.append(row)


def answer(driver: PackageDriver, prompt: Prompt, new_tokens: int) -> Answer:
    """A prefill with all its logits, then greedy decode steps, one request alone."""
    request = driver.add_request(prompt.token_ids, prompt.features)
    logits = driver.prefill(request, rows=range(len(prompt.token_ids)))
    rows = [logits[-1]]
    tokens = [int(rows[-1].argmax())]
    for _ in range(new_tokens - 1):
        rows.append(driver.decode([request], tokens[-1:])[0])
        tokens.append(int(rows[-1].argmax()))
    driver.release(request)
    return Answer(logits, tokens, torch.stack(rows))
