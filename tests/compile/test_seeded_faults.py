"""What a device compiler would choke on is found, each fault with the line that it is in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from vlmgen.compile.graphs import Deployment, Graph

pytestmark = [pytest.mark.needs_jax, pytest.mark.slow]

FAMILY = "qwen3_vl"
SMALL = Deployment(256, 32, (256,), (2,), (256,), 256)
NORM = "        hidden = self.norm(hidden)\n        return self.tp_group.all_gather"
WRITE = "self.k_cache.index_put_(index, key.to(self.k_cache.dtype))"


@dataclass(frozen=True)
class Fault:
    """A change of model.py, the rule that must find it, and the text of the line that it names."""

    name: str
    rule: str
    line: str
    changes: tuple[tuple[str, str, str], ...]


def after_norm(line: str) -> tuple[tuple[str, str, str], ...]:
    """A line of its own after the last norm of the decoder."""
    first, _, rest = NORM.partition("\n")
    return (("model.py", NORM, f"{first}\n        {line}\n{rest}"),)


FAULTS = (
    Fault(
        "a Python number from a tensor",
        "scalar-from-tensor",
        "hidden = hidden * positions.max().item()",
        after_norm("hidden = hidden * positions.max().item()"),
    ),
    Fault(
        "a branch that depends on values",
        "value-dependent-branch",
        "if hidden.sum() > 0:",
        after_norm("if hidden.sum() > 0:\n            hidden = hidden * 2"),
    ),
    Fault(
        "a slice by a tensor",
        "value-dependent-shape",
        "hidden = hidden[: positions.max()]",
        after_norm("hidden = hidden[: positions.max()]"),
    ),
    Fault(
        "an integer per layer",
        "specialised-layer",
        "partial = partial * (1 + self.index % 2)",
        (
            (
                "model.py",
                "        self.norm = Qwen3VLTextRMSNorm(config.hidden_size,",
                "        for index, layer in enumerate(self.layers):\n"
                "            layer.index = index\n"
                "        self.norm = Qwen3VLTextRMSNorm(config.hidden_size,",
            ),
            (
                "model.py",
                "        return hidden + self._reduce(partial, prefill)",
                "        partial = partial * (1 + self.index % 2)\n"
                "        return hidden + self._reduce(partial, prefill)",
            ),
        ),
    ),
    Fault(
        "a cache that is written by copy",
        "cache-by-copy",
        "self.k_cache.copy_(torch.where(slots[..., None] >= 0, written, written))",
        (
            (
                "model.py",
                WRITE,
                "written = self.k_cache.index_put(index, key.to(self.k_cache.dtype))\n"
                "        slots = slots[:1, :, None]\n"
                "        self.k_cache.copy_(torch.where(slots[..., None] >= 0, written, written))",
            ),
        ),
    ),
    Fault(
        "a cache whose copy is written",
        "cache-by-copy",
        "written = self.k_cache.clone()",
        (
            (
                "model.py",
                WRITE,
                "written = self.k_cache.clone()\n"
                "        written.index_put_(index, key.to(self.k_cache.dtype))",
            ),
        ),
    ),
    Fault(
        "a float64 constant",
        "float64",
        "hidden = hidden * torch.tensor(0.5, dtype=torch.float64)",
        after_norm("hidden = hidden * torch.tensor(0.5, dtype=torch.float64)"),
    ),
)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "-"))
def test_a_fault_is_found_with_its_line(
    fault: Fault,
    seeded: Callable[..., Path],
    tiny: Callable[[str], Path],
    tmp_path: Path,
    rank: None,
) -> None:
    from vlmgen.compile.artifacts import ArtifactCache
    from vlmgen.compile.build import GraphBuilder
    from vlmgen.compile.calls import CallRecorder
    from vlmgen.validate.package import load_factory

    package = seeded(FAMILY, *fault.changes)
    recorder = CallRecorder(load_factory(package), tiny(FAMILY), SMALL)
    builder = GraphBuilder(package, ArtifactCache(tmp_path / "cache"))
    built = builder.build(recorder.calls[Graph("decode", 2)])

    found = [finding for finding in built.errors if finding.rule == fault.rule]
    assert found, [str(finding) for finding in built.findings]
    (module,) = package.glob("vllm_neuron_*")
    places = {(finding.place.path, finding.place.line) for finding in found}
    lines = (module / "model.py").read_text(encoding="utf-8").splitlines()
    wanted = 1 + next(index for index, line in enumerate(lines) if fault.line == line.strip())
    assert places == {(f"{module.name}/model.py", wanted)}
    assert {finding.rule for finding in built.errors} == {fault.rule}
