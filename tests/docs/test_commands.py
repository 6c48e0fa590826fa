"""Every command block of README and docs is run, and prints what the page shows."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .elsewhere import COMMANDS, PAGES, REPEATED, SLOW, elsewhere
from .pages import Command, commands_of, documented, missing

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ("vlmgen", "python", "sed", "cp", "rm", "cat", "ls", "echo", "diff")
TEXTS = {page: text for page, text in documented(ROOT).items() if page not in PAGES}
FOUND = {page: list(commands_of(page, text)) for page, text in TEXTS.items()}
RUN = {
    page: [c for c in found if not elsewhere(c.text) and c.text not in REPEATED.get(page, ())]
    for page, found in FOUND.items()
}
SECONDS = 300


# --- what is known ------------------------------------------------------------------------------


@pytest.mark.parametrize("page", sorted(TEXTS))
def test_every_command_is_run_or_known_to_be_run_elsewhere(page: str) -> None:
    for command in FOUND[page]:
        program = command.text.split()[0]
        assert (
            elsewhere(command.text) or program in PROGRAMS
        ), f"{page}:{command.line}: `{command.text}` is neither run nor listed with a reason"


def test_what_is_listed_is_used_and_its_place_is_there() -> None:
    texts = [re.sub(r"\s+# .*$", "", c.text) for found in FOUND.values() for c in found]
    for pattern, (reason, where) in COMMANDS.items():
        assert any(re.fullmatch(pattern, text) for text in texts), f"no page has {pattern}"
        assert reason and (where.startswith("nowhere: ") or (ROOT / where).is_file()), where
    for page, (reason, where) in PAGES.items():
        assert reason and (ROOT / page).is_file() and (ROOT / where).is_file()


def test_what_is_repeated_is_run_with_the_readme() -> None:
    run = {c.text for c in RUN["README.md"]}
    for page, commands in REPEATED.items():
        assert set(commands) <= run & {c.text for c in FOUND[page]}, page


def test_targets_of_make_exist() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    for found in FOUND.values():
        for command in found:
            if command.text.startswith("make "):
                assert re.search(rf"^{command.text.split()[1]}:", makefile, re.MULTILINE), command


# --- runs ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def path_with_vlmgen(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A PATH on which `vlmgen` and `python` are those of this test run."""
    programs = tmp_path_factory.mktemp("bin")
    for name, arguments in (("vlmgen", " -m vlmgen"), ("python", "")):
        script = programs / name
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}"{arguments} "$@"\n')
        script.chmod(0o755)
    return f"{programs}{os.pathsep}{os.environ['PATH']}"


def last_slow(page: str) -> int:
    """How many commands of a page lead up to its last slow one."""
    slow = [number for number, c in enumerate(RUN[page], 1) if SLOW.match(c.text)]
    return max(slow, default=0)


@pytest.mark.parametrize("page", sorted(page for page, commands in RUN.items() if commands))
def test_the_fast_commands_of_a_page(page: str, tmp_path: Path, path_with_vlmgen: str) -> None:
    run_all([c for c in RUN[page] if not SLOW.match(c.text)], tmp_path, path_with_vlmgen)


@pytest.mark.slow
@pytest.mark.parametrize("page", sorted(filter(last_slow, RUN)))
def test_the_slow_commands_of_a_page(page: str, tmp_path: Path, path_with_vlmgen: str) -> None:
    """With the commands before them that make their files; those of vlmgen are run above."""
    until = RUN[page][: last_slow(page)]
    run_all(
        [c for c in until if SLOW.match(c.text) or not c.text.startswith("vlmgen ")],
        tmp_path,
        path_with_vlmgen,
    )


def run_all(commands: list[Command], tmp_path: Path, path_with_vlmgen: str) -> None:
    """Run commands one after another in a folder with the specs and the packages."""
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("specs", "generated", "vlmgen/spec"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    environment = {
        **os.environ,
        "PATH": path_with_vlmgen,
        "PYTHONPATH": str(ROOT),
        "COLUMNS": "200",
        "VLLM_NEURON_CPU_MODE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    for command in commands:
        where = f"{command.page}:{command.line}: `{command.text}`"
        try:
            done = subprocess.run(
                ["bash", "-c", command.text],
                cwd=tmp_path,
                env=environment,
                capture_output=True,
                text=True,
                timeout=SECONDS,
            )
        except subprocess.TimeoutExpired:
            pytest.fail(f"{where} took over {SECONDS} s: list it in elsewhere.py with the reason")
        printed = f"{done.stdout}\n{done.stderr}"
        assert done.returncode == command.exit_code, f"{where} ended with\n{printed}"
        lost = missing(command, printed)
        assert not lost, f"{where} does not print\n{lost}\nbut\n{printed}"


# --- the reader of pages ------------------------------------------------------------------------

PAGE = """
```text
no command
```

```console
$ one --a \\
    --b   # why
first
...
last ... end
$ two    # exit 3
```

~~~sh
# a comment
three
four
~~~

```text
$ five
```
"""


def test_reading_a_page() -> None:
    found = list(commands_of("x.md", PAGE))
    assert [c.text for c in found] == ["one --a --b   # why", "two", "three", "four", "five"]
    assert [c.exit_code for c in found] == [0, 3, 0, 0, 0]
    assert found[0].fragments == ["first", "last", "end"]
    assert [c.line for c in found] == [7, 12, 17, 18, 22]


@pytest.mark.parametrize(
    ("printed", "lost"),
    [
        ("first\nxx last\n y end", ""),
        ("│ first │\n└───┘ last end", ""),
        ("last first end", "last"),
        ("first last", "end"),
        ("", "first"),
    ],
)
def test_comparing_output(printed: str, lost: str) -> None:
    assert missing(Command("x.md", 1, "one", ["first", "...", "last ... end"]), printed) == lost


def test_an_unknown_command_is_no_known_one() -> None:
    for command in ("curl example.org", "make everything", "vlmgenx", "docker run x"):
        assert elsewhere(command) is None and command.split()[0] not in PROGRAMS
