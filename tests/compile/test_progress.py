"""The progress bar: how far a part is, and how long the rest may take."""

from __future__ import annotations

import io

from rich.console import Console

from vlmgen.terminal import SILENT, steps


def shown(terminal: bool) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=120)
    with steps("compiling", console) as bar:
        bar.say("loading")
        bar.begin("in 2 processes", 4)
        bar.done()
        bar.done()
        bar.say("decode-2")
    return out.getvalue()


def test_a_terminal_shows_steps_and_an_estimate() -> None:
    text = shown(terminal=True)
    assert "compiling: decode-2" in text and "2/4" in text
    last = text[text.rindex("2/4") :]
    assert "left" in last and "0:00:00" in last  # two steps took no time, nor will the others


def test_a_pipe_is_left_alone() -> None:
    assert shown(terminal=False) == ""
    with steps("compiling", Console(file=io.StringIO())) as bar:
        assert bar is SILENT
