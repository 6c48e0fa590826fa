"""Each part of the text decoder against Hugging Face's, in float32 (bfloat16 where rounding is
the point).
"""

import pytest
import torch
from vllm_neuron_glm4v_moe import model as package

from .support import (
    TABLE_BLOCKS,
    bind_caches,
    metadata,
    random_positions,
    relative_error,
    tiny_config,
)

LIMIT = 1e-5
SEEDS = range(10)
CONFIG = tiny_config().get_text_config()
WIDTH, LAYERS = CONFIG.hidden_size, CONFIG.num_hidden_layers
FIRST = next(getattr(CONFIG, key) for key in ("first_k_dense_replace",))  # layer with experts


@pytest.fixture(scope="module")
def text(model):
    return model.language_model


@pytest.fixture(scope="module")
def hf_text(reference):
    return reference.model.language_model


def prefill(model, ids, positions, blocks=None, vision_positions=None):
    places = torch.arange(len(ids))
    return model.language_model(
        ids.int(),
        places,
        positions,
        metadata(model, places, True),
        torch.tensor(0),
        blocks,
        vision_positions,
    )


def batched(positions):
    """Positions with the batch that Hugging Face's modules want."""
    return positions[..., None, :]


@pytest.mark.parametrize("scale", [1.0, 1e-3, 30.0])
def test_rms_norm(text, hf_text, rng, scale):
    hidden = torch.randn(7, WIDTH, generator=rng) * scale
    assert relative_error(text.norm(hidden), hf_text.norm(hidden)) <= LIMIT


def test_rms_norm_rounds_before_the_weight(hf_text, rng):
    theirs = hf_text.norm.__class__(WIDTH, eps=1e-6).to(torch.bfloat16)
    theirs.weight.copy_(1 + torch.randn(WIDTH, generator=rng) * 0.3)
    ours = package.Glm4vMoeTextRMSNorm(WIDTH, 1e-6, torch.bfloat16)
    ours.weight.copy_(theirs.weight)
    hidden = torch.randn(64, WIDTH, generator=rng).to(torch.bfloat16)
    assert torch.equal(ours(hidden), theirs(hidden))


