"""Tiny checkpoints, a cache that all tests share, and packages with faults seeded into them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from vlmgen.spec.model import Spec
from vlmgen.standin.ranks import one_rank

MISSING = [name for name in ("jax", "torchax") if importlib.util.find_spec(name) is None]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not MISSING:
        return
    mark = pytest.mark.skip(reason=f"{' and '.join(MISSING)} not installed: the extra compile")
    for item in items:
        if Path(__file__).parent in item.path.parents and "needs_jax" in item.keywords:
            item.add_marker(mark)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> Callable[[str], Path]:
    """The tiny checkpoint of a family, built once, of as few layers as show every structure."""
    from vlmgen.spec.load import load_spec
    from vlmgen.tiny.build import build_tiny

    folder, built = tmp_path_factory.mktemp("tiny"), {}

    def build(family: str) -> Path:
        if family not in built:
            spec = load_spec(repository / "specs" / f"{family}.yaml")
            built[family] = build_tiny(spec, folder / family, **few_layers(spec))
        return built[family]

    return build


def few_layers(spec: Spec) -> dict[str, dict[str, int]]:
    """Two layers per tower: exporting takes most of the time, and each layer as much.

    Levels need as many layers of the decoder as there are, and their blocks; so do windows in some
    of the blocks.
    """
    text = {"num_hidden_layers": max(2, spec.vision.num_levels)}
    if spec.vision.num_levels or spec.vision.attention.window is not None:
        return {"text": text}
    return {"text": text, "vision": {spec.vision.keys.depth: 2}}


@pytest.fixture(scope="module")
def rank() -> Iterator[None]:
    """One rank and one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with one_rank():
        yield
    torch.set_num_threads(threads)


@pytest.fixture
def seeded(repository: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy of a package with some text replaced; every text must be there exactly once."""
    import shutil

    def seed(family: str, *changes: tuple[str, str, str]) -> Path:
        target = tmp_path / "seeded" / family
        ignore = shutil.ignore_patterns("__pycache__", "tests")
        shutil.copytree(repository / "generated" / family, target, ignore=ignore)
        (module,) = target.glob("vllm_neuron_*")
        for name, old, new in changes:
            text = (module / name).read_text(encoding="utf-8")
            assert text.count(old) == 1, f"{name} holds {old!r} {text.count(old)} times"
            (module / name).write_text(text.replace(old, new), encoding="utf-8")
        return target

    return seed
