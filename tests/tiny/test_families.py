"""Every tiny checkpoint: loads without a key too many or too few, runs, and all of it matters."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from vlmgen.tiny.build import build_tiny, quiet_transformers
from vlmgen.tiny.family import family_names, load_family
from vlmgen.validate.pictures import moving_view, picture

NEW_TOKENS = 4
Folder = Callable[..., Path]

# The library reads these two layouts only with a renaming of the caller, or wrong.
NOT_READ = {("qwen3_vl", "flat"), ("qwen3_vl_tied", "flat"), ("qwen3_vl_moe_square", "nested")}
READ = [
    (name, layout)
    for name in family_names()
    for layout in load_family(name)["layouts"]
    if (name, layout) not in NOT_READ
]
PROMPTS: dict[str, list[Any]] = {
    "text": ["The capital of France is"],
    "picture": [picture("coffee", 128, 192), "What is in the picture?"],
    "two pictures": [picture("rocket", 192, 96), "one", picture("chelsea", 32, 32), "two?"],
    "video": [moving_view("flower", 6, 64, 96), "What moves?"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """Builds a tiny checkpoint, the same one only once."""
    built: dict[tuple, Path] = {}

    def build(family: str, **options: Any) -> Path:
        key = (family, *sorted(options.items()))
        if key not in built:
            built[key] = build_tiny(family, tmp_path_factory.mktemp("tiny") / family, **options)
        return built[key]

    return build


def load(folder: Path, family: str) -> Any:
    """The reference model; transformers must find exactly the tensors it wants."""
    import transformers

    model_class = getattr(transformers, load_family(family)["model_class"])
    with quiet_transformers():
        model, info = model_class.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True
        )
    assert not {key: names for key, names in info.items() if names}
    return model.eval()


def inputs(folder: Path, parts: list[Any]) -> dict[str, torch.Tensor]:
    """A prompt through the chat template and the processor; a part is a text or pixels."""
    from transformers import AutoProcessor
    from transformers.video_utils import VideoMetadata

    processor = AutoProcessor.from_pretrained(folder)
    content: list[dict[str, str]] = []
    images, videos = [], []
    for part in parts:
        if isinstance(part, str):
            content.append({"type": "text", "text": part})
        else:
            content.append({"type": "image" if part.ndim == 3 else "video"})
            (images if part.ndim == 3 else videos).append(part)
    text = processor.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    media: dict[str, Any] = {"images": images} if images else {}
    if videos:
        metadata = [
            VideoMetadata(
                total_num_frames=len(video),
                fps=2.0,
                frames_indices=list(range(len(video))),
                height=video.shape[1],
                width=video.shape[2],
                duration=len(video) / 2.0,
            )
            for video in videos
        ]
        media |= {"videos": videos, "video_metadata": metadata, "do_sample_frames": False}
    batch = processor(text=[text], return_tensors="pt", **media)
    # One processor answers with the seconds of each frame as a list.
    return {k: v if torch.is_tensor(v) else torch.tensor(v) for k, v in batch.items()}


def logits(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        return model(**batch).logits[0]


def has_video(family: str) -> bool:
    return "video_slot" in load_family(family)["chat"]


@pytest.mark.parametrize("family", family_names())
def test_prompts_run(folder: Folder, family: str) -> None:
    """Text, a picture, two pictures, a video: a forward pass, then four greedy tokens."""
    options = {"as_saved": True} if (family, "nested") in NOT_READ else {}
    checkpoint = folder(family, **options)
    model = load(checkpoint, family)
    vocabulary = load_family(family)["config_kwargs"]["text_config"]["vocab_size"]
    for name, parts in PROMPTS.items():
        if name == "video" and not has_video(family):
            continue
        batch = inputs(checkpoint, parts)
        length = batch["input_ids"].shape[1]
        assert length < 400, name
        result = logits(model, batch)
        assert result.shape == (length, vocabulary) and bool(torch.isfinite(result).all()), name
        tokens = model.generate(
            **batch, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False
        )
        assert tokens.shape == (1, length + NEW_TOKENS), name


@pytest.mark.parametrize(("family", "layout"), READ)
def test_a_published_layout_is_read_as_the_saved_one(
    folder: Folder, family: str, layout: str
) -> None:
    """No missing and no unexpected key, and the very same numbers."""
    saved = load(folder(family, as_saved=True), family).state_dict()
    published = load(folder(family, layout=layout), family).state_dict()
    assert saved.keys() == published.keys()
    for name, tensor in saved.items():
        assert torch.equal(published[name], tensor), name


def test_a_square_expert_matrix_is_read_wrong(folder: Folder) -> None:
    """Why the layout is declared: transformers turns by shape, and this shape does not tell."""
    family = "qwen3_vl_moe_square"
    saved = load(folder(family, as_saved=True), family)
    published = load(folder(family), family)
    differing = {
        re.sub(r"\.\d+\.", ".#.", name)
        for name, tensor in saved.state_dict().items()
        if not torch.equal(tensor, published.state_dict()[name])
    }
    assert differing == {"model.language_model.layers.#.mlp.experts.gate_up_proj"}
    first = "model.language_model.layers.0.mlp.experts.gate_up_proj"
    wrong, right = published.state_dict()[first], saved.state_dict()[first]
    assert torch.equal(wrong.transpose(1, 2), right) and right.shape == (8, 128, 128)


@pytest.mark.parametrize("family", family_names())
def test_every_tensor_matters(folder: Folder, family: str) -> None:
    """A tensor forgotten or left at its start value moves the logits of a prompt with a picture."""
    options = {"as_saved": True} if (family, "nested") in NOT_READ else {}
    checkpoint = folder(family, **options)
    model = load(checkpoint, family)
    batch = inputs(checkpoint, PROMPTS["two pictures"])
    right = logits(model, batch)
    kinds: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        kinds.setdefault(re.sub(r"\.\d+\.", ".#.", name), tensor)
    unmoved = {}
    for kind, tensor in kinds.items():
        kept = tensor.clone()
        tensor.fill_(1.0 if kind.endswith("norm.weight") else 0.0)
        moved = float((logits(model, batch) - right).abs().max())
        tensor.copy_(kept)
        if moved < 0.01:
            unmoved[kind] = moved
    # Without rotation a key bias adds the same to all scores of a query: softmax undoes it.
    plain = load_family(family)["config_class"] == "InternVLConfig"
    key_bias = "model.vision_tower.encoder.layer.#.attention.k_proj.bias"
    assert set(unmoved) == ({key_bias} & set(kinds) if plain else set()), unmoved
    assert torch.equal(logits(model, batch), right)


@pytest.mark.parametrize("family", family_names())
def test_pixels_move_the_last_logits(folder: Folder, family: str) -> None:
    options = {"as_saved": True} if (family, "nested") in NOT_READ else {}
    checkpoint = folder(family, **options)
    model = load(checkpoint, family)
    one, other = (
        logits(model, inputs(checkpoint, [picture(name, 128, 192), "What is it?"]))[-1]
        for name in ("coffee", "astronaut")
    )
    assert float((one - other).abs().max()) > 0.1


@pytest.mark.parametrize("family", family_names())
def test_sizes_for_runs_on_ranks(folder: Folder, family: str) -> None:
    """8 query and 2 key/value heads, an odd vocabulary, vision widths that four ranks can share."""
    checkpoint = folder(family, **{"parallel": True})
    config = load(checkpoint, family).config
    text, vision = config.get_text_config(), config.vision_config
    assert (text.num_attention_heads, text.num_key_value_heads) == (8, 2)
    assert text.vocab_size % 2 == 1
    assert text.intermediate_size % 4 == 0 and getattr(text, "moe_intermediate_size", 4) % 4 == 0
    assert vision.num_attention_heads == 4 and getattr(vision, "intermediate_size", 4) % 4 == 0


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "paddleocr_vl"])
def test_the_published_config_is_flat(folder: Folder, family: str) -> None:
    config = json.loads((folder(family) / "config.json").read_text())
    nested = json.loads((folder(family, layout="nested") / "config.json").read_text())
    assert "text_config" not in config and "rope_parameters" not in config
    assert config["hidden_size"] == nested["text_config"]["hidden_size"]
    rope = nested["text_config"]["rope_parameters"]
    assert config["rope_theta"] == rope["rope_theta"]
    assert config["rope_scaling"]["mrope_section"] == rope["mrope_section"]
    assert config["model_type"] == nested["model_type"] == family


def test_a_correction_bias_stays_float32(folder: Folder) -> None:
    tensors = load_file(folder("glm4v_moe", dtype="bfloat16") / "model.safetensors")
    biases = {name for name, tensor in tensors.items() if tensor.dtype == torch.float32}
    assert biases == {
        f"model.language_model.layers.{n}.mlp.gate.e_score_correction_bias" for n in (1, 2)
    }


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
@pytest.mark.parametrize(("frames", "height", "width"), [(6, 64, 96), (9, 96, 128)])
def test_clips_on_which_both_rules_of_position_agree(
    folder: Folder, family: str, frames: int, height: int, width: int
) -> None:
    """After a clip: largest position + 1, or start + max(h, w) of the merged grid."""
    checkpoint = folder(family)
    batch = inputs(checkpoint, [moving_view("flower", frames, height, width), "?"])
    spatial = ("input_ids", "mm_token_type_ids", "video_grid_thw", "second_per_grid_ts")
    with torch.no_grad():
        positions, _ = load(checkpoint, family).model.get_rope_index(
            **{key: value for key, value in batch.items() if key in spatial}
        )
    video = load_family(family)["config_kwargs"]["video_token_id"]
    (places,) = torch.nonzero(batch["input_ids"][0] == video, as_tuple=True)
    first, last = int(places[0]), int(places[-1])
    ((_, h, w),) = batch["video_grid_thw"].tolist()
    after = positions[:, 0, last + 1].tolist()
    assert after == [int(positions[:, 0, first].max()) + max(h, w) // 2] * 3
    assert after == [int(positions[:, 0, first : last + 1].max()) + 1] * 3


def test_a_video_through_the_image_token(folder: Folder) -> None:
    """GLM puts the frames of a video under the image token."""
    checkpoint = folder("glm4v")
    ids = inputs(checkpoint, PROMPTS["video"])["input_ids"][0].tolist()
    config = load_family("glm4v")["config_kwargs"]
    assert config["video_token_id"] not in ids
    assert ids.count(config["image_start_token_id"]) == 3  # a frame pair each


def test_tiles_of_a_picture(folder: Folder) -> None:
    """InternVL cuts a landscape in tiles and adds a thumbnail; a small square is one tile."""
    checkpoint = folder("internvl")
    landscape = inputs(checkpoint, [picture("coffee", 128, 192), "?"])
    square = inputs(checkpoint, [picture("coffee", 64, 64), "?"])
    assert landscape["pixel_values"].shape[1:] == square["pixel_values"].shape[1:] == (3, 84, 84)
    assert len(landscape["pixel_values"]) > 2 and len(square["pixel_values"]) == 1
    context = load_family("internvl")["config_kwargs"]["image_token_id"]
    count = landscape["input_ids"][0].tolist().count(context)
    assert count == 9 * len(landscape["pixel_values"])


def test_expert_width_never_meets_the_hidden_size() -> None:
    """But for the one description that is there for it."""
    for family in family_names():
        text = load_family(family)["config_kwargs"]["text_config"]
        width = text.get("moe_intermediate_size")
        square = width is not None and text["hidden_size"] in (width, 2 * width)
        assert square == (family == "qwen3_vl_moe_square"), family
        assert np.gcd(text["vocab_size"], 2) == 2
