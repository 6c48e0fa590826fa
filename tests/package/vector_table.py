"""What the generated Qwen3-VL package does with every golden vector of the plugin's model code.

A rule names cases of one topic, what becomes of them, and the test that shows it:

    reproduced   the package's function gives the recorded values at the recorded tolerance
    adapted      the same values through another signature (rows leave the tower by block and
                 offset, the convolution kernel is stored flat, weights of positions stay float32)
    different    the package deliberately does something else; the test asserts both values

The tests take their cases from here: a case in a rule is run, and a case in no rule fails
`test_every_vector_is_accounted_for`.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import NamedTuple

import pytest

from tests.vectors.reader import Vector, vectors


class Rule(NamedTuple):
    """Cases of a topic (shell patterns), their treatment, their test, and why."""

    topic: str
    cases: str
    treatment: str
    test: str
    why: str = ""

    def matches(self, vector: Vector) -> bool:
        """Whether this rule speaks of the vector."""
        patterns = self.cases.split()
        return vector.topic == self.topic and any(
            fnmatchcase(vector.case, pattern) for pattern in patterns
        )


RULES = (
    # ------------------------------------------------------------------------------- packing
    Rule(
        "packing",
        "ffd_exact ffd_ties_keep_input_order ffd_one_block ffd_empty_blocks ffd_no_images "
        "ffd_group_ids_ignored ffd_zero_tokens",
        "reproduced",
        "test_first_fit_decreasing_fills_the_same_blocks",
        "the plugin has this mode but never uses it",
    ),
    Rule(
        "packing",
        "ffd_worse_than_optimal ffd_too_many",
        "adapted",
        "test_too_many_blocks_are_refused_when_the_bucket_is_chosen",
        "the packer opens as many blocks as it needs; the bucket says how many there are",
    ),
    Rule(
        "packing",
        "ffd_too_large one_item_too_large",
        "adapted",
        "test_a_frame_above_the_block_is_refused_before_packing",
    ),
    Rule(
        "packing",
        "one_item_basic one_item_exact_count one_item_too_few_blocks one_item_tutorial_fault "
        "one_item_none one_item_zero_tokens groups_*",
        "different",
        "test_frames_share_blocks_where_the_plugin_opens_new_ones",
        "design D4: vision blocks are packed first-fit decreasing, whatever item a frame is of",
    ),
    Rule(
        "packing",
        "scatter_two_blocks scatter_index_order scatter_empty_block scatter_bf16_3d "
        "scatter_int32_1d",
        "adapted",
        "test_pixels_are_laid_out_in_the_recorded_blocks",
    ),
    Rule(
        "packing",
        "scatter_overfull",
        "adapted",
        "test_an_overfull_block_fails_and_the_packer_never_makes_one",
    ),
    Rule(
        "packing",
        "bounds_*",
        "adapted",
        "test_bounds_of_real_patches_and_of_padding",
        "padding sees [0, 1) instead of the empty range [0, 0)",
    ),
    Rule(
        "packing",
        "unpack_*",
        "adapted",
        "test_row_destinations_are_the_inverse_of_the_unpack_indices",
    ),
    Rule("packing", "pack_scatter_bounds", "adapted", "test_picture_and_video_packed_together"),
    # ------------------------------------------------------------------------- preprocessing
    Rule(
        "preprocessing",
        "rope_g* rope_mix* rope_theta rope_frames_as_rows_d8",
        "reproduced",
        "test_rotary_tables",
    ),
    Rule(
        "preprocessing",
        "rope_d6",
        "different",
        "test_a_head_width_that_is_no_multiple_of_4_is_refused",
        "the plugin returns tables wider than the head",
    ),
    Rule(
        "preprocessing",
        "pos_g1x[246]*_f32 pos_g1x3x5*_f32 pos_g1x1x1*_f32 pos_g3*_f32 pos_mix*_f32",
        "reproduced",
        "test_position_weights_in_float32",
    ),
    Rule(
        "preprocessing",
        "pos_g1x32x32_n48_f32",
        "different",
        "test_position_weights_follow_hugging_face_to_the_last_bit",
        "design D5: Hugging Face's closed form; the plugin's linspace rounds otherwise",
    ),
    Rule(
        "preprocessing",
        "pos_g1x2x2_n48 pos_g1x4x6_n48 pos_g1x6x10_n48 pos_g3x4x6_n48 pos_g1x32x32_n48 "
        "pos_mix3_n48 pos_mix_tall_wide_n48 pos_frames_as_rows_n48 pos_g1x4x6_n5 "
        "pos_g1x4x4_n4_identity pos_g1x6x6_merge3_n5 pos_g1x3x5_merge1_n4 pos_g1x1x1_merge1",
        "adapted",
        "test_position_corners_and_rounded_weights",
        "design D5: weights stay float32, as in Hugging Face",
    ),
    Rule("preprocessing", "flat_bounds_*", "adapted", "test_bounds_of_frames_back_to_back"),
    # --------------------------------------------------------------------------------- merge
    Rule("merge", "local_*", "reproduced", "test_token_indices_become_rows_of_the_rank"),
    Rule(
        "merge", "dummy_row dummy_row_cast", "reproduced", "test_rows_without_a_place_are_dropped"
    ),
    Rule("merge", "dummy_row_beyond", "reproduced", "test_only_one_sentinel_is_legal"),
    Rule(
        "merge",
        "merge_ds* merge_all_sentinel merge_noise_in_padding merge_f32_hidden_bf16_blocks "
        "merge_two_items_out_of_order merge_local_rows_only",
        "reproduced",
        "test_vision_rows_replace_placeholders",
        "levels are a list; without deepstack it is empty instead of None",
    ),
    Rule(
        "merge",
        "merge_fat_* merge_no_blocks",
        "reproduced",
        "test_blocks_that_do_not_fit_the_hidden_width_fail",
    ),
    # ---------------------------------------------------------------------------- text_mrope
    Rule(
        "text_mrope",
        "s24_20_20_* s12_10_10_* s6_5_5_* decode_batch_bf16 section_11_11_10_f32",
        "reproduced",
        "test_text_rotary_tables",
    ),
    Rule(
        "text_mrope",
        "default_section_f32",
        "reproduced",
        "test_text_rotary_sections_have_a_default",
    ),
    Rule(
        "text_mrope",
        "section_short_f32",
        "different",
        "test_sections_that_leave_frequencies_over_are_refused",
        "the plugin leaves the surplus on time in silence",
    ),
    Rule(
        "text_mrope",
        "one_dim_f32 two_rows_are_batch_f32 three_dims_f32",
        "different",
        "test_only_three_rows_of_positions_are_taken",
        "the runner hands over [3, T]; another shape is a fault (reported fault O3)",
    ),
    Rule("text_mrope", "interleave_6_5_5", "adapted", "test_each_frequency_has_one_axis"),
    # ------------------------------------------------------------------------------ text_ops
    Rule("text_ops", "apply_rotary_*", "reproduced", "test_text_rotation"),
    Rule("text_ops", "rmsnorm_f32_eps*", "reproduced", "test_text_norm_in_float32"),
    Rule(
        "text_ops",
        "rmsnorm_bf16_eps* rmsnorm_f32_weight_bf16_input",
        "different",
        "test_text_norm_in_bf16_casts_before_the_weight",
        "design D5: Hugging Face's cast order",
    ),
    # ------------------------------------------------------------------------------ kv_write
    Rule(
        "kv_write",
        "table_kv1",
        "different",
        "test_one_kv_head_keeps_the_plain_table",
        "the kernel takes the 2-D table and caches without a head axis",
    ),
    Rule("kv_write", "table_kv2 table_kv4", "reproduced", "test_block_table_per_kv_head"),
    Rule(
        "kv_write",
        "table_3d",
        "different",
        "test_block_table_of_another_rank_is_not_checked_here",
        "the runner's table is 2-D, always",
    ),
    Rule(
        "kv_write",
        "scatter_kv* decode_single_head*",
        "reproduced",
        "test_decode_writes_new_keys_and_values",
    ),
    Rule("kv_write", "scatter_wrong_length", "adapted", "test_one_slot_per_new_token"),
    Rule("kv_write", "prefill_kv*", "reproduced", "test_prefill_writes_keys_and_values"),
    Rule(
        "kv_write",
        "prefill_dtype_mismatch",
        "different",
        "test_prefill_casts_to_the_cache_dtype",
        "the plugin casts in decode only",
    ),
    Rule("kv_write", "decode_tables_s1", "adapted", "test_decode_tables_lie_as_the_kernel_reads"),
    # --------------------------------------------------------------------------------- tower
    Rule(
        "tower",
        "two_images_ds?_f32 one_image_ds3_f32 two_frames_ds?_f32 three_frames_ds1_f32 "
        "image_and_unused_block_ds1_f32 block_128_ds3_f32 image_two_time_steps_ds1_f32 "
        "one_image_ds_unsorted_f32",
        "adapted",
        "test_tower_in_float32",
        "equal with the plugin's erf GELU seeded; with tanh GELU off by the noted step",
    ),
    Rule(
        "tower",
        "two_images_ds?_bf16 two_frames_ds?_bf16 three_frames_ds1_bf16",
        "adapted",
        "test_tower_in_bf16",
        "equal with the plugin's bf16 rotation and position sum seeded as well; without them as "
        "close to the float32 tower as the plugin is",
    ),
    Rule(
        "tower",
        "embed_two_images_* embed_one_image_ds3_f32 embed_two_frames_* embed_three_frames_* "
        "embed_block_128_ds3_f32",
        "adapted",
        "test_embed_hands_the_recorded_inputs_to_the_tower",
        "frames share blocks, rows carry their destination",
    ),
    Rule(
        "tower",
        "embed_image_two_time_steps_ds1_f32 embed_one_image_ds_unsorted_f32",
        "adapted",
        "test_embed_hands_the_recorded_inputs_to_the_tower",
    ),
    Rule(
        "tower_errors",
        "buffer_dtype_mismatch",
        "different",
        "test_rows_are_cast_to_the_dtype_of_the_cache",
        "the runner's cache is bf16 whatever the tower's dtype",
    ),
    Rule(
        "tower_errors", "buffer_width_mismatch", "reproduced", "test_a_cache_of_another_width_fails"
    ),
    Rule(
        "tower_errors",
        "buffer_rows_mismatch",
        "different",
        "test_larger_cache_blocks_take_the_rows_by_offset",
        "design D4: rows go to (block, offset), so a cache block may hold more rows",
    ),
    Rule(
        "tower_errors",
        "write_ids_too_many write_ids_too_few",
        "reproduced",
        "test_one_scratch_id_per_vision_block",
    ),
    Rule(
        "tower_errors",
        "write_ids_broadcast",
        "different",
        "test_two_write_ids_for_one_block_are_refused",
        "the plugin writes one block twice in silence",
    ),
    Rule("tower_load", "tp*", "adapted", "test_tower_shards"),
    Rule(
        "tower_load",
        "depth2_ds0",
        "different",
        "test_a_checkpoint_with_more_layers_is_refused",
        "design D6: unknown keys are an error",
    ),
    # ---------------------------------------------------------------------------- embed_errors
    Rule("embed_errors", "neither both", "reproduced", "test_exactly_one_modality"),
    Rule("embed_errors", "image_too_large", "reproduced", "test_embed_refuses_a_large_image"),
    Rule(
        "embed_errors",
        "image_t2_too_large",
        "different",
        "test_an_image_of_two_frames_is_sized_by_its_frame",
        "only patches of one frame attend to each other",
    ),
    Rule(
        "embed_errors",
        "frame_fits_video_long unused_blocks_to_scratch",
        "reproduced",
        "test_embed_allocates_the_recorded_blocks",
    ),
    Rule(
        "embed_errors",
        "bucket_too_small_leaks packing_fails_leaks dp_rounding_hides_packing cache_full",
        "different",
        "test_embed_refuses_before_it_allocates",
        "design D4: every refusal comes before the first allocation",
    ),
    Rule(
        "embed_errors",
        "video_sized_by_blocks",
        "different",
        "test_video_rows_fill_cache_blocks_densely",
        "design D4: the cache keeps no gap after a frame",
    ),
    Rule(
        "embed_errors",
        "same_hash_twice",
        "different",
        "test_a_repeated_key_is_encoded_once",
        "the plugin encodes and writes the picture twice",
    ),
    # ----------------------------------------------------------------------- names, sizes, limits
    Rule("weight_names", "*", "adapted", "test_every_parameter_is_filled_from_the_recorded_keys"),
    Rule(
        "warmup_inputs",
        "*",
        "adapted",
        "test_warmup_inputs",
        "two tensors of row destinations more; float32 position weights; bounds [0, 1)",
    ),
    Rule(
        "select_vision_bucket",
        "exact next small zero unsorted dp4 dp4_five_blocks dp2_exact bucket_below_block "
        "not_multiple thirty thirty_small_items",
        "adapted",
        "test_smallest_bucket_that_holds_the_packed_blocks",
    ),
    Rule("select_vision_bucket", "too_large", "adapted", "test_no_bucket_is_large_enough"),
    Rule(
        "select_vision_bucket",
        "empty",
        "different",
        "test_no_buckets_means_one_block",
        "the platform fills the list; a text-only build has none",
    ),
    Rule(
        "select_vision_bucket",
        "token_sum_hides_blocks",
        "different",
        "test_the_bucket_follows_packed_blocks_and_not_tokens",
        "design D4",
    ),
    Rule(
        "max_pixels_token_count",
        "px262144_p16 px1003520_p16 px200704_p14",
        "reproduced",
        "test_most_patches_of_one_image",
    ),
    Rule(
        "max_pixels_token_count",
        "px1000_p16 px255_p16",
        "different",
        "test_limits_below_the_smallest_picture",
        "the processor keeps a side of at least one merge window",
    ),
)

TOPICS = tuple(dict.fromkeys(rule.topic for rule in RULES))


def cases(test: str) -> pytest.MarkDecorator:
    """Parametrize a test over the vectors that the table gives to it."""
    rules = [rule for rule in RULES if rule.test == test]
    if not rules:
        raise ValueError(f"no rule names {test}")
    found = [v for v in vectors(*{r.topic for r in rules}) if any(r.matches(v) for r in rules)]
    return pytest.mark.parametrize("vector", found, ids=[vector.case for vector in found])
