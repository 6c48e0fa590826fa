"""Counters of the encoder cache in the server's ``/metrics``.

Entry point of the group ``vllm.stat_logger_plugins``; vLLM makes one per engine in the front end.
"""

from __future__ import annotations

from typing import Any

from prometheus_client import REGISTRY, Counter, Gauge
from vllm.v1.metrics.loggers import StatLoggerBase

__all__ = ["EncoderCacheStatLogger"]

# vLLM takes every collector with "vllm" in its name out of the registry when it starts.
_COUNTERS = {
    "encoder_items_encoded": "Images and videos that went through the vision tower.",
    "encoder_cache_hits": "Images and videos of a prompt that were in the encoder cache.",
}
_GAUGES = {"encoder_cache_blocks_used": "Blocks of the encoder cache that hold an item."}


class EncoderCacheStatLogger(StatLoggerBase):
    """Publishes what the stand-in's scheduler reports; silent on every other platform.

    Args:
        vllm_config: vLLM's.
        engine_index: number of the engine, a label.
    """

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        scheduler = str(vllm_config.scheduler_config.scheduler_cls)
        self._active = "neuron_scheduler" in scheduler
        self._last: dict[str, int] = {}
        self._labels = {"engine": str(engine_index)}

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """Take the totals of a step over."""
        if not self._active or scheduler_stats is None:
            return
        totals = scheduler_stats.waiting_lora_adapters
        for name, text in _COUNTERS.items():
            added = totals.get(name, 0) - self._last.get(name, 0)
            _metric(Counter, name, text).labels(**self._labels).inc(max(0, added))
        for name, text in _GAUGES.items():
            _metric(Gauge, name, text).labels(**self._labels).set(totals.get(name, 0))
        self._last = dict(totals)

    def log_engine_initialized(self) -> None:
        """Show the counters at zero."""
        if self._active:
            for name, text in _COUNTERS.items():
                _metric(Counter, name, text).labels(**self._labels)


_metrics: dict[str, Any] = {}


def _metric(kind: Any, name: str, text: str) -> Any:
    """One collector per process and name."""
    if name not in _metrics:
        _metrics[name] = kind(f"neuron_{name}", text, ["engine"], registry=REGISTRY)
    return _metrics[name]
