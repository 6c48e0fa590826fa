"""`vlmgen watch`: regenerate a package whenever its spec, a base of it or a template changes.

Files are looked at five times a second instead of being reported by the system: some dozens of
`stat` calls take less than a millisecond, need no further dependency, and also see changes on
network and container mounts, which report none.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from vlmgen.errors import VlmgenError
from vlmgen.render import templates
from vlmgen.render.chain import spec_chain, stated_templates
from vlmgen.render.generate import GenerationResult

INTERVAL = 0.2
SETTLE = 0.1
LONGEST_SETTLE = 20  # looks: a file that is written for ever is not waited for

Snapshot = Mapping[Path, tuple[int, int, int] | None]


def watched_files(
    spec: Path, search: Sequence[Path] | None = None, overrides: Path | None = None
) -> list[Path]:
    """The files that a package is made from: the spec, what it extends, every template.

    Args:
        spec: The spec file.
        search: Template directories; by default those that ship with vlmgen.
        overrides: Folder of template overrides, by default the one that the spec names.
    """
    overrides = overrides or stated_templates(spec)
    directories = [*([overrides] if overrides else []), *(search or templates.directories())]
    found = [path for top in directories for path in sorted(top.rglob("*")) if path.is_file()]
    return [*spec_chain(spec), *found]


def changes(
    files: Callable[[], Iterable[Path]],
    *,
    interval: float = INTERVAL,
    settle: float = SETTLE,
    sleep: Callable[[float], object] = time.sleep,
) -> Iterator[tuple[Path, ...]]:
    """Wait for changes, for ever.

    Args:
        files: The files to look at, asked anew at every look: a spec may come to extend another.
        interval: Seconds between two looks.
        settle: Seconds for which nothing may change before a change counts: editors write in
            several steps.
        sleep: Waits.

    Yields:
        The files that were changed, added or removed since the last time, sorted.
    """
    before = _snapshot(files())
    while True:
        sleep(interval)
        now = _snapshot(files())
        if now == before:
            continue
        for _ in range(LONGEST_SETTLE):
            sleep(settle)
            later = _snapshot(files())
            if later == now:
                break
            now = later
        changed = {path for path in {*before, *now} if before.get(path) != now.get(path)}
        before = now
        if changed:
            yield tuple(sorted(changed))


def _snapshot(files: Iterable[Path]) -> Snapshot:
    found: dict[Path, tuple[int, int, int] | None] = {}
    for path in files:
        try:
            status = path.stat()
            found[path] = (status.st_mtime_ns, status.st_size, status.st_ino)
        except OSError:
            found[path] = None
    return found


def watch(
    spec: Path,
    regenerate: Callable[[], GenerationResult],
    ticks: Iterable[tuple[Path, ...]],
    clock: Callable[[], str] = lambda: time.strftime("%H:%M:%S"),
) -> None:
    """Regenerate now and at every change; an error is shown, and the watch goes on.

    Args:
        spec: The spec file, for the messages.
        regenerate: Generates the package.
        ticks: Changes, as `changes` gives them.
        clock: The time of day, for the messages.
    """
    _run(str(spec), regenerate, clock)
    for changed in ticks:
        # Of a large change, such as another branch, one file is named.
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        _run(f"{_shown(changed[0])}{more}", regenerate, clock)


def _run(cause: str, regenerate: Callable[[], GenerationResult], clock: Callable[[], str]) -> None:
    started = time.perf_counter()
    try:
        result = regenerate()
    except VlmgenError as error:
        print(f"{clock()} {cause}: nothing written", flush=True)
        print(error.render(), file=sys.stderr, flush=True)
    except Exception:
        # A fault of vlmgen: shown in full, and perhaps gone with the next change.
        print(f"{clock()} {cause}: nothing written", flush=True)
        traceback.print_exc()
    else:
        changed = sum(status != "unchanged" for _, status in result.files)
        what = f"{changed} of {len(result.files)} files changed" if changed else "unchanged"
        seconds = time.perf_counter() - started
        print(f"{clock()} {cause} -> {result.target}: {what} ({seconds:.1f} s)", flush=True)


def _shown(path: Path) -> Path:
    """Relative to the working directory where it lies below it."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path
