"""The recorded names and shapes, against what transformers builds and publishers state."""

from __future__ import annotations

from pathlib import Path

import pytest

from vlmgen.errors import UsageError
from vlmgen.spec.load import load_spec
from vlmgen.weights.published import families, published_family

NAMES = ["Qwen3-VL-2B-Instruct", "Qwen3-VL-4B-Instruct", "Qwen3-VL-8B-Instruct",
         "Qwen3-VL-32B-Instruct"]  # fmt: skip


def test_every_checkpoint_of_the_spec_is_recorded(qwen3_vl_spec: Path) -> None:
    spec = load_spec(qwen3_vl_spec)
    assert [c.name for c in spec.checkpoints] == list(published_family("qwen3_vl").checkpoints)
    assert list(published_family("qwen3_vl").checkpoints) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_the_shapes_add_up_to_the_published_parameter_count(name: str) -> None:
    checkpoint = published_family("qwen3_vl").checkpoints[name]
    assert round(checkpoint.num_parameters / 1e9, 3) == checkpoint.parameters_billion


@pytest.mark.parametrize(("name", "tensors"), list(zip(NAMES, [625, 713, 750, 1058], strict=True)))
def test_the_number_of_tensors(name: str, tensors: int) -> None:
    """11 per decoder layer, 12 per block, 6 per merger, and 5 or 6 single ones."""
    family = published_family("qwen3_vl")
    checkpoint = family.checkpoints[name]
    text, vision = checkpoint.config["text_config"], checkpoint.config["vision_config"]
    heads = 0 if checkpoint.config["tie_word_embeddings"] else 1
    by_hand = 11 * text["num_hidden_layers"] + 12 * vision["depth"] + 6 * 4 + 5 + heads
    assert len(checkpoint.tensors(family.layouts["nested"])) == by_hand == tensors


@pytest.mark.parametrize("name", NAMES)
def test_names_and_shapes_are_those_of_transformers(name: str) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    family = published_family("qwen3_vl")
    checkpoint = family.checkpoints[name]
    config = transformers.Qwen3VLConfig.from_dict(dict(checkpoint.config))
    with torch.device("meta"):
        model = transformers.Qwen3VLForConditionalGeneration(config)
    own = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    if checkpoint.config["tie_word_embeddings"]:
        assert own.pop("lm_head.weight") == own["model.language_model.embed_tokens.weight"]
    assert own == checkpoint.tensors(family.layouts[family.published_layout])


def test_a_tied_checkpoint_has_no_head() -> None:
    checkpoints = published_family("qwen3_vl").checkpoints
    assert {name: "head" in c.keys for name, c in checkpoints.items()} == dict(
        zip(NAMES, [False, False, True, True], strict=True)
    )


def test_layouts_differ_in_prefixes_only() -> None:
    family = published_family("qwen3_vl")
    checkpoint = family.checkpoints["Qwen3-VL-8B-Instruct"]
    nested, flat = (checkpoint.tensors(family.layouts[n]) for n in ("nested", "flat"))
    assert nested["model.visual.merger.norm.weight"] == flat["visual.merger.norm.weight"] == (1152,)
    assert list(nested.values()) == list(flat.values())
    assert set(nested) & set(flat) == {"lm_head.weight"}


def test_an_unknown_family() -> None:
    assert "qwen3_vl" in families()
    with pytest.raises(UsageError, match="'qwen9_vl'; recorded: .*qwen3_vl"):
        published_family("qwen9_vl")
