"""Memory per rank: against the totals, and against the modules of the generated packages."""

from __future__ import annotations

from pathlib import Path

import pytest

from vlmgen.check.source import read_package
from vlmgen.errors import UsageError
from vlmgen.spec.derive import derive, text_parameters, vision_parameters
from vlmgen.spec.load import load_spec
from vlmgen.spec.memory import BFLOAT16, rank_memory, text_rank_bytes

from .conftest import ROOT

SPECS = sorted((ROOT / "specs").glob("*.yaml"))


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_one_rank_holds_everything(path: Path) -> None:
    spec = load_spec(path)
    for entry in spec.checkpoints:
        checkpoint = spec.checkpoint(entry.name)
        text, moe = checkpoint.text, checkpoint.text.moe
        memory = rank_memory(checkpoint, 1)
        assert memory.vision_weights == BFLOAT16 * vision_parameters(checkpoint.vision)
        router = 0  # float32, two bytes more than the rest
        if moe is not None:
            width = text.hidden_size + (1 if moe.router == "sigmoid_bias" else 0)
            router = (text.num_layers - moe.first_dense) * moe.num_experts * width
        assert memory.text_weights == BFLOAT16 * (text_parameters(text) + router)


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_more_ranks_hold_less_each_and_no_less_together(path: Path) -> None:
    spec = load_spec(path)
    for entry in spec.checkpoints:
        checkpoint = spec.checkpoint(entry.name)
        sizes = [rank_memory(checkpoint, tp) for tp in derive(spec, entry.name).text_tp]
        for fewer, more in zip(sizes, sizes[1:], strict=False):
            assert more.text_weights < fewer.text_weights
            assert more.text_weights * more.text_tp >= fewer.text_weights * fewer.text_tp
            assert more.kv_per_token <= fewer.kv_per_token
            assert more.text_tp % more.vision_tp == 0


def test_an_illegal_split_is_refused(spec) -> None:
    with pytest.raises(UsageError, match="text TP 3 is illegal"):
        rank_memory(spec.checkpoint("Qwen3-VL-8B-Instruct"), 3)


def test_the_kv_cache_of_a_rank(spec) -> None:
    checkpoint = spec.checkpoint("Qwen3-VL-8B-Instruct")  # 36 layers, 8 KV heads of 128
    assert rank_memory(checkpoint, 4).kv_per_token == 36 * 2 * 2 * 128 * BFLOAT16
    # At 16 ranks a head is on two of them.
    assert rank_memory(checkpoint, 16).kv_per_token == rank_memory(checkpoint, 8).kv_per_token


PACKAGES = sorted(path.parent for path in (ROOT / "generated").glob("*/spec.yaml"))


@pytest.mark.parametrize("root", PACKAGES, ids=lambda root: root.name)
def test_the_modules_of_a_package_have_this_size(root: Path) -> None:
    pytest.importorskip("torch", reason="builds the package on the meta device")
    pytest.importorskip("vllm", reason="the package imports vLLM")
    from vlmgen.weights import coverage
    from vlmgen.weights.published import published_family

    spec = load_spec(root / "spec.yaml")
    published = published_family(spec.family)
    source = read_package(root)
    report = coverage._Report("x", {})
    entry = spec.checkpoints[0]
    checkpoint = spec.checkpoint(entry.name)
    derived = derive(spec, entry.name)
    with coverage._imported(source) as package:
        proof = coverage._Proof(
            package, spec, checkpoint, published.checkpoints[entry.name], published, report
        )
        for text_tp, vision_tp in {
            (1, 1),
            (derived.text_tp[len(derived.text_tp) // 2], derived.vision_tp[-1]),
            (derived.text_tp[-1], derived.vision_tp[len(derived.vision_tp) // 2]),
        }:
            with coverage._groups(package, (0, text_tp), (0, vision_tp)):
                _, model = proof._build(vision_tp)
            sizes: dict[str, int] = {}
            for name, parameter in model.named_parameters():
                tower = name.partition(".")[0]
                sizes[tower] = sizes.get(tower, 0) + parameter.numel() * parameter.element_size()
            vision = sizes.pop("visual")
            assert vision == vision_parameters(checkpoint.vision, vision_tp) * BFLOAT16
            if not checkpoint.text.tie_word_embeddings:
                assert sum(sizes.values()) == text_rank_bytes(checkpoint.text, text_tp)
            else:
                assert sizes["language_model"] == text_rank_bytes(checkpoint.text, text_tp)
