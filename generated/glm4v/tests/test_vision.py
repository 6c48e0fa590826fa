"""Each part of the vision tower against Hugging Face's, in float32."""

from types import SimpleNamespace

import pytest
import torch
from vllm_neuron.vllm.worker.encoder_cache_blocks import EncoderCacheBlocks
from vllm_neuron_glm4v.utils.block_packing import VisionInputError
from vllm_neuron_glm4v.utils.preprocessing import position_taps

from .support import BLOCK_SIZE, ITEMS, hf_rows, num_rows, relative_error, vision_pixels

LIMIT = 1e-5
SEEDS = range(10)
BLOCKS = range(3)


@pytest.fixture(scope="module")
def tower(model):
    return model.visual


@pytest.fixture(scope="module")
def vision(model):
    return model.config.vision_config


@pytest.fixture(scope="module")
def hf_tower(reference):
    return reference.model.visual


@pytest.fixture(scope="module")
def hf_blocks(hf_tower):
    return hf_tower.blocks


@pytest.fixture
def hidden(rng, vision):
    """Two frames of 24 places in one block."""
    return torch.randn(48, vision.hidden_size, generator=rng)


def units(vision):
    """Rotary tables and bounds of the two, `[1, 48, ...]`."""
    angles = torch.rand(1, 48, vision.head_dim // 2, generator=torch.Generator().manual_seed(3)) * 6
    cos, sin = (torch.cat([table, table], dim=-1) for table in (angles.cos(), angles.sin()))
    low = torch.tensor([0] * 24 + [24] * 24, dtype=torch.int32).view(1, 48, 1)
    return cos, sin, low, low + 24


def hf_attend(module, hidden, cos, sin, *_):
    """A block or its attention in Hugging Face's calling convention, `[48, H]`."""
    output = module(
        hidden, cu_seqlens=torch.tensor([0, 24, 48]), position_embeddings=(cos[0], sin[0])
    )
    return (output[0] if isinstance(output, tuple) else output).view_as(hidden)


def windows_first(raster, h, w):
    """`[h * w, ...]` row by row -> merge windows one after the other."""
    cut = raster.reshape(h // 2, 2, w // 2, 2, -1)
    return cut.transpose(1, 2).reshape(raster.shape)


@pytest.mark.parametrize("seed", SEEDS)
def test_patch_embedding(tower, vision, hf_tower, seed):
    pixels = torch.randn(12, vision.patch_dim, generator=torch.Generator().manual_seed(seed))
    convolution = hf_tower.get_submodule("patch_embed.proj")
    expected = convolution(pixels.view(12, vision.in_channels, *convolution.kernel_size)).flatten(1)
    assert relative_error(tower.patch_embed(pixels[None])[0], expected) <= LIMIT


@pytest.mark.parametrize(
    ("h", "w"),
    [(2, 2), (4, 6), (6, 4), (14, 10), (2, 20), (32, 30), (6, 2), (8, 8), (64, 2), (20, 2)],
)
def test_position_embedding(vision, tower, hf_tower, h, w):
    """Against torch's own sampling of the learned table, brought into merge-window order."""
    side = vision.position_grid_side
    table = hf_tower.embeddings.position_embedding.weight.view(1, side, side, -1).permute(
        0, 3, 1, 2
    )
    rows, cols = (
        2 * (torch.arange(size) + 0.5) / size - 1 for size in (h, w)
    )  # centres in -1 .. 1
    centres = torch.stack(torch.meshgrid(rows, cols, indexing="ij")[::-1], dim=-1)[None]
    sampled = torch.nn.functional.grid_sample(
        table, centres, mode="bicubic", align_corners=False, padding_mode="border"
    )
    expected = windows_first(sampled[0].permute(1, 2, 0).reshape(h * w, -1), h, w)
    index, weight = position_taps(h, w, side, 2)
    assert relative_error(tower.pos_embed(index[:, None], weight[:, None])[0], expected) <= LIMIT


@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("blocks.0.norm1", "model.visual.blocks.0.norm1"),
        ("blocks.0.norm2", "model.visual.blocks.0.norm2"),
        ("embed_norm", "model.visual.post_conv_layernorm"),
        ("final_norm", "model.visual.post_layernorm"),
        ("merger.norm", "model.visual.merger.post_projection_norm"),
    ],
)
def test_norm(tower, reference, rng, scale, ours, theirs):
    """The smallest input shows a wrong epsilon."""
    norm = tower.get_submodule(ours)
    hidden = torch.randn(20, len(norm.weight), generator=rng) * scale
    assert relative_error(norm(hidden), reference.get_submodule(theirs)(hidden)) <= LIMIT


@pytest.mark.parametrize("block", BLOCKS)
def test_attention_stays_within_each_frame(vision, tower, hf_blocks, hidden, block):
    inputs = units(vision)
    ours = tower.blocks[block].attn(hidden[None], *inputs)[0]
    assert relative_error(ours, hf_attend(hf_blocks[block].attn, hidden, *inputs)) <= LIMIT


@pytest.mark.parametrize("scale", [0.1, 1.0, 4.0])
def test_mlp(tower, hf_blocks, hidden, scale):
    ours = tower.blocks[0].mlp(hidden[None] * scale)[0]
    assert relative_error(ours, hf_blocks[0].mlp(hidden * scale)) <= LIMIT


@pytest.mark.parametrize("block", BLOCKS)
def test_block(vision, tower, hf_blocks, hidden, block):
    inputs = units(vision)
    ours = tower.blocks[block](hidden[None], *inputs)[0]
    assert relative_error(ours, hf_attend(hf_blocks[block], hidden, *inputs)) <= LIMIT


