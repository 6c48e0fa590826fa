"""What a deployment compiles: one graph per bucket of the runner's warm-up, and why each exists."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

KINDS = ("vision", "prefill", "decode")


@dataclass(frozen=True, order=True)
class Graph:
    """One graph of the runner's warm-up.

    Args:
        kind: `vision`, `prefill` or `decode`.
        size: Patches of a vision bucket, padded tokens of a prefill, padded requests of a decode
            step.
    """

    kind: str
    size: int

    @property
    def name(self) -> str:
        """`prefill-256`; also a legal file name."""
        return f"{self.kind}-{self.size}"


@dataclass(frozen=True)
class Deployment:
    """The sizes that decide which graphs there are and what their shapes are.

    Args:
        max_model_len: Longest sequence.
        kv_block_size: Tokens per KV block.
        token_buckets: Padded lengths of a prefill.
        seq_buckets: Padded batches of a decode step.
        vision_buckets: Padded patches of one call of the tower.
        vision_block: Patches of one attention block.
        cache_blocks: Blocks of the encoder cache; None takes the least.
    """

    max_model_len: int
    kv_block_size: int
    token_buckets: tuple[int, ...]
    seq_buckets: tuple[int, ...]
    vision_buckets: tuple[int, ...]
    vision_block: int
    cache_blocks: int | None = None

    def graphs(self) -> list[Graph]:
        """Every graph, in the order of warm-up."""
        sizes = (self.vision_buckets, self.token_buckets, self.seq_buckets)
        return [Graph(kind, size) for kind, own in zip(KINDS, sizes, strict=True) for size in own]

    def why(self, graph: Graph) -> str:
        """Why a graph exists: which calls end up in it."""
        own = {
            "vision": self.vision_buckets,
            "prefill": self.token_buckets,
            "decode": self.seq_buckets,
        }[graph.kind]
        below = max((size for size in own if size < graph.size), default=0)
        if graph.kind == "vision":
            blocks, least = -(-graph.size // self.vision_block), below // self.vision_block + 1
            what = f"pictures and frames that pack into {_span(least, blocks, 'block')}"
            return f"{what} of {self.vision_block} patches"
        noun = "prompts" if graph.kind == "prefill" else "steps"
        unit = "token" if graph.kind == "prefill" else "request"
        padded = f", padded to {graph.size}" if below + 1 < graph.size else ""
        return f"{noun} of {_span(below + 1, graph.size, unit)}{padded}"

    def driver_settings(self) -> dict[str, Any]:
        """Keywords of :class:`vlmgen.validate.driver.PackageDriver`."""
        return {
            "max_model_len": self.max_model_len,
            "kv_block_size": self.kv_block_size,
            "token_buckets": self.token_buckets,
            "seq_buckets": self.seq_buckets,
            "vision_neuron_config": {
                "vision_attention_block_size": self.vision_block,
                "num_vision_tokens_buckets": list(self.vision_buckets),
                "encoder_cache_num_blocks": self.cache_blocks,
            },
        }

    def additional_config(self, served: Mapping[str, Any]) -> dict[str, Any]:
        """The plugin's settings for these sizes.

        Args:
            served: Those that `vlmgen serve` gives, which say everything else.
        """
        text = {
            "num_batched_tokens_buckets": list(self.token_buckets),
            "num_seqs_buckets": list(self.seq_buckets),
        }
        vision = self.driver_settings()["vision_neuron_config"]
        if self.cache_blocks is None:
            del vision["encoder_cache_num_blocks"]
        return {
            **served,
            "neuron_config": {**served["neuron_config"], **text},
            "vision_neuron_config": {**served["vision_neuron_config"], **vision},
        }

    def to_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return {name: list(v) if isinstance(v, tuple) else v for name, v in vars(self).items()}


def _span(first: int, last: int, noun: str) -> str:
    """`3 to 4 blocks`, `1 block`."""
    numbers = f"{first} to {last}" if first < last else f"{last}"
    return f"{numbers} {noun}{'' if last == 1 else 's'}"


def deployment_of(settings: Any) -> Deployment:
    """The deployment that `vlmgen serve` starts.

    Args:
        settings: :class:`vlmgen.serve.settings.ServeSettings`.
    """
    config: Mapping[str, Any] = settings.additional_config
    text, vision = config["neuron_config"], config["vision_neuron_config"]
    return Deployment(
        max_model_len=settings.max_model_len,
        kv_block_size=DEFAULT_KV_BLOCK,
        token_buckets=tuple(sorted(text["num_batched_tokens_buckets"])),
        seq_buckets=tuple(sorted(text["num_seqs_buckets"])),
        vision_buckets=tuple(sorted(vision["num_vision_tokens_buckets"])),
        vision_block=vision["vision_attention_block_size"],
        cache_blocks=vision.get("encoder_cache_num_blocks"),
    )


DEFAULT_KV_BLOCK = 32
"""Tokens per KV block where nothing else is said, as the plugin's platform sets it."""
