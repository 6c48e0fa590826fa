"""A check of one module, both ways, and what all of them need: recorded inputs, chosen layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vlmgen.validate.compare import Comparison
from vlmgen.validate.driver import PackageDriver
from vlmgen.validate.reference import Reference

_MOST_LAYERS = 4  # of a deep model, so many layers are checked, from the first to the last


@dataclass(frozen=True)
class Check:
    """One module, both ways.

    Args:
        name: Row of the report.
        reference: Hugging Face's result for a case, as a tensor.
        actual: The package's result for the same case, of the same shape.
        cases: The inputs.
    """

    name: str
    reference: Callable[[Reference, Any], torch.Tensor]
    actual: Callable[[PackageDriver, Any], torch.Tensor]
    cases: Sequence[Any]


def run_checks(
    checks: Iterable[Check], reference: Reference, driver: PackageDriver
) -> Iterator[tuple[str, Comparison | Exception]]:
    """Run checks one by one; a check that raises yields its exception."""
    for check in checks:
        comparison = Comparison()
        try:
            with torch.no_grad():
                for case in check.cases:
                    expected = check.reference(reference, case)
                    comparison.add(case_name(case), check.actual(driver, case), expected)
        except Exception as error:
            yield check.name, error
        else:
            yield check.name, comparison


def case_name(case: Any) -> str:
    """Name of a case for messages."""
    if isinstance(case, tuple):
        return f"{case[0].name}, layer {case[1]}"
    return case.name


class InputsOf:
    """Records the hidden states that submodules receive: path -> list of them.

    Args:
        module: The module.
        paths: Paths of the submodules.
    """

    def __init__(self, module: torch.nn.Module, paths: Sequence[str]) -> None:
        self._module, self._paths = module, paths
        self._seen: dict[str, list[torch.Tensor]] = {}
        self._handles: list[Any] = []

    def __enter__(self) -> dict[str, list[torch.Tensor]]:
        for path in dict.fromkeys(self._paths):
            hook = self._hook(path)
            module = self._module.get_submodule(path)
            self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        return self._seen

    def _hook(self, path: str) -> Callable[..., None]:
        def record(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden = args[0] if args else kwargs["hidden_states"]
            self._seen.setdefault(path, []).append(hidden.detach().clone())

        return record

    def __exit__(self, *exception: object) -> None:
        for handle in self._handles:
            handle.remove()


def parent(path: str) -> str:
    """`self_attn.q_proj` -> `self_attn`."""
    return path.rpartition(".")[0]


def spread(count: int) -> list[int]:
    """Indexes of a few of `count` layers, first and last included."""
    if count <= _MOST_LAYERS:
        return list(range(count))
    step = (count - 1) / (_MOST_LAYERS - 1)
    return [round(i * step) for i in range(_MOST_LAYERS)]
