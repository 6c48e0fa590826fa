"""A checkpoint that does not fit ends in a message and exit code 3, without a traceback."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from vlmgen.cli import app
from vlmgen.errors import CheckpointError, UsageError
from vlmgen.validate.run import validate

NORM = "model.language_model.norm.weight"


def edit_tensors(folder: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def lose_a_shard(folder: Path) -> None:
    sorted(folder.glob("*.safetensors"))[1].unlink()


def add_key(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.visual.extra.weight"] = torch.ones(1)


PROBLEMS = {
    "missing key": (lambda f: edit_tensors(f, lambda t: t.pop(NORM)), [NORM, "missing"]),
    "extra key": (lambda f: edit_tensors(f, add_key), ["model.visual.extra.weight", "unknown"]),
    "wrong shape": (
        lambda f: edit_tensors(f, lambda t: t.update({NORM: torch.ones(64)})),
        [NORM, "64", "128"],
    ),
    "truncated file": (truncate, ["model.safetensors", "cut short"]),
    "missing shard": (lose_a_shard, ["model-00002-of", "are not in"]),
    "no head": (
        lambda f: edit_tensors(f, lambda t: t.pop("lm_head.weight")),
        ["tie_word_embeddings is false", "lm_head.weight"],
    ),
    "another family": (
        lambda f: edit_config(
            f, architectures=["Qwen2VLForConditionalGeneration"], model_type="qwen2_vl"
        ),
        ["Qwen2VLForConditionalGeneration", "Qwen3VLForConditionalGeneration"],
    ),
    "another case": (
        lambda f: edit_config(f, architectures=["Qwen3VlForConditionalGeneration"]),
        ["Qwen3VlForConditionalGeneration", "case"],
    ),
    "no config": (lambda f: (f / "config.json").unlink(), ["config.json"]),
    "broken config": (lambda f: (f / "config.json").write_text("{"), ["config.json"]),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), ["safetensors"]),
}


@pytest.fixture(scope="module")
def whole(checkpoint: Callable[..., Path]) -> dict[str, Path]:
    return {"single": checkpoint(), "sharded": checkpoint("sharded", max_shard_size=400_000)}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_a_broken_checkpoint_ends_in_a_message(
    whole: dict[str, Path], repository: Path, tmp_path: Path, problem: str
) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(whole["sharded" if problem == "missing shard" else "single"], folder)
    damage, words = PROBLEMS[problem]
    damage(folder)
    with pytest.raises(CheckpointError) as caught:
        validate(repository / "generated" / "qwen3_vl", checkpoint=folder, only=["positions"])
    for word in words:
        assert word in caught.value.message, caught.value.message
    assert caught.value.exit_code == 3


def test_the_command_prints_the_message_only(
    whole: dict[str, Path], repository: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(whole["single"], folder)
    truncate(folder)
    package = str(repository / "generated" / "qwen3_vl")
    result = CliRunner().invoke(app, ["validate", package, "--checkpoint", str(folder)])
    assert result.exit_code == 3
    assert "cut short" in result.output and "Traceback" not in result.output


def test_a_directory_that_is_no_package_or_no_checkpoint_is_a_usage_error(
    repository: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="spec.yaml is missing"):
        validate(tmp_path, tiny=True)
    with pytest.raises(UsageError, match="is not a directory"):
        validate(repository / "generated" / "qwen3_vl", checkpoint=tmp_path / "nowhere")


def test_a_flat_and_sharded_checkpoint_is_as_good_as_the_published_one(
    checkpoint: Callable[..., Path], repository: Path
) -> None:
    folder = checkpoint("flat", layout="flat", max_shard_size=400_000)
    report = validate(
        repository / "generated" / "qwen3_vl",
        checkpoint=folder,
        only=["end to end/prefill logits"],
    )
    assert report.passed and report.rows[0].inputs >= 10


def test_a_tied_checkpoint_uses_its_embedding_as_head(
    checkpoint: Callable[..., Path], repository: Path
) -> None:
    report = validate(
        repository / "generated" / "qwen3_vl",
        checkpoint=checkpoint("tied", tied=True),
        only=["end to end/prefill logits"],
    )
    assert report.passed and report.rows[0].inputs >= 10
