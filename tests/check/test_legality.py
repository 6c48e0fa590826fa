"""Parallel legality: the spec's defaults, and the generated config against vlmgen's tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from vlmgen.check.legality import check_legality, default_problems
from vlmgen.check.source import read_package
from vlmgen.spec.load import load_spec
from vlmgen.spec.model import Spec


@pytest.fixture(scope="module")
def spec(qwen3_vl_spec: Path) -> Spec:
    return load_spec(qwen3_vl_spec)


def test_the_committed_package_agrees(package: Path, spec: Spec) -> None:
    assert check_legality(read_package(package), spec) == []


@pytest.mark.parametrize(
    ("block", "buckets", "said"),
    [
        (2000, [2000], "block_size 2000 is illegal"),
        (2048, [2048, 3000], "bucket 3000 is no multiple"),
        (2048, [4096, 2048], "do not ascend"),
    ],
)
def test_illegal_defaults(spec: Spec, block: int, buckets: list[int], said: str) -> None:
    neuron = spec.neuron.model_copy(
        update={"vision_attention_block_size": block, "num_vision_tokens_buckets": buckets}
    )
    changed = spec.model_copy(update={"neuron": neuron})
    assert any(said in message for message, _ in default_problems(changed))
    assert not list(default_problems(spec))


@pytest.mark.parametrize(
    ("old", "new", "code", "said"),
    [
        ("heads // tp_size % 2", "heads // tp_size % 4", "VG402", "refuses"),
        ("if kv_heads % tp_size and tp_size % kv_heads", "if kv_heads % tp_size", "VG402",
         "is legal"),
        ("'intermediate_size': self.intermediate_size, ", "", "VG402", ""),
        ("range(1, self.num_attention_heads + 1)", "range(1, 9)", "VG403", "lists [1, 2, 4, 8]"),
        ("-(-self.vocab_size // tp_size) * tp_size", "self.vocab_size + tp_size", "VG402", "pads"),
        ("def tp_problems(self", "def problems(self", "VG402", "has no tp_problems"),
        ("heads, kv_heads = (self.num_attention_heads, ", "heads, kv_heads = (self.heads, ",
         "VG402", "cannot judge"),
    ],
)  # fmt: skip
def test_a_config_that_judges_otherwise_is_found(edited, spec, old, new, code, said) -> None:
    source = read_package(edited("config.py", old, new))
    if "intermediate_size': " in old:  # every legal head split of these sizes divides the MLP too
        entry = spec.checkpoints[0]
        vision = entry.vision.model_copy(update={"intermediate_size": 4100})
        spec = spec.model_copy(
            update={"checkpoints": (entry.model_copy(update={"vision": vision}),)}
        )
    findings = [f for f in check_legality(source, spec) if f.code == code]
    assert findings and any(said in finding.message for finding in findings)
    assert all(f.path.endswith("config.py") and f.line > 1 for f in findings)
