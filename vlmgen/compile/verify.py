"""Real inputs for every graph, what the eager package makes of them, and Hugging Face's answer.

One picture and a question go through the runner's way: the tower, a prefill, decode steps. The
buckets are narrowed to the graph in question, so that every graph sees the same request; its inputs
are then padded as the runner pads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from vlmgen.compile.calls import Call, CallRecorder
from vlmgen.compile.interface import Interface
from vlmgen.validate.compare import relative_error
from vlmgen.validate.driver import Request
from vlmgen.validate.pictures import picture
from vlmgen.validate.reference import Media, Prompt, Reference

LIMIT = 1e-5
"""Relative to the largest value of the reference, in float32."""


@dataclass(frozen=True)
class RealCall:
    """A call with real values.

    Args:
        values: One tensor per argument of the program, as they were before the call.
        results: What the eager package gave: the changed arguments and the result, in the order of
            the program's kept outputs.
        expected: Hugging Face's rows.
        pick: Takes the rows to compare with `expected` out of the results.
    """

    values: list[torch.Tensor]
    results: list[torch.Tensor]
    expected: torch.Tensor
    pick: Callable[[Sequence[torch.Tensor]], torch.Tensor]


@dataclass(frozen=True)
class Difference:
    """How far a compiled program is from the two references.

    Args:
        eager: Largest relative difference from the eager package, over all results.
        hugging_face: Largest relative difference from Hugging Face.
    """

    eager: float
    hugging_face: float

    @property
    def passed(self) -> bool:
        """Both within the limit."""
        return self.eager <= LIMIT and self.hugging_face <= LIMIT


class Verifier:
    """Real calls of one loaded package.

    Args:
        recorder: The package.
        reference: Hugging Face, of the same checkpoint in float32.
    """

    def __init__(self, recorder: CallRecorder, reference: Reference) -> None:
        self._recorder, self._reference = recorder, reference
        self.prompt = self._smallest_picture()

    def _smallest_picture(self) -> Prompt:
        media = Media("image", picture("chelsea", 32, 32))
        return self._reference.prompt("picture", media, "What is in the picture?")

    def real_call(self, call: Call, interface: Interface) -> RealCall:
        """A request's call of a graph.

        Args:
            call: The graph's warm-up call.
            interface: How its program takes the arguments.
        """
        self._recorder.encoder_cache.clear()
        return getattr(self, f"_{call.graph.kind}")(call, interface)

    def difference(self, real: RealCall, results: Sequence[torch.Tensor]) -> Difference:
        """Compare what a compiled program gave with both references."""
        eager = max(
            relative_error(ours.float(), theirs.float())
            for ours, theirs in zip(results, real.results, strict=True)
        )
        return Difference(eager, relative_error(real.pick(results).float(), real.expected.float()))

    # ------------------------------------------------------------------------------ the three kinds

    def _vision(self, call: Call, interface: Interface) -> RealCall:
        recorder = self._recorder
        request = recorder.add_request(self.prompt.token_ids, self.prompt.features)
        with self._narrowed(vision=call.graph.size), self._watched(call, interface) as seen:
            recorder.encode(request)
        feature = request.features[0]
        ids = recorder.encoder_cache.get_block_ids(feature.identifier)
        counts = recorder.encoder_cache.get_tokens_per_block(feature.identifier)
        # The exported tower's only result is the cache.
        kept = [interface.changed_outputs[index] for index in interface.kept_outputs]
        place = next(i for i, target in enumerate(kept) if target is not None)

        def pick(results: Sequence[torch.Tensor]) -> torch.Tensor:
            blocks = zip(ids, counts, strict=True)
            return torch.cat([results[place][block, :count] for block, count in blocks])

        recorder.release(request)
        return RealCall(seen["values"], seen["results"], self._reference.rows_of(feature), pick)

    def _prefill(self, call: Call, interface: Interface) -> RealCall:
        recorder = self._recorder
        request = recorder.add_request(self.prompt.token_ids, self.prompt.features)
        recorder.encode(request)
        with self._narrowed(tokens=call.graph.size), self._watched(call, interface) as seen:
            recorder.prefill(request)
        recorder.release(request)
        expected = self._reference.logits(self.prompt)[-1:]
        return RealCall(seen["values"], seen["results"], expected, lambda results: results[-1])

    def _decode(self, call: Call, interface: Interface) -> RealCall:
        recorder, tokens = self._recorder, self.prompt.token_ids
        requests: list[Request] = []
        for _ in range(call.graph.size):
            request = recorder.add_request(tokens[:-1], self.prompt.features)
            recorder.prefill(request)
            requests.append(request)
        with self._narrowed(seqs=call.graph.size), self._watched(call, interface) as seen:
            recorder.decode(requests, [tokens[-1]] * call.graph.size)
        for request in requests:
            recorder.release(request)
        expected = self._reference.logits(self.prompt)[-1:].repeat(call.graph.size, 1)
        return RealCall(seen["values"], seen["results"], expected, lambda results: results[-1])

    # --------------------------------------------------------------------------------------- parts

    @contextmanager
    def _narrowed(
        self, vision: int | None = None, tokens: int | None = None, seqs: int | None = None
    ) -> Iterator[None]:
        """Leave one bucket, so that the request ends in the graph that is wanted."""
        recorder = self._recorder
        neuron = recorder.model.vision_neuron_config
        before = recorder.token_buckets, recorder.seq_buckets, neuron.num_vision_tokens_buckets
        if tokens is not None:
            recorder.token_buckets = [tokens]
        if seqs is not None:
            recorder.seq_buckets = [seqs]
        if vision is not None:
            neuron.num_vision_tokens_buckets = [vision]
        try:
            yield
        finally:
            recorder.token_buckets, recorder.seq_buckets, buckets = before
            neuron.num_vision_tokens_buckets = buckets

    @contextmanager
    def _watched(self, call: Call, interface: Interface) -> Iterator[dict[str, Any]]:
        """Keep the next call of the program's module: its values before, its results after."""
        module = call.module
        seen: dict[str, Any] = {}

        def before(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen["kwargs"] = kwargs
            seen["values"] = [value.clone() for value in interface.values(module, kwargs)]

        def after(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
            now = interface.values(module, seen["kwargs"])
            flat = torch.utils._pytree.tree_leaves(result)
            results: list[torch.Tensor] = []
            own = iter(flat)
            targets = interface.changed_outputs
            for index, target in enumerate(targets):
                value = now[target] if target is not None else next(own)
                if index in interface.kept_outputs:
                    results.append(value.clone())
            seen["results"] = results

        hooks = [
            module.register_forward_pre_hook(before, with_kwargs=True),
            module.register_forward_hook(after, with_kwargs=True),
        ]
        try:
            yield seen
        finally:
            for hook in hooks:
                hook.remove()