def hf_merge(reference, hf_tower, hidden):
    """Hugging Face's merger over one frame whose patches stand merge window by merge window."""
    windows = hidden.view(-1, 2, 2, hidden.shape[-1]).permute(0, 3, 1, 2)
    return hf_tower.merger(hf_tower.downsample(windows).flatten(1))


@pytest.mark.parametrize("scale", [1e-3, 1.0])
def test_merger(tower, vision, reference, hf_tower, rng, scale):
    hidden = torch.randn(36, vision.hidden_size, generator=rng) * scale
    assert (
        relative_error(tower.merger(hidden[None])[0], hf_merge(reference, hf_tower, hidden))
        <= LIMIT
    )


def cache_of(vision, num_blocks=12):
    return EncoderCacheBlocks(
        num_blocks,
        BLOCK_SIZE // vision.merge_area,
        vision.fat_width,
        dtype=torch.float32,
        device="cpu",
        min_hold_time_ms=0,
    )


def arguments(items, pixels, modality="image"):
    names = {
        "image": ("pixel_values", "image_grid_thw"),
        "video": ("pixel_values_videos", "video_grid_thw"),
    }
    return dict(zip(names[modality], (pixels, torch.tensor(items)), strict=True))


def encode(model, items, pixels, keys=None, modality="image", noise=None):
    """Rows of every item, `[rows, W]`, as the cache holds them."""
    cache = cache_of(model.config.vision_config)
    if noise is not None:
        cache.buffer.copy_(
            noise * torch.randn(cache.buffer.shape, generator=torch.Generator().manual_seed(5))
        )
    keys = keys or [f"item{i}" for i in range(len(items))]
    model.embed_multimodal(
        encoder_cache=cache, mm_hashes=keys, **arguments(items, pixels, modality), timestamps=[0.0]
    )
    return [cache.get(key).clone() for key in keys], cache


@pytest.mark.parametrize("seed", SEEDS)
def test_tower_rows_of_several_images_in_shared_blocks(model, vision, reference, seed):
    items = (ITEMS[seed % 5 :] + ITEMS[: seed % 5])[: 1 + seed % 4]
    pixels = vision_pixels(vision, items, seed)
    ours, _ = encode(model, items, pixels)
    for mine, theirs in zip(ours, hf_rows(reference, vision, items, pixels), strict=True):
        assert relative_error(mine, theirs) <= LIMIT


def test_tower_rows_of_a_video_of_several_frames(model, vision, reference):
    items = [[4, 8, 10]]
    pixels = vision_pixels(vision, items)
    ours, cache = encode(model, items, pixels, modality="video")
    rows = num_rows(vision, items[0])
    assert cache.get_tokens_per_block("item0") == [32] * (rows // 32) + [rows % 32]
    assert relative_error(ours[0], hf_rows(reference, vision, items, pixels)[0]) <= LIMIT


def test_rows_do_not_depend_on_neighbours_or_on_cache_contents(model, vision):
    one, pixels = vision_pixels(vision, ITEMS[:1]), vision_pixels(vision, ITEMS[1:3], seed=1)
    together, _ = encode(model, ITEMS[:3], torch.cat([one, pixels]), noise=100.0)
    alone, _ = encode(model, ITEMS[1:3], pixels)
    assert relative_error(together[1], alone[0]) <= LIMIT


def test_only_the_items_own_blocks_and_scratch_are_written(model, vision):
    _, cache = encode(model, ITEMS[:2], vision_pixels(vision, ITEMS[:2]))
    owned = {block for key in ("item0", "item1") for block in cache.get_block_ids(key)}
    written = {int(block) for block in cache.buffer.abs().sum((1, 2)).nonzero()}
    assert owned <= written <= owned | {cache.scratch_block_id}


def test_a_repeated_key_takes_one_block(model, vision):
    items = [ITEMS[0], ITEMS[0]]
    _, cache = encode(model, items, vision_pixels(vision, items), keys=["same", "same"])
    assert cache.num_free_blocks == 12 - 1 - 1


@pytest.mark.parametrize(
    ("items", "words"),
    [
        ([[1, 12, 12]], "144 patches does not fit"),
        ([[1, 2, 2]] * 5, "5 items need 5"),
        ([[5, 8, 16]], "can read 4"),
    ],
)
def test_what_does_not_fit_takes_no_cache_block(model, vision, items, words):
    cache = cache_of(vision, num_blocks=9)
    keys = [str(i) for i in range(len(items))]
    with pytest.raises(VisionInputError, match=words):
        model.embed_multimodal(
            **arguments(items, vision_pixels(vision, items)), encoder_cache=cache, mm_hashes=keys
        )
    assert cache.num_free_blocks == 8


def test_both_modalities_or_none_in_one_call_are_refused(model):
    with pytest.raises(VisionInputError, match="exactly one"):
        model.embed_multimodal(encoder_cache=SimpleNamespace(), mm_hashes=[])


def test_warmup_inputs_have_the_shapes_of_real_ones(model, vision, monkeypatch):
    seen = {}
    monkeypatch.setattr(model.visual, "forward", lambda **inputs: seen.update(inputs))
    encode(model, ITEMS[:1], vision_pixels(vision, ITEMS[:1]))
    warmup = model.build_vision_synthetic_inputs(BLOCK_SIZE, model.vision_neuron_config, "cpu")
    real = {name: (value.shape, value.dtype) for name, value in seen.items()}
    assert set(real) - set(warmup) == {"encoder_cache_buffer", "write_block_ids"}
    assert {name: (value.shape, value.dtype) for name, value in warmup.items()} == {
        n: real[n] for n in warmup
    }
