"""Which cause changed which lines of a package.

Between the file on the disk and the new one lie texts that differ in one thing each:

    on the disk -> generated last -> old spec, templates of today -> one value of the spec after
    another -> new

A line that is removed is followed forward until it is gone, one that is added is followed backward
until it was not there; the step where that happens is its cause. Most changes have one cause, and
then nothing is rendered between.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vlmgen.errors import OutputError, SpecError
from vlmgen.render import plan as planning
from vlmgen.render.escaping import to_yaml
from vlmgen.render.generate import diff_lines
from vlmgen.render.merge import changed_ranges
from vlmgen.render.package import RenderedPackage, render_package

if TYPE_CHECKING:
    from vlmgen.spec import Spec
    from vlmgen.spec.compare import Change

Kind = Literal["spec", "base", "template", "source", "generator", "version", "results", "hand"]
Texts = Mapping[str, bytes]

CONTEXT = 3  # lines around a hunk
# Values of a spec that are told apart by rendering; the rest is rendered together.
MOST_STEPS = 6
_WORDS: dict[str, str] = {
    "spec": "the spec",
    "base": "a spec that it extends",
    "template": "a template",
    "source": "a file that it copies or quotes",
    "generator": "the generating code of vlmgen",
    "version": "the version of vlmgen",
    "results": "the stored results",
    "hand": "an edit by hand",
}


@dataclass(frozen=True)
class Cause:
    """Why a package would change.

    Args:
        kind: What kind of input.
        name: Which one, such as a template's name; empty where the kind says it.
        how: `changed`, `new` or `gone`.
        path: Which value of a spec, `text.rope.theta`; empty for everything else.
        old: That value as it was, as a spec writes it.
        new: That value as it is.
        place: `file:line` of the new value, `default` for one that no file states.
    """

    kind: Kind
    name: str = ""
    how: str = "changed"
    path: str = ""
    old: str = ""
    new: str = ""
    place: str = ""

    def text(self) -> str:
        """For a person."""
        if self.path:
            return f"{self.place or self.name}: {self.path} {self.old} -> {self.new}"
        what = _WORDS[self.kind] + (f" {self.name}" if self.name else "")
        return what if self.kind == "hand" else f"{what} ({self.how})"

    def short(self) -> str:
        """For a person, beside a file."""
        if self.path:
            return self.path
        return _WORDS["hand"] if self.kind == "hand" else self.name or _WORDS[self.kind]

    def to_dict(self) -> dict[str, str]:
        """For `--json`: a value's fields are there for a value of a spec only."""
        data = asdict(self)
        return data if self.path else {key: data[key] for key in ("kind", "name", "how")}


Causes = tuple[Cause, ...]


@dataclass(frozen=True)
class Hunk:
    """Lines that change together.

    Args:
        old_start: First line in the file that is there, as unified diffs count.
        old_lines: How many.
        new_start: First line in the new file.
        new_lines: How many.
        causes: What they come from, in the order of the steps.
        lines: The hunk without its `@@` line, each line with its line feed.
    """

    old_start: int
    old_lines: int
    new_start: int
    new_lines: int
    causes: Causes
    lines: tuple[str, ...]

    def text(self) -> str:
        """As a unified diff has it, with the causes where git shows the function."""
        ranges = (
            f"-{_range(self.old_start, self.old_lines)} +{_range(self.new_start, self.new_lines)}"
        )
        notes = "; ".join(c.text() if c.path else c.short() for c in self.causes)
        return f"@@ {ranges} @@ {notes}".rstrip() + "\n" + "".join(self.lines)

    def to_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "old": [self.old_start, self.old_lines],
            "new": [self.new_start, self.new_lines],
            "causes": [cause.to_dict() for cause in self.causes],
        }


def _range(start: int, lines: int) -> str:
    return str(start) if lines == 1 else f"{start},{lines}"


def hunks_of(texts: Sequence[bytes | None], causes: Sequence[Causes]) -> tuple[Hunk, ...]:
    """The hunks between the first and the last of several texts, each with its causes.

    Args:
        texts: A file at every step, None where it is not there.
        causes: What made each text out of the one before; one fewer.
    """
    steps = [[line.encode("utf-8", "surrogateescape") for line in diff_lines(t)] for t in texts]
    removed = _steps_of(steps)
    added = [len(causes) - 1 - step if step >= 0 else -1 for step in _steps_of(steps[::-1])]
    old, new = diff_lines(texts[0]), diff_lines(texts[-1])
    different = [step for step, pair in enumerate(pairwise(steps)) if pair[0] != pair[1]]
    changes = []
    for i1, i2, j1, j2 in changed_ranges(steps[0], steps[-1]):
        # Several ways may lead from one text to the other; then it may have been any step.
        at = sorted({*removed[i1:i2], *added[j1:j2]} - {-1}) or different
        named = dict.fromkeys(cause for step in at for cause in causes[step])
        changes.append((i1, i2, j1, j2, tuple(named)))
    return tuple(_hunk(old, new, *group) for group in _grouped(changes, len(old)))


# Ranges of lines of the old and of the new text, and what they come from.
_Change = tuple[int, int, int, int, Causes]


