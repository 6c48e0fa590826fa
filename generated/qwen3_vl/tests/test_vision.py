"""Each part of the vision tower against Hugging Face's, in float32."""

from types import SimpleNamespace

import pytest
import torch
from vllm_neuron.vllm.worker.encoder_cache_blocks import EncoderCacheBlocks
from vllm_neuron_qwen3_vl.utils.block_packing import VisionInputError
from vllm_neuron_qwen3_vl.utils.preprocessing import position_taps, rotary_tables

from .support import BLOCK_SIZE, relative_error

LIMIT = 1e-5
SEEDS = range(10)
GRIDS = [[1, 4, 6], [1, 8, 8], [1, 2, 2], [1, 10, 4], [1, 6, 12]]


@pytest.fixture(scope="module")
def tower(model):
    return model.visual


@pytest.fixture(scope="module")
def hf_tower(reference):
    return reference.model.visual


@pytest.fixture
def hidden(rng, tower):
    """Two frames, of 4 x 6 and 6 x 4 patches, in one block."""
    return torch.randn(48, 64, generator=rng)


def frames(config):
    """Rotary tables and bounds of two frames that share a block, `[1, 48, ...]`."""
    tables = [
        rotary_tables(h, w, config.head_dim, 2, config.rope_theta) for h, w in ((4, 6), (6, 4))
    ]
    cos, sin = (torch.cat(parts)[None] for parts in zip(*tables, strict=True))
    low = torch.tensor([0] * 24 + [24] * 24, dtype=torch.int32).view(1, 48, 1)
    return cos, sin, low, low + 24


def hf_frames(cos, sin):
    return {"cu_seqlens": torch.tensor([0, 24, 48]), "position_embeddings": (cos[0], sin[0])}


@pytest.mark.parametrize("seed", SEEDS)
def test_patch_embedding(tower, hf_tower, seed):
    pixels = torch.randn(12, 1536, generator=torch.Generator().manual_seed(seed))
    assert relative_error(tower.patch_embed(pixels[None])[0], hf_tower.patch_embed(pixels)) <= LIMIT


