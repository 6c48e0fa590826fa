"""Versions of the spec format: which one this vlmgen reads, and who reads the others.

Format n comes with vlmgen 0.n; a test holds the two together. What changes the meaning of a spec
that was right before (a key renamed, a key that is now required) makes a new format and a step of
`vlmgen migrate`; a new key that may be left out does not.
"""

from __future__ import annotations

import re

import vlmgen
from vlmgen.errors import Problem, SpecError
from vlmgen.spec.source import Document, Span

FORMAT = 1
KEY = "vlmgen"
MISSING_HINT = f"write `{KEY}: {FORMAT}`; for an older spec, run `vlmgen migrate`"

_LINE = re.compile(rf"{KEY}:[ \t]*([0-9]{{1,18}})[ \t]*(?:#.*)?")


def refuse_other_versions(document: Document) -> None:
    """Refuse a spec that this vlmgen does not read, before anything else is said about it.

    Args:
        document: A parsed spec with what it extends. Without a version it is let through: that the
            key is missing is told with everything else.

    Raises:
        SpecError: It, or a spec that it extends, is of another format.
    """
    problems = []
    for source, (_, lines) in enumerate(document.sources):
        for number, line in enumerate(lines, 1):
            found = _LINE.fullmatch(line)
            if found and int(found[1]) != FORMAT:
                span = Span(number, found.start(1) + 1, len(found[1]), source)
                problems.append(_other_version(document, span, int(found[1])))
    stated = document.data.get(KEY) if isinstance(document.data, dict) else None
    if not problems and type(stated) is int and stated >= 0 and stated != FORMAT:
        problems.append(_other_version(document, document.span((KEY,)), stated))
    if problems:
        raise SpecError(problems)


def _other_version(document: Document, span: Span, version: int) -> Problem:
    file, _ = document.sources[span.source]
    return document.problem(
        span,
        f"the spec is of format {version}",
        rule=f"vlmgen {vlmgen.__version__} reads format {FORMAT}",
        hint=(
            f"run `vlmgen migrate {file}`"
            if version < FORMAT
            else f"vlmgen 0.{version} reads it: install that version, or a later one"
        ),
        path=KEY,
        code="VG541" if version < FORMAT else "VG542",
    )
