"""`vlmgen adopt`: a package that vlmgen did not write becomes one that it can update."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

from vlmgen.check.integrity import check_integrity
from vlmgen.errors import OutputError, SpecError, UsageError
from vlmgen.render import manifest
from vlmgen.render.adopt import adopt
from vlmgen.render.drift import drift
from vlmgen.render.generate import generate
from vlmgen.render.update import update

Search = tuple[Path]
CONFIG = "vllm_neuron_qwen3_vl/config.py"
MROPE = "vllm_neuron_qwen3_vl/utils/mrope.py"


@pytest.fixture
def target(tmp_path: Path, spec_path: Path, search: Search) -> Path:
    """A package written by hand: some files as generated, some not, some missing, some its own."""
    template = search[0] / "package/config.py.j2"
    template.write_text("A = 1\nB = 2\nC = 3\nD = 4\n" + template.read_text())
    directory = tmp_path / "generated" / "qwen3_vl"
    generate(spec_path, directory, search=search)
    shutil.rmtree(directory / manifest.FOLDER)
    config = directory / CONFIG
    config.write_text(config.read_text().replace("A = 1\n", "A = 100  # by hand\nA2 = 1\n"))
    (directory / "README.md").unlink()
    (directory / "vllm_neuron_qwen3_vl" / "kernels.py").write_text("K = 1\n")
    (directory / "notes.txt").write_text("notes\n")
    return directory


def contents(target: Path) -> dict[str, tuple[int, bytes]]:
    return {
        path.relative_to(target).as_posix(): (path.stat().st_ino, path.read_bytes())
        for path in target.rglob("*")
        if path.is_file() and manifest.FOLDER not in path.parts
    }


def test_report_and_nothing_touched(target: Path, spec_path: Path, search: Search) -> None:
    before = contents(target)
    for dry_run in (True, False):
        result = adopt(target, spec_path, search=search, dry_run=dry_run)
        found = {f.path: f.status for f in result.files if f.status != "same"}
        assert found == {
            CONFIG: "differs",
            "README.md": "absent",
            "notes.txt": "own",
            "vllm_neuron_qwen3_vl/kernels.py": "own",
        }
        (config,) = (f for f in result.files if f.path == CONFIG)
        assert (config.added, config.removed) == (2, 1)
        assert "-A = 1\n+A = 100  # by hand\n+A2 = 1\n" in result.diff
        assert contents(target) == before
        assert (target / manifest.FOLDER).exists() != dry_run == (not result.written)
    assert os.listdir(target.parent) == [target.name]
    assert list(result.lines())[-1] == (
        f"adopted {target}: {len(before) - 3} as generated, 1 edited, 1 left out, 2 of its own"
    )


def test_later_updates_merge(target: Path, spec_path: Path, search: Search) -> None:
    adopt(target, spec_path, search=search)
    assert not update(target, search=search).written
    template = search[0] / "package/config.py.j2"
    template.write_text(template.read_text().replace("D = 4", "D = 5"))
    (search[0] / "utils/mrope.py.j2").write_text("M = 1\n")
    result = update(target, search=search)
    statuses = {f.path: f.status for f in result.files if f.status != "unchanged"}
    assert statuses == {CONFIG: "merged", MROPE: "changed", "README.md": "deleted"}
    text = (target / CONFIG).read_text()
    assert "A = 100  # by hand\nA2 = 1\n" in text and "D = 5\n" in text
    assert (target / "vllm_neuron_qwen3_vl/kernels.py").read_text() == "K = 1\n"


def test_checks_know_what_was_taken_over(target: Path, spec_path: Path, search: Search) -> None:
    assert [finding.code for finding in check_integrity(target)] == ["VG003"]
    adopt(target, spec_path, search=search)
    assert check_integrity(target) == []
    assert [d.path for d in drift(spec_path.parent, target.parent, search)] == [
        "qwen3_vl/notes.txt"
    ]
    (target / "vllm_neuron_qwen3_vl" / "late.py").write_text("")
    (finding,) = check_integrity(target)
    assert finding.path.endswith("late.py") and finding.message == "was not generated"


def test_package_as_generated(
    target: Path, spec_path: Path, search: Search, tmp_path: Path
) -> None:
    """Adopting what `new` wrote gives what `new` wrote."""
    other = tmp_path / "generated" / "other"
    generate(spec_path, other, search=search)
    whole = {p: p.read_bytes() for p in other.rglob("*") if p.is_file()}
    shutil.rmtree(other / manifest.FOLDER)
    adopt(other, spec_path, search=search)
    assert {p: p.read_bytes() for p in other.rglob("*") if p.is_file()} == whole


def test_in_tree_layout(spec_path: Path, search: Search, tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    modules = checkout / "vllm_neuron" / "model" / "qwen3_vl"
    modules.mkdir(parents=True)
    (modules / "config.py").write_text("MINE = 1\n")
    (checkout / "vllm_neuron" / "model" / "other.py").write_text("")
    with pytest.raises(UsageError, match="holds none of the") as error:
        adopt(checkout, spec_path, search=search)
    assert "--layout" in error.value.hint
    result = adopt(checkout, spec_path, "in-tree", search=search)
    statuses = {f.path: f.status for f in result.files}
    assert statuses["vllm_neuron/model/qwen3_vl/config.py"] == "differs"
    assert statuses["vllm_neuron/model/other.py"] == "own"
    assert not update(checkout, search=search).conflicts
    assert (modules / "config.py").read_text() == "MINE = 1\n"


def test_what_cannot_be_adopted(
    target: Path, spec_path: Path, search: Search, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="is not a folder"):
        adopt(tmp_path / "absent", spec_path, search=search)
    config = target / CONFIG
    text = config.read_text()
    config.write_text(f"<<<<<<< a\n{text}")
    with pytest.raises(OutputError, match=rf"{config}:1: holds conflict markers"):
        adopt(target, spec_path, search=search)
    config.unlink()
    config.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OutputError, match="is no plain file"):
        adopt(target, spec_path, search=search)
    config.unlink()
    config.write_text(text)
    spec = spec_path.read_text()
    spec_path.write_text(re.sub("num_layers: 36", "num_layers: many", spec, count=1))
    with pytest.raises(SpecError):
        adopt(target, spec_path, search=search)
    assert not (target / manifest.FOLDER).exists()
    spec_path.write_text(spec)
    adopt(target, spec_path, search=search)
    with pytest.raises(UsageError, match="is a package of vlmgen already") as error:
        adopt(target, spec_path, search=search)
    assert "vlmgen update" in error.value.hint
