"""Formatting of generated Python with black, and the check that it parses."""

from __future__ import annotations

import ast
import contextlib
import gc
import json
import os
import sys
import threading
from collections.abc import Iterator, Mapping

from vlmgen.render.environment import TemplateError

LINE_LENGTH = 100
# Below this many characters a second process costs more than it saves.
_WORTH_A_PROCESS = 40_000
_alone = False


def format_modules(texts: Mapping[str, str]) -> dict[str, str]:
    """Format the modules of a package, half of them in a second process where that is safe.

    Args:
        texts: What the templates rendered to, by path.

    Returns:
        The modules as black writes them, by path.

    Raises:
        TemplateError: A text is not Python; the first by path.
    """
    import black  # noqa: F401  (before the fork, so that both processes have it)

    with _collector_off():
        here, there = _halves(texts)
        if _may_fork() and sum(map(len, there.values())) > _WORTH_A_PROCESS:
            return _format_in_two(here, there)
        return _format_all(texts)


def format_python(text: str, path: str) -> str:
    """Format one generated module.

    Args:
        text: What the template rendered to.
        path: The module, for messages.

    Returns:
        The module as black writes it.

    Raises:
        TemplateError: The text is not Python.
    """
    import black

    mode = black.Mode(target_versions={black.TargetVersion.PY311}, line_length=LINE_LENGTH)
    try:
        # One pass, half the time of `format_str`, which makes a second one wherever the first
        # changed anything, for a rare play of trailing commas with parentheses. Nor are the
        # syntax trees compared here. The tests do both for the committed packages.
        formatted = black._format_str_once(text, mode=mode)
        ast.parse(formatted)
    except black.InvalidInput as error:
        raise TemplateError(f"{path}: the rendered text is not Python: {error}") from error
    except SyntaxError as error:
        raise TemplateError(
            f"{path}: the rendered text is not Python: line {error.lineno}: {error.msg}"
        ) from error
    return formatted


def format_text(text: str) -> str:
    """Trailing blanks off, one line feed at the end: for files that are not Python."""
    lines = [line.rstrip() for line in text.split("\n")]
    return "\n".join(lines).rstrip("\n") + "\n"


def _format_all(texts: Mapping[str, str]) -> dict[str, str]:
    return {path: format_python(texts[path], path) for path in sorted(texts)}


@contextlib.contextmanager
def _collector_off() -> Iterator[None]:
    """No garbage collection meanwhile: black's trees are large, and collecting them is slow."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _halves(texts: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Two shares of about equal length."""
    shares: tuple[dict[str, str], dict[str, str]] = ({}, {})
    lengths = [0, 0]
    for path in sorted(texts, key=lambda path: (-len(texts[path]), path)):
        index = 0 if lengths[0] <= lengths[1] else 1
        shares[index][path] = texts[path]
        lengths[index] += len(texts[path])
    return shares


def stay_in_one_process() -> None:
    """Format in this process alone from now on: it is one of several that render already."""
    global _alone
    _alone = True


def _may_fork() -> bool:
    """A fork copies one thread only, so it is for a process that has no other."""
    return (
        not _alone
        and hasattr(os, "sched_getaffinity")
        and len(os.sched_getaffinity(0)) > 1
        and threading.active_count() == 1
        and "torch" not in sys.modules
    )


def _format_in_two(here: Mapping[str, str], there: Mapping[str, str]) -> dict[str, str]:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(reading)
            with os.fdopen(writing, "wb") as stream:
                stream.write(json.dumps(_format_all(there)).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    try:
        formatted = _format_all(here)
    finally:
        with os.fdopen(reading, "rb") as stream:
            answer = stream.read()
        _, status = os.waitpid(child, 0)
    if status != 0:
        # Whatever it was, it happens again here, with its message.
        return formatted | _format_all(there)
    return formatted | json.loads(answer)
