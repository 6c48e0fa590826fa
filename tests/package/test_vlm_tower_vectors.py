"""Golden vectors of the plugin's vision tower and of its calls against the generated package.

What becomes of each vector stands in `vector_table.py`. The plugin's tower uses erf GELU in its
MLPs and rounds position weights to bf16; both are seeded here where values are compared, and the
package's own choices are shown to differ by as much as the vectors' notes say.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from vllm_neuron.model.neuron_config import NeuronConfig, VisionNeuronConfig
from vllm_neuron.utils.checkpoints import SafetensorsCheckpoint
from vllm_neuron.vllm.worker.encoder_cache_blocks import EncoderCacheBlocks
from vllm_neuron_qwen3_vl import model as package_model
from vllm_neuron_qwen3_vl import vision_encoder
from vllm_neuron_qwen3_vl.config import Qwen3VLConfig, Qwen3VLTextConfig, Qwen3VLVisionConfig
from vllm_neuron_qwen3_vl.model import Qwen3VLNeuronModel
from vllm_neuron_qwen3_vl.utils import preprocessing
from vllm_neuron_qwen3_vl.utils.block_packing import VisionInputError
from vllm_neuron_qwen3_vl.vision_encoder import Qwen3VLVisionModel
from vllm_neuron_qwen3_vl.weight_loaders import CheckpointError, load_tower, open_checkpoint
from vllm_neuron_qwen3_vl.weight_mapping import LAYOUTS, build_mappings

from tests.package.vector_table import cases
from tests.vectors.reader import Vector, compare, vectors

TABLES = ("pixel_values", "pos_emb_idx", "pos_emb_weight", "cos", "sin")
BOUNDS = ("bound_min", "bound_max")


# Where a call one level up has no tower vector of its own name.
TOLERANCE = {torch.float32: (2e-5, 2e-5), torch.bfloat16: (0.016, 0.06)}

# ------------------------------------------------------------------------- building the tower


def vision_config(sizes: dict[str, Any], dtype: torch.dtype = torch.float32) -> Qwen3VLVisionConfig:
    """The recorded sizes, past `from_configs`, which refuses blocks of 32 and no deepstack."""
    levels = tuple(sizes["deepstack_visual_indexes"])
    return Qwen3VLVisionConfig(**{**sizes, "deepstack_visual_indexes": levels}, dtype=dtype)


def both_towers(vision: Qwen3VLVisionConfig) -> Qwen3VLConfig:
    """A text tower of one layer to go with it."""
    text = Qwen3VLTextConfig(
        hidden_size=vision.out_hidden_size,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        vocab_size=16,
        dtype=vision.dtype,
        neuron_config=NeuronConfig(on_device_sampling_config=None),
    )
    return Qwen3VLConfig(text_config=text, vision_config=vision)


def recorded_weights() -> dict[str, torch.Tensor]:
    """The tower's checkpoint tensors, bf16, with the published names."""
    return next(v for v in vectors("tower") if "weights" in v.entry["args"]).args["weights"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> SafetensorsCheckpoint:
    folder = tmp_path_factory.mktemp("tower")
    save_file(recorded_weights(), folder / "model.safetensors")
    return SafetensorsCheckpoint(folder)


def load(
    config: Qwen3VLVisionConfig,
    checkpoint: SafetensorsCheckpoint,
    rank: int = 0,
    world_size: int = 1,
) -> Qwen3VLVisionModel:
    """A tower built on meta and loaded through the package's own loaders."""
    with torch.device("meta"):
        tower = Qwen3VLVisionModel(config)
    mapping = build_mappings(both_towers(config), LAYOUTS["nested"])["vision"]
    state = load_tower(
        checkpoint,
        tower,
        mapping,
        device=torch.device("cpu"),
        rank=rank,
        world_size=world_size,
    )
    tower.load_state_dict(state, strict=True, assign=True)
    return tower


@pytest.fixture
def erf_gelu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plugin's activation in the tower's MLPs."""
    monkeypatch.setattr(vision_encoder, "gelu_tanh", vision_encoder.gelu)


@pytest.fixture
def rounded_positions(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The plugin's position weights: rounded to bf16."""
    exact = preprocessing.position_taps

    def rounded(*args: int) -> tuple[torch.Tensor, torch.Tensor]:
        index, weight = exact(*args)
        return index, weight.to(torch.bfloat16).float()

    monkeypatch.setattr(preprocessing, "position_taps", rounded)
    yield


@pytest.fixture
def bf16_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plugin's bf16 rotation and position sum, both float32 in the package (design D5)."""

    def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
        return x * cos.to(x.dtype) + turned * sin.to(x.dtype)

    def positions(self: Any, index: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        corners = torch.nn.functional.embedding(index, self.pos_embed_weight)
        first, second, third, fourth = corners * weight[..., None].to(corners.dtype)
        return first + second + third + fourth

    monkeypatch.setattr(vision_encoder, "rotate", rotate)
    monkeypatch.setattr(vision_encoder.Qwen3VLVisionPositionEmbedding, "forward", positions)


def tower_inputs(args: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The recorded inputs in the package's form: rows of block b go to its recorded cache block."""
    inputs = {name: args[name] for name in (*TABLES, *BOUNDS)}
    inputs["pos_emb_weight"] = inputs["pos_emb_weight"].float()
    # Padding saw nothing there; here it sees the first patch of its block.
    inputs["bound_max"] = inputs["bound_max"].clamp(min=1)
    blocks, patches = inputs["pixel_values"].shape[:2]
    ids = args["write_block_ids"]
    rows = patches // 4
    inputs["row_block_ids"] = ids[:blocks, None].expand(len(ids[:blocks]), rows)
    inputs["row_offsets"] = torch.arange(rows).repeat(blocks, 1)
    return inputs | {
        "write_block_ids": ids,
        "encoder_cache_buffer": args["encoder_cache_buffer"],
    }


def specified_rows(vector: Vector, outputs: dict[str, Any]) -> torch.Tensor:
    """Rows of the buffer that the record specifies: real ones, and those of untouched blocks."""
    rows = outputs["real_rows"].clone()
    untouched = torch.ones(len(rows), dtype=torch.bool)
    untouched[vector.args["write_block_ids"]] = False
    rows[untouched] = True
    return rows


def assert_buffer(vector: Vector, buffer: torch.Tensor) -> None:
    """Compare the cache at the vector's tolerance."""
    outputs, rule = vector.outputs, vector.compare["buffer"]
    rows = specified_rows(vector, outputs)
    tolerance = (rule["rtol"], rule["atol"])
    compare(buffer[rows], outputs["buffer"][rows], tolerance, f"{vector.name} buffer")


def noted_step(vector: Vector) -> float:
    """By how much tanh GELU moves the real rows, from the note."""
    (figure,) = re.findall(r"real rows by up to (\d\.\de-\d\d)", vector.note)
    return float(figure)


# ------------------------------------------------------------------------------- the tower alone


@cases("test_tower_in_float32")
def test_tower_in_float32(
    vector: Vector, checkpoint: SafetensorsCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    tower = load(vision_config(vector.args["config"]), checkpoint)
    outputs = vector.outputs
    own = tower(**tower_inputs(vector.args))
    real = outputs["real_rows"]
    step = float((own[real] - outputs["buffer"][real]).abs().max())
    assert step == pytest.approx(noted_step(vector), rel=0.06), "tanh GELU against erf GELU"
    with pytest.raises(AssertionError):
        assert_buffer(vector, own)

    monkeypatch.setattr(vision_encoder, "gelu_tanh", vision_encoder.gelu)
    assert_buffer(vector, tower(**tower_inputs(vector.args)))


@cases("test_tower_in_bf16")
def test_tower_in_bf16(
    vector: Vector, checkpoint: SafetensorsCheckpoint, erf_gelu: None, bf16_arithmetic: None
) -> None:
    tower = load(vision_config(vector.args["config"], torch.bfloat16), checkpoint)
    assert_buffer(vector, tower(**_bf16_inputs(vector)))


def _bf16_inputs(vector: Vector) -> dict[str, torch.Tensor]:
    inputs = tower_inputs(vector.args)
    return {**inputs, "pixel_values": inputs["pixel_values"].to(torch.bfloat16)}


@pytest.mark.parametrize("case", ["two_images_ds3", "two_images_ds0", "two_frames_ds3"])
def test_bf16_tower_is_as_close_to_float32_as_the_plugins(
    case: str, checkpoint: SafetensorsCheckpoint, erf_gelu: None
) -> None:
    """The package's own arithmetic, by the plugin's accuracy statistics (L-inf 5, L2 3)."""
    (exact,) = [v for v in vectors("tower") if v.case == f"{case}_f32"]
    (vector,) = [v for v in vectors("tower") if v.case == f"{case}_bf16"]
    tower = load(vision_config(vector.args["config"], torch.bfloat16), checkpoint)
    ours, outputs = tower(**_bf16_inputs(vector)), vector.outputs
    rows = outputs["real_rows"]
    reference = exact.outputs["buffer"][rows]
    error = ours[rows].float() - reference
    recorded = outputs["buffer"][rows].float() - reference
    assert not torch.equal(ours[rows], outputs["buffer"][rows]), "other roundings than the plugin's"
    assert error.abs().max() < 5 * recorded.abs().max()
    assert error.norm() < 1.25 * recorded.norm()  # the rule says 3


def test_hidden_states_of_every_block(checkpoint: SafetensorsCheckpoint, erf_gelu: None) -> None:
    """Finds the first deviation: after the embedding, after each block, after each merger."""
    (vector,) = [v for v in vectors("tower") if v.case == "two_images_ds3_f32"]
    args, outputs = vector.args, vector.outputs
    tower = load(vision_config(args["config"]), checkpoint)
    seen: dict[str, torch.Tensor] = {}

    def keep(name: str) -> Any:
        return lambda module, inputs, output: seen.__setitem__(name, output)

    for index, block in enumerate(tower.blocks):
        block.register_forward_hook(keep(f"hidden_after_block_{index}"))
    tower.blocks[0].register_forward_pre_hook(
        lambda module, inputs: seen.__setitem__("hidden_after_embed", inputs[0])
    )
    tower.merger.register_forward_hook(keep("main_merged"))
    for level, merger in enumerate(tower.deepstack_merger_list):
        merger.register_forward_hook(keep(f"deepstack_{level}"))
    tower(**tower_inputs(args))

    patches = args["bound_max"][..., 0] > args["bound_min"][..., 0]  # [n, S]
    rows = patches.view(len(patches), -1, 4).all(-1)
    names = [name for name in outputs if name not in ("buffer", "real_rows")]
    assert set(names) == set(seen) and len(names) == 9
    for name in names:
        mask = patches if name.startswith("hidden") else rows
        compare(seen[name][mask], outputs[name][mask], (2e-5, 2e-5), name)


# What goes wrong in a tower: each must show in a vector at float32 tolerance.
FAULTS = {
    "deepstack levels swapped": lambda tower: setattr(
        tower,
        "deepstack_merger_list",
        torch.nn.ModuleList([tower.deepstack_merger_list[level] for level in (1, 0, 2)]),
    ),
    "deepstack shifted by one layer": lambda tower: setattr(
        tower, "deepstack_visual_indexes", (1, 2, 3)
    ),
    "merger norm after the join": lambda tower: setattr(
        tower.merger, "norm", torch.nn.LayerNorm(32, eps=1e-2)
    ),
    "epsilon 1e-3": lambda tower: [setattr(b.norm1, "eps", 1e-3) for b in tower.blocks],
    "scale of the whole width": lambda tower: [
        setattr(b.attn, "scale", 32**-0.5) for b in tower.blocks
    ],
    "second MLP bias forgotten": lambda tower: tower.blocks[3].mlp.fc2_bias.zero_(),
    "keys and values swapped": lambda tower: tower.blocks[1].attn.qkv_weight.copy_(
        tower.blocks[1].attn.qkv_weight[:, [*range(32), *range(64, 96), *range(32, 64)]]
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_in_the_tower_are_noticed(
    fault: str, checkpoint: SafetensorsCheckpoint, erf_gelu: None
) -> None:
    (vector,) = [v for v in vectors("tower") if v.case == "two_images_ds3_f32"]
    tower = load(vision_config(vector.args["config"]), checkpoint)
    assert_buffer(vector, tower(**tower_inputs(vector.args)))
    FAULTS[fault](tower)
    with pytest.raises(AssertionError):
        assert_buffer(vector, tower(**tower_inputs(vector.args)))


def test_float32_position_weights_move_the_rows_as_the_notes_say(
    checkpoint: SafetensorsCheckpoint, erf_gelu: None
) -> None:
    """The package keeps them; against the plugin's rounded ones rows differ by up to 8e-3."""
    steps = []
    for vector in vectors("tower"):
        if not vector.case.startswith("embed_") or not vector.case.endswith("_f32"):
            continue
        model, cache = _model_and_cache(vector.args, checkpoint)
        recorded = _recorded_rows(vector)
        _embed(model, cache, vector.args)
        for key, rows in recorded.items():
            steps.append(float((cache.get(key) - rows).abs().max()))
    assert len(steps) >= 8 and 1e-3 < max(steps) < 8.5e-3, steps


# -------------------------------------------------------------------------- one level up: embed


def _model_and_cache(
    args: dict[str, Any],
    checkpoint: SafetensorsCheckpoint | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Qwen3VLNeuronModel, EncoderCacheBlocks]:
    """The top-level class with the recorded settings; without a checkpoint a listening tower."""
    vision = vision_config(args["config"], dtype)
    sizes = args["encoder_cache"]
    config = both_towers(vision)
    vision.neuron_config = VisionNeuronConfig(**args["vision_neuron_config"])
    with torch.device("meta"):
        model = Qwen3VLNeuronModel(config)
    model.visual = Listener() if checkpoint is None else load(vision, checkpoint)
    cache = EncoderCacheBlocks(
        sizes["num_blocks"], sizes["block_size"], sizes["fat_dim"], dtype=dtype, min_hold_time_ms=0
    )
    if "buffer" in sizes:
        cache.buffer.copy_(sizes["buffer"])
    for item in sizes.get("allocated_before", []):
        cache.allocate(item["identifier"], item["tokens_per_block"])
    return model, cache


class Listener(torch.nn.Module):
    """Stands in the tower's place and keeps what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs: dict[str, torch.Tensor] | None = None

    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        self.inputs = inputs
        return inputs["encoder_cache_buffer"]


def _embed(model: Qwen3VLNeuronModel, cache: EncoderCacheBlocks, args: dict[str, Any]) -> None:
    names = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")
    keywords = {name: args[name] for name in names if name in args}
    model.embed_multimodal(encoder_cache=cache, mm_hashes=args["mm_hashes"], **keywords)


def _recorded_rows(vector: Vector) -> dict[str, torch.Tensor]:
    """Real rows of every item, out of the recorded buffer and its counts per block."""
    outputs = vector.outputs
    return {
        key: torch.cat(
            [
                outputs["buffer"][block, :count]
                for block, count in zip(ids, outputs["tokens_per_block"][key], strict=True)
            ]
        )
        for key, ids in outputs["block_ids"].items()
    }


@cases("test_embed_hands_the_recorded_inputs_to_the_tower")
def test_embed_hands_the_recorded_inputs_to_the_tower(
    vector: Vector,
    checkpoint: SafetensorsCheckpoint,
    erf_gelu: None,
    rounded_positions: None,
    request: pytest.FixtureRequest,
) -> None:
    args, outputs = vector.args, vector.outputs
    dtype = outputs["buffer"].dtype
    if dtype == torch.bfloat16:
        request.getfixturevalue("bf16_arithmetic")
    model, cache = _model_and_cache(args, checkpoint, dtype)
    seen: dict[str, torch.Tensor] = {}
    model.visual.register_forward_pre_hook(
        lambda module, positional, keywords: seen.update(keywords), with_kwargs=True
    )
    _embed(model, cache, args)

    recorded = outputs["visual_inputs"]
    assert seen["pixel_values"].dtype == dtype, "cast to the model's dtype, as in warm-up"
    assert seen["pixel_values"].shape[0] == outputs["num_blocks"]
    compare(seen["pixel_values"].to(recorded["pixel_values"].dtype), recorded["pixel_values"], None)
    compare(seen["pos_emb_idx"], recorded["pos_emb_idx"], None, "pos_emb_idx")
    compare(
        seen["pos_emb_weight"].to(torch.bfloat16),
        recorded["pos_emb_weight"],
        (0.0079, 4e-6),
        "pos_emb_weight",
    )
    for name in ("cos", "sin"):
        compare(seen[name], recorded[name], (0, 2e-6), name)
    real = recorded["bound_max"] > 0
    for name in BOUNDS:
        compare(seen[name][real], recorded[name][real], None, name)

    assert {key: cache.get_block_ids(key) for key in args["mm_hashes"]} == outputs["block_ids"]
    for key, rows in _recorded_rows(vector).items():
        assert cache.get_num_tokens(key) == len(rows)
        compare(cache.get(key), rows, TOLERANCE[dtype], f"{vector.name} {key}")


# ----------------------------------------------------------------------- errors of the tower


def _errors_tower(checkpoint: SafetensorsCheckpoint) -> Qwen3VLVisionModel:
    """The tower of those vectors: rows of 48, so one deepstack level."""
    (vector,) = [v for v in vectors("tower") if v.case == "two_images_ds1_bf16"]
    return load(vision_config(vector.args["config"]), checkpoint)


@cases("test_rows_are_cast_to_the_dtype_of_the_cache")
def test_rows_are_cast_to_the_dtype_of_the_cache(
    vector: Vector, checkpoint: SafetensorsCheckpoint
) -> None:
    assert vector.raises["type"] == "RuntimeError" and not vector.raises["deliberate"]
    tower, inputs = _errors_tower(checkpoint), tower_inputs(vector.args)
    exact = torch.zeros_like(inputs["encoder_cache_buffer"], dtype=torch.float32)
    tower(**{**inputs, "encoder_cache_buffer": exact})
    written = tower(**inputs)
    block = int(inputs["write_block_ids"][0])
    assert written.dtype == torch.bfloat16
    assert torch.equal(written[block], exact[block].to(torch.bfloat16))
    assert written[block].abs().max() > 0


@cases("test_a_cache_of_another_width_fails")
def test_a_cache_of_another_width_fails(vector: Vector, checkpoint: SafetensorsCheckpoint) -> None:
    tower, inputs = _errors_tower(checkpoint), tower_inputs(vector.args)
    vector.expect_raises(lambda: tower(**inputs))


@cases("test_larger_cache_blocks_take_the_rows_by_offset")
def test_larger_cache_blocks_take_the_rows_by_offset(
    vector: Vector, checkpoint: SafetensorsCheckpoint
) -> None:
    assert vector.raises["type"] == "RuntimeError" and not vector.raises["deliberate"]
    tower, inputs = _errors_tower(checkpoint), tower_inputs(vector.args)
    before = inputs["encoder_cache_buffer"].clone()
    block = int(inputs["write_block_ids"][0])
    small = before[:, :8].clone()
    tower(**{**inputs, "encoder_cache_buffer": small})
    tower(**inputs)
    buffer = inputs["encoder_cache_buffer"]
    assert torch.equal(buffer[block, :8], small[block])
    assert torch.equal(buffer[block, 8:], before[block, 8:])


@cases("test_one_scratch_id_per_vision_block")
def test_one_scratch_id_per_vision_block(vector: Vector, checkpoint: SafetensorsCheckpoint) -> None:
    tower, args = _errors_tower(checkpoint), vector.args
    full = {**args, "write_block_ids": torch.tensor([1, 2])}
    inputs = {**tower_inputs(full), "write_block_ids": args["write_block_ids"]}
    vector.expect_raises(lambda: tower(**inputs))


@cases("test_two_write_ids_for_one_block_are_refused")
def test_two_write_ids_for_one_block_are_refused(
    vector: Vector, checkpoint: SafetensorsCheckpoint
) -> None:
    assert vector.outputs == {"blocks_written": [1, 2], "both_equal": True}
    tower, inputs = _errors_tower(checkpoint), tower_inputs(vector.args)
    before = inputs["encoder_cache_buffer"].clone()
    assert len(inputs["write_block_ids"]) == 2 and len(inputs["pixel_values"]) == 1
    with pytest.raises(RuntimeError, match="shape"):
        tower(**inputs)
    assert torch.equal(inputs["encoder_cache_buffer"], before)


# ---------------------------------------------------------------------------- loading the tower


@cases("test_tower_shards")
def test_tower_shards(
    vector: Vector, checkpoint: SafetensorsCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shapes of every parameter and the recorded tensors, at vision TP 1, 2 and 4."""
    args, outputs = vector.args, vector.outputs
    rank, world_size = args["rank"], args["world_size"]
    group = SimpleNamespace(world_size=world_size, rank_in_group=rank)
    monkeypatch.setattr(vision_encoder, "get_neuron_vision_tp_group", lambda: group)
    levels = args["deepstack_visual_indexes"]
    sizes = {**args["config"], "depth": args["depth"], "deepstack_visual_indexes": levels}
    tower = load(vision_config(sizes, torch.bfloat16), checkpoint, rank, world_size)
    ours = dict(tower.named_parameters())

    recorded = {_our_name(name): shape for name, shape in outputs["shapes"].items()}
    kernel = recorded.pop("patch_embed.proj_weight")  # [H, C, T, p, p]
    shapes = {name: list(parameter.shape) for name, parameter in ours.items()}
    assert shapes.pop("patch_embed.proj_weight") == [kernel[1] * kernel[2] * kernel[3] ** 2, 32]
    assert shapes == recorded

    for name, tensor in outputs["tensors"].items():
        if name == "patch_embed.proj.weight":
            tensor = tensor.reshape(len(tensor), -1).t().contiguous()
        compare(ours[_our_name(name)].data, tensor, None, f"{vector.name} {name}")


def test_a_naive_column_shard_of_the_fused_matrix_is_noticed(
    checkpoint: SafetensorsCheckpoint,
) -> None:
    (vector,) = [v for v in vectors("tower_load") if v.case == "tp2_rank1"]
    whole = recorded_weights()["model.visual.blocks.0.attn.qkv.weight"]
    recorded = vector.outputs["tensors"]["blocks.0.attn.qkv_weight"]
    naive = whole[48:].t().contiguous()
    assert naive.shape == recorded.shape and not torch.equal(naive, recorded)


def _our_name(name: str) -> str:
    renamed = {
        "pos_embed.pos_embed.weight": "pos_embed.pos_embed_weight",
        "patch_embed.proj.weight": "patch_embed.proj_weight",
        "patch_embed.proj.bias": "patch_embed.proj_bias",
    }
    return renamed.get(name, name)


@cases("test_a_checkpoint_with_more_layers_is_refused")
def test_a_checkpoint_with_more_layers_is_refused(vector: Vector, tmp_path: Path) -> None:
    args, unexpected = vector.args, vector.outputs["unexpected_keys"]
    assert vector.raises is None and len(unexpected) > 8
    levels = args["deepstack_visual_indexes"]
    sizes = {**args["config"], "depth": args["depth"], "deepstack_visual_indexes": levels}
    config = both_towers(vision_config(sizes))
    mappings = build_mappings(config, LAYOUTS["nested"])
    text = {key for name in ("text", "head") for keys in mappings[name].values() for key in keys}
    tensors = recorded_weights() | {key: torch.zeros(1) for key in text}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError) as refused:
        open_checkpoint(str(tmp_path), None, config, True)
    message = str(refused.value)
    assert "missing (0): none" in message and f"unknown ({len(unexpected)})" in message
    assert all(key in message for key in sorted(unexpected)[:8])
    assert f"and {len(unexpected) - 8} more" in message


# ------------------------------------------------------------------------------ refusals of embed


def _embed_call(vector: Vector, **changes: Any) -> tuple[Listener, EncoderCacheBlocks, Any]:
    """The recorded call on a listening tower; the third value is the error or None."""
    args = vector.args
    settings = {
        "vision_attention_block_size": args["vision_attention_block_size"],
        "num_vision_tokens_buckets": args["num_vision_tokens_buckets"],
        "dp_size": args["dp_size"],
        **changes,
    }
    model, cache = _model_and_cache(
        {
            "config": args["config"],
            "vision_neuron_config": settings,
            "encoder_cache": {
                "num_blocks": args["cache_num_blocks"],
                "block_size": args["cache_block_size"],
                "fat_dim": args["fat_dim"],
            },
        }
    )
    call: dict[str, Any] = {"mm_hashes": args["mm_hashes"]}
    if args["grid_thw"] is not None:
        grid = torch.tensor(args["grid_thw"])
        pixels = torch.zeros(int(grid.prod(1).sum()), 96)
        for name in args["keywords"]:
            call[name] = grid if name.endswith("grid_thw") else pixels
    error = None
    try:
        _embed(model, cache, call)
    except Exception as raised:  # its type is asserted by the tests
        error = raised
    return model.visual, cache, error


def _assert_untouched(tower: Listener, cache: EncoderCacheBlocks, vector: Vector) -> None:
    assert tower.inputs is None, "the tower was called"
    assert cache.num_free_blocks == vector.args["cache_num_blocks"] - 1
    assert all(cache.get_block_ids(key) is None for key in vector.args["mm_hashes"])


@cases("test_exactly_one_modality")
def test_exactly_one_modality(vector: Vector) -> None:
    tower, cache, error = _embed_call(vector)
    assert isinstance(error, VisionInputError) and isinstance(error, ValueError)
    assert "exactly one" in str(error)
    _assert_untouched(tower, cache, vector)


@cases("test_embed_refuses_a_large_image")
def test_embed_refuses_a_large_image(vector: Vector) -> None:
    tower, cache, error = _embed_call(vector)
    assert isinstance(error, VisionInputError) and isinstance(error, ValueError)
    said = {int(number) for number in re.findall(r"\d+", str(error))}
    assert set(vector.raises["numbers"]) | {128} <= said, "both numbers, and the legal block size"
    _assert_untouched(tower, cache, vector)


@cases("test_an_image_of_two_frames_is_sized_by_its_frame")
def test_an_image_of_two_frames_is_sized_by_its_frame(vector: Vector) -> None:
    assert vector.raises["numbers"] == [32, 48]
    tower, cache, error = _embed_call(vector)
    assert "need 2 encoder-cache blocks" in str(error) and "read 1" in str(error)
    _assert_untouched(tower, cache, vector)
    tower, cache, error = _embed_call(vector, num_vision_tokens_buckets=[64])
    assert error is None and cache.get_tokens_per_block("h0") == [8, 4]
    assert tower.inputs["bound_max"][:, 0, 0].tolist() == [24, 24], "one frame per block"


@cases("test_embed_allocates_the_recorded_blocks")
def test_embed_allocates_the_recorded_blocks(vector: Vector) -> None:
    tower, cache, error = _embed_call(vector)
    assert error is None
    outputs, keys = vector.outputs, vector.args["mm_hashes"]
    assert {key: cache.get_block_ids(key) for key in keys} == outputs["block_ids"]
    assert {key: cache.get_tokens_per_block(key) for key in keys} == outputs["tokens_per_block"]
    assert cache.num_free_blocks == outputs["num_free_blocks"]
    assert list(tower.inputs["pixel_values"].shape) == outputs["pixel_values_shape"]
    # Where the plugin writes whole blocks, rows go one by one; unused blocks go to scratch.
    scratch = cache.scratch_block_id
    block_of_row = tower.inputs["row_block_ids"]
    written = [
        sorted({scratch if block < 0 else block for block in rows})
        for rows in block_of_row.tolist()
    ]
    expected = [[block] for block in outputs["write_block_ids"]]
    if vector.case == "unused_blocks_to_scratch":
        expected[0] = [0, scratch]  # 4 of 8 rows are padding
    assert written == expected
    assert tower.inputs["write_block_ids"].tolist() == [scratch] * len(written)


REFUSALS = {
    "bucket_too_small_leaks": ["2 items need 2", "read 1", "at least 64"],
    "packing_fails_leaks": ["2 items need 2", "read 1", "at least 64"],
    "dp_rounding_hides_packing": ["2 items need 2", "read 1", "at least 64"],
    "cache_full": ["3 items need 3", "the cache has 2", "at least 4"],
}


@cases("test_embed_refuses_before_it_allocates")
def test_embed_refuses_before_it_allocates(vector: Vector, monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = vector.outputs
    allocated = [key for key, ids in outputs["block_ids"].items() if ids is not None]
    assert len(allocated) == 2, "the plugin leaves two items allocated"
    dp_size = vector.args["dp_size"]
    monkeypatch.setattr(Qwen3VLNeuronModel, "_vision_dp_size", lambda self: dp_size)
    tower, cache, error = _embed_call(vector)
    assert isinstance(error, VisionInputError)
    assert all(part in str(error) for part in REFUSALS[vector.case]), str(error)
    _assert_untouched(tower, cache, vector)


@cases("test_video_rows_fill_cache_blocks_densely")
def test_video_rows_fill_cache_blocks_densely(vector: Vector) -> None:
    outputs = vector.outputs
    assert outputs["tokens_per_block"] == {"h0": [4, 4, 4]}, "the plugin: a frame per cache block"
    tower, cache, error = _embed_call(vector)
    assert error is None
    assert cache.get_block_ids("h0") == [0, 1]
    assert cache.get_tokens_per_block("h0") == [6, 6]
    assert list(tower.inputs["pixel_values"].shape) == outputs["pixel_values_shape"]
    real = tower.inputs["row_block_ids"] >= 0
    rows = tower.inputs["row_block_ids"][real] * 6 + tower.inputs["row_offsets"][real]
    assert rows.tolist() == list(range(12)), "in order, without a gap"


@cases("test_a_repeated_key_is_encoded_once")
def test_a_repeated_key_is_encoded_once(vector: Vector) -> None:
    outputs = vector.outputs
    assert outputs["write_block_ids"] == [0, 0], "the plugin writes the block twice"
    tower, cache, error = _embed_call(vector)
    assert error is None
    assert cache.get_block_ids("same") == outputs["block_ids"]["same"]
    assert cache.get_tokens_per_block("same") == outputs["tokens_per_block"]["same"]
    assert cache.num_free_blocks == outputs["num_free_blocks"]
    assert (tower.inputs["row_block_ids"] == 0).sum() == 4
    assert (tower.inputs["row_block_ids"][1] == -1).all()


def test_the_top_level_class_finds_the_dp_size_of_its_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert Qwen3VLNeuronModel._vision_dp_size() == 1
    group = SimpleNamespace(world_size=4)
    monkeypatch.setattr(package_model, "get_neuron_vision_dp_group", lambda: group)
    assert Qwen3VLNeuronModel._vision_dp_size() == 4
