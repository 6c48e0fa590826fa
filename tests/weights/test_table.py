"""The weight table of every spec uses every published key, and each as often as its verb allows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from vlmgen.spec.load import load_spec
from vlmgen.spec.model import ResolvedCheckpoint, Spec
from vlmgen.weights import WeightEntry, weight_table
from vlmgen.weights.published import families, published_family
from vlmgen.weights.table import VERBS

# Group -> tower whose prefix its keys have.
TOWER = {
    "text": "text",
    "text_layer": "text",
    "text_dense_layer": "text",
    "text_expert_layer": "text",
    "head": "head",
    "vision": "vision",
    "vision_block": "vision",
    "vision_level": "vision",
    "projector": "projector",
}


@pytest.fixture(params=families())
def spec(request: pytest.FixtureRequest, repository: Path) -> Spec:
    return load_spec(repository / "specs" / f"{request.param}.yaml")


def repeats(group: str, sizes: ResolvedCheckpoint) -> list[dict[str, int]]:
    layers, moe = sizes.text.num_layers, sizes.text.moe
    first = moe.first_dense if moe else layers
    over = {
        "text_layer": ("layer", range(layers)),
        "text_dense_layer": ("layer", range(first)),
        "text_expert_layer": ("layer", range(first, layers)),
        "vision_block": ("block", range(sizes.vision.depth)),
        "vision_level": ("level", range(sizes.vision.num_levels)),
    }
    if group not in over:
        return [{}]
    index, numbers = over[group]
    return [{index: number} for number in numbers]


def rows(
    spec: Spec, sizes: ResolvedCheckpoint
) -> Iterator[tuple[str, str, WeightEntry, list[str]]]:
    """(tower, parameter, row, keys) of every parameter of a checkpoint."""
    experts = sizes.text.moe.num_experts if sizes.text.moe else 0
    for group, entries in weight_table(spec).groups():
        for index in repeats(group, sizes):
            for entry in entries:
                each = range(experts) if "{expert}" in entry.keys[0] else range(1)
                keys = [key.format(expert=e, **index) for e in each for key in entry.keys]
                yield TOWER[group], entry.parameter.format(**index), entry, keys


def test_every_published_key_is_used(spec: Spec) -> None:
    for listed in spec.checkpoints:
        published = published_family(spec.family).checkpoints[listed.name].keys
        used: Counter[tuple[str, str]] = Counter()
        for tower, parameter, entry, keys in rows(spec, spec.checkpoint(listed.name)):
            if tower == "head" and "head" not in published:
                continue  # tied: filled from the embedding
            for key in keys:
                assert key in published[tower], (listed.name, parameter, key)
            used.update((tower, key) for key in keys)
            assert entry.verb in VERBS
        assert set(used) == {(tower, key) for tower, keys in published.items() for key in keys}
        twice = {key for (_, key), count in used.items() if count > 1}
        assert set(used.values()) <= {1, 2}
        fused = spec.text.mlp.layout == "fused_gate_up"
        assert all(key.endswith("gate_up_proj.weight") for key in twice) and bool(twice) == fused


def test_every_parameter_has_one_row(spec: Spec) -> None:
    sizes = spec.checkpoint(spec.defaults_from)
    names = [
        ("vision" if tower == "projector" else tower, parameter)
        for tower, parameter, _, _ in rows(spec, sizes)
    ]
    assert len(names) == len(set(names))
    assert not any("None" in key for *_, keys in rows(spec, sizes) for key in keys)


def test_only_used_groups_are_there(repository: Path) -> None:
    """A package has no table for layers that its family does not have."""

    def groups(family: str) -> set[str]:
        table = weight_table(load_spec(repository / "specs" / f"{family}.yaml"))
        return {name for name, _ in table.groups()}

    common = {"text", "text_layer", "head", "vision", "vision_block"}
    assert groups("qwen2_vl") == groups("glm4v") == common
    assert groups("qwen3_vl") == groups("qwen3_vl_moe") == common | {"vision_level"}
    assert groups("glm4v_moe") == common | {"text_dense_layer", "text_expert_layer"}
    assert groups("paddleocr_vl") == groups("internvl3_5_moe") == common | {"projector"}


@pytest.mark.parametrize(
    ("family", "parameter", "keys", "verb"),
    [
        ("qwen2_vl", "layers.{layer}.self_attn.qkv_proj_bias", 3, "fuse_qkv"),
        ("qwen3_vl_moe", "layers.{layer}.mlp.gate_up_weight", 1, "experts_in_out"),
        ("glm4v_moe", "layers.{layer}.mlp.gate_up_weight", 2, "stack_experts"),
        ("glm4v_moe", "layers.{layer}.mlp.down_weight", 1, "stack_experts"),
        ("glm4v_moe", "layers.{layer}.mlp.correction_bias", 1, "rename"),
        ("glm4v", "layers.{layer}.mlp.up_proj_weight", 1, "split_gate_up"),
        ("glm4v", "merger.conv_weight", 1, "window_conv"),
        ("internvl", "patch_embed.class_token", 1, "squeeze"),
        ("internvl", "pos_embed.pos_embed_weight", 1, "squeeze"),
        ("internvl", "blocks.{block}.attn.qkv_weight", 3, "fuse_vision_qkv"),
        ("internvl_6b", "blocks.{block}.attn.q_norm_weight", 1, "rename"),
        ("paddleocr_vl", "blocks.{block}.attn.qkv_bias", 3, "fuse_vision_qkv"),
    ],
)
def test_rows_of_the_families_own_axes(
    repository: Path, family: str, parameter: str, keys: int, verb: str
) -> None:
    table = weight_table(load_spec(repository / "specs" / f"{family}.yaml"))
    (entry,) = (row for _, rows in table.groups() for row in rows if row.parameter == parameter)
    assert (len(entry.keys), entry.verb) == (keys, verb)


def test_a_part_that_a_rule_demands_is_never_taken_for_absent(repository: Path) -> None:
    spec = load_spec(repository / "specs" / "qwen3_vl.yaml")
    vision = spec.weights.vision.model_copy(update={"pos_embed": None})
    weights = spec.weights.model_copy(update={"vision": vision})
    with pytest.raises(LookupError, match="a part of the spec is missing that a rule demands"):
        weight_table(spec.model_copy(update={"weights": weights}))
