"""Checkpoints, derived values, axis table, dump and JSON Schema."""

from __future__ import annotations

import json
from typing import Any, Literal, get_args, get_origin

import jsonschema
import pytest
import yaml

from vlmgen.errors import UsageError
from vlmgen.spec.axes import AXES, LATER_KEYS
from vlmgen.spec.derive import (
    derive,
    kv_shard,
    padded_vocab,
    text_parameters,
    vision_parameters,
)
from vlmgen.spec.dump import spec_yaml
from vlmgen.spec.load import _inner_model, load_spec_text
from vlmgen.spec.model import Spec
from vlmgen.spec.schema import committed_schema_text, json_schema, schema_text

from .conftest import SPEC_PATH

# --- checkpoints ------------------------------------------------------------------------------


def test_checkpoint_applies_its_sizes_and_keeps_the_structure(spec):
    small = spec.checkpoint("Qwen3-VL-2B-Instruct")
    assert (small.text.hidden_size, small.text.num_layers) == (2048, 28)
    assert (small.text.attention.num_heads, small.text.attention.num_kv_heads) == (16, 8)
    assert small.text.mlp.intermediate_size == 6144
    assert small.text.tie_word_embeddings is True
    assert (small.vision.hidden_size, small.vision.depth) == (1024, 24)
    assert small.vision.deepstack.indices == (5, 11, 17)
    assert small.vision.out_hidden_size == 2048
    assert small.vision.mlp.intermediate_size == 4096
    assert small.text.rope == spec.text.rope
    assert small.vision.deepstack.merger == spec.vision.deepstack.merger


def test_default_checkpoint_is_the_spec_itself(spec):
    default = spec.checkpoint(spec.defaults_from)
    assert (default.text, default.vision) == (spec.text, spec.vision)


def test_also_name_has_the_same_sizes(spec):
    thinking = spec.checkpoint("Qwen3-VL-32B-Thinking")
    assert thinking.name == "Qwen3-VL-32B-Thinking"
    assert thinking.text == spec.checkpoint("Qwen3-VL-32B-Instruct").text


def test_unknown_checkpoint_lists_the_names(spec):
    with pytest.raises(UsageError) as caught:
        spec.checkpoint("Qwen3-VL-7B")
    assert "Qwen3-VL-2B-Instruct, Qwen3-VL-2B-Thinking" in str(caught.value)


def test_optional_sizes_apply(spec_text):
    text = spec_text.replace(
        "tie_word_embeddings: true}",
        "tie_word_embeddings: true, vocab_size: 160000, max_position_embeddings: 1024}",
        1,
    )
    small = load_spec_text(text).checkpoint("Qwen3-VL-2B-Instruct")
    assert (small.text.vocab_size, small.text.max_position_embeddings) == (160000, 1024)


# --- derived values ---------------------------------------------------------------------------

# Parameters of the published models: total in billions, tower in millions.
PUBLISHED = {
    "Qwen3-VL-2B-Instruct": (2.128, 407.0),
    "Qwen3-VL-4B-Instruct": (4.438, 415.3),
    "Qwen3-VL-8B-Instruct": (8.767, 576.4),
    "Qwen3-VL-32B-Instruct": (33.357, 595.3),
}


@pytest.mark.parametrize(("name", "counts"), PUBLISHED.items())
def test_parameter_counts_are_the_published_ones(spec, name, counts):
    derived = derive(spec, name)
    assert round(derived.parameters / 1e9, 3) == counts[0]
    assert round(derived.vision_parameters / 1e6, 1) == counts[1]


