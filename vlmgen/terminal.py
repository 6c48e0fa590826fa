"""Where commands print: tables for people, JSON for programs."""

from __future__ import annotations

import sys
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
