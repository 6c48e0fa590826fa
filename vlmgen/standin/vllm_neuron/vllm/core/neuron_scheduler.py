"""vLLM's scheduler under the plugin's rules: a step is one prefill or all decodes.

Nothing of vLLM's own scheduling is written again: each of the two kinds of step is vLLM's
``schedule`` with the other kind of request out of sight.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.metrics.stats import SchedulerStats
from vllm_neuron.vllm.limits import VisionLimits

__all__ = ["CACHE_BLOCKS", "CACHE_HITS", "ITEMS_ENCODED", "NeuronScheduler"]

ITEMS_ENCODED = "encoder_items_encoded"
CACHE_HITS = "encoder_cache_hits"
CACHE_BLOCKS = "encoder_cache_blocks_used"


class NeuronScheduler(Scheduler):
    """First come first served, one prefill per step, a prompt always in one piece."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._encoded = self._hits = 0
        if self.max_num_encoder_input_tokens:
            limits = VisionLimits.from_vllm_config(self.vllm_config)
            self.max_num_encoder_input_tokens = min(
                self.max_num_encoder_input_tokens, limits.tokens_per_step
            )

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """One prefill if a waiting request can be admitted, otherwise all running requests.

        Raises:
            RuntimeError: a step came out mixed.
        """
        idle = None
        if self.waiting and len(self.running) < self.max_num_active_reqs:
            output = self._schedule_prefill(throttle_prefills)
            if output.total_num_scheduled_tokens or not self.running:
                return output
            idle = output
        output = self._schedule_decode(throttle_prefills)
        if idle is not None:  # what the attempt told the worker must not get lost
            output.finished_req_ids |= idle.finished_req_ids
            output.free_encoder_mm_hashes[:0] = idle.free_encoder_mm_hashes
            output.new_block_ids_to_zero = [
                *(idle.new_block_ids_to_zero or []),
                *(output.new_block_ids_to_zero or []),
            ] or None
        return output

    def _schedule_prefill(self, throttle_prefills: bool) -> SchedulerOutput:
        running, limit = self.running, self.max_num_active_reqs
        self.running = []
        self.max_num_active_reqs = 1 + self.num_waiting_for_streaming_input
        try:
            output = super().schedule(throttle_prefills)
        finally:
            admitted = self.running
            self.running, self.max_num_active_reqs = running + admitted, limit
        if len(output.num_scheduled_tokens) > 1:
            raise RuntimeError(f"{len(output.num_scheduled_tokens)} prefills in one step")
        for request in admitted:
            encoded = len(output.scheduled_encoder_inputs.get(request.request_id, ()))
            self._encoded += encoded
            self._hits += len(request.mm_features) - encoded
        return output

    def _schedule_decode(self, throttle_prefills: bool) -> SchedulerOutput:
        limit = self.max_num_active_reqs
        self.max_num_active_reqs = 0
        try:
            output = super().schedule(throttle_prefills)
        finally:
            self.max_num_active_reqs = limit
        if output.total_num_scheduled_tokens != len(output.num_scheduled_tokens):
            raise RuntimeError("a decode step holds a request with more than one token")
        return output

    def _try_schedule_encoder_inputs(
        self,
        request: Any,
        num_computed_tokens: int,
        num_new_tokens: int,
        encoder_compute_budget: int,
        shift_computed_tokens: int = 0,
    ) -> tuple[list[int], int, int, list[int], list[int]]:
        """vLLM's choice, or nothing: vLLM would cut a prompt before an item that has no room."""
        chosen = super()._try_schedule_encoder_inputs(
            request,
            num_computed_tokens,
            num_new_tokens,
            encoder_compute_budget,
            shift_computed_tokens,
        )
        if chosen[1] < num_new_tokens:
            return [], 0, encoder_compute_budget, [], []
        return chosen

    def make_stats(self, *args: Any, **kwargs: Any) -> SchedulerStats | None:
        """vLLM's figures, with those of the encoder cache.

        They travel in a field for LoRA adapters, which this platform refuses: what is sent
        between the processes has no room for further fields.
        """
        stats = super().make_stats(*args, **kwargs)
        if stats is not None:
            used = getattr(self.encoder_cache_manager, "num_used_blocks", 0)
            stats.waiting_lora_adapters = {
                ITEMS_ENCODED: self._encoded,
                CACHE_HITS: self._hits,
                CACHE_BLOCKS: used,
            }
        return stats
