"""Which tensor- and data-parallel sizes a model allows, with the reason for each that it does not.

Pure functions of sizes; no torch. Rules: the design's "Rules a device imposes" and the runner
contract (2.3 sequence parallelism, 7.2 vision split, 8.1 shards, 8.5 fused QKV widths).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from vlmgen.errors import CheckFailed, UsageError

if TYPE_CHECKING:
    from vlmgen.spec.model import ResolvedCheckpoint
    from vlmgen.spec.text import TextSpec
    from vlmgen.spec.vision import VisionSpec

MAX_RANKS = 64

# Per-rank fused QKV widths for which a fork measured wrong results from the plugin's QKV kernel.
SUSPECT_QKV_WIDTHS = range(3072, 3584)


@dataclass(frozen=True)
class TextSplit:
    """One text TP.

    Args:
        tp: The size.
        problems: Why it is illegal; empty if it is legal.
        warnings: What to know about a legal size.
        heads: Query heads per rank, 0 where they do not divide.
        kv_heads: KV heads per rank, 0 where they do not divide.
        kv_replicas: Ranks that hold the same KV head.
        qkv_width: Fused QKV width per rank.
        padded_vocab: Rows of the padded vocabulary.
    """

    tp: int
    problems: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    heads: int = 0
    kv_heads: int = 0
    kv_replicas: int = 1
    qkv_width: int = 0
    padded_vocab: int = 0

    @property
    def legal(self) -> bool:
        """Whether no rule is broken."""
        return not self.problems

    @property
    def facts(self) -> tuple[str, ...]:
        """What one rank holds, for a table."""
        return (
            f"per rank: {self.heads} heads, {self.kv_heads} KV heads, QKV width {self.qkv_width}",
        )


@dataclass(frozen=True)
class VisionSplit:
    """One vision TP x DP.

    Args:
        tp: Vision tensor-parallel size.
        dp: Vision data-parallel size.
        problems: Why it is illegal; empty if it is legal.
        warnings: What to know about a legal split.
        heads: Heads per rank, 0 where they do not divide.
    """

    tp: int
    dp: int
    problems: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    heads: int = 0

    @property
    def legal(self) -> bool:
        """Whether no rule is broken."""
        return not self.problems

    @property
    def facts(self) -> tuple[str, ...]:
        """What one rank holds, for a table."""
        return (f"per rank: {self.heads} heads",)


@dataclass(frozen=True)
class ParallelTable:
    """Every size that is worth a row, for one checkpoint.

    Args:
        name: The checkpoint.
        text: Text TP, ascending.
        vision: World size -> vision TP x DP, ascending.
    """

    name: str
    text: tuple[TextSplit, ...]
    vision: dict[int, tuple[VisionSplit, ...]]

    def to_dict(self) -> dict[str, object]:
        """Plain data for `--json`."""
        return {
            "checkpoint": self.name,
            "text": [_split_dict(split) for split in self.text],
            "vision": {
                str(ranks): [_split_dict(split) for split in splits]
                for ranks, splits in self.vision.items()
            },
        }


def parallel_table(checkpoint: ResolvedCheckpoint, world_size: int | None = None) -> ParallelTable:
    """Text TP and, for every world size of a legal text TP, vision TP x DP.

    Args:
        checkpoint: Both towers with the sizes of a checkpoint.
        world_size: Only this many ranks, legal or not; None for all up to `MAX_RANKS`.

    Raises:
        UsageError: The world size is below 1.
    """
    if world_size is not None:
        text: tuple[TextSplit, ...] = (text_split(checkpoint.text, world_size),)
        worlds = [world_size]
    else:
        text = text_splits(checkpoint.text)
        worlds = [split.tp for split in text if split.legal]
    vision = {ranks: vision_splits(checkpoint.vision, ranks) for ranks in worlds}
    return ParallelTable(checkpoint.name, text, vision)


def _split_dict(split: TextSplit | VisionSplit) -> dict[str, object]:
    return {"legal": split.legal, **asdict(split)}


def text_split(text: TextSpec, tp: int) -> TextSplit:
    """Judge one text TP.

    Args:
        text: The text tower with the sizes of a checkpoint.
        tp: Tensor-parallel size, at least 1.

    Raises:
        UsageError: `tp` is below 1.
    """
    _positive("text TP", tp)
    attention = text.attention
    heads, kv_heads = attention.num_heads, attention.num_kv_heads
    problems: list[str] = []
    warnings: list[str] = []
    per_rank = 0
    if heads % tp:
        problems.append(f"heads: {heads} / {tp} leaves {heads % tp}")
    else:
        per_rank = heads // tp
        if per_rank % 2:
            problems.append(f"heads per rank: {heads} / {tp} = {per_rank} is odd")
    kv_per_rank, replicas = 0, 1
    if kv_heads % tp == 0:
        kv_per_rank = kv_heads // tp
    elif tp % kv_heads == 0:
        kv_per_rank, replicas = 1, tp // kv_heads
    else:
        problems.append(f"KV heads: neither {kv_heads} / {tp} nor {tp} / {kv_heads} is whole")
    problems += [
        f"{name}: {size} / {tp} leaves {size % tp}"
        for name, size in _text_widths(text)
        if size % tp
    ]
    width = (per_rank + 2 * kv_per_rank) * attention.head_dim if per_rank and kv_per_rank else 0
    if not problems:
        if replicas > 1:
            warnings.append(f"each KV head is on {replicas} ranks")
        if width in SUSPECT_QKV_WIDTHS:
            warnings.append(
                f"fused QKV width {width} per rank: wrong results were reported for "
                f"{SUSPECT_QKV_WIDTHS.start} to {SUSPECT_QKV_WIDTHS.stop - 1}"
            )
        if text.vocab_size % tp:
            warnings.append(
                f"vocabulary padded from {text.vocab_size} to {padded_vocab(text.vocab_size, tp)}"
            )
    return TextSplit(
        tp,
        tuple(problems),
        tuple(warnings),
        per_rank,
        kv_per_rank,
        replicas,
        width,
        padded_vocab(text.vocab_size, tp),
    )


def vision_split(vision: VisionSpec, tp: int, dp: int, world_size: int) -> VisionSplit:
    """Judge one vision TP x DP on a world of ranks.

    Args:
        vision: The vision tower with the sizes of a checkpoint.
        tp: Vision tensor-parallel size.
        dp: Vision data-parallel size.
        world_size: Ranks of the text tower; TP x DP must equal it.

    Raises:
        UsageError: A size is below 1.
    """
    for name, size in (("vision TP", tp), ("vision DP", dp), ("world size", world_size)):
        _positive(name, size)
    problems: list[str] = []
    warnings: list[str] = []
    if tp * dp != world_size:
        problems.append(f"TP x DP: {tp} x {dp} = {tp * dp}, the world size is {world_size}")
    problems += _vision_tp_problems(vision, tp)
    heads = vision.attention.num_heads
    if not problems and dp > 1:
        warnings.append(f"the blocks of a bucket are rounded up to a multiple of {dp}")
    return VisionSplit(
        tp, dp, tuple(problems), tuple(warnings), heads // tp if heads % tp == 0 else 0
    )


def padded_vocab(vocab_size: int, tp: int) -> int:
    """Rows of the embedding table and head after padding to a multiple of TP."""
    return -(-vocab_size // tp) * tp


def text_splits(text: TextSpec, limit: int = MAX_RANKS) -> tuple[TextSplit, ...]:
    """Powers of two up to `limit`, and every other legal size, ascending."""
    sizes = {1 << n for n in range(limit.bit_length()) if 1 << n <= limit}
    rows = [text_split(text, tp) for tp in range(1, limit + 1)]
    return tuple(row for row in rows if row.legal or row.tp in sizes)


def vision_splits(vision: VisionSpec, world_size: int) -> tuple[VisionSplit, ...]:
    """Every TP x DP whose product is the world size, by ascending TP."""
    _positive("world size", world_size)
    return tuple(
        vision_split(vision, tp, world_size // tp, world_size)
        for tp in range(1, world_size + 1)
        if world_size % tp == 0
    )


def legal_text_tp(text: TextSpec, limit: int = MAX_RANKS) -> tuple[int, ...]:
    """Legal text TP up to `limit`, ascending."""
    return tuple(tp for tp in range(1, limit + 1) if text_split(text, tp).legal)


def legal_vision_tp(vision: VisionSpec, limit: int = MAX_RANKS) -> tuple[int, ...]:
    """Legal vision TP up to `limit`, ascending; DP is world size / TP."""
    return tuple(tp for tp in range(1, limit + 1) if not _vision_tp_problems(vision, tp))


def require_text_tp(text: TextSpec, tp: int, name: str) -> TextSplit:
    """The split of a legal text TP.

    Raises:
        CheckFailed: The TP is illegal; the message gives every reason and the legal sizes.
    """
    split = text_split(text, tp)
    if not split.legal:
        raise CheckFailed(
            f"text TP {tp} is illegal for {name}: {'; '.join(split.problems)}; "
            f"legal: {_numbers(legal_text_tp(text))}"
        )
    return split


def require_vision_split(
    vision: VisionSpec, tp: int, dp: int, world_size: int, name: str
) -> VisionSplit:
    """The split of a legal vision TP x DP.

    Raises:
        CheckFailed: The split is illegal; the message gives every reason and the legal splits.
    """
    split = vision_split(vision, tp, dp, world_size)
    if not split.legal:
        legal = [s for s in vision_splits(vision, world_size) if s.legal]
        shown = ", ".join(f"{s.tp}x{s.dp}" for s in legal) or "none"
        raise CheckFailed(
            f"vision TP {tp} x DP {dp} is illegal for {name} on {world_size} ranks: "
            f"{'; '.join(split.problems)}; legal: {shown}"
        )
    return split


def prefill_bucket_problems(buckets: Iterable[int], tp: int) -> tuple[str, ...]:
    """Why prefill buckets do not fit a text TP; empty if all do.

    Sequence parallelism gives each rank T / tp tokens, at least two.

    Args:
        buckets: Token counts T of `num_batched_tokens_buckets`.
        tp: Text TP.
    """
    _positive("text TP", tp)
    problems = []
    for size in buckets:
        if size % tp:
            problems.append(f"prefill bucket {size} is not divisible by text TP {tp}")
        elif size <= tp:
            problems.append(f"prefill bucket {size} is not larger than text TP {tp}")
    return tuple(problems)


def _text_widths(text: TextSpec) -> list[tuple[str, int]]:
    """Widths that tensor parallelism cuts, by name."""
    widths = []
    if text.moe is None or text.moe.first_dense:
        widths.append(("intermediate size", text.mlp.intermediate_size))
    if text.moe is not None:
        widths.append(("expert intermediate size", text.moe.intermediate_size))
        if text.moe.shared is not None:
            shared = text.moe.shared.count * text.moe.intermediate_size
            widths.append(("shared expert intermediate size", shared))
    return widths


def _vision_tp_problems(vision: VisionSpec, tp: int) -> list[str]:
    widths = {
        "vision heads": vision.attention.num_heads,
        "vision intermediate size": vision.mlp.intermediate_size,
        "merger width": vision.merger_width,
    }
    if vision.merger.op == "strided_conv":  # its first projection is cut as well
        widths["vision output width"] = vision.out_hidden_size
    return [
        f"{name}: {size} / {tp} leaves {size % tp}" for name, size in widths.items() if size % tp
    ]


def _positive(name: str, size: int) -> None:
    if size < 1:
        raise UsageError(f"{name} is {size}; it is at least 1")


def _numbers(values: Iterable[int]) -> str:
    return ", ".join(map(str, values)) or "none"
