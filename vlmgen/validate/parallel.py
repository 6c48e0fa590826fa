"""Tensor and data parallel runs in real processes, against one rank.

The checkpoint has 8 query heads and 2 key/value heads, so that at TP 4 each KV head is on two
ranks, and an odd vocabulary, so that it is padded at every TP (the sizes are the `parallel` of the
tiny checkpoint's description). All its logits of text are negative:
a padded row, whose logit is zero, would be picked if the model did not mask it.
"""

from __future__ import annotations

import re
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

import torch

from vlmgen.standin.ranks import RankProcesses
from vlmgen.tiny.build import build_tiny
from vlmgen.validate.compare import Comparison
from vlmgen.validate.driver import PackageDriver
from vlmgen.validate.fork_server import start_fork_server
from vlmgen.validate.package import load_factory
from vlmgen.validate.reference import Prompt, Reference
from vlmgen.validate.report import Report, Row
from vlmgen.weights import WeightEntry, weight_table

if TYPE_CHECKING:
    from vlmgen.spec import Spec

GROUP = "parallel"
LIMIT = 1e-5
NEW_TOKENS = 8
_SMALL_LAYOUTS = {2: ((2, 1), (1, 2)), 4: ((2, 2), (4, 1), (1, 4))}
_EXPERT_LAYOUTS = {2: ((2, 1, 2),), 4: ((2, 2, 2), (4, 1, 4))}  # the third is ep_degree
_TIMEOUT = 300.0


@dataclass(frozen=True)
class ParallelLayout:
    """Text TP over all ranks, vision TP x DP over the same ranks.

    With `ep_degree` the ranks share out the experts first, and then the width of each.
    """

    world_size: int
    vision_tp: int
    vision_dp: int
    ep_degree: int = 1

    @property
    def name(self) -> str:
        """Row of the report."""
        experts = f" ep {self.ep_degree}" if self.ep_degree > 1 else ""
        return f"tp {self.world_size}{experts}, vision tp {self.vision_tp} x dp {self.vision_dp}"


def layouts(world_size: int, has_experts: bool = False) -> list[ParallelLayout]:
    """The splits that are run on a world of 2 or 4 ranks."""
    splits = [*_SMALL_LAYOUTS[world_size], *(_EXPERT_LAYOUTS[world_size] if has_experts else ())]
    return [ParallelLayout(world_size, *split) for split in splits]


WORLD_SIZES = tuple(_SMALL_LAYOUTS)


@dataclass(frozen=True)
class RankResult:
    """What one rank computed, per prompt.

    Args:
        logits: Prefill `[n, V]`.
        tokens: Greedy tokens, picked here.
        step_logits: Logits they came from, `[NEW_TOKENS, V]`.
        sampled: Greedy tokens, picked by the model.
        sampled_logits: Logits gathered by the model that samples.
    """

    logits: list[torch.Tensor]
    tokens: list[list[int]]
    step_logits: list[torch.Tensor]
    sampled: list[list[int]]
    sampled_logits: list[torch.Tensor]


def build_parallel_checkpoint(spec: Spec, out: Path) -> Path:
    """A tiny checkpoint whose heads and vocabulary make sharding hard; see the module."""
    folder = build_tiny(spec, out, seed=3, parallel=True)
    push_logits_down(folder, spec)
    return folder


def push_logits_down(checkpoint: Path, spec: Spec) -> None:
    """Rewrite a checkpoint so that every text token's logits are negative.

    Channel 0 of the residual stream carries the constant 8, which nothing writes to, and the head
    weighs it with -4.
    """
    from safetensors.torch import load_file, save_file

    (path,) = checkpoint.glob("*.safetensors")
    tensors = load_file(path)
    layout, names = spec.weights.layouts[0], spec.weights.text
    for row in _writers(spec):
        pattern = re.sub(r"\\\{\w+\\\}", r"\\d+", re.escape(layout.text + row.keys[0]))
        last = row.verb == "experts_in_out"  # elsewhere the output dimension is the next to last
        for name, tensor in tensors.items():
            if re.fullmatch(pattern, name):
                tensor[(..., 0) if last else (..., 0, slice(None))] = 0.0
    tensors[f"{layout.text}{names.embed_tokens}.weight"][:, 0] = 8.0
    tensors[f"{layout.text}{names.norm}.weight"][0] = 1.0
    tensors[f"{layout.head}weight"][:, 0] = -4.0
    save_file(tensors, path, metadata={"format": "pt"})


