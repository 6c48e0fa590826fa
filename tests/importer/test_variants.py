"""Checkpoints that differ: a spec with exactly the differences, which then serves them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from vlmgen.errors import UsageError
from vlmgen.importer import ImportResult, import_checkpoint
from vlmgen.spec.load import load_spec
from vlmgen.spec.model import Spec
from vlmgen.weights.published import published_family

from .checkpoints import Headers

SPECS = Path(__file__).resolve().parents[2] / "specs"
IDENTITY = ("family", "title", "defaults_from", "checkpoints")
# What the tiny checkpoints have of their own; a spec of a variant states it too.
SIZES = (
    *("hidden_size", "num_layers", "vocab_size", "max_position_embeddings", "intermediate_size"),
    *("num_heads", "num_kv_heads", "head_dim", "sections", "depth", "out_hidden_size", "size"),
    *("num_embeddings", "indices", "id", "full_blocks", "num_experts", "top_k", "inner", "count"),
    *("tie_word_embeddings", "routed_scale"),
)


def leaves(value, path: str = "") -> dict[str, object]:
    if isinstance(value, dict):
        return {p: v for k, inner in value.items() for p, v in leaves(inner, f"{path}.{k}").items()}
    return {path.removeprefix("."): value}


def differences(spec: Spec, base: Spec) -> dict[str, object]:
    """Path -> value of everything in which a spec differs from another."""
    own, theirs = leaves(spec.model_dump()), leaves(base.model_dump())
    changed = {p: v for p, v in own.items() if theirs.get(p, "absent") != v}
    gone = {p: None for p in theirs if p not in own and not any(q in own for q in parents(p))}
    return {p: v for p, v in {**changed, **gone}.items() if p.split(".")[0] not in IDENTITY}


def parents(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[:n]) for n in range(1, len(parts))]


@pytest.fixture
def written(folder, tmp_path) -> Callable[..., tuple[ImportResult, Spec, dict[str, object]]]:
    """Import with a spec written: the result, the spec, and its differences but for sizes."""

    def write(headers: Headers, family: str = "") -> tuple[ImportResult, Spec, dict[str, object]]:
        out = tmp_path / "specs" / "mine.yaml"
        result = import_checkpoint(headers.write(folder), out=out, family=family)
        assert result.path == out
        spec = load_spec(out)
        base = result.match.known.spec
        assert out.read_text().count(f"extends: {base.family}.yaml") == 1
        found = differences(spec, base)
        own = {p: v for p, v in found.items() if p.rpartition(".")[2] not in SIZES}
        again = import_checkpoint(folder, specs=[out.parent])
        assert again.match.known.path == out.resolve()
        assert again.match.serves and again.text == ""
        assert [d.reading.path for d in again.match.differences] == []
        return result, spec, own

    return write


# --- structure ----------------------------------------------------------------------------------


def bias(h: Headers) -> None:
    h.config["text_config"]["attention_bias"] = True
    for role in "qkv":
        h.add_bias(f"self_attn.{role}_proj")


def norms_off(h: Headers) -> None:
    h.drop("self_attn.q_norm")
    h.drop("self_attn.k_norm")


def no_deepstack(h: Headers) -> None:
    h.config["vision_config"]["deepstack_visual_indexes"] = []
    h.drop("deepstack_merger_list")


def no_pre_bias(h: Headers) -> None:
    h.drop("patch_embed.proj.bias")


def rms_tower(h: Headers) -> None:
    h.drop("norm1.bias")
    h.drop("norm2.bias")


def no_sandwich(h: Headers) -> None:
    h.drop("post_self_attn_layernorm")
    h.drop("post_mlp_layernorm")


def no_final_norm(h: Headers) -> None:
    h.drop("post_layernorm")


def no_scale(h: Headers) -> None:
    h.drop("lambda_1")
    h.drop("lambda_2")


def no_shared_expert(h: Headers) -> None:
    h.config["text_config"]["n_shared_experts"] = 0
    h.drop("shared_experts")


def gelu_tower(h: Headers) -> None:
    h.config["vision_config"]["hidden_act"] = "gelu"


def no_rotation_of_half(h: Headers) -> None:
    text = h.config["text_config"]
    text.pop("partial_rotary_factor", None)
    text["rope_parameters"]["partial_rotary_factor"] = 1.0
    text["rope_parameters"]["mrope_section"] = [
        n * 2 for n in text["rope_parameters"]["mrope_section"]
    ]


def contiguous(h: Headers) -> None:
    h.config["text_config"]["rope_parameters"]["mrope_interleaved"] = False


def other_names(h: Headers) -> None:
    h.rename("mlp.linear_fc1", "mlp.fc1")
    h.rename("mlp.linear_fc2", "mlp.fc2")


def other_prefixes(h: Headers) -> None:
    h.rename("model.visual.", "vision_tower.")
    h.rename("model.language_model.", "language_model.model.")


def other_architecture(h: Headers) -> None:
    h.config["architectures"] = ["MyVLForConditionalGeneration"]
    h.config["model_type"] = "my_vl"
    h.config["text_config"]["model_type"] = "my_vl_text"


CASES = {
    "bias of q, k and v": ("qwen3_vl", bias, {"text.attention.qkv_bias": True}),
    "no norm of q and k": (
        "qwen3_vl",
        norms_off,
        {
            "text.attention.qk_norm": "none",
            "weights.text.q_norm": None,
            "weights.text.k_norm": None,
        },
    ),
    "no deepstack": (
        "qwen3_vl",
        no_deepstack,
        {"vision.deepstack": None, "weights.vision.deepstack": None},
    ),
    "no bias of the patch embedding": (
        "qwen3_vl",
        no_pre_bias,
        {"vision.patch_embed.bias": False},
    ),
    "RMS norms in the tower": ("qwen2_vl", rms_tower, {"vision.norm.kind": "rms"}),
    "no norms of outputs": (
        "glm4v",
        no_sandwich,
        {
            "text.norm.topology": "pre",
            "weights.text.post_self_attn_layernorm": None,
            "weights.text.post_mlp_layernorm": None,
        },
    ),
    "no final norm": (
        "glm4v",
        no_final_norm,
        {"vision.final_norm": None, "weights.vision.final_norm": None},
    ),
    "no layer scale": (
        "internvl",
        no_scale,
        {
            "vision.layer_scale": False,
            "weights.vision.scale1": None,
            "weights.vision.scale2": None,
        },
    ),
    "no shared expert": (
        "glm4v_moe",
        no_shared_expert,
        {"text.moe.shared": None, "weights.text.moe.shared": None},
    ),
    "another activation": ("qwen3_vl", gelu_tower, {"vision.mlp.activation": "gelu"}),
    "the whole head rotated": ("glm4v", no_rotation_of_half, {"text.rope.partial": 1.0}),
    "contiguous sections": ("qwen3_vl", contiguous, {"text.rope.order": "contiguous"}),
    "names of another family": (
        "qwen3_vl",
        other_names,
        {"weights.vision.fc1": "mlp.fc1", "weights.vision.fc2": "mlp.fc2"},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_spec_states_exactly_the_differences(tiny, written, case):
    family, change, expected = CASES[case]
    headers = tiny(family)
    change(headers)
    result, _, found = written(headers)
    assert result.match.known.spec.family == family
    assert found == expected
    paths = {difference.reading.path for difference in result.match.structural}
    assert paths >= {path for path, value in expected.items() if not path.startswith("weights")}
    assert all(difference.reading.evidence for difference in result.match.differences)


def test_prefixes_of_another_layout(tiny, written):
    headers = tiny("qwen3_vl")
    other_prefixes(headers)
    _, spec, found = written(headers)
    assert set(found) == {"weights.layouts"}
    (layout,) = spec.weights.layouts
    assert (layout.text, layout.vision) == ("language_model.model.", "vision_tower.")
    assert layout.head == "lm_head."


def test_architecture_of_another_name(tiny, written):
    headers = tiny("qwen3_vl")
    other_architecture(headers)
    result, spec, found = written(headers)
    assert found == {
        "architecture": "MyVLForConditionalGeneration",
        "model_type": "my_vl",
        "class_prefix": "MyVL",
        "text.model_type": "my_vl_text",
    }
    assert "reference" in {gap.path for gap in result.gaps}


def test_name_of_the_family_comes_from_the_directory(tiny, written):
    headers = tiny("qwen3_vl")
    bias(headers)
    result, spec, _ = written(headers)
    assert result.family == spec.family == "my_vlm_7b"
    assert (spec.title, spec.defaults_from) == ("My-VLM-7B", "My-VLM-7B")
    assert [c.name for c in spec.checkpoints] == ["My-VLM-7B"]


def test_name_of_a_known_family_is_refused(tiny, tmp_path):
    headers = tiny("qwen3_vl")
    bias(headers)
    with pytest.raises(UsageError, match="'qwen3_vl' is the name of a known family"):
        import_checkpoint(headers.write(tmp_path / "Qwen3-VL"))
    with pytest.raises(UsageError, match="'qwen2_vl' is the name of a known family"):
        import_checkpoint(tmp_path / "Qwen3-VL", family="qwen2_vl")


# --- values that the package reads from config.json ---------------------------------------------


@pytest.fixture
def published() -> Callable[[], Headers]:
    """The headers of Qwen3-VL-8B as published."""
    family = published_family("qwen3_vl")
    checkpoint = family.checkpoints["Qwen3-VL-8B-Instruct"]
    shapes = checkpoint.tensors(family.layouts["nested"])
    return Headers(dict(checkpoint.config), dict(shapes)).copy


def theta(h: Headers) -> None:
    h.config["text_config"]["rope_theta"] = 1_000_000


def head_dim(h: Headers) -> None:
    h.config["text_config"]["head_dim"] = 64
    h.config["text_config"]["rope_scaling"]["mrope_section"] = [12, 10, 10]
    for role in "qkv":
        for key in [k for k in h.shapes if f"self_attn.{role}_proj.weight" in k]:
            h.shapes[key] = (h.shapes[key][0] // 2, h.shapes[key][1])
    for key in [k for k in h.shapes if "o_proj" in k]:
        h.shapes[key] = (h.shapes[key][0], h.shapes[key][1] // 2)
    for key in [k for k in h.shapes if "_norm.weight" in k and "self_attn" in k]:
        h.shapes[key] = (64,)


def levels(h: Headers) -> None:
    h.config["vision_config"]["deepstack_visual_indexes"] = [6, 13]
    h.drop("deepstack_merger_list.2.")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (theta, {"text.rope.theta": 1_000_000.0}),
        (head_dim, {"text.attention.head_dim": 64, "text.rope.sections": (12, 10, 10)}),
        (levels, {"vision.deepstack.indices": (6, 13)}),
    ],
)
def test_values_read_at_load_need_no_spec_and_get_one_on_request(
    published, folder, tmp_path, change, expected
):
    headers = published()
    change(headers)
    result = import_checkpoint(headers.write(folder))
    assert result.match.serves and result.text == ""
    read = {d.reading.path: d.reading.value for d in result.match.differences}
    assert read == expected
    assert result.sizes_of == ("Qwen3-VL-8B-Instruct" if change is theta else "")
    out = tmp_path / "specs" / "mine.yaml"
    asked = import_checkpoint(folder, family="mine", out=out)
    assert differences(load_spec(out), asked.match.known.spec) == expected
    again = import_checkpoint(folder, specs=[out.parent])
    assert again.match.known.spec.family == "mine" and again.match.differences == ()


def test_fine_tuned_checkpoint_has_nothing_to_write(published, folder):
    headers = published()
    headers.config |= {"eos_token_id": 151645, "transformers_version": "4.57.1", "use_cache": False}
    result = import_checkpoint(headers.write(folder))
    assert result.match.differences == ()
    assert (result.text, result.sizes_of) == ("", "Qwen3-VL-8B-Instruct")


# --- what the files do not say ------------------------------------------------------------------


def test_names_of_norms_that_only_config_states_are_taken_from_the_families(tiny, folder, tmp_path):
    """InternVL's config says that the tower has norms of queries; no tensor shows their names."""
    headers = tiny("internvl")
    headers.config["vision_config"]["use_qk_norm"] = True
    headers.shapes = None
    out = tmp_path / "specs" / "mine.yaml"
    result = import_checkpoint(headers.write(folder), out=out)
    spec = load_spec(out)
    assert spec.weights.vision.q_norm == "attention.q_norm"
    taken = {gap.path: gap.taken for gap in result.gaps}
    assert taken["weights.vision.q_norm"] == "attention.q_norm"


