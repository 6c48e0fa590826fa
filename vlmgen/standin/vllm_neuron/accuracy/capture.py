"""Recording what modules return."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["ModelCapture"]


class ModelCapture:
    """Records the outputs of named modules while a model runs.

    The plugin's signature is not public; this one is the stand-in's own::

        with ModelCapture(model, ["layers.0", "norm"]) as captured:
            model(x)
        captured.outputs["norm"]  # one entry per call

    Args:
        model: any module.
        modules: names as in ``named_modules()``; None is every module without children.

    Attributes:
        outputs: module name -> detached copies of the first tensor of each call's result.

    Raises:
        KeyError: a name is not a module; the message lists the nearest ones.
    """

    def __init__(self, model: torch.nn.Module, modules: Sequence[str] | None = None) -> None:
        known = dict(model.named_modules())
        if modules is None:
            modules = [name for name, module in known.items() if not list(module.children())]
        absent = [name for name in modules if name not in known]
        if absent:
            import difflib

            near = difflib.get_close_matches(absent[0], known, n=3)
            raise KeyError(f"the model has no modules {absent}; near {absent[0]!r} are {near}")
        self._modules = {name: known[name] for name in modules}
        self._handles: list[Any] = []
        self.outputs: dict[str, list[torch.Tensor]] = {}

    def __enter__(self) -> ModelCapture:
        self.outputs = {name: [] for name in self._modules}
        for name, module in self._modules.items():
            hook = self._recorder(name)
            self._handles.append(module.register_forward_hook(hook))
        return self

    def _recorder(self, name: str) -> Any:
        def record(module: torch.nn.Module, args: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple | list) else output
            if isinstance(first, torch.Tensor):
                self.outputs[name].append(first.detach().clone())

        return record

    def __exit__(self, *exception: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
