"""Engine settings for a checkpoint: what vLLM and the plugin must be told to serve it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlmgen.errors import CheckpointError

if TYPE_CHECKING:
    from vlmgen.spec import Spec

DEFAULT_MODEL_LEN = 4096
DEFAULT_NUM_SEQS = 8
BLOCK_PATCHES = 2048  # the plugin's default attention block
BLOCK_STEP = 128
BLOCKS_PER_PROMPT = 4
SMALLEST_TOKEN_BUCKET = 128
CACHE_BYTES = 256 * 2**20  # what the encoder cache may take beyond its minimum


@dataclass(frozen=True)
class ServeSettings:
    """What `vllm serve` is given beside the user's own options.

    Args:
        max_model_len: Longest sequence, and longest prefill.
        max_num_seqs: Largest decode batch.
        additional_config: The plugin's part.
        mm_processor_kwargs: Limits of the processor; empty leaves the checkpoint's.
    """

    max_model_len: int
    max_num_seqs: int
    additional_config: dict[str, Any]
    mm_processor_kwargs: dict[str, Any]


def settings_for(
    factory: Any,
    checkpoint: Path,
    *,
    max_model_len: int | None = None,
    max_num_seqs: int | None = None,
    additional_config: Mapping[str, Any] | None = None,
    spec: Spec | None = None,
) -> ServeSettings:
    """Work out buckets and block sizes.

    The attention block takes the largest picture that the checkpoint's processor makes; where that
    is above the plugin's default block, the processor is told to make pictures no larger. One
    prompt may hold four such blocks of pictures and frames.

    Args:
        factory: The package's factory class.
        checkpoint: Folder with the checkpoint.
        max_model_len: None takes what the model has, at most 4096.
        max_num_seqs: None is 8.
        additional_config: The user's settings, which win key by key.
        spec: The package's spec; needed where it takes tiles.

    Raises:
        CheckpointError: A file of the checkpoint is missing or is no JSON.
    """
    from transformers import AutoConfig

    raw = read_json(checkpoint / "config.json")
    hf_config = AutoConfig.from_pretrained(checkpoint)
    text = hf_config.get_text_config()
    longest = getattr(text, "max_position_embeddings", DEFAULT_MODEL_LEN)
    model_len = max_model_len or min(longest, DEFAULT_MODEL_LEN)
    num_seqs = max_num_seqs or DEFAULT_NUM_SEQS
    area = factory.get_vision_token_merge_factor(hf_config)
    given = dict(additional_config or {})
    own_vision = dict(given.pop("vision_neuron_config", None) or {})
    own_text = dict(given.pop("neuron_config", None) or {})

    tile = _tile_places(spec, hf_config, area)
    if tile is None:
        block, limits, most = *_block_size(factory, hf_config, checkpoint), BLOCKS_PER_PROMPT
    else:
        block, limits = -(-tile // BLOCK_STEP) * BLOCK_STEP, {}
        most = max(BLOCKS_PER_PROMPT, _largest_tiles(checkpoint))
    block = own_vision.get("vision_attention_block_size", block)
    vision: dict[str, Any] = {"vision_attention_block_size": block}
    if not own_vision.get("max_vision_seq_len"):
        blocks = max(1, min(most, model_len * area // block))
        vision["num_vision_tokens_buckets"] = [block * count for count in doublings(1, blocks)]
    row_bytes = _row_bytes(raw, text.hidden_size)
    minimum = -(-model_len // (block // area)) + 1
    vision["encoder_cache_num_blocks"] = max(
        minimum, most + 1, min(4 * minimum, CACHE_BYTES // (row_bytes * block // area))
    )
    config = {
        "neuron_config": {
            "num_batched_tokens_buckets": doublings(SMALLEST_TOKEN_BUCKET, model_len),
            "num_seqs_buckets": doublings(1, num_seqs),
            # vLLM's sampler on the host knows every parameter of the OpenAI API.
            "on_device_sampling_config": None,
            "enable_structured_outputs": True,
            **own_text,
        },
        "vision_neuron_config": {**vision, **own_vision},
        **given,
    }
    return ServeSettings(model_len, num_seqs, config, limits)


def doublings(first: int, last: int) -> list[int]:
    """`(128, 1000) -> [128, 256, 512, 1000]`."""
    sizes, size = [], first
    while size < last:
        sizes.append(size)
        size *= 2
    return [*sizes, last]


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file of a checkpoint.

    Raises:
        CheckpointError: It is missing or broken.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: is no JSON: {error}") from None


def _block_size(factory: Any, hf_config: Any, checkpoint: Path) -> tuple[int, dict[str, Any]]:
    """Patches of the attention block, and limits for the processor."""
    pixels = _largest_picture(checkpoint)
    patches = None if pixels is None else factory.get_max_pixels_token_count(hf_config, pixels)
    if patches is not None and patches <= BLOCK_PATCHES:
        return -(-patches // BLOCK_STEP) * BLOCK_STEP, {}
    patch = hf_config.vision_config.patch_size
    pixels = BLOCK_PATCHES * patch * patch
    while factory.get_max_pixels_token_count(hf_config, pixels) > BLOCK_PATCHES:
        pixels = pixels * 3 // 4
    return BLOCK_PATCHES, {"max_pixels": pixels}


def _largest_picture(checkpoint: Path) -> int | None:
    """Pixels of the largest picture that the checkpoint's processor makes."""
    for config in _image_processors(checkpoint):
        pixels = (config.get("size") or {}).get("longest_edge") or config.get("max_pixels")
        if pixels:
            return int(pixels)
    return None


def _tile_places(spec: Spec | None, hf_config: Any, area: int) -> int | None:
    """Places that one tile and its class token take in a block; None where pictures are grids."""
    if spec is None or spec.vision.input != "tiles":
        return None
    vision = hf_config.vision_config
    size, patch = (_side(getattr(vision, name)) for name in ("image_size", "patch_size"))
    return int((size // patch) ** 2 + (area if spec.vision.class_token else 0))


def _side(size: Any) -> int:
    """A side that may be stated as height and width."""
    return int(size if isinstance(size, int) else size[0])


def _largest_tiles(checkpoint: Path) -> int:
    """Tiles of the largest picture that the checkpoint's processor makes, with the thumbnail."""
    for config in _image_processors(checkpoint):
        if config.get("max_patches"):
            return int(config["max_patches"]) + 1
    return BLOCKS_PER_PROMPT


def _image_processors(checkpoint: Path) -> Iterator[dict[str, Any]]:
    """The image processor's settings, from the files that may hold them."""
    for name in ("preprocessor_config.json", "processor_config.json"):
        path = checkpoint / name
        if path.is_file():
            config = read_json(path)
            yield config.get("image_processor", config)


def _row_bytes(raw: Mapping[str, Any], text_width: int) -> int:
    """Bytes of one row of the encoder cache, in the widest dtype."""
    vision = raw.get("vision_config") or {}
    return 4 * text_width * (1 + len(vision.get("deepstack_visual_indexes") or ()))
