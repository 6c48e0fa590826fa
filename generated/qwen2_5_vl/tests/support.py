"""A tiny Qwen2.5-VL with random weights: Hugging Face's, and as it is loaded here.

Every weight is moved off its usual start value, so that a forgotten bias, norm or table shows.
"""

import torch
import transformers
from vllm_neuron.model.neuron_config import NeuronConfig, VisionNeuronConfig
from vllm_neuron_qwen2_5_vl.factory import Qwen2_5_VLForConditionalGeneration

BLOCK_SIZE = 128  # patches of a vision attention block
KV_BLOCK, TABLE_BLOCKS = 32, 8  # tokens of a KV block, blocks of the one request
TINY = {
    "text_config": {
        "vocab_size": 324,
        "hidden_size": 160,
        "intermediate_size": 224,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-06,
        "use_sliding_window": False,
        "rope_parameters": {
            "rope_type": "default",
            "mrope_section": [4, 8, 8],
            "rope_theta": 1000000.0,
        },
        "eos_token_id": 258,
        "pad_token_id": 256,
        "bos_token_id": 256,
    },
    "vision_config": {
        "depth": 4,
        "hidden_size": 64,
        "num_heads": 4,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "intermediate_size": 88,
        "out_hidden_size": 160,
        "window_size": 56,
        "fullatt_block_indexes": [1, 3],
        "tokens_per_second": 2,
    },
    "tie_word_embeddings": False,
    "image_token_id": 262,
    "video_token_id": 263,
    "vision_start_token_id": 259,
    "vision_end_token_id": 260,
}


def tiny_config(
    text: dict | None = None, vision: dict | None = None, **top
) -> transformers.PretrainedConfig:
    """The tiny configuration, with changes to either tower or the top level."""
    settings = {**TINY, **top}
    settings["text_config"] = {**TINY["text_config"], **(text or {})}
    settings["vision_config"] = {**TINY["vision_config"], **(vision or {})}
    config = transformers.Qwen2_5_VLConfig(**settings)
    config.architectures = ["Qwen2_5_VLForConditionalGeneration"]
    return config


def build_reference(config: transformers.PretrainedConfig, seed: int = 0) -> torch.nn.Module:
    """Hugging Face's model with weights drawn so that every part of it matters."""
    torch.manual_seed(seed)
    model = transformers.Qwen2_5_VLForConditionalGeneration(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape)
            if parameter.dim() == 1:
                parameter.add_(noise * 0.1)
            else:
                parameter.copy_(noise * parameter[0].numel() ** -0.5)
    return model


def save_checkpoint(model: torch.nn.Module, folder, **save) -> None:
    """Write a model as its published checkpoints are."""
    model.save_pretrained(folder, **save)


def neuron_configs(ranks: int = 1) -> dict:
    """Settings of both towers for small pictures."""
    vision = VisionNeuronConfig(
        num_vision_tokens_buckets=[BLOCK_SIZE, 4 * BLOCK_SIZE],
        vision_attention_block_size=BLOCK_SIZE,
        tp_size=ranks,
    )
    return {
        "text_neuron_config": NeuronConfig(on_device_sampling_config=None),
        "vision_neuron_config": vision,
    }


def build_package(
    config: transformers.PretrainedConfig, checkpoint: str, **neuron
) -> torch.nn.Module:
    """This package's model, built on the meta device and loaded, as the runner does it."""
    with torch.device("meta"):
        model = Qwen2_5_VLForConditionalGeneration.from_configs(
            hf_config=config, **{**neuron_configs(), **neuron}
        )
    model.load_weights(checkpoint, torch.device("cpu"), None)
    return model


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference, by the largest value of the reference."""
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    return float((actual.float() - expected.float()).abs().max() / expected.float().abs().max())


ITEMS = [[1, 4, 6], [1, 8, 8], [1, 2, 2], [1, 10, 4], [1, 6, 12]]  # grids, t h w in patches


def num_rows(config, item: list[int]) -> int:
    """Merged rows of an item."""
    t, h, w = item
    return t * h * w // config.merge_area


def vision_pixels(config, items: list[list[int]], seed: int = 0) -> torch.Tensor:
    """Noise for pixels, as the Hugging Face processor shapes them."""
    patches = sum(t * h * w for t, h, w in items)
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(patches, config.patch_dim, generator=generator)


def hf_rows(reference, config, items: list, pixels: torch.Tensor) -> list[torch.Tensor]:
    """Rows of each item as the encoder cache holds them, from Hugging Face's model."""
    frames = torch.tensor([[1, h, w] for t, h, w in items for _ in range(t)])
    output = reference.model.get_image_features(pixels, frames, return_dict=True)
    rows = torch.cat(list(output.pooler_output))
    return list(rows.split([num_rows(config, item) for item in items]))


def bind_caches(model, dtype=torch.float32):
    caches = {
        layer.name: [
            torch.zeros(
                TABLE_BLOCKS + 2, layer.num_kv_heads, KV_BLOCK, layer.head_size, dtype=dtype
            )
            for _ in "kv"
        ]
        for layer in model.get_kv_spec().layers
    }
    model.bind_kv_cache(caches)
    return caches


def metadata(model, places: torch.Tensor, prefill: bool, padding: int = 0, padding_slot: int = 0):
    """Attention metadata of one request whose tokens lie in blocks 8, 7, 6, ..., out of order."""
    blocks = torch.arange(TABLE_BLOCKS, 0, -1)
    slots = blocks[places // KV_BLOCK] * KV_BLOCK + places % KV_BLOCK
    shared = {
        "block_table_tensor": blocks[None].to(torch.int32),
        "slot_mapping": torch.cat([slots, torch.full((padding,), padding_slot)]),
        "max_query_len": len(places) + padding if prefill else 1,
        "decode_token_threshold": 1,
        "block_size": KV_BLOCK,
        "max_blocks_per_seq": TABLE_BLOCKS,
    }
    return {layer.name: shared for layer in model.get_kv_spec().layers}


def random_positions(rng, tokens: int) -> torch.Tensor:
    """Three axes that differ, as after an image."""
    return torch.arange(tokens) + torch.randint(0, 40, (3, tokens), generator=rng)


class Slice:
    """A lazily opened checkpoint tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    def __getitem__(self, index):
        return self.tensor[index]