def _writers(spec: Spec) -> list[WeightEntry]:
    """Rows of the matrices whose output is added to the residual stream of the text."""
    ends = (".o_proj_weight", ".down_proj_weight", ".mlp.down_weight")
    rows = (
        row for name, group in weight_table(spec).groups() if name[:4] == "text" for row in group
    )
    return [row for row in rows if row.parameter.endswith(ends)]


class ParallelRuns:
    """Compares parallel runs of one package with a run on one rank.

    Args:
        package: Folder of the package.
        checkpoint: The checkpoint.
        prompts: A few prompts.
        settings: Further arguments of `PackageDriver`.
        report: Takes the rows.
        has_experts: Whether expert parallelism is run as well.
    """

    def __init__(
        self,
        package: Path,
        checkpoint: Path,
        prompts: Sequence[Prompt],
        settings: Mapping[str, Any],
        report: Report,
        has_experts: bool = False,
    ) -> None:
        self.package, self.checkpoint, self.prompts = package, checkpoint, list(prompts)
        self.has_experts = has_experts
        self.settings, self.report = dict(settings), report
        self._single: RankResult | None = None
        self._ranks: RankProcesses | None = None
        self._stopped = Event()

    def run_one_rank(self) -> None:
        """The run in this process that all others are compared with; comes first."""
        factory = load_factory(self.package)
        self._single = run_rank(factory, self.checkpoint, self.prompts, self.settings)

    @property
    def single(self) -> RankResult:
        """What `run_one_rank` computed."""
        if self._single is None:
            raise RuntimeError("run_one_rank comes first")
        return self._single

    def check_reference(self, reference: Reference) -> None:
        """The one rank itself, against Hugging Face."""
        comparison = Comparison()
        for prompt, logits in zip(self.prompts, self.single.logits, strict=True):
            comparison.add(prompt.name, logits, reference.logits(prompt))
        self.report.compared(GROUP, "tp 1 against Hugging Face", comparison, 1e-4)
        lowest = max(float(rows.max()) for rows in self.single.step_logits)
        if lowest >= 0.0:
            raise ValueError(f"the checkpoint is of no use: a logit is {lowest:g}, not negative")

    def check_world(self, world_size: int, progress: Callable[[str], None]) -> None:
        """Every vision split of one world size; the processes are started once.

        Another thread may call it, and this one `stop`.
        """
        single = self.single
        arguments = (str(self.package), str(self.checkpoint), self.prompts, self.settings)
        start_fork_server()
        ranks = RankProcesses(world_size, start_rank, arguments, start_method="forkserver")
        self._ranks = ranks
        with ranks, tempfile.TemporaryDirectory(prefix="vlmgen-parallel-") as folder:
            for layout in layouts(world_size, self.has_experts):
                if self._stopped.is_set():
                    return
                progress(f"{GROUP}: {layout.name}")
                meeting = str(Path(folder) / layout.name)
                ranks.call([(layout, meeting)] * world_size)
                self._judge(layout, single, ranks.collect(_TIMEOUT))

    def stop(self) -> None:
        """End the ranks' processes, now and from now on; whoever waits for them sees them die."""
        self._stopped.set()
        if self._ranks is not None:
            self._ranks.terminate()

    def _judge(self, layout: ParallelLayout, single: RankResult, ranks: list[RankResult]) -> None:
        comparison, wrong, sampled_wrong = Comparison(), 0, 0
        for rank, result in enumerate(ranks):
            for index, prompt in enumerate(self.prompts):
                name = f"{prompt.name}, rank {rank}"
                comparison.add(name, result.logits[index], single.logits[index])
                # After a differing token the two go on from different texts.
                for tokens, logits, reference in (
                    (result.tokens[index], result.step_logits, single.step_logits),
                    (result.sampled[index], result.sampled_logits, single.sampled_logits),
                ):
                    steps = 1 + _common(tokens, single.tokens[index])
                    comparison.add(name, logits[index][:steps], reference[index][:steps])
                wrong += result.tokens[index] != single.tokens[index]
                sampled_wrong += result.sampled[index] != single.tokens[index]
        count = len(ranks) * len(self.prompts)
        detail = f"tokens differ {wrong} times" if wrong else "same tokens"
        if wrong:
            comparison.worst = max(comparison.worst, 1.0)
        self.report.compared(GROUP, layout.name, comparison, LIMIT, detail)
        self.report.rows.append(
            Row(
                GROUP,
                f"{layout.name}, on-device sampling",
                count,
                float(sampled_wrong),
                0.0,
                sampled_wrong == 0,
                f"differing; {NEW_TOKENS} tokens each",
            )
        )


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens are equal from the start."""
    pairs = enumerate(zip(one, other, strict=True))
    return next((i for i, (a, b) in pairs if a != b), len(one))


def run_rank(
    factory: type, checkpoint: str | Path, prompts: Sequence[Prompt], settings: Mapping[str, Any]
) -> RankResult:
    """Everything that one rank computes, with and without sampling in the model."""
    result = RankResult([], [], [], [], [])
    driver = PackageDriver(factory, checkpoint, **settings)
    for group in _batches(driver, prompts):
        requests = [driver.add_request(prompt.token_ids, prompt.features) for prompt in group]
        rows = [[driver.prefill(r, rows=range(len(r.token_ids)))] for r in requests]
        tokens = [[int(logits[-1].argmax())] for (logits,) in rows]
        for _ in range(NEW_TOKENS - 1):
            step = driver.decode(requests, [own[-1] for own in tokens])
            for index, logits in enumerate(step):
                rows[index].append(logits[None])
                tokens[index].append(int(logits.argmax()))
        result.logits.extend(prefill for prefill, *_ in rows)
        result.step_logits.extend(torch.cat([first[-1:], *later]) for first, *later in rows)
        result.tokens.extend(tokens)
        for request in requests:
            driver.release(request)
    # What its calls look like was compared with warm-up above, and on one rank for this one too.
    sampling = PackageDriver(
        factory,
        checkpoint,
        on_device_sampling=True,
        neuron_config={"max_logprobs": 5},
        warm_up=False,
        **settings,
    )
    for group in _batches(sampling, prompts):
        requests = [sampling.add_request(prompt.token_ids, prompt.features) for prompt in group]
        tokens, logits = sampling.generate(requests, NEW_TOKENS)
        result.sampled.extend(tokens)
        result.sampled_logits.extend(logits)
        for request in requests:
            sampling.release(request)
    return result


def _batches(driver: PackageDriver, prompts: Sequence[Prompt]) -> Iterator[Sequence[Prompt]]:
    """Prompts in batches as large as the driver's."""
    size = max(driver.seq_buckets)
    for start in range(0, len(prompts), size):
        yield prompts[start : start + size]