@pytest.mark.parametrize(
    ("h", "w"),
    [(2, 2), (4, 6), (6, 4), (14, 10), (2, 20), (32, 30), (3 * 2, 2), (8, 8), (64, 2), (20, 2)],
)
def test_position_embedding(model, tower, hf_tower, h, w):
    """Against torch's own resize of the learned table, brought into merge-window order."""
    side = model.config.vision_config.position_grid_side
    table = hf_tower.pos_embed.weight.view(1, side, side, -1).permute(0, 3, 1, 2)
    resized = torch.nn.functional.interpolate(
        table, size=(h, w), mode="bilinear", align_corners=True
    )
    windows = (
        resized[0]
        .permute(1, 2, 0)
        .view(h // 2, 2, w // 2, 2, -1)
        .transpose(1, 2)
        .reshape(h * w, -1)
    )
    index, weight = position_taps(h, w, side, 2)
    ours = tower.pos_embed(index[:, None], weight[:, None])[0]
    assert relative_error(ours, windows) <= LIMIT


@pytest.mark.parametrize("block", range(4))
def test_attention_stays_within_each_frame(model, tower, hf_tower, hidden, block):
    cos, sin, low, high = frames(model.config.vision_config)
    ours = tower.blocks[block].attn(hidden[None], cos, sin, low, high)[0]
    assert relative_error(ours, hf_tower.blocks[block].attn(hidden, **hf_frames(cos, sin))) <= LIMIT


@pytest.mark.parametrize("scale", [0.1, 1.0, 4.0])
def test_mlp(tower, hf_tower, hidden, scale):
    ours = tower.blocks[0].mlp(hidden[None] * scale)[0]
    assert relative_error(ours, hf_tower.blocks[0].mlp(hidden * scale)) <= LIMIT


@pytest.mark.parametrize("block", range(4))
def test_block(model, tower, hf_tower, hidden, block):
    cos, sin, low, high = frames(model.config.vision_config)
    ours = tower.blocks[block](hidden[None], cos, sin, low, high)[0]
    assert relative_error(ours, hf_tower.blocks[block](hidden, **hf_frames(cos, sin))) <= LIMIT


def test_merger(tower, hf_tower, hidden):
    assert relative_error(tower.merger(hidden[None])[0], hf_tower.merger(hidden)) <= LIMIT


@pytest.mark.parametrize("level", range(3))
def test_deepstack_merger(tower, hf_tower, hidden, level):
    ours = tower.deepstack_merger_list[level](hidden[None])[0]
    assert relative_error(ours, hf_tower.deepstack_merger_list[level](hidden)) <= LIMIT


def encode(model, grids, pixels, keys=None, modality="image", num_blocks=12, noise=None):
    """Rows of every item, `[rows, W]`, as the cache holds them."""
    vision = model.config.vision_config
    cache = EncoderCacheBlocks(
        num_blocks,
        BLOCK_SIZE // vision.merge_area,
        vision.fat_width,
        dtype=torch.float32,
        device="cpu",
        min_hold_time_ms=0,
    )
    if noise is not None:
        cache.buffer.copy_(
            noise * torch.randn(cache.buffer.shape, generator=torch.Generator().manual_seed(5))
        )
    keys = keys or [f"item{i}" for i in range(len(grids))]
    names = {
        "image": ("pixel_values", "image_grid_thw"),
        "video": ("pixel_values_videos", "video_grid_thw"),
    }
    arguments = dict(zip(names[modality], (pixels, torch.tensor(grids)), strict=True))
    model.embed_multimodal(encoder_cache=cache, mm_hashes=keys, **arguments, timestamps=[0.0])
    return [cache.get(key).clone() for key in keys], cache


def hf_rows(hf_tower, grids, pixels):
    output = hf_tower(pixels, grid_thw=torch.tensor(grids), return_dict=True)
    rows = torch.cat([output.pooler_output, *output.deepstack_features], dim=-1)
    return rows.split([t * h * w // 4 for t, h, w in grids])


def pixels_of(grids, seed=0):
    patches = sum(t * h * w for t, h, w in grids)
    return torch.randn(patches, 1536, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("seed", SEEDS)
def test_tower_rows_of_several_images_in_shared_blocks(model, hf_tower, seed):
    grids = (GRIDS[seed % 5 :] + GRIDS[: seed % 5])[: 1 + seed % 4]
    pixels = pixels_of(grids, seed)
    ours, _ = encode(model, grids, pixels)
    for mine, theirs in zip(ours, hf_rows(hf_tower, grids, pixels), strict=True):
        assert relative_error(mine, theirs) <= LIMIT


def test_tower_rows_of_a_video_of_several_frames(model, hf_tower):
    grids = [[4, 8, 10]]
    pixels = pixels_of(grids)
    ours, cache = encode(model, grids, pixels, modality="video")
    assert cache.get_tokens_per_block("item0") == [32, 32, 16]
    assert relative_error(ours[0], hf_rows(hf_tower, grids, pixels)[0]) <= LIMIT


def test_rows_do_not_depend_on_neighbours_or_on_cache_contents(model):
    pixels = pixels_of(GRIDS[:3])
    together, _ = encode(model, GRIDS[:3], pixels, noise=100.0)
    alone, _ = encode(model, GRIDS[1:2], pixels[24:88])
    assert relative_error(together[1], alone[0]) <= LIMIT


def test_only_the_items_own_blocks_and_scratch_are_written(model):
    _, cache = encode(model, GRIDS[:2], pixels_of(GRIDS[:2]))
    owned = {block for key in ("item0", "item1") for block in cache.get_block_ids(key)}
    written = {int(block) for block in cache.buffer.abs().sum((1, 2)).nonzero()}
    assert owned <= written <= owned | {cache.scratch_block_id}


def test_a_repeated_key_takes_one_block(model):
    grids = [[1, 4, 4], [1, 4, 4]]
    _, cache = encode(model, grids, pixels_of(grids), keys=["same", "same"])
    assert cache.num_free_blocks == 12 - 1 - 1


@pytest.mark.parametrize(
    ("grids", "words"),
    [
        ([[1, 12, 12]], "144 patches does not fit"),
        ([[1, 2, 2]] * 5, "5 items need 5"),
        ([[5, 8, 16]], "can read 4"),
    ],
)
def test_what_does_not_fit_takes_no_cache_block(model, grids, words):
    vision = model.config.vision_config
    cache = EncoderCacheBlocks(
        9,
        BLOCK_SIZE // vision.merge_area,
        vision.fat_width,
        dtype=torch.float32,
        device="cpu",
        min_hold_time_ms=0,
    )
    with pytest.raises(VisionInputError, match=words):
        model.embed_multimodal(
            pixel_values=pixels_of(grids),
            image_grid_thw=torch.tensor(grids),
            encoder_cache=cache,
            mm_hashes=[str(i) for i in range(len(grids))],
        )
    assert cache.num_free_blocks == 8


def test_both_modalities_or_none_in_one_call_are_refused(model):
    with pytest.raises(VisionInputError, match="exactly one"):
        model.embed_multimodal(encoder_cache=SimpleNamespace(), mm_hashes=[])


def test_warmup_inputs_have_the_shapes_of_real_ones(model, monkeypatch):
    seen = {}
    monkeypatch.setattr(model.visual, "forward", lambda **inputs: seen.update(inputs))
    encode(model, GRIDS[:1], pixels_of(GRIDS[:1]))
    warmup = model.build_vision_synthetic_inputs(BLOCK_SIZE, model.vision_neuron_config, "cpu")
    real = {name: (value.shape, value.dtype) for name, value in seen.items()}
    assert set(real) - set(warmup) == {"encoder_cache_buffer", "write_block_ids"}
    assert {name: (value.shape, value.dtype) for name, value in warmup.items()} == {
        n: real[n] for n in warmup
    }
