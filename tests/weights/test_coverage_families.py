"""The coverage proof of the other families' own rows and loaders: each seeded fault is found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the coverage proof builds models")
pytest.importorskip("vllm", reason="the package imports vLLM")

from vlmgen.check.source import PackageSource, read_package  # noqa: E402
from vlmgen.spec.load import load_spec  # noqa: E402
from vlmgen.spec.model import Spec  # noqa: E402
from vlmgen.weights.coverage import check_coverage  # noqa: E402
from vlmgen.weights.published import families  # noqa: E402

MAPPING, LOADERS, MODEL = "weight_mapping.py", "weight_loaders.py", "model.py"

# (family, module, text, seeded fault, code -> what its message names)
FAULTS = [
    # Biases of all ranks from the first one's heads.
    ("qwen2_vl", LOADERS, "starts = (local * q_width, ", "starts = (0, ",
     {"VG306": "self_attn.q_proj.bias"}),
    # A flat config whose towers have other prefixes.
    ("qwen2_vl", MAPPING, "vision='visual.'", "vision='vision.'",
     {"VG304": "vision.blocks.0.", "VG303": "visual.blocks.0."}),
    # A norm of the tower that has no bias is asked for one.
    ("qwen2_5_vl", MAPPING, "Entry('merger.norm.weight', ('merger.ln_q.weight',), 'rename')",
     "Entry('merger.norm.weight', ('merger.ln_q.bias',), 'rename')",
     {"VG304": "merger.ln_q.bias", "VG303": "merger.ln_q.weight"}),
    # Experts: the layout is declared, and a wrong declaration has another shape.
    ("qwen3_vl_moe", LOADERS, "expecting([(experts, hidden_size, 2 * wide)]",
     "expecting([(experts, 2 * wide, hidden_size)]", {"VG305": "mlp.gate_up_weight"}),
    ("qwen3_vl_moe", LOADERS, "for first in (start, wide + start)",
     "for first in (start, start)", {"VG306": "mlp.experts.gate_up_proj"}),
    # One matrix per expert: the last one forgotten, or gate and up not kept apart.
    ("glm4v_moe", MAPPING, "range(experts if ", "range(experts - 1 if ",
     {"VG303": "mlp.experts.127.", "VG305": "gate_up_weight"}),
    ("glm4v_moe", LOADERS, ".unflatten(0, (-1, 2)).transpose(1, 2)",
     ".unflatten(0, (-1, 2))", {"VG305": "mlp.gate_up_weight"}),
    # Shares of the experts: every rank takes the first share, or all of their width.
    ("glm4v_moe", LOADERS, "first = get_neuron_ep_rank() * count", "first = 0",
     {"VG306": "model.language_model.layers.1.mlp.experts.64.gate_proj.weight"}),
    ("qwen3_vl_moe", LOADERS, "place = get_neuron_ep_tp_group().rank_in_group", "place = 0",
     {"VG306": "384 to 767 of dim 1 of"}),
    # The boundary between dense layers and layers with experts.
    ("glm4v_moe", MAPPING, "layer=range(text.first_dense))", "layer=range(text.first_dense + 1))",
     {"VG301": "layers.1.mlp.gate_proj_weight", "VG304": "layers.1.mlp.gate_proj.weight"}),
    # A bias that only chooses experts is still a tensor.
    ("glm4v_moe", MAPPING, "mlp.gate.e_score_correction_bias", "mlp.gate.bias",
     {"VG304": "mlp.gate.bias", "VG303": "e_score_correction_bias"}),
    # The layer that predicts a second token.
    ("glm4v_moe", MAPPING, "'model.language_model.layers.46.*'",
     "'model.language_model.layers.47.*'", {"VG303": "layers.46."}),
    # Up read where gate is.
    ("glm4v", LOADERS, "part * wide + rank % tp_size * width", "rank % tp_size * width",
     {"VG306": "mlp.gate_up_proj.weight"}),
    # One key for two parameters that do not share it.
    ("glm4v", MAPPING, "'layers.{layer}.post_mlp_layernorm.weight',)",
     "'layers.{layer}.post_attention_layernorm.weight',)",
     {"VG302": "post_attention_layernorm", "VG303": "post_mlp_layernorm"}),
    # The convolution of the merger: a rank's share of its outputs.
    ("glm4v", LOADERS, "kernel = slices[0][start:start + width]", "kernel = slices[0][:width]",
     {"VG306": "downsample.weight"}),
    # Keys that no model reads.
    ("paddleocr_vl", MAPPING, "'*.vision_model.head.*'", "'*.vision_model.tail.*'",
     {"VG303": "vision_model.head."}),
    # The projector's keys lie beside the tower's.
    ("paddleocr_vl", MAPPING, "_expand(layout.projector, PROJECTOR)",
     "_expand(layout.vision, PROJECTOR)", {"VG304": "linear_1", "VG303": "mlp_AR."}),
    ("internvl", MAPPING, "projector='multi_modal_projector.'", "projector='projector.'",
     {"VG304": "projector.linear_1.weight", "VG303": "multi_modal_projector.linear_1.weight"}),
    # Tensors without .weight, and with leading dimensions of one.
    ("internvl", MAPPING, "'embeddings.cls_token'", "'embeddings.cls_token.weight'",
     {"VG304": "embeddings.cls_token.weight", "VG303": "embeddings.cls_token"}),
    ("internvl", LOADERS, "(1,) * (3 - len(shape)) + shape", "shape",
     {"VG305": "patch_embed.class_token"}),
    # Separate Q, K, V of the tower: every rank takes the first heads.
    ("internvl", LOADERS, "piece[start:start + width, :].t()", "piece[:width, :].t()",
     {"VG306": "attention.q_proj.weight"}),
    # A norm over the full width is cut like the heads it belongs to.
    ("internvl_6b", "vision_encoder.py",
     "self.q_norm_weight = _parameter(self.width, dtype=dtype, "
     "loader=column_parallel_bias_loader(hidden_size, tp_size))",
     "self.q_norm_weight = _parameter(self.width, dtype=dtype, "
     "loader=whole_loader((hidden_size,)))", {"VG305": "attn.q_norm_weight"}),
    # Experts in every layer of another text.
    ("internvl3_5_moe", LOADERS, "return torch.stack([piece[:, start:start + width].t()",
     "return torch.stack([piece[:, :width].t()", {"VG306": "down_proj.weight"}),
    ("internvl3_5", MAPPING, "self_attn.q_norm.weight", "self_attn.query_norm.weight",
     {"VG304": "self_attn.query_norm.weight", "VG303": "self_attn.q_norm.weight"}),
]  # fmt: skip


@pytest.fixture
def package(family: str, repository: Path) -> Path:
    """The committed package, which `edited` copies."""
    return repository / "generated" / family


@pytest.fixture
def smallest(family: str, repository: Path) -> Spec:
    """The family's spec with one checkpoint, which can be split most ways among the small."""
    spec = load_spec(repository / "specs" / f"{family}.yaml")
    untied = [c for c in spec.checkpoints if not spec.checkpoint(c.name).text.tie_word_embeddings]
    return spec.model_copy(update={"checkpoints": tuple(untied[:1])})


@pytest.mark.slow
@pytest.mark.parametrize("family", [name for name in families() if name != "qwen3_vl"])
def test_every_published_checkpoint_is_covered(
    package: Path, family: str, repository: Path
) -> None:
    spec = load_spec(repository / "specs" / f"{family}.yaml")
    proven: list[str] = []
    assert check_coverage(read_package(package), spec, proven.append) == []
    assert proven == [checkpoint.name for checkpoint in spec.checkpoints]


@pytest.mark.parametrize(
    ("family", "name", "old", "new", "wanted"),
    FAULTS,
    ids=[f"{family}-{i}" for i, (family, *_) in enumerate(FAULTS)],
)
def test_a_seeded_fault_is_found(
    edited: Callable[[str, str, str], PackageSource],
    smallest: Spec,
    family: str,
    name: str,
    old: str,
    new: str,
    wanted: dict[str, str],
) -> None:
    findings = check_coverage(edited(name, old, new), smallest)
    for code, named in wanted.items():
        messages = [finding.message for finding in findings if finding.code == code]
        assert any(named in message for message in messages), (code, named, findings)
