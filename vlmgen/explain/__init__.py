"""What every code means: `vlmgen explain CODE` and docs/codes.md come from the same pages.

A page is a table of one of the TOML files in `pages/`. The title of a finding is its rule in
`vlmgen/check/finding.py`; the tests produce what the examples show.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from vlmgen.check.finding import RULES
from vlmgen.errors import UsageError

# (first digit of the code, file of the pages, what they are about), in the order of docs/codes.md.
GROUPS = (
    ("0", "package", "Files of a package"),
    ("1", "contract", "The plugin's contract"),
    ("2", "device", "Rules of a device"),
    ("3", "weights", "Weights"),
    ("4", "parallel", "Parallel sizes"),
    ("5", "spec", "Specs"),
    ("6", "compile", "Compiled graphs"),
    ("9", "errors", "Errors of commands"),
)


@dataclass(frozen=True)
class Page:
    """What one code means.

    Args:
        code: `VG` and three digits; never given another meaning.
        title: The rule that is broken, or what went wrong.
        means: What it means and why it matters.
        mend: How to mend it.
        says: What vlmgen says in the example, without place and code.
        wrong: The example: code, YAML or a command.
        right: The example, mended; empty where `mend` says it all.
        language: Of the example, for highlighting.
        file: Which file of a package the example stands in; empty for model.py.
        how: How the tests produce the example; see tests/explain.
    """

    code: str
    title: str
    means: str
    mend: str
    says: str
    wrong: str = ""
    right: str = ""
    language: str = "python"
    file: str = ""
    how: str = ""

    def text(self) -> str:
        """The page for a terminal."""
        parts = [f"{self.code}  {self.title}", self.means]
        parts.append("Example" + (f", in {self.file}" if self.file else ""))
        parts += [_indented(self.wrong)] if self.wrong else []
        parts.append(_indented(self.says, f"  {self.code}  "))
        parts += ["Right", _indented(self.right)] if self.right else []
        parts += ["How to mend it", self.mend]
        return "\n\n".join(parts)

    def markdown(self) -> str:
        """The page as a section of docs/codes.md."""
        parts = [f"### {self.code}", f"**{self.title}**", self.means]
        if self.wrong:
            where = f" in `{self.file}`" if self.file else ""
            parts.append(f"Example{where}:\n\n```{self.language}\n{self.wrong}\n```")
        parts.append(f"```text\n{self.code} {self.says}\n```")
        if self.right:
            parts.append(f"Right:\n\n```{self.language}\n{self.right}\n```")
        parts.append(f"*How to mend it.* {self.mend}")
        return "\n\n".join(parts)


@cache
def pages() -> dict[str, Page]:
    """Every page by code, in the order of the codes."""
    found: dict[str, Page] = {}
    for _, name, _ in GROUPS:
        text = files("vlmgen.explain").joinpath("pages", f"{name}.toml").read_text("utf-8")
        for code, body in tomllib.loads(text).items():
            stripped = {key: value.strip("\n") for key, value in body.items()}
            title = stripped.pop("title", "") or RULES[code]
            found[code] = Page(code, title, **stripped)
    return dict(sorted(found.items()))


def page(code: str) -> Page:
    """The page of a code.

    Args:
        code: A code in any case, such as `VG103`.

    Raises:
        UsageError: There is no such code.
    """
    known = pages()
    wanted = code.strip().upper()
    if wanted not in known:
        close = difflib.get_close_matches(wanted, known, 3)
        raise UsageError(
            f"there is no code {code[:40]!r}",
            hint=(
                f"did you mean {', '.join(close)}?"
                if close
                else "vlmgen explain lists every code with its title"
            ),
        )
    return known[wanted]


def groups() -> Iterator[tuple[str, list[Page]]]:
    """(what they are about, pages) of every group."""
    for digit, _, about in GROUPS:
        yield about, [p for code, p in pages().items() if code[2] == digit]


def _indented(text: str, first: str = "  ") -> str:
    lines = text.splitlines() or [""]
    rest = " " * len(first)
    return "\n".join([first + lines[0], *(rest + line if line else "" for line in lines[1:])])