def _grouped(changes: Sequence[_Change], length: int) -> Iterator[tuple[list[_Change], int, int]]:
    """Changes that are one hunk, and how many lines of context stand before and behind them.

    Changes of different causes are different hunks, and share the lines between them.
    """
    group: list[_Change] = []
    before = min(CONTEXT, changes[0][0]) if changes else 0
    for index, change in enumerate(changes):
        group.append(change)
        if index + 1 == len(changes):
            yield group, before, min(CONTEXT, length - change[1])
            break
        following = changes[index + 1]
        gap = following[0] - change[1]
        if following[4] != change[4] or gap > 2 * CONTEXT:
            behind = min(CONTEXT, gap // 2)
            yield group, before, behind
            group, before = [], min(CONTEXT, gap - behind)


def _hunk(
    old: Sequence[str], new: Sequence[str], group: Sequence[_Change], before: int, behind: int
) -> Hunk:
    first, last = group[0], group[-1]
    start, end = first[0] - before, last[1] + behind
    new_start, new_end = first[2] - before, last[3] + behind
    lines = []
    for i1, i2, j1, j2, _ in group:
        lines += [f" {line}" for line in old[start:i1]]
        lines += [f"-{line}" for line in old[i1:i2]] + [f"+{line}" for line in new[j1:j2]]
        start = i2
    lines += [f" {line}" for line in old[start:end]]
    start = first[0] - before
    return Hunk(
        start + (end > start),
        end - start,
        new_start + (new_end > new_start),
        new_end - new_start,
        first[4],
        tuple(line if line.endswith("\n") else f"{line}\n" for line in lines),
    )


def _steps_of(texts: Sequence[Sequence[bytes]]) -> list[int]:
    """For every line of the first text the step after which it is gone, -1 for none."""
    here: list[int | None] = list(range(len(texts[0])))
    gone = [-1] * len(here)
    for step, (before, after) in enumerate(pairwise(texts)):
        moved: list[int | None] = [None] * len(before)
        done = shift = 0
        for start, end, _, other_end in [
            *changed_ranges(before, after),
            (len(before), len(before), len(after), len(after)),
        ]:
            moved[done:start] = range(done + shift, start + shift)
            done, shift = end, other_end - end
        for line, place in enumerate(here):
            if place is not None:
                here[line] = moved[place]
                if here[line] is None:
                    gone[line] = step
    return gone


# ---------------------------------------------------------------- the spec


def value_causes(old: Spec, new: Spec, spec: Path) -> list[Cause]:
    """Values that differ, with the line that the new one comes from.

    Args:
        old: The spec that a package was generated from.
        new: The spec as it is.
        spec: Its file.
    """
    from vlmgen.spec.compare import indexed_path, shown, value_changes
    from vlmgen.spec.origin import spec_origins

    # Where the folder of overrides is does not matter; what is in it is a cause of its own.
    changes = [change for change in value_changes(old, new) if change.path != "templates"]
    places = {row.path: row for row in spec_origins(spec)} if changes else {}

    def cause(change: Change) -> Cause:
        path = indexed_path(new, change.path)
        row = places.get(path) or next(
            (r for p, r in places.items() if p.startswith((f"{path}.", f"{path}["))), None
        )
        file = Path(row.file) if row and row.file else spec
        return Cause(
            "spec" if file.name == spec.name else "base",
            file.name,
            path=change.path,
            old=shown(change.left),
            new=shown(change.right),
            place=row.place if row else "",
        )

    return [cause(change) for change in changes]


def steps(
    old: Spec,
    new: Spec,
    values: Sequence[Cause],
    then: RenderedPackage | None,
    layout: planning.Layout,
    results: Mapping[str, Any] | None,
    search: Sequence[Path],
) -> Iterator[tuple[Causes, Texts]]:
    """What lies between a package as it was generated and as it would be, the ends left out.

    Args:
        old: The spec that it was generated from.
        new: The spec as it is.
        values: The values that differ between the two.
        then: The package of the old spec and everything else of today; None where nothing else
            changed.
        layout: The package's layout.
        results: The stored results.
        search: Template folders.

    Yields:
        The values that changed since the step before, none for the templates and everything else
        that is no spec; and the package after it. The last step, to the package as it would be,
        has the values that no step names.
    """
    if then:
        yield (), _bytes(then)
    data = old.model_dump(mode="json", exclude_none=True)
    today = new.model_dump(mode="json", exclude_none=True)
    # A list is taken over as a whole.
    groups: dict[str, list[Cause]] = {}
    for value in values:
        groups.setdefault(value.path.partition("[")[0], []).append(value)
    pending: list[Cause] = []
    for path, causes in list(groups.items())[: min(MOST_STEPS, len(groups) - 1)]:
        _take_over(data, today, path.split("."))
        pending += causes
        spec = _spec(data)
        package = rendered(spec, layout, results, search) if spec else None
        if package:  # else the value is legal only together with the next ones
            yield tuple(pending), _bytes(package)
            pending = []


def _take_over(data: dict[str, Any], today: Mapping[str, Any], path: Sequence[str]) -> None:
    """Set one value, or take it away."""
    *parents, name = path
    source: Mapping[str, Any] = today
    for parent in parents:
        source = source.get(parent) or {}
        data = data.setdefault(parent, {})
    if name in source:
        data[name] = source[name]
    else:
        data.pop(name, None)


def _spec(data: dict[str, Any]) -> Spec | None:
    from vlmgen.spec.load import load_spec_text

    try:
        return load_spec_text(to_yaml(data))
    except SpecError:
        return None


def rendered(
    spec: Spec,
    layout: planning.Layout,
    results: Mapping[str, Any] | None,
    search: Sequence[Path],
) -> RenderedPackage | None:
    """A package of a spec that is not today's; None where the templates of today do not fit it."""
    try:
        return render_package(spec, layout, results, search)
    except OutputError:
        return None


def _bytes(package: RenderedPackage) -> Texts:
    return {path: text.encode("utf-8") for path, text in package.texts.items()}
