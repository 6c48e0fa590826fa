"""Three-way merge: git is the oracle, and no edit is ever lost without a mark."""

from __future__ import annotations

import itertools
import subprocess
from pathlib import Path

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from vlmgen.render.merge import Conflict, find_conflicts, merge, settle, split_lines

BASE = b"".join(b"line %d\n" % number for number in range(12))


def edited(*changes: tuple[int, int, bytes]) -> bytes:
    """`BASE` with lines [start, end) replaced, in one go."""
    lines = split_lines(BASE)
    for start, end, text in sorted(changes, reverse=True):
        lines[start:end] = split_lines(text)
    return b"".join(lines)


def git(
    *arguments: str, base: bytes, ours: bytes, theirs: bytes, folder: Path
) -> tuple[int, bytes]:
    """What `git merge-file` makes of three texts: number of conflicts, and the text."""
    for name, text in (("ours", ours), ("base", base), ("theirs", theirs)):
        (folder / name).write_bytes(text)
    run = subprocess.run(
        ["git", "merge-file", "-p", "-L", "edited by hand", "-L", "base", "-L", "new"]
        + [*arguments, "ours", "base", "theirs"],
        cwd=folder,
        capture_output=True,
    )
    assert 0 <= run.returncode < 128, run.stderr
    return run.returncode, run.stdout


# Lines of a few kinds: unique ones, so that there is one right alignment, in every position.
def texts(draw: st.DrawFn) -> tuple[bytes, bytes, bytes]:
    base = [b"base %d\n" % number for number in range(draw(st.integers(0, 14)))]
    fresh = itertools.count()

    def side(name: bytes) -> bytes:
        lines = list(base)
        for _ in range(draw(st.integers(0, 3))):
            start = draw(st.integers(0, len(lines)))
            end = min(len(lines), start + draw(st.integers(0, 3)))
            count = draw(st.integers(0, 3))
            lines[start:end] = [b"%s %d\n" % (name, next(fresh)) for _ in range(count)]
        text = b"".join(lines)
        return text[:-1] if draw(st.integers(0, 9)) == 0 else text

    return b"".join(base), side(b"ours"), side(b"theirs")


three_texts = st.composite(texts)()


@settings(max_examples=120)
@given(three_texts)
def test_git_merges_the_same(tmp_path_factory: pytest.TempPathFactory, three: tuple) -> None:
    base, ours, theirs = three
    folder = tmp_path_factory.getbasetemp()
    result = merge(base, ours, theirs)
    conflicts, text = git(base=base, ours=ours, theirs=theirs, folder=folder)
    assert result.is_clean == (conflicts == 0)
    assert result.marked("new") == text
    for side in ("ours", "theirs"):
        _, settled = git(f"--{side}", base=base, ours=ours, theirs=theirs, folder=folder)
        assert result.take(side) == settled


lines = st.sampled_from([b"a\n", b"b\n", b"c\n", b"\n", b"    )\n", b"x"])
any_text = st.lists(lines, max_size=12).map(b"".join) | st.binary(max_size=30)


@settings(max_examples=300)
@given(any_text, any_text, any_text)
@example(b"", b"a\n", b"b\n")
@example(b"a", b"a\n", b"ab")
def test_what_holds_for_any_text(base: bytes, ours: bytes, theirs: bytes) -> None:
    """Also where lines repeat and several alignments are right."""
    assume(not any(map(find_conflicts, (base, ours, theirs))))
    assert merge(base, ours, base).take("theirs") == ours
    assert merge(base, base, theirs).take("ours") == theirs
    assert merge(base, ours, ours).take("ours") == ours
    for result in (merge(base, ours, theirs), merge(None, ours, theirs)):
        assert result.is_clean == (not find_conflicts(result.marked("new")))
        if result.is_clean:
            assert result.take("ours") == result.take("theirs") == result.marked("new")
    without_base = merge(None, ours, theirs)
    assert without_base.take("ours") == ours and without_base.take("theirs") == theirs
    swapped = merge(base, theirs, ours)
    assert merge(base, ours, theirs).is_clean == swapped.is_clean
    assert merge(base, ours, theirs).take("ours") == swapped.take("theirs")


