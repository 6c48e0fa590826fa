"""A tiny InternVL3.5 with random weights: Hugging Face's, and as it is loaded here.

Every weight is moved off its usual start value, so that a forgotten bias, norm or table shows.
"""

import torch
import transformers
from vllm_neuron.model.neuron_config import NeuronConfig, VisionNeuronConfig
from vllm_neuron_internvl3_5.factory import InternVLForConditionalGeneration

BLOCK_SIZE = 128  # patches of a vision attention block
KV_BLOCK, TABLE_BLOCKS = 32, 8  # tokens of a KV block, blocks of the one request
TINY = {
    "text_config": {
        "model_type": "qwen3",
        "vocab_size": 324,
        "hidden_size": 160,
        "intermediate_size": 224,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-06,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "eos_token_id": 258,
        "pad_token_id": 256,
        "bos_token_id": 256,
        "head_dim": 48,
    },
    "vision_config": {
        "hidden_size": 64,
        "intermediate_size": 112,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "image_size": [84, 84],
        "patch_size": [14, 14],
        "attention_bias": True,
        "use_qk_norm": False,
        "norm_type": "layer_norm",
        "layer_norm_eps": 1e-06,
        "hidden_act": "gelu",
        "layer_scale_init_value": 0.5,
    },
    "image_token_id": 261,
    "image_seq_length": 9,
    "downsample_ratio": 0.5,
    "tie_word_embeddings": False,
}


def tiny_config(
    text: dict | None = None, vision: dict | None = None, **top
) -> transformers.PretrainedConfig:
    """The tiny configuration, with changes to either tower or the top level."""
    settings = {**TINY, **top}
    settings["text_config"] = {**TINY["text_config"], **(text or {})}
    settings["vision_config"] = {**TINY["vision_config"], **(vision or {})}
    config = transformers.InternVLConfig(**settings)
    config.architectures = ["InternVLForConditionalGeneration"]
    return config


def build_reference(config: transformers.PretrainedConfig, seed: int = 0) -> torch.nn.Module:
    """Hugging Face's model with weights drawn so that every part of it matters."""
    torch.manual_seed(seed)
    model = transformers.InternVLForConditionalGeneration(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape)
            if parameter.dim() == 1:
                parameter.add_(noise * 0.1)
            elif parameter.dim() == 3:  # class token and positions
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
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
        model = InternVLForConditionalGeneration.from_configs(
            hf_config=config, **{**neuron_configs(), **neuron}
        )
    model.load_weights(checkpoint, torch.device("cpu"), None)
    return model


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference, by the largest value of the reference."""
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    return float((actual.float() - expected.float()).abs().max() / expected.float().abs().max())


ITEMS = [1, 3, 2, 1, 3]  # tiles of each image


def num_rows(config, item: int) -> int:
    """Merged rows of an item."""
    return item * config.position_grid_side**2 // config.merge_area


def vision_pixels(config, items: list[int], seed: int = 0) -> torch.Tensor:
    """Noise for pixels, as the Hugging Face processor shapes them."""
    side = config.position_grid_side * config.patch_size
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sum(items), config.in_channels, side, side, generator=generator)


def hf_rows(reference, config, items: list, pixels: torch.Tensor) -> list[torch.Tensor]:
    """Rows of each item as the encoder cache holds them, from Hugging Face's model."""
    rows = reference.model.get_image_features(pixels, return_dict=True).pooler_output.flatten(0, 1)
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
    """Places from anywhere in a sequence."""
    return torch.arange(tokens) + torch.randint(0, 40, (1,), generator=rng)


class Slice:
    """A lazily opened checkpoint tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    def __getitem__(self, index):
        return self.tensor[index]