@pytest.mark.parametrize("seed", SEEDS)
def test_rotary_tables(text, hf_text, seed):
    positions = random_positions(torch.Generator().manual_seed(seed), 50) * (1 + 100 * seed)
    for ours, theirs, unrotated in zip(
        text.rotary_emb(positions),
        hf_text.rotary_emb(torch.zeros(1), batched(positions)),
        (1, 0),
        strict=True,
    ):
        pairs = theirs[0, :, : theirs.shape[-1] // 2]
        assert torch.equal(ours[:, : pairs.shape[1]], pairs)
        assert (ours[:, pairs.shape[1] :] == unrotated).all() and ours.shape[1] == text.layers[
            0
        ].self_attn.head_dim // 2


def test_text_rotation_is_one_dimensional_where_the_axes_agree(text):
    places = torch.arange(9)
    angles = places[:, None] * text.rotary_emb.inv_freq
    assert torch.equal(text.rotary_emb(places.expand(3, -1))[0], angles.cos())


def test_frequencies_stay_float32_when_the_model_is_cast(model):
    rotary = package.Glm4vMoeTextRotaryEmbedding(model.config.text_config)
    before = rotary.inv_freq.clone()
    rotary.to(torch.bfloat16)
    assert rotary.inv_freq.dtype == torch.float32 and torch.equal(rotary.inv_freq, before)


@pytest.mark.parametrize("seed", SEEDS)
def test_mlp(text, hf_text, seed):
    hidden = torch.randn(11, WIDTH, generator=torch.Generator().manual_seed(seed))
    index = seed % FIRST
    assert (
        relative_error(text.layers[index].mlp(hidden), hf_text.layers[index].mlp(hidden)) <= LIMIT
    )


def expert_layers(text, hf_text, seed):
    """A layer with experts, ours and theirs."""
    index = FIRST + seed % (LAYERS - FIRST)
    return text.layers[index], hf_text.layers[index]


@pytest.mark.parametrize("seed", SEEDS)
def test_router(text, hf_text, seed):
    hidden = torch.randn(40, WIDTH, generator=torch.Generator().manual_seed(seed))
    ours, theirs = expert_layers(text, hf_text, seed)
    logits, weights, chosen = theirs.get_submodule("mlp.gate")(hidden)
    expected = torch.zeros_like(logits).scatter(-1, chosen, weights)
    assert relative_error(ours.mlp.route(hidden), expected) <= LIMIT
    assert ours.mlp.router_weight.dtype == torch.float32


@pytest.mark.parametrize("seed", SEEDS)
def test_experts(text, hf_text, seed):
    hidden = torch.randn(11 + seed, WIDTH, generator=torch.Generator().manual_seed(seed))
    ours, theirs = expert_layers(text, hf_text, seed)
    assert relative_error(ours.mlp(hidden), theirs.mlp(hidden[None])[0]) <= LIMIT


def test_a_router_computes_in_float32(text, rng):
    """Rounded hidden states are routed as the same values in float32."""
    router = text.layers[-1].mlp
    hidden = torch.randn(200, WIDTH, generator=rng).to(torch.bfloat16)
    exact = router.route(hidden.float())
    assert relative_error(router.route(hidden), exact) <= LIMIT


def hf_attention(layer, hf_text, hidden, positions):
    tables = hf_text.rotary_emb(hidden, batched(positions))
    return layer.self_attn(hidden[None], position_embeddings=tables, attention_mask=None)[0][0]


@pytest.mark.parametrize("seed", SEEDS)
def test_attention_prefill(model, hf_text, seed):
    rng = torch.Generator().manual_seed(seed)
    tokens = 20 + 7 * seed
    hidden, positions = torch.randn(tokens, WIDTH, generator=rng), random_positions(rng, tokens)
    bind_caches(model)
    places = torch.arange(tokens)
    meta = metadata(model, places, True)["layers.1.self_attn"]
    ours = model.language_model.layers[1].self_attn(
        hidden, *model.language_model.rotary_emb(positions), places, meta
    )
    assert (
        relative_error(ours, hf_attention(hf_text.layers[1], hf_text, hidden, positions)) <= LIMIT
    )


def test_a_wide_projection_goes_around_the_kernel(model, hf_text, monkeypatch):
    monkeypatch.setattr(package, "QKV_KERNEL_MAX_WIDTH", 0)
    monkeypatch.setattr(package.NF, "qkv_proj", None)
    test_attention_prefill(model, hf_text, 0)


def in_steps(model, module, hidden, positions, steps=3):
    """A layer or its attention over all tokens but the last ones, then over these one by one; their
    results.
    """
    tables = model.language_model.rotary_emb(positions)
    places = torch.arange(len(hidden))
    start = len(hidden) - steps
    outputs = []
    for first, last in [(0, start), *((place, place + 1) for place in range(start, len(hidden)))]:
        meta = metadata(model, places[first:last], first == 0)["layers.0.self_attn"]
        outputs.append(
            module(
                hidden[first:last],
                *(table[first:last] for table in tables),
                places[first:last],
                meta,
            )
        )
    return torch.cat(outputs[1:])


@pytest.mark.parametrize("seed", SEEDS)
def test_attention_decode_reads_what_prefill_wrote(model, hf_text, seed):
    rng = torch.Generator().manual_seed(seed)
    tokens = 20 + 7 * seed
    hidden, positions = torch.randn(tokens, WIDTH, generator=rng), random_positions(rng, tokens)
    bind_caches(model)
    ours = in_steps(model, model.language_model.layers[0].self_attn, hidden, positions)
    expected = hf_attention(hf_text.layers[0], hf_text, hidden, positions)
    assert relative_error(ours, expected[-3:]) <= LIMIT


@pytest.mark.parametrize("slot", [0, -1])
def test_padding_slots_leave_every_owned_block_alone(model, rng, slot):
    tokens, padding = 10, 6
    caches = bind_caches(model)
    places = torch.arange(tokens)
    meta = metadata(model, places, True, padding, slot)["layers.0.self_attn"]
    hidden = torch.randn(tokens + padding, WIDTH, generator=rng)
    tables = model.language_model.rotary_emb(random_positions(rng, tokens + padding))
    model.language_model.layers[0].self_attn(hidden, *tables, torch.arange(tokens + padding), meta)
    key_cache = caches["layers.0.self_attn"][0]
    written = {int(block) for block in key_cache.abs().sum((1, 2, 3)).nonzero()}
    assert written == {0, TABLE_BLOCKS}
    assert not key_cache[TABLE_BLOCKS, :, tokens:].any()


@pytest.mark.parametrize("seed", SEEDS)
def test_decoder_layer(model, hf_text, seed):
    """Every layer over a whole prompt, and over its last tokens one by one."""
    rng = torch.Generator().manual_seed(seed)
    tokens = 15 + seed
    hidden, positions = torch.randn(tokens, WIDTH, generator=rng), random_positions(rng, tokens)
    bind_caches(model)
    places, layer = torch.arange(tokens), seed % LAYERS
    meta = metadata(model, places, True)[f"layers.{layer}.self_attn"]
    ours = model.language_model.layers[layer]
    whole = ours(hidden, *model.language_model.rotary_emb(positions), places, meta)
    tables = hf_text.rotary_emb(hidden, batched(positions))
    theirs = hf_text.layers[layer](hidden[None], position_embeddings=tables, attention_mask=None)[0]
    assert relative_error(whole, theirs) <= LIMIT
    assert relative_error(in_steps(model, ours, hidden, positions), theirs[-3:]) <= LIMIT


@pytest.mark.parametrize("seed", SEEDS)
def test_whole_text_tower(model, hf_text, seed):
    rng = torch.Generator().manual_seed(seed)
    tokens = 30 + seed
    ids, positions = torch.randint(0, 256, (tokens,), generator=rng), random_positions(rng, tokens)
    bind_caches(model)
    theirs = hf_text(input_ids=ids[None], position_ids=batched(positions)).last_hidden_state[0]
    assert relative_error(prefill(model, ids, positions), theirs) <= LIMIT


def test_vision_rows_stand_in_for_placeholders(model, hf_text, rng):
    tokens, capacity = 24, 8
    ids, positions = torch.randint(0, 256, (tokens,), generator=rng), random_positions(rng, tokens)
    seen = torch.tensor([3, 4, 5, 6, 7, 15, 16])
    rows = torch.randn(len(seen), model.config.vision_config.fat_width, generator=rng)
    bind_caches(model)
    block = torch.cat([rows, torch.full((1, rows.shape[1]), 7.0)])
    places = torch.cat([seen, torch.tensor([tokens])]).view(1, capacity)
    ours = prefill(model, ids, positions, (block,), places)

    embeds = hf_text.embed_tokens(ids)
    embeds[seen] = rows[:, :WIDTH]
    theirs = hf_text(
        inputs_embeds=embeds[None],
        position_ids=batched(positions),
    ).last_hidden_state[0]
    assert relative_error(ours, theirs) <= LIMIT


def test_cache_names_must_be_exactly_the_layers(model):
    caches = bind_caches(model)
    caches["layers.9.self_attn"] = caches.pop("layers.0.self_attn")
    with pytest.raises(
        KeyError, match=r"missing \['layers.0.self_attn'\], unknown \['layers.9.self_attn'\]"
    ):
        model.bind_kv_cache(caches)


def test_positions_of_three_axes_are_mandatory(model):
    with pytest.raises(TypeError, match="rotary_position_ids"):
        model(input_ids=torch.zeros(4, dtype=torch.int32), positions=torch.arange(4))
