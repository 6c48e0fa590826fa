"""Where commands print: tables for people, JSON for programs, progress on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def console() -> Console:
    """A console on stdout."""
    from rich.console import Console

    # A pipe has no width; let lines be as long as they are instead of wrapping tables at 80.
    return Console() if sys.stdout.isatty() else Console(width=200)


def print_json(data: Any) -> None:
    """Print plain data as JSON."""
    import json

    print(json.dumps(data, indent=2, ensure_ascii=False))


@contextmanager
def progress(title: str) -> Iterator[Callable[[str], None]]:
    """A status line on stderr, on a terminal only.

    Args:
        title: What is going on; the callable that is handed out adds what is being done now.
    """
    if not sys.stderr.isatty():
        yield lambda message: None
        return
    from rich.console import Console

    with Console(stderr=True).status(title) as status:
        yield lambda message: status.update(f"{title}: {message}")
