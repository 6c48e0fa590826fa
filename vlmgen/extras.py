"""What an installation without extras lacks, and the message that says so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

# What the extras "cpu" and "compile" install and the core does not.
EXTRA_MODULES = frozenset(
    (
        "torch",
        "torchvision",
        "transformers",
        "vllm",
        "safetensors",
        "tokenizers",
        "numpy",
        "PIL",
        "skimage",
        "sklearn",
        "openai",
        "jax",
        "torchax",
        "google",  # protobuf
    )
)


@contextmanager
def needs_extra(extra: str) -> Iterator[None]:
    """Turn the absence of an optional dependency into a message that names the extra."""
    from vlmgen.errors import MissingDependencyError

    try:
        yield
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name not in EXTRA_MODULES:
            raise
        raise MissingDependencyError(
            f"{name} is not installed; this command needs the extra {extra!r}",
            hint=f"pip install 'vlmgen[{extra}]'",
        ) from None