def test_experts_of_a_dense_family_are_filled_from_another(tiny, folder, tmp_path):
    headers = tiny("qwen2_vl", "nested")
    text = headers.config["text_config"]
    text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
    hidden = text["hidden_size"]
    for layer in range(3):
        prefix = f"model.language_model.layers.{layer}.mlp."
        for role in ("gate", "up", "down"):
            headers.shapes.pop(f"{prefix}{role}_proj.weight")
        headers.shapes[f"{prefix}gate.weight"] = (4, hidden)
        headers.shapes[f"{prefix}experts.gate_up_proj"] = (4, hidden, 80)
        headers.shapes[f"{prefix}experts.down_proj"] = (4, 40, hidden)
    out = tmp_path / "specs" / "mine.yaml"
    result = import_checkpoint(headers.write(folder), out=out)
    moe = load_spec(out).text.moe
    assert (moe.num_experts, moe.top_k, moe.intermediate_size) == (4, 2, 40)
    assert (moe.router, moe.checkpoint, moe.first_dense) == ("softmax", "fused_in_out", 0)
    assert {gap.path for gap in result.gaps} >= {"text.moe", "weights.text.moe"}


def test_unknown_names_are_reported(tiny, folder):
    headers = tiny("qwen3_vl")
    headers.shapes["model.visual.gizmo.weight"] = (3, 3)
    result = import_checkpoint(headers.write(folder))
    (gap,) = result.gaps
    assert gap.why == "no known part of a model is stored as model.visual.gizmo.weight"


