"""Weight table and loaders: every parameter filled once, every key used, wrong checkpoints
refused.
"""

import json
import shutil
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm_neuron.utils.weight_loader import get_weight_loader
from vllm_neuron_internvl.config import InternVLConfig
from vllm_neuron_internvl.factory import InternVLForConditionalGeneration
from vllm_neuron_internvl.weight_loaders import (
    CheckpointError,
    column_parallel_bias_loader,
    column_parallel_loader,
    fused_qkv_bias_loader,
    fused_qkv_loader,
    patch_embed_loader,
    row_parallel_loader,
    squeezed_loader,
    vision_qkv_bias_loader,
    vision_qkv_loader,
    vocabulary_loader,
)
from vllm_neuron_internvl.weight_mapping import IGNORED, LAYOUTS, build_mappings, find_layout

from .support import (
    Slice,
    build_package,
    build_reference,
    neuron_configs,
    save_checkpoint,
    tiny_config,
)

PUBLISHED = LAYOUTS["published"]
HEAD_KEY = PUBLISHED.head + "weight"


def load(loader, *tensors: torch.Tensor, rank: int) -> torch.Tensor:
    return loader.load([Slice(tensor) for tensor in tensors], rank)


def rewrite(checkpoint: str, folder: Path, change) -> str:
    """A copy of the checkpoint whose tensors went through `change`."""
    shutil.copytree(checkpoint, folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file(change(tensors), file, metadata={"format": "pt"})
    return str(folder)


def parsed(**changes) -> InternVLConfig:
    return InternVLConfig.from_configs(tiny_config(**changes))


def test_mapping_names_every_parameter_once(model):
    mappings = build_mappings(parsed(), PUBLISHED)
    modules = {"text": model.language_model, "head": model.lm_head, "vision": model.visual}
    for name, module in modules.items():
        assert set(mappings[name]) == {parameter for parameter, _ in module.named_parameters()}


def test_mapping_uses_every_key_of_the_checkpoint_once(checkpoint):
    mappings = build_mappings(parsed(), PUBLISHED)
    used = [key for mapping in mappings.values() for keys in mapping.values() for key in keys]
    stored = set(load_file(Path(checkpoint) / "model.safetensors"))
    assert set(used) == {
        name for name in stored if not any(fnmatchcase(name, pattern) for pattern in IGNORED)
    }
    assert len(used) == len(set(used))


def test_nothing_stays_on_the_meta_device(model):
    tensors = [*model.named_parameters(), *model.named_buffers()]
    assert [name for name, tensor in tensors if tensor.is_meta] == []


def test_the_nested_layout_loads_the_same_parameters(config, model, checkpoint, tmp_path):
    renamed = {
        "language_model.model.": "model.language_model.",
        "vision_tower.": "model.vision_tower.",
        "multi_modal_projector.": "model.multi_modal_projector.",
        "language_model.lm_head.": "lm_head.",
    }

    def rename(name):
        old = next(prefix for prefix in renamed if name.startswith(prefix))
        return renamed[old] + name.removeprefix(old)

    def to_other(tensors):
        return {rename(name): tensor for name, tensor in tensors.items()}

    other = build_package(config, rewrite(checkpoint, tmp_path / "other", to_other))
    for (name, ours), (_, theirs) in zip(
        model.named_parameters(), other.named_parameters(), strict=True
    ):
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_the_layout_is_found_from_the_names(layout):
    mappings = build_mappings(parsed(), LAYOUTS[layout])
    names = [key for mapping in mappings.values() for keys in mapping.values() for key in keys]
    assert find_layout(names) == layout


def test_a_tied_head_is_the_embedding(tmp_path):
    config = tiny_config(tie_word_embeddings=True)
    save_checkpoint(build_reference(config), tmp_path)
    assert HEAD_KEY not in load_file(tmp_path / "model.safetensors")
    model = build_package(config, str(tmp_path))
    assert torch.equal(model.lm_head.weight, model.language_model.embed_tokens.weight)


def test_an_untied_head_is_its_own(model, reference):
    assert torch.equal(model.lm_head.weight, reference.lm_head.weight)
    assert not torch.equal(model.lm_head.weight, model.language_model.embed_tokens.weight)


def test_an_untied_flag_without_a_head_is_a_contradiction(config, checkpoint, tmp_path):
    def drop(tensors):
        return {name: tensor for name, tensor in tensors.items() if name != HEAD_KEY}

    with pytest.raises(CheckpointError, match=f"tie_word_embeddings is false, .* no '{HEAD_KEY}'"):
        build_package(config, rewrite(checkpoint, tmp_path / "headless", drop))


def test_missing_and_unknown_keys_are_both_listed(config, checkpoint, tmp_path):
    def change(tensors):
        moved = tensors.pop(PUBLISHED.text + "norm.weight")
        return {**tensors, PUBLISHED.text + "normal.weight": moved}

    with pytest.raises(
        CheckpointError, match=r"(?s)missing \(1\): .*norm.weight.*unknown \(1\): .*normal"
    ):
        build_package(config, rewrite(checkpoint, tmp_path / "renamed", change))


def test_a_wrong_shape_names_the_key_and_loads_nothing(config, checkpoint, tmp_path):
    key = PUBLISHED.text + "layers.1.self_attn.o_proj.weight"
    rows, columns = (
        config.get_text_config().hidden_size,
        parsed().text_config.num_attention_heads * parsed().text_config.head_dim,
    )

    def widen(tensors):
        return {**tensors, key: torch.cat([tensors[key], tensors[key][:1]])}

    folder = rewrite(checkpoint, tmp_path / "wide", widen)
    with pytest.raises(
        CheckpointError,
        match=rf"{key}: shape in the checkpoint \[\({rows + 1}, {columns}\)\], expected",
    ):
        build_package(config, folder)


def test_a_shard_that_is_not_there_is_named(config, reference, tmp_path):
    save_checkpoint(reference, tmp_path, max_shard_size="500KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    lost = sorted(set(index["weight_map"].values()))[1]
    (tmp_path / lost).unlink()
    with pytest.raises(Exception, match=lost.removesuffix(".safetensors")):
        build_package(config, str(tmp_path))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_shards_of_all_ranks_are_the_matrix(rng, ranks):
    matrix, bias = torch.randn(24, 16, generator=rng), torch.randn(24, generator=rng)
    columns = [load(column_parallel_loader((24, 16), ranks), matrix, rank=r) for r in range(ranks)]
    rows = [load(row_parallel_loader((24, 16), ranks), matrix, rank=r) for r in range(ranks)]
    biases = [load(column_parallel_bias_loader(24, ranks), bias, rank=r) for r in range(ranks)]
    assert torch.equal(torch.cat(columns, dim=1), matrix.t())
    assert torch.equal(torch.cat(rows, dim=0), matrix.t())
    assert torch.equal(torch.cat(biases), bias)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_fused_qkv_holds_each_ranks_own_heads(rng, ranks):
    text = replace(parsed().text_config, num_attention_heads=8, num_key_value_heads=2)
    d, heads = text.head_dim, 8 // ranks
    q, k, v = (torch.randn(n, d, text.hidden_size, generator=rng) for n in (8, 2, 2))
    flat = [part.flatten(0, 1) for part in (q, k, v)]
    for rank in range(ranks):
        first_kv = rank * heads // 4  # the KV head of this rank's first query head
        kv = slice(first_kv, first_kv + max(1, 2 // ranks))
        own = [q[rank * heads : (rank + 1) * heads], k[kv], v[kv]]
        expected = torch.cat(own).flatten(0, 1)
        assert torch.equal(load(fused_qkv_loader(text, ranks), *flat, rank=rank), expected.t())
        biases = [part[:, 0] for part in flat]
        assert torch.equal(
            load(fused_qkv_bias_loader(text, ranks), *biases, rank=rank), expected[None, :, 0]
        )


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_vision_qkv_takes_the_same_heads_of_each_matrix(rng, ranks):
    vision = parsed().vision_config
    hidden = vision.hidden_size
    matrices = [torch.randn(hidden, hidden, generator=rng) for _ in "qkv"]
    biases = [torch.randn(hidden, generator=rng) for _ in "qkv"]
    for rank in range(ranks):
        own = slice(rank * hidden // ranks, (rank + 1) * hidden // ranks)
        expected = torch.cat([matrix[own] for matrix in matrices])
        assert torch.equal(
            load(vision_qkv_loader(vision, ranks), *matrices, rank=rank), expected.t()
        )
        expected = torch.cat([bias[own] for bias in biases])
        assert torch.equal(
            load(vision_qkv_bias_loader(vision, ranks), *biases, rank=rank), expected
        )


def test_the_patch_kernel_becomes_a_matrix(rng):
    vision = parsed().vision_config
    side = vision.patch_size
    kernel = torch.randn(vision.hidden_size, vision.in_channels, side, side, generator=rng)
    assert torch.equal(load(patch_embed_loader(vision), kernel, rank=0), kernel.flatten(1).t())


def test_leading_dimensions_of_one_are_dropped(rng):
    table = torch.randn(1, 5, 8, generator=rng)
    assert torch.equal(load(squeezed_loader((5, 8)), table, rank=0), table[0])
    assert torch.equal(load(squeezed_loader((8,)), table[:, :1], rank=0), table[0, 0])
    with pytest.raises(CheckpointError, match="expected"):
        load(squeezed_loader((5, 8)), table[0], rank=0)


def test_the_vocabulary_is_padded_with_zeros(rng):
    text = replace(parsed().text_config, vocab_size=321)
    matrix = torch.randn(321, text.hidden_size, generator=rng)
    shards = torch.cat([load(vocabulary_loader(text, 4), matrix, rank=rank) for rank in range(4)])
    assert shards.shape[0] == 324
    assert torch.equal(shards[:321], matrix) and not shards[321:].any()


def test_every_parameter_has_a_loader_that_checks_shapes(config):
    with torch.device("meta"):
        model = InternVLForConditionalGeneration.from_configs(hf_config=config, **neuron_configs())
    for parameter in model.parameters():
        with pytest.raises(CheckpointError, match="expected"):
            load(get_weight_loader(parameter), torch.zeros(1, 1), rank=0)
