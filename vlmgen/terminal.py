"""Where commands print: tables for people, JSON for programs, progress on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress


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


class Steps:
    """Work whose steps are counted: how far it is and how long the rest may take.

    This one shows nothing; see :func:`steps` for one that does.
    """

    def begin(self, what: str, count: int) -> None:
        """A part of the work begins.

        Args:
            what: What is being done.
            count: Of how many steps.
        """

    def say(self, what: str) -> None:
        """Something is being done, within a step or outside of all."""

    def done(self) -> None:
        """A step of the part is done."""


SILENT = Steps()


class Bar(Steps):
    """A bar per part, with the time that it has taken and that it may take.

    Args:
        bars: Where it is drawn.
    """

    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._part = bars.add_task("", total=None)

    def begin(self, what: str, count: int) -> None:
        self._bars.remove_task(self._part)
        self._part = self._bars.add_task(what, total=count)

    def say(self, what: str) -> None:
        self._bars.update(self._part, description=what)

    def done(self) -> None:
        self._bars.advance(self._part)


@contextmanager
def steps(title: str, console: Console | None = None) -> Iterator[Steps]:
    """A progress bar on stderr, on a terminal only.

    Args:
        title: What the whole of the work is.
        console: Where to draw instead; whether it is a terminal is its own matter.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = console or Console(stderr=True)
    if not console.is_terminal:
        yield SILENT
        return
    columns = (
        TextColumn(f"{title}: {{task.description}}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    # A step may take minutes, and the estimate is from all steps of a part.
    bars = Progress(*columns, console=console, transient=True, speed_estimate_period=24 * 3600)
    with bars:
        yield Bar(bars)