def start_rank(
    rank: int, package: str, checkpoint: str, prompts: list[Prompt], settings: Mapping[str, Any]
) -> Callable[[ParallelLayout, str], RankResult]:
    """Called once in every rank's process; returns what answers for one split."""
    warnings.filterwarnings("ignore", category=FutureWarning)  # torch on its own collectives
    factory = load_factory(Path(package))

    def answer(layout: ParallelLayout, meeting_point: str) -> RankResult:
        regroup(layout, meeting_point)
        sizes = {"tp_size": layout.vision_tp, "dp_size": layout.vision_dp}
        vision = {**settings["vision_neuron_config"], **sizes}
        return run_rank(factory, checkpoint, prompts, {**settings, "vision_neuron_config": vision})

    return answer


def regroup(layout: ParallelLayout, meeting_point: str) -> None:
    """Take this process's groups down and put them up again with another split."""
    from vllm_neuron.parallel import neuron_parallel_state as state

    world_size, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    state.destroy_neuron_distributed_environment()
    state.init_neuron_distributed_environment(
        world_size=world_size,
        rank=rank,
        local_rank=rank,
        distributed_init_method=f"file://{meeting_point}",
        backend="gloo",
        tensor_parallel_size=world_size,
        ep_degree=layout.ep_degree,
        vision_tp_size=layout.vision_tp,
        vision_dp_size=layout.vision_dp,
    )