def test_parameter_counts_equal_transformers_modules():
    """The same formula on a tiny size, against the parameters of Hugging Face's own modules."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    spec = load_spec_text(SPEC_PATH.read_text(encoding="utf-8"))
    sizes = spec.checkpoint("Qwen3-VL-2B-Instruct")
    text, vision = sizes.text, sizes.vision
    config = Qwen3VLConfig(
        text_config={
            "hidden_size": text.hidden_size,
            "num_hidden_layers": text.num_layers,
            "num_attention_heads": text.attention.num_heads,
            "num_key_value_heads": text.attention.num_kv_heads,
            "head_dim": text.attention.head_dim,
            "intermediate_size": text.mlp.intermediate_size,
            "vocab_size": text.vocab_size,
            "rope_scaling": {"rope_type": "default", "mrope_section": list(text.rope.sections)},
        },
        vision_config={
            "hidden_size": vision.hidden_size,
            "depth": vision.depth,
            "num_heads": vision.attention.num_heads,
            "intermediate_size": vision.mlp.intermediate_size,
            "out_hidden_size": vision.out_hidden_size,
            "num_position_embeddings": vision.position.num_embeddings,
            "deepstack_visual_indexes": list(vision.deepstack.indices),
        },
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = Qwen3VLForConditionalGeneration(config)
    assert sum(p.numel() for p in model.model.visual.parameters()) == vision_parameters(vision)
    decoder = sum(p.numel() for p in model.model.language_model.parameters())
    assert decoder == text_parameters(text)


def test_derived_values_of_the_default_checkpoint(spec):
    derived = derive(spec)
    assert derived.name == "Qwen3-VL-8B-Instruct"
    assert (derived.q_size, derived.kv_size, derived.gqa_ratio) == (4096, 1024, 4)
    assert (derived.merge_area, derived.patch_dim, derived.vision_head_dim) == (4, 1536, 72)
    assert (derived.position_grid, derived.merged_width) == (48, 4608)
    assert (derived.levels, derived.fat_width) == (3, 16384)
    assert derived.cache_block_tokens == 512
    assert derived.text_tp == (1, 2, 4, 8, 16)


def test_query_width_is_heads_times_head_dim_not_hidden(spec):
    assert derive(spec, "Qwen3-VL-4B-Instruct").q_size == 4096 != 2560


@pytest.mark.parametrize(("tp", "heads", "replicas"), [(1, 8, 1), (2, 4, 1), (8, 1, 1), (16, 1, 2)])
def test_kv_shard(spec, tp, heads, replicas):
    shard = kv_shard(spec.text, tp)
    assert (shard.heads, shard.replicas) == (heads, replicas)


def test_kv_shard_of_an_illegal_tp(spec):
    with pytest.raises(UsageError, match="32 / 32 = 1 is odd"):
        kv_shard(spec.text, 32)


@pytest.mark.parametrize(
    ("vocab", "tp", "rows"), [(151936, 8, 151936), (151674, 4, 151676), (7, 8, 8), (8, 8, 8)]
)
def test_padded_vocab(vocab, tp, rows):
    assert padded_vocab(vocab, tp) == rows


# --- axis table -------------------------------------------------------------------------------


def literals(annotation: Any) -> set[Any]:
    """The literal values inside an annotation."""
    if get_origin(annotation) is Literal:
        return set(get_args(annotation))
    return {value for inner in get_args(annotation) for value in literals(inner)}


def axis_fields(model: type, prefix: str = ""):
    for name, info in model.model_fields.items():
        inner = _inner_model(info.annotation)
        if inner is not None:
            yield from axis_fields(inner, f"{prefix}{name}.")
        values = literals(info.annotation)
        if values:
            yield f"{prefix}{name}", values


def test_axis_table_lists_exactly_what_the_models_accept():
    fields = dict(axis_fields(Spec))
    assert fields.pop("vlmgen") == {1}
    for path, values in fields.items():
        assert values == set(AXES[path].implemented), path
    assert set(AXES) - set(fields) == {"text.rope.partial"}


def test_no_axis_value_is_both_implemented_and_later():
    for path, axis in AXES.items():
        assert not set(axis.implemented) & set(axis.later), path
        assert all(users for users in axis.later.values()), path


def test_later_keys_are_not_keys_of_the_schema():
    def keys(model, prefix=""):
        for name, info in model.model_fields.items():
            yield prefix + name
            inner = _inner_model(info.annotation)
            if inner is not None:
                yield from keys(inner, f"{prefix}{name}.")

    known = set(keys(Spec))
    assert not known & set(LATER_KEYS)
    parents = {path.rpartition(".")[0] for path in LATER_KEYS} - {""}
    assert parents <= known


# --- dump and schema --------------------------------------------------------------------------


def test_dumped_spec_reads_back_equal(spec):
    assert load_spec_text(spec_yaml(spec)) == spec


def test_committed_schema_is_current():
    assert (
        committed_schema_text() == schema_text()
    ), "vlmgen/spec/schema.json is stale; run `vlmgen schema --out vlmgen/spec/schema.json`"


def test_schema_is_valid_and_accepts_the_spec(spec_text):
    schema = json.loads(committed_schema_text())
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.Draft202012Validator(schema).validate(yaml.safe_load(spec_text))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("text", "norm", "topology"), "post"),
        (("text", "hiden_size"), 1),
        (("vision", "depth"), 0),
        (("family",), "Qwen"),
        (("text", "rope", "sections"), [24, 20]),
        (("text", "rope", "partial"), 0.75),
        (("vision", "attention"), None),
    ],
)
def test_schema_refuses_what_vlmgen_refuses(spec_text, path, value):
    data = yaml.safe_load(spec_text)
    node = data
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(data, json_schema(), jsonschema.Draft202012Validator)


def test_every_property_has_a_description():
    schema = json_schema()
    for name, definition in [("Spec", schema), *schema["$defs"].items()]:
        assert definition["additionalProperties"] is False, name
        assert definition["description"], name
        for key, field in definition["properties"].items():
            assert field.get("description"), f"{name}.{key}"


def test_specs_point_an_editor_at_the_schema(spec_text):
    first = spec_text.split("\n")[0]
    assert first == "# yaml-language-server: $schema=../vlmgen/spec/schema.json"
    assert (SPEC_PATH.parent / "../vlmgen/spec/schema.json").is_file()
