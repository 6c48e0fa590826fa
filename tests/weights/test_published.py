"""The recorded names and shapes, against what transformers builds and publishers state."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from vlmgen.errors import UsageError
from vlmgen.spec.derive import text_parameters, vision_parameters
from vlmgen.spec.load import load_spec
from vlmgen.weights.published import PublishedCheckpoint, families, published_family
from vlmgen.weights.sizes import sizes_of

ALL = [(family, name) for family in families() for name in published_family(family).checkpoints]
every_checkpoint = pytest.mark.parametrize(("family", "name"), ALL, ids=[name for _, name in ALL])


def checkpoint_of(family: str, name: str) -> PublishedCheckpoint:
    return published_family(family).checkpoints[name]


@pytest.mark.parametrize("family", families())
def test_every_checkpoint_of_the_spec_is_recorded(repository: Path, family: str) -> None:
    spec = load_spec(repository / "specs" / f"{family}.yaml")
    assert [c.name for c in spec.checkpoints] == list(published_family(family).checkpoints)


@every_checkpoint
def test_the_shapes_add_up_to_the_published_parameter_count(family: str, name: str) -> None:
    checkpoint = checkpoint_of(family, name)
    assert round(checkpoint.num_parameters / 1e9, 3) == checkpoint.parameters_billion


@every_checkpoint
def test_the_spec_derives_the_same_parameter_count(
    repository: Path, family: str, name: str
) -> None:
    """To the last element, tower by tower; the merger belongs to the tower."""
    resolved = load_spec(repository / "specs" / f"{family}.yaml").checkpoint(name)
    recorded = {tower: 0 for tower in ("text", "vision")}
    for tower, rows in checkpoint_of(family, name).keys.items():
        for shape in rows.values():
            count = 1
            for size in shape:
                count *= size
            recorded["text" if tower in ("text", "head") else "vision"] += count
    assert recorded == {
        "text": text_parameters(resolved.text),
        "vision": vision_parameters(resolved.vision),
    }


@every_checkpoint
def test_the_spec_states_the_sizes_of_the_published_config(
    repository: Path, family: str, name: str
) -> None:
    spec = load_spec(repository / "specs" / f"{family}.yaml")
    sizes = list(sizes_of(spec, spec.checkpoint(name), checkpoint_of(family, name)))
    assert len(sizes) >= 19 and [row for row in sizes if row[1] != row[2]] == []


@every_checkpoint
def test_the_spec_states_the_same_tie(repository: Path, family: str, name: str) -> None:
    resolved = load_spec(repository / "specs" / f"{family}.yaml").checkpoint(name)
    checkpoint = checkpoint_of(family, name)
    assert checkpoint.tied == resolved.text.tie_word_embeddings
    assert ("head" in checkpoint.keys) != checkpoint.tied


def per_layer_and_once(family: str, config: dict[str, Any]) -> int:
    """Tensors of an untied checkpoint, counted by hand."""
    text, vision = config.get("text_config", config), config["vision_config"]
    layers = text["num_hidden_layers"]
    blocks = vision.get("depth", vision.get("num_hidden_layers"))
    return {
        # a layer x layers, a block x blocks, then mergers, tables, norms, head
        "qwen3_vl": lambda: 11 * layers + 12 * blocks + 6 * 4 + 6,
        "qwen3_vl_moe": lambda: 11 * layers + 12 * blocks + 6 * 4 + 6,
        "qwen2_vl": lambda: 12 * layers + 12 * blocks + 6 + 4,
        "qwen2_5_vl": lambda: 12 * layers + 12 * blocks + 5 + 4,
        "paddleocr_vl": lambda: 9 * layers + 16 * blocks + 6 + 5 + 3,
        "glm4v": lambda: 13 * layers + 7 * blocks + 8 + 5 + 3,
        "glm4v_moe": lambda: 9 * layers + 3 + (layers - 1) * (2 + 3 * 129) + 7 * blocks + 8 + 5 + 3,
        "internvl": lambda: 12 * layers + 18 * blocks + 6 + 4 + 3,
        "internvl_6b": lambda: 12 * layers + 15 * blocks + 6 + 4 + 3,
        "internvl3_5": lambda: 11 * layers + 18 * blocks + 6 + 4 + 3,
        "internvl3_5_moe": lambda: layers * (8 + 1 + 3 * 128) + 18 * blocks + 6 + 4 + 3,
    }[family]()


@every_checkpoint
def test_the_number_of_tensors(family: str, name: str) -> None:
    recorded, checkpoint = published_family(family), checkpoint_of(family, name)
    tensors = checkpoint.tensors(recorded.layouts[recorded.published_layout])
    by_hand = per_layer_and_once(family, dict(checkpoint.config))
    assert len(tensors) == by_hand - (1 if checkpoint.tied else 0)


@cache
def reference(family: str, name: str) -> tuple[Any, dict[str, tuple[int, ...]]]:
    """transformers' model on the meta device, and what it would save."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from transformers.core_model_loading import revert_weight_conversion

    from vlmgen.tiny.build import quiet_transformers

    checkpoint = checkpoint_of(family, name)
    (architecture,) = checkpoint.config["architectures"]
    model_class = getattr(transformers, architecture)
    with quiet_transformers(), torch.device("meta"):
        model = model_class(model_class.config_class.from_dict(dict(checkpoint.config)))
    state = model.state_dict()
    if checkpoint.tied:
        head = state.pop("lm_head.weight")
        assert head.shape == state["model.language_model.embed_tokens.weight"].shape
    saved = revert_weight_conversion(model, state)
    return model, {key: tuple(value.shape) for key, value in saved.items()}


