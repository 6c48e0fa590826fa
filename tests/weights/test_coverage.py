"""The coverage proof holds for the committed package and finds every seeded fault."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the coverage proof builds models")
pytest.importorskip("vllm", reason="the package imports vLLM")

from vlmgen.check.source import read_package  # noqa: E402
from vlmgen.spec.load import load_spec  # noqa: E402
from vlmgen.spec.model import Spec  # noqa: E402
from vlmgen.weights.coverage import Box, _first_gap, _Slice, check_coverage  # noqa: E402


@pytest.fixture(scope="module")
def spec(qwen3_vl_spec: Path) -> Spec:
    return load_spec(qwen3_vl_spec)


@pytest.fixture(scope="module")
def smallest(spec: Spec) -> Spec:
    """The spec with its smallest checkpoint, whose head is tied."""
    return spec.model_copy(update={"checkpoints": spec.checkpoints[:1]})


@pytest.fixture(scope="module")
def untied(spec: Spec) -> Spec:
    """The spec with a checkpoint that has a head of its own."""
    return spec.model_copy(update={"checkpoints": spec.checkpoints[2:3]})


@pytest.mark.slow
def test_every_published_checkpoint_is_covered(package: Path, spec: Spec) -> None:
    proven: list[str] = []
    assert check_coverage(read_package(package), spec, proven.append) == []
    assert proven == [checkpoint.name for checkpoint in spec.checkpoints]


MAPPING = "weight_mapping.py"
LOADERS = "weight_loaders.py"
UP = ("Entry('layers.{layer}.mlp.up_proj_weight', ('layers.{layer}.mlp.up_proj.weight',), "
      "'transpose')")  # fmt: skip

# (module, text, seeded fault, code -> what its message names)
FAULTS = [
    # A row that is missing.
    (MAPPING, UP + ", ", "",
     {"VG301": "mlp.up_proj_weight", "VG303": "mlp.up_proj.weight"}),
    # A row that is there twice.
    (MAPPING, UP, UP + ", " + UP, {"VG302": "up_proj_weight has rows in lines"}),
    # One key for two parameters.
    (MAPPING, "'layers.{layer}.mlp.up_proj.weight'", "'layers.{layer}.mlp.gate_proj.weight'",
     {"VG302": "mlp.gate_proj_weight and text layers.0.mlp.up_proj_weight", "VG303": "up_proj"}),
    # Keys that this transformers release writes, or none does.
    (MAPPING, "merger.linear_fc1.weight", "merger.mlp.0.weight",
     {"VG304": "merger.mlp.0.weight", "VG303": "merger.linear_fc1.weight"}),
    # A parameter's name that the model does not have.
    (MAPPING, "'pos_embed.pos_embed_weight'", "'pos_embed.weight'",
     {"VG301": "pos_embed.pos_embed_weight"}),
    # A layout that is taken for another, and one that maps elsewhere.
    (MAPPING, "Layout(text='model.', vision='visual.'", "Layout(text='model.', vision='vision.'",
     {"VG308": "flat"}),
    # The head of a tied checkpoint asked for under its own name.
    (MAPPING, "if text.tie_word_embeddings and (not has_head):", "if False:",
     {"VG304": "lm_head.weight"}),
    # Wrong widths and shards.
    ("model.py", "torch.empty(width, hidden_size, dtype=config.dtype)",
     "torch.empty(wide, hidden_size, dtype=config.dtype)", {"VG305": "mlp.down_proj_weight"}),
    (LOADERS, "shard_dim=1, shard_size=shape[0] // tp_size",
     "shard_dim=1, shard_size=shape[1] // tp_size", {"VG305": "TP"}),
    (LOADERS, "kv_size=max(1, kv_heads // tp_size) * d", "kv_size=kv_heads // tp_size * d",
     {"VG305": "TP 16"}),
    (LOADERS, "num_kv_replicas=max(1, tp_size // kv_heads)", "num_kv_replicas=1",
     {"VG305": "TP 16"}),
    (LOADERS, "rank % tp_size * width", "0", {"VG306": "attn.qkv.weight"}),
    (LOADERS, "num_shards=tp_size, pad_shard=True", "num_shards=1, pad_shard=True",
     {"VG306": "embed_tokens.weight"}),
    (LOADERS, "shard_dim=0, shard_size=shape[1] // tp_size, num_shards=tp_size",
     "shard_dim=0, shard_size=shape[1] // tp_size, num_shards=1", {"VG306": "o_proj.weight"}),
    (LOADERS, "reshape(config.hidden_size, -1).t()", "reshape(config.hidden_size, -1)",
     {"VG305": "patch_embed.proj_weight"}),
    # The shape that a loader expects in the checkpoint.
    (LOADERS, "return expecting([(3 * hidden_size,)], load)",
     "return expecting([(2 * hidden_size,)], load)", {"VG305": "attn.qkv_bias"}),
    # A tower that load_weights forgets.
    ("model.py", "if self.visual is not None:\n            group", "if False:\n            group",
     {"VG301": "visual."}),
    # One layer in the middle that differs from the first.
    ("model.py", "self.rotary_emb = Qwen3VLTextRotaryEmbedding(config)",
     "self.rotary_emb = Qwen3VLTextRotaryEmbedding(config)\n"
     "        weight = self.layers[3].mlp.down_proj_weight\n"
     "        weight.data = weight.data[1:]", {"VG307": "layers.3.mlp.down_proj_weight is [6143"}),
    # A published configuration that the package refuses.
    ("config.py", "'gelu_pytorch_tanh'", "'gelu'", {"VG307": "gelu_pytorch_tanh"}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "old", "new", "wanted"), FAULTS, ids=[f"{n}-{i}" for i, (n, *_) in enumerate(FAULTS)]
)
def test_a_seeded_fault_is_found(edited, smallest, untied, name, old, new, wanted) -> None:
    # The smallest checkpoint has no legal TP at which KV heads are replicated.
    spec = untied if "TP 16" in wanted.values() else smallest
    findings = check_coverage(edited(name, old, new), spec)
    for code, named in wanted.items():
        messages = [finding.message for finding in findings if finding.code == code]
        assert any(named in message for message in messages), (code, named, findings)
    assert all(finding.path.endswith(MAPPING) and finding.line >= 1 for finding in findings)


def test_a_shape_finding_says_both_shapes_tp_and_rank(edited, smallest) -> None:
    old = "torch.empty(width, hidden_size, dtype=config.dtype)"
    source = edited("model.py", old, old.replace("width", "wide"))
    findings = check_coverage(source, smallest)
    (finding,) = [f for f in findings if f.code == "VG305"]
    assert "Qwen3-VL-2B-Instruct, text TP 2, rank 0: layers.0.mlp.down_proj_weight" in (
        finding.message
    )
    assert "[6144, 2048]" in finding.message and "[3072, 2048]" in finding.message
    assert "more of this kind" in finding.message
    lines = Path(finding.path).read_text().splitlines()
    row = " ".join(lines[finding.line - 1 : finding.line + 1])
    assert "Entry(" in row and "layers.{layer}.mlp.down_proj_weight" in row


def test_an_ignored_key_is_no_finding(edited, smallest) -> None:
    edited(MAPPING, UP + ", ", "")
    ignored = "IGNORED: Mapping[str, str] = {'*.mlp.up_proj.weight': 'a test'}"
    source = edited(MAPPING, "IGNORED: Mapping[str, str] = {}", ignored)
    # The key is excused, the parameter is not; without the excuse see the first seeded fault.
    assert {f.code for f in check_coverage(source, smallest)} == {"VG301"}


def test_an_untied_head_is_a_tensor_of_its_own(edited, untied) -> None:
    source = edited(MAPPING, "if text.tie_word_embeddings and (not has_head):", "if True:")
    found = {f.code: f.message for f in check_coverage(source, untied)}
    assert "lm_head.weight" in found["VG303"] and "embed_tokens" in found["VG302"]


def test_sizes_of_the_spec_that_differ_from_the_published_ones(package, spec) -> None:
    entry = spec.checkpoints[0]
    text = entry.text.model_copy(update={"num_layers": 27})
    changed = spec.model_copy(update={"checkpoints": (entry.model_copy(update={"text": text}),)})
    findings = check_coverage(read_package(package), changed)
    assert {finding.code for finding in findings} == {"VG309"}
    layers, parameters = sorted(finding.message for finding in findings)
    assert "num_hidden_layers 27, published is 28" in layers + parameters
    assert "the number of parameters" in layers + parameters


def test_a_checkpoint_without_recorded_keys(package, spec) -> None:
    entry = spec.checkpoints[0].model_copy(update={"name": "Qwen3-VL-3B"})
    changed = spec.model_copy(update={"checkpoints": (entry,)})
    (finding,) = check_coverage(read_package(package), changed)
    assert finding.code == "VG300" and "Qwen3-VL-3B" in finding.message


def test_a_slice_notes_what_is_read() -> None:
    read: set[Box] = set()
    piece = _Slice((6, 4, 2), read)
    assert tuple(piece[2:4].shape) == (2, 4, 2)
    assert tuple(piece[..., 1].shape) == (6, 4)
    assert tuple(piece[-1, :, 0:99].shape) == (4, 2)
    assert read == {
        ((2, 4), (0, 4), (0, 2)),
        ((0, 6), (0, 4), (1, 2)),
        ((5, 6), (0, 4), (0, 2)),
    }


def test_gaps() -> None:
    assert _first_gap({((0, 2),), ((2, 5),)}, (5,)) is None
    assert _first_gap({((0, 5),), ((1, 2),)}, (5,)) is None
    assert _first_gap({((0, 2),), ((3, 5),)}, (5,)) == ((2, 3),)
    assert _first_gap({((0, 2),)}, (5,)) == ((2, 5),)
    assert _first_gap(set(), (5,)) == ((0, 5),)


def test_a_look_at_the_first_row_covers_no_column() -> None:
    """Loaders look at `piece[:1]` for the dtype; that row is read, the others are not."""
    first_row = ((0, 1), (0, 6))
    assert _first_gap({first_row, ((0, 4), (0, 3))}, (4, 6)) == ((1, 4), (3, 6))
    assert _first_gap({first_row, ((0, 4), (0, 3)), ((0, 4), (3, 6))}, (4, 6)) is None
    assert _first_gap({((0, 4), (0, 3)), ((0, 2), (3, 6)), ((2, 4), (4, 6))}, (4, 6)) == (
        (2, 4),
        (3, 4),
    )