def test_unknown_config_fields_are_reported(tiny, folder):
    headers = tiny("qwen3_vl")
    headers.config["text_config"]["secret_gate"] = 3
    result = import_checkpoint(headers.write(folder))
    (gap,) = result.gaps
    assert gap.why == "text_config.secret_gate is 3; what that changes is not known"


def test_token_of_another_text_is_reported(tiny, folder):
    headers = tiny("qwen3_vl")
    number = headers.config["image_token_id"]
    headers.write(folder)
    (folder / "tokenizer_config.json").write_text(
        f'{{"added_tokens_decoder": {{"{number}": {{"content": "<picture>"}}}}}}'
    )
    (gap,) = import_checkpoint(folder).gaps
    assert (gap.path, gap.taken) == ("tokens.image.token", "<|image_pad|>")


def test_index_without_the_files_gives_names_but_no_shapes(tiny, folder):
    headers = tiny("qwen3_vl")
    names = list(headers.shapes)
    headers.shapes = None
    headers.write(folder)
    weight_map = {
        name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(names)
    }
    import json

    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    result = import_checkpoint(folder)
    assert result.match.known.spec.family == "qwen3_vl" and result.match.serves
    assert "2 of 2 files are not here" in result.checkpoint.notes[0]


# --- what no spec can state today ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "field", "value", "axis"),
    [
        ("text_config", "hidden_act", "relu2", "text.mlp.activation"),
        ("text_config", "sliding_window", 4096, "text.layer_types"),
        ("text_config", "layer_types", ["linear_attention"], "text.layer_types"),
        ("text_config", "kv_lora_rank", 512, "text.attention.kind mla"),
        ("text_config", "final_logit_softcapping", 30.0, "a soft cap on the logits"),
        ("vision_config", "hidden_act", "gegelu", "vision.mlp.activation"),
        ("", "quantization_config", {"quant_method": "fp8"}, "tensors that are stored quantised"),
        ("rope", "rope_type", "yarn", "text.rope.scaling"),
        ("rope", "factor", 4.0, "text.rope.scaling"),
    ],
)
def test_what_is_not_generated_is_named_and_nothing_is_written(
    tiny, folder, tmp_path, section, field, value, axis
):
    headers = tiny("qwen3_vl")
    target = headers.config
    if section == "rope":
        target = target["text_config"]["rope_parameters"]
    elif section:
        target = target[section]
    target[field] = value
    out = tmp_path / "mine.yaml"
    result = import_checkpoint(headers.write(folder), out=out)
    assert [gap.path for gap in result.refused] == [axis]
    assert not out.exists() and not result.match.serves


def test_extra_biases_are_not_generated(tiny, folder):
    headers = tiny("qwen3_vl")
    headers.add_bias("self_attn.o_proj")
    headers.add_bias("mlp.down_proj")
    result = import_checkpoint(headers.write(folder))
    assert [gap.path for gap in result.refused] == ["text.attention.output_bias", "text.mlp.bias"]
