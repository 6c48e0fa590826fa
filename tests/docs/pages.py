"""The command blocks of README and docs, and what a run of them must show."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

SHELLS = ("console", "sh", "bash", "shell", "zsh")
EXIT = re.compile(r"\s+# exit (\d+)$")
BOX = re.compile(r"[\u2500-\u257f]+")


@dataclass
class Command:
    """One command of a page.

    Args:
        page: The page, below the repository.
        line: 1-based line.
        text: The command as the page shows it, continued lines joined.
        output: What the page shows below it; empty where nothing is shown.
        exit_code: The exit code, `# exit N` behind the command.
    """

    page: str
    line: int
    text: str
    output: list[str] = field(default_factory=list)
    exit_code: int = 0

    @property
    def fragments(self) -> list[str]:
        """What must be printed, in this order: the shown output between the dots."""
        shown = " ".join(plain("\n".join(self.output)).split())
        return [part.strip() for part in re.split(r"(?<!\S)\.\.\.(?!\S)", shown) if part.strip()]


def plain(text: str) -> str:
    """Without the lines of tables and without the width of columns."""
    return " ".join(BOX.sub(" ", text).split())


def missing(command: Command, printed: str) -> str:
    """The first shown fragment that was not printed where it should be; empty if all were."""
    rest = plain(printed)
    for fragment in command.fragments:
        before, found, rest = rest.partition(fragment)
        if not found:
            return fragment
    return ""


def commands_of(page: str, text: str) -> Iterator[Command]:
    """Every command of a page's fenced blocks, in order.

    A block is one of commands by its language or by a line that begins with `$ `.
    """
    fence = language = ""
    block: list[tuple[int, str]] = []
    for number, line in enumerate(text.splitlines(), 1):
        opening = re.match(r" *(`{3,}|~{3,})(.*)", line)
        if not fence and opening:
            fence, language, block = opening[1], opening[2].strip(), []
        elif fence and line.strip() == fence:
            yield from _block(page, language, block)
            fence = ""
        elif fence:
            block.append((number, line))
    assert not fence, f"{page}: a block is not closed"


def _block(page: str, language: str, block: list[tuple[int, str]]) -> Iterator[Command]:
    prompted = any(line.startswith("$ ") for _, line in block)
    if not prompted and language not in SHELLS:
        return
    assert prompted or language != "console", f"{page}: a console block without `$ `"
    command: Command | None = None
    continued = False
    for number, line in block:
        if continued:
            assert command is not None
            command.text = f"{command.text[:-1].rstrip()} {line.strip()}"
        elif line.startswith("$ ") or (not prompted and line.strip() and line[0] != "#"):
            if command is not None:
                yield _finished(command)
            command = Command(page, number, line.removeprefix("$ "))
        elif prompted and command is not None:
            command.output.append(line)
        continued = command is not None and not command.output and command.text.endswith("\\")
    if command is not None:
        yield _finished(command)


def _finished(command: Command) -> Command:
    found = EXIT.search(command.text)
    if found:
        command.exit_code = int(found[1])
        command.text = command.text[: found.start()]
    command.text = command.text.strip()
    return command


def documented(repository: Path) -> dict[str, str]:
    """Page -> text, of README and every page of docs/."""
    paths = [repository / "README.md", *sorted((repository / "docs").rglob("*.md"))]
    return {path.relative_to(repository).as_posix(): path.read_text("utf-8") for path in paths}
