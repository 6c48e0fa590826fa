"""One tiny checkpoint, one reference and its prompts for all tests of the validate room."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from vlmgen.standin.ranks import one_rank
from vlmgen.validate.report import Row
from vlmgen.validate.run import Run


@dataclass
class Workshop:
    """A validation whose models are built once, and variants of the package it is about."""

    run: Run
    package: Path
    folder: Path

    def variant(self, name: str, changes: dict[str, list[tuple[str, str]]]) -> Path:
        """A copy of the package with some text replaced; every replacement must be found."""
        target = self.folder / name
        module = next(self.package.glob("vllm_neuron_*"))
        for source in [self.package / "spec.yaml", *module.rglob("*.py")]:
            text = source.read_text(encoding="utf-8")
            relative = source.relative_to(self.package)
            for old, new in (
                changes.pop(str(relative.relative_to(module.name)), [])
                if (source.suffix == ".py")
                else []
            ):
                assert old in text, f"{relative} holds no {old!r}: the fault must be written anew"
                text = text.replace(old, new)
            path = target / relative
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert not changes, f"no such files: {sorted(changes)}"
        return target

    def rows(self, package: Path, group: str, *checks: str) -> dict[str, Row]:
        """Run one group, or some checks of it, with the shared checkpoint and reference."""
        run = Run(package, self.run.spec, None, self.folder, lambda message: None)
        shared = ("checkpoint", "bfloat16_checkpoint", "reference", "prompts", "settings")
        run.__dict__.update({name: getattr(self.run, name) for name in shared})
        run.group(group, checks)
        run.finish()
        return {row.check: row for row in run.report.rows}


@pytest.fixture(scope="module")
def workshop(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    from vlmgen.validate.package import load_package_spec

    package = repository / "generated" / "qwen3_vl"
    folder = tmp_path_factory.mktemp("validate")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with one_rank():
        run = Run(package, load_package_spec(package), None, folder, lambda message: None)
        yield Workshop(run, package, folder)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Builds tiny checkpoints in a temporary folder."""
    from vlmgen.tiny.build import build_tiny

    def build(name: str = "tiny", **options: object) -> Path:
        folder = tmp_path_factory.mktemp("checkpoints") / name
        return build_tiny("qwen3_vl", folder, **options)

    return build
