"""Wrong variants of prompts and positions, by scheme; the families' catalogues pick from them."""

from __future__ import annotations

from . import MERGE, MODEL, MROPE, Fault

LOGITS = "test_end_to_end.py::test_prefill_logits_of_every_token"
MIXTURES = "test_mrope.py::test_random_mixtures_equal_vllm"
LONG_VIDEO = "test_mrope.py::test_after_a_long_video_the_largest_position_counts"
ORDER = "test_mrope.py::test_image_and_video_in_either_order"

BLOCK = (
    Fault(
        "after a video at its longer side",
        MROPE,
        "position += text + int(block.max()) + 1",
        "position += text + max(h, w) // merge",
        LONG_VIDEO,
    ),
    Fault(
        "time stands still in a video",
        MROPE,
        "np.indices((t, h // merge, w // merge)).reshape(3, -1)",
        "np.indices((t, h // merge, w // merge)).reshape(3, -1) * [[0], [1], [1]]",
        MIXTURES,
    ),
    Fault(
        "rows and columns exchanged in the positions",
        MROPE,
        "np.indices((t, h // merge, w // merge))",
        "np.indices((t, w // merge, h // merge))",
        "test_mrope.py::test_worked_example",
    ),
    Fault(
        "a video looked for under the image token",
        MROPE,
        "== token_ids[modality]",
        '== token_ids["image"]',
        ORDER,
    ),
)

SECONDS = (
    Fault(
        "time rounded to the nearest position",
        MROPE,
        "block[0] = scaled.astype(np.int64)",
        "block[0] = np.rint(scaled)",
        "test_mrope.py::test_time_is_rounded_down",
    ),
    Fault(
        "seconds taken for positions",
        MROPE,
        "return per_frame * config.vision_config.tokens_per_second",
        "return per_frame",
        LONG_VIDEO,
    ),
    Fault(
        "without seconds a frame is a position",
        MROPE,
        "    per_frame = 1.0\n",
        "    per_frame = 1.0 / config.vision_config.tokens_per_second\n",
        "test_mrope.py::test_without_seconds_a_frame_is_a_second",
    ),
)

IMAGE_TOKEN = (
    Fault(
        "frames looked for under the video token",
        MROPE,
        "== config.image_token_id)",
        '== (config.image_token_id if modality == "image" else config.video_token_id))',
        ORDER,
    ),
    Fault(
        "frames told from images by the token, not by the item",
        MROPE,
        "_runs(tokens[span.offset : span.offset + span.length] == config.image_token_id)",
        "_runs(tokens == config.image_token_id)",
        ORDER,
    ),
)

RASTER = (
    Fault(
        "the pixels of the first image for all",
        MODEL,
        "for item in pixels])",
        "for item in [pixels[0]] * len(pixels)])",
        LOGITS,
    ),
)

TILES = (
    Fault(
        "tiles of images counted for a video",
        MODEL,
        "counts = image_num_patches if pixel_values is not None else video_num_patches",
        "counts = image_num_patches",
        LOGITS,
    ),
    Fault(
        "positions of text count double",
        MODEL,
        "self.rotary_emb(positions)",
        "self.rotary_emb(2 * positions)",
        LOGITS,
    ),
)

ROWS = (
    Fault(
        "vision rows added to the placeholders",
        MERGE,
        "padded.index_put_((rows,), values.to(base.dtype))",
        "padded.index_put_((rows,), values.to(base.dtype), accumulate=True)",
        "test_merge.py::test_rows_replace_placeholders",
    ),
)
