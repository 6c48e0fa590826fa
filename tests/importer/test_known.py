"""Checkpoints of known families: nothing to write, and which spec serves them."""

from __future__ import annotations

from pathlib import Path

import pytest

from vlmgen.importer import import_checkpoint
from vlmgen.spec.load import load_spec
from vlmgen.tiny.family import family_names, load_family
from vlmgen.weights.published import families, published_family

from .checkpoints import Headers

SPECS = {load_spec(p).family: load_spec(p) for p in
         sorted((Path(__file__).resolve().parents[2] / "specs").glob("*.yaml"))}  # fmt: skip
LAYOUTS = [
    (name, layout)
    for name in family_names()
    for layout in (*load_family(name)["layouts"], "as_saved")
]
# transformers saves the experts of this family in the other direction; see test_variants.
RESAVED = ("qwen3_vl_moe", "as_saved"), ("qwen3_vl_moe_square", "as_saved")


def family_of(tiny: str) -> str:
    """The family whose spec names a tiny checkpoint, or the one it is a variant of."""
    found = [
        f for f, spec in SPECS.items() if tiny == spec.tiny or tiny.startswith(f"{spec.tiny}_")
    ]
    return max(found, key=len)


@pytest.mark.parametrize(
    ("name", "layout"), [row for row in LAYOUTS if row not in RESAVED], ids=lambda value: value
)
def test_tiny_checkpoint_imports_to_its_own_spec(tiny, folder, name, layout):
    result = import_checkpoint(tiny(name, layout).write(folder))
    assert result.match.known.spec.family == family_of(name)
    assert result.match.serves
    assert [d.reading.path for d in result.match.structural] == []
    assert (result.text, result.family) == ("", "")
    assert result.gaps == ()


@pytest.mark.parametrize("name", sorted({family_of(name) for name in family_names()}))
def test_config_alone_is_enough_to_find_the_family(tiny, folder, name):
    headers = tiny(SPECS[name].tiny)
    headers.shapes = None
    result = import_checkpoint(headers.write(folder) / "config.json")
    assert result.match.known.spec.family == name
    assert result.match.serves
    assert {gap.path for gap in result.gaps} >= {"tensors"}


PUBLISHED = [(f, name) for f in families() for name in published_family(f).checkpoints]


@pytest.mark.parametrize(("family", "name"), PUBLISHED, ids=lambda value: value)
def test_published_checkpoint_is_served_by_its_family(folder, family, name):
    recorded = published_family(family)
    checkpoint = recorded.checkpoints[name]
    for layout in recorded.layouts.values():
        shapes = checkpoint.tensors(layout)
        result = import_checkpoint(Headers(dict(checkpoint.config), shapes).write(folder))
        assert result.match.known.spec.family == family
        assert result.match.serves, result.match.structural
        assert result.sizes_of == name or name in _also(family, result.sizes_of)
        # Where both widths are equal, a square matrix does not tell which one it is.
        assert {gap.path for gap in result.gaps} <= {"vision.merger.inner"}
    alone = Headers(dict(checkpoint.config), None).write(folder.with_name("config-only"))
    assert import_checkpoint(alone / "config.json").match.known.spec.family == family


def _also(family: str, name: str) -> tuple[str, ...]:
    return next((c.also for c in SPECS[family].checkpoints if c.name == name), ())


def test_evidence_names_field_key_and_shape(tiny, folder):
    result = import_checkpoint(tiny("qwen3_vl").write(folder))
    decided = {r.path: r.evidence for r in result.match.readings}
    assert decided["text.attention.qkv_bias"] == (
        "text_config.attention_bias is false; "
        "model.language_model.layers.0.self_attn.q_proj.weight and no bias"
    )
    assert decided["vision.patch_embed.kind"] == (
        "model.visual.patch_embed.proj.weight is [64, 3, 2, 16, 16]"
    )
    assert decided["weights.vision.merger.fc1"] == "model.visual.merger.linear_fc1.weight"
    assert "text_config.rope_parameters.mrope_section is [" in decided["text.rope.sections"]


def test_sizes_of_no_published_checkpoint_are_read_at_load(tiny, folder):
    result = import_checkpoint(tiny("qwen2_vl").write(folder))
    assert result.sizes_of == ""
    assert result.match.differences
    assert all(difference.read_at_load for difference in result.match.differences)


def test_every_known_family_is_ranked(tiny, folder):
    result = import_checkpoint(tiny("internvl3_5").write(folder))
    assert [name for name, _ in result.ranking][:2] == ["internvl3_5", "internvl"]
    assert {name for name, _ in result.ranking} == set(SPECS)


def test_experts_as_saved_by_transformers_are_told_by_their_shapes(tiny, folder):
    """The published tensors are transposed; with H = 2I one of the two shapes still tells."""
    for name in ("qwen3_vl_moe", "qwen3_vl_moe_square"):
        result = import_checkpoint(tiny(name, "as_saved").write(folder))
        assert [(d.reading.path, d.reading.value) for d in result.match.structural] == [
            ("text.moe.checkpoint", "fused_out_in")
        ]
        assert "checkpoint: fused_out_in" in result.text
