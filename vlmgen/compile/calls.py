"""The exact call of every graph: what the runner's warm-up passes, and a real request's values.

The package is built and loaded as the runner does it; instead of running a warm-up call, its
keywords are kept.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from vlmgen.compile.graphs import Deployment, Graph
from vlmgen.validate.driver import PackageDriver


@dataclass(frozen=True)
class Call:
    """A module and the keywords that it is called with.

    Args:
        graph: Which graph it is.
        module: The tower, or the whole model.
        kwargs: Keyword arguments: tensors, and containers of them.
    """

    graph: Graph
    module: torch.nn.Module
    kwargs: dict[str, Any]


class CallRecorder(PackageDriver):
    """A loaded package whose warm-up calls are kept and not run.

    Args:
        factory: The package's factory class.
        checkpoint: Folder of the checkpoint.
        deployment: Buckets and sizes.
        dtype: Of weights and caches.
        vision: Further keys of the vision settings, such as its parallel sizes.
    """

    def __init__(
        self,
        factory: Any,
        checkpoint: Any,
        deployment: Deployment,
        dtype: torch.dtype | None = torch.float32,
        vision: Mapping[str, Any] | None = None,
    ) -> None:
        self.deployment = deployment
        self.calls: dict[Graph, Call] = {}
        settings = deployment.driver_settings()
        settings["vision_neuron_config"] |= vision or {}
        super().__init__(factory, checkpoint, dtype=dtype, **settings)
        hold_caches_as_buffers(self.model, self._kv)

    def _warm_up(self) -> None:
        with self._calls_kept():
            super()._warm_up()
        self.encoder_cache.buffer.zero_()

    @contextmanager
    def _calls_kept(self) -> Iterator[None]:
        model, visual = self.model, self.model.visual
        buckets = iter(self.deployment.vision_buckets)

        @functools.wraps(type(visual).forward.__get__(visual))
        def keep_vision(**kwargs: Any) -> None:
            graph = Graph("vision", next(buckets))
            self.calls[graph] = Call(graph, visual, kwargs)

        @functools.wraps(type(model).forward.__get__(model))
        def keep_text(**kwargs: Any) -> None:
            first = next(iter(kwargs["attn_metadata"].values()))
            prefill = first["max_query_len"] > first["decode_token_threshold"]
            graph = Graph("prefill" if prefill else "decode", kwargs["input_ids"].shape[0])
            self.calls[graph] = Call(graph, model, kwargs)

        visual.forward, model.forward = keep_vision, keep_text
        try:
            yield
        finally:
            del visual.forward, model.forward


@contextmanager
def shapes_only(factory: Any) -> Iterator[Any]:
    """A factory whose models have sizes and no values; everything made in the block is like that.

    Args:
        factory: The package's factory class.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=True)

    class WithoutWeights(factory):
        """Builds on a CPU that holds no values, and loads nothing."""

        @classmethod
        def from_configs(cls, **kwargs: Any) -> torch.nn.Module:
            with torch.device("cpu"):
                model = factory.from_configs(**kwargs)
            model.load_weights = lambda *_: None
            return model

    with mode:
        yield WithoutWeights


def hold_caches_as_buffers(model: torch.nn.Module, caches: Mapping[str, torch.Tensor]) -> None:
    """Make the bound KV caches buffers of the modules that hold them.

    The runner's graphs take them as inputs that are changed in place; `torch.export` takes buffers
    that way and plain attributes as constants. They stay the same tensors.
    """
    storages = {cache.untyped_storage()._cdata for cache in caches.values()}
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if not torch.is_tensor(value):
                continue
            if value.untyped_storage()._cdata in storages:
                delattr(module, name)
                module.register_buffer(name, value, persistent=False)