@settings(max_examples=200)
@given(three_texts)
def test_no_line_of_either_side_is_lost(three: tuple) -> None:
    """Whatever the way of merging: every line is new on one side only, so it can be found."""
    base, ours, theirs = (split_lines(text + b"\n") for text in three)
    text = merge(*(b"".join(lines) for lines in (base, ours, theirs))).marked("new")
    found = split_lines(text)
    for line in {*ours, *theirs} - {*base}:
        assert line in found, "an added line is gone"
    marked = bool(find_conflicts(text))
    for line in base:
        kept = (line in ours) and (line in theirs)
        if kept:
            assert line in found, "a line that both sides keep is gone"
        elif not marked:
            assert line not in found, "a line that one side removed is back"


def test_changes_apart_are_both_taken() -> None:
    result = merge(BASE, edited((2, 3, b"mine\n")), edited((6, 8, b"new\nnew too\nand more\n")))
    assert result.is_clean
    expected = edited((2, 3, b"mine\n"), (6, 8, b"new\nnew too\nand more\n"))
    assert result.take("ours") == expected


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ((2, 3, b"mine\n"), (2, 3, b"new\n")),
        ((2, 3, b"mine\n"), (3, 4, b"new\n")),
        ((2, 2, b"mine\n"), (2, 2, b"new\n")),
        ((2, 5, b""), (3, 4, b"new\n")),
        ((2, 3, b"mine\n"), (1, 5, b"")),
        ((0, 0, b"mine\n"), (0, 0, b"new\n")),
        ((12, 12, b"mine\n"), (12, 12, b"new\n")),
    ],
)
def test_changes_that_meet_conflict(
    ours: tuple[int, int, bytes], theirs: tuple[int, int, bytes], tmp_path: Path
) -> None:
    texts = {"base": BASE, "ours": edited(ours), "theirs": edited(theirs)}
    result = merge(**texts)
    assert not result.is_clean
    count, text = git(**texts, folder=tmp_path)
    assert count == 1 and result.marked("new") == text


def test_markers_name_both_sides_and_their_lines() -> None:
    result = merge(BASE, edited((3, 4, b"mine\n")), edited((3, 4, b"new\n")))
    text = result.marked("vlmgen 1.0")
    assert text == edited(
        (3, 4, b"<<<<<<< edited by hand\nmine\n=======\nnew\n>>>>>>> vlmgen 1.0\n")
    )
    assert find_conflicts(text) == [Conflict(4, 8)]
    assert result.conflicts_in_ours() == [Conflict(4, 4)]


def test_line_without_a_line_feed_does_not_swallow_a_marker() -> None:
    text = merge(b"a\n", b"a\nmine", b"a\nnew").marked("new")
    assert text == b"a\n<<<<<<< edited by hand\nmine\n=======\nnew\n>>>>>>> new\n"


def test_markers_take_the_line_ends_of_the_file() -> None:
    text = merge(b"a\r\nb\r\n", b"a\r\nmine\r\n", b"a\r\nnew\r\n").marked("new")
    assert text.count(b"\n") == text.count(b"\r\n") == 6


@settings(max_examples=150)
@given(three_texts, st.sampled_from(["ours", "theirs"]))
def test_settling_markers_is_settling_the_merge(three: tuple, side: str) -> None:
    base, ours, theirs = (text + b"\n" for text in three)  # else a marker adds a line feed
    result = merge(base, ours, theirs)
    assert settle(result.marked("new"), side) == result.take(side)


@pytest.mark.parametrize(
    "text",
    [
        b"<<<<<<< a\nx\n",
        b"x\n>>>>>>> b\n",
        b"<<<<<<< a\nx\n>>>>>>> b\n",
        b"<<<<<<< a\nx\n=======\ny\n=======\nz\n>>>>>>> b\n",
        b"<<<<<<< a\n<<<<<<< a\nx\n=======\ny\n>>>>>>> b\n",
    ],
)
def test_half_a_resolution_is_none(text: bytes) -> None:
    assert find_conflicts(text)
    assert settle(text, "ours") is None


@pytest.mark.parametrize(
    "text", [b"Title\n=======\n", b" <<<<<<< x\n", b"<<<<<<<<<< x\n", b"a <<<<<<< b >>>>>>> c\n"]
)
def test_text_that_only_looks_like_a_marker(text: bytes) -> None:
    assert find_conflicts(text) == []
    assert settle(text, "theirs") == text


def test_markers_with_the_base_between_are_settled_too() -> None:
    text = b"<<<<<<< a\nours\n||||||| base\nold\n=======\ntheirs\n>>>>>>> b\nend\n"
    assert settle(text, "ours") == b"ours\nend\n"
    assert settle(text, "theirs") == b"theirs\nend\n"
