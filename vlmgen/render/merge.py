"""Three-way merge of texts by lines, with the conflict markers that git writes.

The rules are git's: two changes meet where no unchanged line of the base lies between them, equal
changes on both sides count once, and what both sides of a conflict have in common stays outside
its markers. `git merge-file` is the oracle in the tests; vlmgen itself does not need git. (The
library in the field, `merge3`, is under the GPL, which a package under Apache-2.0 cannot require.)

A conflict is resolved when its markers are gone: the text itself is the state, as it is for an
editor, so nothing can disagree with it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

Side = Literal["ours", "theirs"]

OURS, MIDDLE, THEIRS, BASE = b"<<<<<<<", b"=======", b">>>>>>>", b"|||||||"
OURS_LABEL = "edited by hand"
# Conflicts with at most this many lines between them are shown as one, as git shows them.
_JOINED = 3


@dataclass(frozen=True)
class Region:
    """A run of lines of a merge.

    Args:
        ours: Lines of our side; the merged lines where there is no conflict.
        theirs: Lines of their side, None where there is no conflict.
        is_shared: Whether both sides have these lines, merged or not.
    """

    ours: tuple[bytes, ...]
    theirs: tuple[bytes, ...] | None = None
    is_shared: bool = False


@dataclass(frozen=True)
class Conflict:
    """Lines of a file that two changes claim.

    Args:
        start: First line, 1-based; the opening marker where markers were written.
        end: Last line.
    """

    start: int
    end: int


@dataclass(frozen=True)
class Merge:
    """The outcome of a merge.

    Args:
        regions: Merged and conflicting runs of lines, in order.
    """

    regions: tuple[Region, ...]

    @property
    def is_clean(self) -> bool:
        """Whether no conflict is left."""
        return all(region.theirs is None for region in self.regions)

    def take(self, side: Side) -> bytes:
        """The text with every conflict settled for one side."""
        return b"".join(
            line
            for region in self.regions
            for line in (region.ours if side == "ours" or region.theirs is None else region.theirs)
        )

    def marked(self, theirs_label: str, ours_label: str = OURS_LABEL) -> bytes:
        """The text with conflict markers.

        Args:
            theirs_label: What stands at the closing marker.
            ours_label: What stands at the opening marker.
        """
        end = (
            b"\r\n" if any(r.ours and r.ours[0].endswith(b"\r\n") for r in self.regions) else b"\n"
        )
        lines: list[bytes] = []
        for region in self.regions:
            if region.theirs is None:
                lines += region.ours
                continue
            for side, opening in (
                (region.ours, OURS + b" " + ours_label.encode()),
                (region.theirs, MIDDLE),
            ):
                lines.append(opening + end)
                lines += side
                if lines[-1][-1:] != b"\n":
                    lines[-1] += end
            lines.append(THEIRS + b" " + theirs_label.encode() + end)
        return b"".join(lines)

    def conflicts_in_ours(self) -> list[Conflict]:
        """Which lines of our text are in conflict; an empty side is the line it stands before."""
        found: list[Conflict] = []
        line = 1
        for region in self.regions:
            if region.theirs is not None:
                found.append(Conflict(line, line + max(0, len(region.ours) - 1)))
            line += len(region.ours)
        return found


def split_lines(text: bytes) -> list[bytes]:
    """Lines with their line feeds; no other character ends a line."""
    lines = [line + b"\n" for line in text.split(b"\n")]
    last = lines.pop()[:-1]
    return [*lines, last] if last else lines


def merge(base: bytes | None, ours: bytes, theirs: bytes) -> Merge:
    """Merge two texts that come from one.

    Args:
        base: The text that both come from; None where it is not known, and then every difference
            between the two is a conflict.
        ours: The one side, here the file with hand edits.
        theirs: The other side, here the newly generated text.
    """
    our_lines, their_lines = split_lines(ours), split_lines(theirs)
    if base is None:
        return Merge(_joined(_between(our_lines, their_lines)))
    base_lines = split_lines(base)
    regions: list[Region] = []
    done = 0  # lines of the base
    for start, end, our_range, their_range in _groups(base_lines, our_lines, their_lines):
        regions.append(Region(tuple(base_lines[done:start]), is_shared=True))
        done = end
        our_part, their_part = our_lines[our_range], their_lines[their_range]
        base_part = base_lines[start:end]
        if our_part == their_part or their_part == base_part:
            regions.append(Region(tuple(our_part), is_shared=our_part == their_part))
        elif our_part == base_part:
            regions.append(Region(tuple(their_part)))
        else:
            regions += _between(our_part, their_part)
    regions.append(Region(tuple(base_lines[done:]), is_shared=True))
    return Merge(_joined(regions))


def find_conflicts(text: bytes) -> list[Conflict]:
    """The conflicts of a text that are not resolved yet: what stands between conflict markers.

    A marker without its partner counts too, as half a resolution is none.
    """
    if OURS not in text and THEIRS not in text:
        return []
    found: list[Conflict] = []
    opened = 0
    for number, line in enumerate(text.split(b"\n"), 1):
        if _is_marker(line, OURS):
            if opened:
                found.append(Conflict(opened, opened))
            opened = number
        elif _is_marker(line, THEIRS):
            found.append(Conflict(opened or number, number))
            opened = 0
    if opened:
        found.append(Conflict(opened, opened))
    return found


def settle(text: bytes, side: Side) -> bytes | None:
    """A text with conflict markers, each conflict settled for one side.

    Args:
        text: The text.
        side: Which part of each conflict to keep.

    Returns:
        The text without markers; None where the markers are not as vlmgen or git wrote them.
    """
    kept: list[bytes] = []
    part = ""  # of a conflict: "ours", "base", "theirs"
    for line in split_lines(text):
        if _is_marker(line, OURS):
            if part:
                return None
            part = "ours"
        elif part == "ours" and _is_marker(line, BASE):
            part = "base"
        elif part and _is_marker(line, MIDDLE):
            if part == "theirs":  # a line of the text that looks like the marker: which one is it?
                return None
            part = "theirs"
        elif _is_marker(line, THEIRS):
            if part != "theirs":
                return None
            part = ""
        elif part in ("", side):
            kept.append(line)
    return None if part else b"".join(kept)


def _is_marker(line: bytes, marker: bytes) -> bool:
    text = line.rstrip(b"\r\n")
    return text == marker or text.startswith(marker + b" ")


Change = tuple[int, int, int, int]  # base start, base end, other start, other end


def changed_ranges(base: Sequence[bytes], other: Sequence[bytes]) -> list[Change]:
    """Where two texts differ, in order.

    Args:
        base: Lines of the one text.
        other: Lines of the other.
    """
    # What both begin and end with is most of them, and the matcher is slow.
    head = 0
    while head < min(len(base), len(other)) and base[head] == other[head]:
        head += 1
    tail = 0
    while tail < min(len(base), len(other)) - head and base[-1 - tail] == other[-1 - tail]:
        tail += 1
    matcher = difflib.SequenceMatcher(
        None, base[head : len(base) - tail], other[head : len(other) - tail], autojunk=False
    )
    return [
        (head + i1, head + i2, head + j1, head + j2)
        for tag, i1, i2, j1, j2 in matcher.get_opcodes()
        if tag != "equal"
    ]


def _groups(
    base: Sequence[bytes], ours: Sequence[bytes], theirs: Sequence[bytes]
) -> Iterable[tuple[int, int, slice, slice]]:
    """Ranges of the base that were changed, with the same ranges of both sides.

    Changes that touch are one range: without an unchanged line between them nothing says in
    which order they belong.
    """
    pending = [(change, 0) for change in changed_ranges(base, ours)]
    pending += [(change, 1) for change in changed_ranges(base, theirs)]
    pending.sort(key=lambda item: (item[0][:2], item[1]))
    shift = [0, 0]  # line number of a side minus that of the base, behind what was handed out
    index = 0
    while index < len(pending):
        start, end = pending[index][0][:2]
        after = list(shift)
        while index < len(pending) and pending[index][0][0] <= end:
            (_, change_end, _, other_end), side = pending[index]
            end = max(end, change_end)
            after[side] = other_end - change_end
            index += 1
        yield (
            start,
            end,
            slice(start + shift[0], end + after[0]),
            slice(start + shift[1], end + after[1]),
        )
        shift = after


def _between(ours: Sequence[bytes], theirs: Sequence[bytes]) -> list[Region]:
    """Two texts without a base: what they share is merged, the rest conflicts."""
    regions: list[Region] = []
    done = 0
    for start, end, other_start, other_end in changed_ranges(ours, theirs):
        regions.append(Region(tuple(ours[done:start]), is_shared=True))
        regions.append(Region(tuple(ours[start:end]), tuple(theirs[other_start:other_end])))
        done = end
    regions.append(Region(tuple(ours[done:]), is_shared=True))
    return regions


def _joined(regions: Iterable[Region]) -> tuple[Region, ...]:
    """Regions with few shared lines between two conflicts taken into one conflict."""
    joined: list[Region] = []
    shared: tuple[bytes, ...] = ()  # behind the last region
    for region in regions:
        if region.is_shared:
            shared += region.ours
            continue
        last = joined[-1] if joined else None
        if (
            last is not None
            and last.theirs is not None
            and region.theirs is not None
            and len(shared) <= _JOINED
        ):
            ours = last.ours + shared + region.ours
            joined[-1] = Region(ours, last.theirs + shared + region.theirs)
        else:
            joined += [Region(shared, is_shared=True)] * bool(shared)
            joined += [region] * bool(region.ours or region.theirs is not None)
        shared = ()
    return (*joined, *[Region(shared, is_shared=True)] * bool(shared))