@every_checkpoint
def test_names_and_shapes_are_those_that_transformers_saves(family: str, name: str) -> None:
    _, saved = reference(family, name)
    recorded = published_family(family)
    published = checkpoint_of(family, name).tensors(recorded.layouts[recorded.published_layout])
    if family == "qwen3_vl_moe":  # published input dimension first, saved output dimension first
        experts = {key for key in published if ".mlp.experts." in key}
        assert (
            len(experts)
            == 2 * checkpoint_of(family, name).config["text_config"]["num_hidden_layers"]
        )
        for key in experts:
            count, rows, columns = published[key]
            published[key] = (count, columns, rows)
    assert saved == published


@every_checkpoint
def test_the_nested_layout_has_the_names_of_the_modules(family: str, name: str) -> None:
    """Apart from experts, whose tensors transformers fuses while it loads."""
    model, _ = reference(family, name)
    recorded, checkpoint = published_family(family), checkpoint_of(family, name)
    own = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    if checkpoint.tied:
        del own["lm_head.weight"]
    nested = checkpoint.tensors(recorded.layouts["nested"])
    apart = ".mlp.experts."
    assert {k: s for k, s in nested.items() if apart not in k} == {
        k: s for k, s in own.items() if apart not in k
    }


@every_checkpoint
def test_transformers_reads_the_recorded_config_as_the_spec_says(
    repository: Path, family: str, name: str
) -> None:
    """Flat or nested, the sizes are those of the spec."""
    config = reference(family, name)[0].config
    resolved = load_spec(repository / "specs" / f"{family}.yaml").checkpoint(name)
    text, own = config.get_text_config(), resolved.text
    assert config.architectures == checkpoint_of(family, name).config["architectures"]
    assert (text.num_attention_heads, text.num_key_value_heads) == (
        own.attention.num_heads,
        own.attention.num_kv_heads,
    )
    assert (text.rms_norm_eps, text.max_position_embeddings) == (
        own.norm.eps,
        own.max_position_embeddings,
    )
    assert text.rope_parameters["rope_theta"] == own.rope.theta
    if own.rope.sections:
        assert tuple(text.rope_parameters["mrope_section"]) == own.rope.sections
    assert text.rope_parameters.get("partial_rotary_factor", 1.0) == own.rope.partial
    if own.moe is not None:
        assert text.num_experts_per_tok == own.moe.top_k
    assert config.vision_config.num_attention_heads == resolved.vision.attention.num_heads


@pytest.mark.parametrize("family", families())
def test_layouts_differ_in_prefixes_only(family: str) -> None:
    recorded = published_family(family)
    *_, checkpoint = recorded.checkpoints.values()
    shapes = [list(checkpoint.tensors(prefixes).values()) for prefixes in recorded.layouts.values()]
    assert all(some == shapes[0] for some in shapes)
    for prefixes in recorded.layouts.values():
        assert set(prefixes) == set(checkpoint.keys) | {"head"}
        assert len(checkpoint.tensors(prefixes)) == len(shapes[0])  # no two keys fall together


@pytest.mark.parametrize("family", families())
def test_layouts_and_ignored_keys_are_those_of_the_spec(repository: Path, family: str) -> None:
    from fnmatch import fnmatchcase

    spec, recorded = load_spec(repository / "specs" / f"{family}.yaml"), published_family(family)
    stated = {
        layout.name: {
            tower: prefix
            for tower in ("text", "vision", "projector", "head")
            if (prefix := getattr(layout, tower)) is not None
        }
        for layout in spec.weights.layouts
    }
    assert stated == {name: dict(prefixes) for name, prefixes in recorded.layouts.items()}
    assert spec.weights.layouts[0].name == recorded.published_layout
    patterns = [item.pattern for item in spec.weights.ignored]
    for checkpoint in recorded.checkpoints.values():
        for prefixes in recorded.layouts.values():
            ignored, read = checkpoint.ignored_tensors(prefixes), checkpoint.tensors(prefixes)
            assert bool(ignored) == bool(patterns)
            assert all(any(fnmatchcase(key, p) for p in patterns) for key in ignored)
            assert not any(fnmatchcase(key, p) for key in read for p in patterns)


def test_what_transformers_does_not_read_is_ignored_here_too() -> None:
    """Patterns of the classes themselves, on the names that are recorded."""
    import re

    for family in ("paddleocr_vl", "glm4v_moe"):
        recorded = published_family(family)
        (name, checkpoint), *_ = recorded.checkpoints.items()
        model, _ = reference(family, name)
        patterns = model._keys_to_ignore_on_load_unexpected
        layout = recorded.layouts[recorded.published_layout]
        ignored, read = checkpoint.ignored_tensors(layout), checkpoint.tensors(layout)
        assert ignored and all(any(re.search(p, key) for p in patterns) for key in ignored)
        assert not any(re.search(p, key) for key in read for p in patterns)


def test_what_is_not_verified() -> None:
    unseen = {family for family, name in ALL if not checkpoint_of(family, name).verified}
    assert unseen == {"internvl3_5", "internvl3_5_moe"}


def test_an_unknown_family() -> None:
    assert "qwen3_vl" in families()
    with pytest.raises(UsageError, match="'qwen9_vl'; recorded: .*qwen3_vl"):
        published_family("qwen9_vl")
