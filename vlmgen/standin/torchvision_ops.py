"""Lets a torchvision wheel from the public index import beside a CPU build of torch.

The wheel's compiled operators are linked against another torch build and do not load; its
Python part then registers fake kernels for two operators that nobody declared, and the import
fails. Declaring the two schemas is enough for everything that does not call the operators
(resizing, normalising, the image and video processors of transformers).
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType

__all__ = ["SCHEMAS", "TorchvisionFinder", "declare_missing_ops"]

SCHEMAS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
"""The operators torchvision's import needs to exist, with their schemas."""

_fragments: list[object] = []  # a torch.library.Library drops its operators when collected


def declare_missing_ops() -> list[str]:
    """Declare the torchvision operators that are missing; call before importing torchvision.

    Does nothing where torchvision is absent or its own operators load.

    Returns:
        Names of the operators that were declared here, empty when none was needed.
    """
    spec = importlib.util.find_spec("torchvision")
    if spec is None or not spec.submodule_search_locations:
        return []
    import torch

    for folder in spec.submodule_search_locations:
        for suffix in EXTENSION_SUFFIXES:
            library = Path(folder) / f"_C{suffix}"
            if not library.is_file():
                continue
            try:
                torch.ops.load_library(str(library))
            except (ImportError, OSError):
                continue  # built against another torch; torchvision itself carries on as well
    missing = [name for name in SCHEMAS if not hasattr(torch.ops.torchvision, name)]
    if missing:
        fragment = torch.library.Library("torchvision", "FRAGMENT")
        for name in missing:
            fragment.define(SCHEMAS[name])
        _fragments.append(fragment)
    return missing


class TorchvisionFinder(importlib.abc.MetaPathFinder):
    """Calls :func:`declare_missing_ops` when torchvision is about to be imported, then steps aside.

    transformers and vLLM import torchvision on their own, so the declaration cannot wait for
    code that knows about it; and it needs torch, which must not be imported before it is wanted.
    """

    def find_spec(
        self, fullname: str, path: object = None, target: ModuleType | None = None
    ) -> None:
        """Answer nothing; the declaration is the point."""
        if fullname == "torchvision" and self in sys.meta_path:
            sys.meta_path.remove(self)  # once is enough, and the look-up below comes back here
            declare_missing_ops()
