"""Tiny checkpoints: what they hold, and when none is written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from vlmgen.errors import OutputError, UsageError
from vlmgen.tiny.build import build_tiny
from vlmgen.tiny.family import family_names, family_of, load_family

Build = Callable[..., Path]


def names(folder: Path) -> set[str]:
    """Names of all tensors of a checkpoint."""
    found: set[str] = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            found |= set(file.keys())
    return found


def test_a_checkpoint_is_complete(checkpoint: Build) -> None:
    folder = checkpoint()
    for name in ("config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors"):
        assert (folder / name).is_file(), name
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["Qwen3VLForConditionalGeneration"]
    assert names(folder) >= {
        "lm_head.weight",
        "model.language_model.embed_tokens.weight",
        "model.visual.pos_embed.weight",
    }


def test_a_seed_gives_the_same_bytes_and_another_seed_others(checkpoint: Build) -> None:
    one, same, other = checkpoint("a"), checkpoint("b"), checkpoint("c", seed=1)
    weights = [(folder / "model.safetensors").read_bytes() for folder in (one, same, other)]
    assert weights[0] == weights[1] != weights[2]


def test_drawing_weights_leaves_the_random_state_alone(tmp_path: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    build_tiny("qwen3_vl", tmp_path / "tiny")
    assert torch.equal(torch.rand(3), expected)


def test_no_parameter_is_at_its_start_value(checkpoint: Build) -> None:
    """A forgotten bias or norm weight must show in the numbers."""
    for name, tensor in load_file(checkpoint() / "model.safetensors").items():
        assert tensor.std() > 0.01, name


def test_a_tied_checkpoint_holds_no_head(checkpoint: Build) -> None:
    folder = checkpoint(tied=True)
    assert "lm_head.weight" not in names(folder)
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is True


def test_flat_layout_and_shards_hold_the_same_numbers(checkpoint: Build) -> None:
    nested = load_file(checkpoint() / "model.safetensors")
    folder = checkpoint("flat", layout="flat", max_shard_size=400_000)
    files = sorted(folder.glob("*.safetensors"))
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    flat = {name: tensor for path in files for name, tensor in load_file(path).items()}
    assert len(files) > 2 and set(index.values()) == {path.name for path in files}
    assert set(index) == set(flat)
    assert torch.equal(
        flat["model.layers.0.mlp.up_proj.weight"],
        nested["model.language_model.layers.0.mlp.up_proj.weight"],
    )
    assert torch.equal(
        flat["visual.blocks.1.attn.qkv.bias"], nested["model.visual.blocks.1.attn.qkv.bias"]
    )


def test_other_sizes_and_dtype(checkpoint: Build) -> None:
    folder = checkpoint(dtype="bfloat16", text={"vocab_size": 323}, vision={"depth": 6})
    tensors = load_file(folder / "model.safetensors")
    assert tensors["lm_head.weight"].shape[0] == 323
    assert tensors["model.visual.blocks.5.norm1.weight"].dtype == torch.bfloat16


def test_a_family_is_named_by_spec_path_or_name(qwen3_vl_spec: Path) -> None:
    assert family_of(qwen3_vl_spec) == family_of("qwen3_vl") == "qwen3_vl"
    assert family_of(Path("qwen3_vl_moe_square")) == "qwen3_vl_moe_square"
    assert family_of("qwen3_vl", tied=True) == "qwen3_vl_tied"
    tied = load_family("qwen3_vl_tied")
    assert tied["config_kwargs"]["tie_word_embeddings"] is True
    assert tied["config_kwargs"]["text_config"]["hidden_size"] == 128


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"spec_or_family": "qwen9"}, "no tiny checkpoint 'qwen9'"),
        ({"layout": "round"}, "legal: nested, flat"),
        ({"dtype": "int8"}, "legal: float32, bfloat16"),
    ],
)
def test_wrong_options_write_nothing(tmp_path: Path, options: dict, message: str) -> None:
    arguments = {"spec_or_family": "qwen3_vl", "out": tmp_path / "tiny", **options}
    with pytest.raises(UsageError, match=message):
        build_tiny(**arguments)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_with_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(OutputError, match="no tiny checkpoint"):
        build_tiny("qwen3_vl", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_an_earlier_tiny_checkpoint_is_replaced(tmp_path: Path) -> None:
    out = build_tiny("qwen3_vl", tmp_path / "tiny", seed=1)
    stale = out / "stale.safetensors"
    stale.write_bytes(b"")
    build_tiny("qwen3_vl", out)
    assert not stale.exists() and [path.name for path in tmp_path.iterdir()] == ["tiny"]


def test_a_failure_leaves_the_earlier_checkpoint_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = build_tiny("qwen3_vl", tmp_path / "tiny")
    before = (out / "model.safetensors").read_bytes()

    def fail(*arguments: object) -> None:
        raise RuntimeError("disk on fire")

    monkeypatch.setattr("vlmgen.tiny.build._make_processor", fail)
    with pytest.raises(RuntimeError, match="disk on fire"):
        build_tiny("qwen3_vl", out, seed=1)
    assert (out / "model.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


def test_every_description_names_its_own_family() -> None:
    assert family_names() and all(load_family(name)["family"] == name for name in family_names())
