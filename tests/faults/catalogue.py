"""Wrong variants of the Qwen3-VL package, and for each the generated test that must notice it.

A fault replaces text that occurs exactly once in one generated file. If a template changes so that
the text is gone, the suite says so: a fault that cannot be seeded proves nothing.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """One wrong variant.

    Args:
        name: What is wrong, for the test's id.
        file: File of the package, below its module folder.
        old: Text that occurs exactly once.
        new: What stands there instead.
        caught_by: `file::test` of the generated tests that must fail; all its cases are run.
    """

    name: str
    file: str
    old: str
    new: str
    caught_by: str


MODEL = "model.py"
VISION = "vision_encoder.py"
LOADERS = "weight_loaders.py"
MAPPING = "weight_mapping.py"
PREPROCESSING = "utils/preprocessing.py"
PACKING = "utils/block_packing.py"
MERGE = "utils/merge_vision_embeds.py"
MROPE = "utils/mrope.py"

FAULTS = (
    Fault(
        "erf for tanh GELU in the tower's MLP",
        VISION,
        "hidden = gelu_tanh(linear(hidden, self.fc1_weight, self.fc1_bias))",
        "hidden = gelu(linear(hidden, self.fc1_weight, self.fc1_bias))",
        "test_vision.py::test_mlp",
    ),
    Fault(
        "tanh for erf GELU in the mergers",
        VISION,
        "hidden = gelu(linear(hidden, self.fc1_weight, self.fc1_bias))",
        "hidden = gelu_tanh(linear(hidden, self.fc1_weight, self.fc1_bias))",
        "test_vision.py::test_merger",
    ),
    Fault(
        "contiguous M-RoPE sections",
        MODEL,
        "is_height = (index % 3 == 1) & (index < 3 * height)\n"
        "        is_width = (index % 3 == 2) & (index < 3 * width)",
        "time = self.head_dim // 2 - height - width\n"
        "        is_height = (index >= time) & (index < time + height)\n"
        "        is_width = index >= time + height",
        "test_text.py::test_rotary_tables",
    ),
    Fault(
        "height and width of M-RoPE exchanged",
        MODEL,
        "is_height = (index % 3 == 1)",
        "is_height = (index % 3 == 0)",
        "test_text.py::test_rotary_tables",
    ),
    Fault(
        "adjacent pairs rotated instead of halves",
        MODEL,
        "first, second = x[..., :half], x[..., half:]",
        "first, second = x[..., 0::2], x[..., 1::2]",
        "test_text.py::test_attention_prefill",
    ),
    Fault(
        "frequencies cast with the module",
        MODEL,
        "if self.inv_freq.dtype != torch.float32:",
        "if self.inv_freq.is_meta:",
        "test_text.py::test_frequencies_stay_float32_when_the_model_is_cast",
    ),
    Fault(
        "deepstack levels swapped in the cache row",
        VISION,
        "rows = torch.cat([self.merger(hidden), *features], dim=-1)",
        "rows = torch.cat([self.merger(hidden), *features[::-1]], dim=-1)",
        "test_vision.py::test_tower_rows_of_several_images_in_shared_blocks",
    ),
    Fault(
        "deepstack merger of the wrong level",
        VISION,
        "level = self.deepstack_visual_indexes.index(index)",
        "level = len(features) - 1",
        "test_vision.py::test_tower_rows_of_a_video_of_several_frames",
    ),
    Fault(
        "deepstack shifted by one layer",
        MODEL,
        "if index < len(deepstack):\n                hidden = hidden + deepstack[index]",
        "if 0 < index <= len(deepstack):\n                hidden = hidden + deepstack[index - 1]",
        "test_text.py::test_deepstack_level_k_enters_after_layer_k",
    ),
    Fault(
        "deepstack levels swapped on their way into the text",
        MERGE,
        "rows[:, width * (level + 1) : width * (level + 2)]",
        "rows[:, width * (levels - level) : width * (levels - level + 1)]",
        "test_merge.py::test_rows_replace_placeholders_and_deepstack_is_zero_elsewhere",
    ),
    Fault(
        "naive column shard of the tower's fused QKV",
        LOADERS,
        "return torch.cat([slices[0][start : start + width, :].t() for start in starts], dim=1)",
        "first = rank % tp_size * 3 * width\n"
        "        return slices[0][first : first + 3 * width, :].t()",
        "test_parallel.py::test_vision_module",
    ),
    Fault(
        "position delta missing in decode",
        MROPE,
        "delta = int(positions.max()) + 1 - len(tokens) if len(tokens) else 0",
        "delta = 0",
        "test_end_to_end.py::test_greedy_tokens_through_the_paged_cache",
    ),
    Fault(
        "position after an image counted by its number of rows",
        MROPE,
        "position += max(rows, cols)",
        "position += rows * cols",
        "test_mrope.py::test_worked_example",
    ),
    Fault(
        "the tower's merger normalises after the join",
        VISION,
        "self.merger = Qwen3VLVisionPatchMerger(config, norm_after_merge=False)",
        "self.merger = Qwen3VLVisionPatchMerger(config, norm_after_merge=True)",
        "test_vision.py::test_merger",
    ),
    Fault(
        "bounds per video instead of per frame",
        PREPROCESSING,
        'inputs["bound_min"][block, offset:end] = offset\n'
        '        inputs["bound_max"][block, offset:end] = end',
        'inputs["bound_min"][block, offset:end] = 0\n'
        '        inputs["bound_max"][block, offset:end] = end',
        "test_preprocessing.py::test_bounds_are_per_frame",
    ),
    Fault(
        "position corners transposed",
        PREPROCESSING,
        "low_r * side + low_c, low_r * side + high_c, high_r * side + low_c",
        "low_r * side + low_c, high_r * side + low_c, low_r * side + high_c",
        "test_preprocessing.py::test_interpolation_equals_hugging_face",
    ),
    Fault(
        "corners not aligned",
        PREPROCESSING,
        "source = place.float() * (side - 1) / max(size - 1, 1)",
        "source = ((place.float() + 0.5) * side / size - 0.5).clamp(min=0)",
        "test_vision.py::test_position_embedding",
    ),
    Fault(
        "row and column swapped in the tower's rotary",
        PREPROCESSING,
        "[rows[:, None].float() * inv_freq, cols[:, None].float() * inv_freq]",
        "[cols[:, None].float() * inv_freq, rows[:, None].float() * inv_freq]",
        "test_preprocessing.py::test_rotary_tables_equal_hugging_face",
    ),
    Fault(
        "patches in raster order",
        PREPROCESSING,
        "order = grid.transpose(1, 2).flatten()",
        "order = grid.flatten()",
        "test_preprocessing.py::test_rotary_tables_equal_hugging_face",
    ),
    Fault(
        "tied head ignored",
        MAPPING,
        "if text.tie_word_embeddings:",
        "if False:",
        "test_weights.py::test_a_tied_head_is_the_embedding",
    ),
    Fault(
        "eps 1e-5 in the text norms",
        MODEL,
        "x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)",
        "x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)",
        "test_text.py::test_rms_norm",
    ),
    Fault(
        "decode norms with the default eps",
        MODEL,
        "rmsnorm_QK_pre_rope_eps=self.eps,",
        "rmsnorm_QK_pre_rope_eps=1e-6,",
        "test_text.py::test_decode_uses_the_checkpoints_eps",
    ),
    Fault(
        "weight applied before rounding in the text norms",
        MODEL,
        "return self.weight * x.to(hidden.dtype)",
        "return (self.weight.float() * x).to(hidden.dtype)",
        "test_text.py::test_rms_norm_rounds_before_the_weight",
    ),
    Fault(
        "KV replica index wrong",
        LOADERS,
        "num_kv_replicas=max(1, tp_size // kv_heads),",
        "num_kv_replicas=1,",
        "test_weights.py::test_fused_qkv_holds_each_ranks_own_heads",
    ),
    Fault(
        "bias added on every rank",
        VISION,
        "return group.all_reduce(x @ weight) + bias",
        "return group.all_reduce(x @ weight + bias)",
        "test_parallel.py::test_vision_module",
    ),
    Fault(
        "vision rows placed without the rank's offset",
        MERGE,
        "positions - rank * length",
        "positions",
        "test_merge.py::test_ranks_together_hold_the_whole_result",
    ),
    Fault(
        "vision rows added to the placeholder's embedding",
        MERGE,
        "merged = place_rows(hidden, target, rows[:, :width])",
        "merged = hidden + place_rows(torch.zeros_like(hidden), target, rows[:, :width])",
        "test_text.py::test_deepstack_level_k_enters_after_layer_k",
    ),
    Fault(
        "padding slot -1 not clamped",
        MODEL,
        'slots = metadata["slot_mapping"].clamp(min=0)[:, None]',
        'slots = metadata["slot_mapping"][:, None]',
        "test_text.py::test_padding_slots_leave_every_owned_block_alone",
    ),
    Fault(
        "gate and up projections exchanged",
        MODEL,
        "gate_w=self.gate_proj_weight,\n            up_w=self.up_proj_weight,",
        "gate_w=self.up_proj_weight,\n            up_w=self.gate_proj_weight,",
        "test_text.py::test_mlp",
    ),
    Fault(
        "keys rotated before their norm",
        MODEL,
        "key = rotate(self.k_layernorm(heads[n : n + k]), cos, sin)",
        "key = self.k_layernorm(rotate(heads[n : n + k], cos, sin))",
        "test_text.py::test_attention_prefill",
    ),
    Fault(
        "keys and values exchanged in the tower",
        VISION,
        "key = self._heads(qkv[..., self.width : 2 * self.width])\n"
        "        value = self._heads(qkv[..., 2 * self.width :])",
        "value = self._heads(qkv[..., self.width : 2 * self.width])\n"
        "        key = self._heads(qkv[..., 2 * self.width :])",
        "test_vision.py::test_attention_stays_within_each_frame",
    ),
    Fault(
        "padded tail of the vocabulary can be sampled",
        MODEL,
        'return logits.masked_fill(columns >= text.vocab_size, float("-inf"))',
        "return logits",
        "test_parallel.py::test_the_padded_tail_of_the_vocabulary_is_never_sampled",
    ),
    Fault(
        "position weights in the model's dtype",
        PREPROCESSING,
        '"pos_emb_weight": torch.zeros(4, n, s, dtype=torch.float32, device=device),',
        '"pos_emb_weight": torch.zeros(4, n, s, dtype=config.dtype, device=device),',
        "test_preprocessing.py::test_tables_are_float32_for_a_bfloat16_tower",
    ),
    Fault(
        "rows of an item beyond its first cache block in the wrong block",
        PREPROCESSING,
        "item_blocks[frame.item][rows // capacity]",
        "item_blocks[frame.item][rows * 0]",
        "test_preprocessing.py::test_rows_go_to_their_items_cache_blocks",
    ),
    Fault(
        "frames of one video packed as one piece",
        PACKING,
        "first_patch + frame * h * w, frame * rows_per_frame",
        "first_patch, frame * rows_per_frame",
        "test_vision.py::test_tower_rows_of_a_video_of_several_frames",
    ),
    Fault(
        "data-parallel ranks all encode the first blocks",
        VISION,
        "tensor.narrow(dim, self.dp_group.rank_in_group * count, count)",
        "tensor.narrow(dim, 0, count)",
        "test_parallel.py::test_whole_tower_under_tensor_and_data_parallelism",
    ),
    Fault(
        "the flat naming loads the tower's keys into nothing",
        MAPPING,
        '"flat": Layout(text="model.", vision="visual.", head="lm_head."),',
        '"flat": Layout(text="model.", vision="vision.", head="lm_head."),',
        "test_weights.py::test_the_flat_layout_loads_the_same_parameters",
    ),
)
