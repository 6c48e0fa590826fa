"""Values of different parts of a spec that go together."""

from __future__ import annotations

import math
from collections.abc import Iterator

from vlmgen.spec.rules.conditions import TILES
from vlmgen.spec.rules.view import View, Violation, at_path, listed, shown, size_of
from vlmgen.spec.source import Key


def positions_fit_the_rope(view: View) -> Iterator[Violation]:
    """Three-axis positions need a three-axis rotation, and the other way round."""
    kind, positions = view[at_path("text.rope.kind")], view[at_path("tokens.positions")]
    if (kind == "mrope") == (positions == "sequence"):
        yield Violation(
            at_path("tokens.positions"),
            f"tokens.positions is {positions}, but text.rope.kind is {kind}",
            "mrope rotates by three-axis positions (mrope_per_frame, mrope_block), plain by places "
            "in the sequence",
            "sequence" if kind == "plain" else "mrope_per_frame, mrope_block",
        )
    seconds = view.present(at_path("tokens.seconds"))
    if seconds and positions != "mrope_block":
        yield Violation(
            at_path("tokens.seconds"),
            f"tokens.seconds is stated, but tokens.positions is {positions}",
            "only a video that is one block (mrope_block) has a temporal axis to scale",
            "null",
        )


_VIDEO_PROMPTS = {
    "mrope_per_frame": ("per_frame_timestamp", "per_frame_image_token", "none"),
    "mrope_block": ("one_run", "none"),
    "sequence": ("per_frame_label", "none"),
}


def video_prompt_fits_the_positions(view: View) -> Iterator[Violation]:
    """Frames that are blocks of their own stand apart in the prompt; one block stands in a run."""
    positions, prompt = view[at_path("tokens.positions")], view[at_path("tokens.video_prompt")]
    legal = _VIDEO_PROMPTS[positions]
    if prompt not in legal:
        yield Violation(
            at_path("tokens.video_prompt"),
            f"tokens.video_prompt is {prompt}, but tokens.positions is {positions}",
            "per-frame positions need the frames apart in the prompt, a block needs one run",
            ", ".join(legal),
        )


def bounds_fit_the_input(view: View) -> Iterator[Violation]:
    """Tiles attend within themselves; a class token needs a unit of its own to stand in."""
    bounds = view[at_path("vision.attention.bounds")]
    if (bounds == "tile") != TILES.holds(view):
        yield Violation(
            at_path("vision.attention.bounds"),
            f"vision.attention.bounds is {bounds}, but {TILES.now(view)}",
            "patches attend within a tile if and only if the input is tiles",
            "tile" if TILES.holds(view) else "frame, window",
        )
    if view.present(at_path("vision.class_token")) and bounds != "tile":
        yield Violation(
            at_path("vision.class_token"),
            f"vision.class_token is stated, but vision.attention.bounds is {bounds}",
            "a class token belongs to one tile; frames and windows of any size have none",
            "null, or vision.input tiles with bounds tile",
        )


def position_table_fits_the_input(view: View) -> Iterator[Violation]:
    """A table without interpolation is for pictures of one size."""
    if not view.present(at_path("vision.position")):
        return
    tiles, kind = TILES.holds(view), view[at_path("vision.position.kind")]
    if (kind == "learned_fixed") != tiles:
        yield Violation(
            at_path("vision.position.kind"),
            f"vision.position.kind is {kind}, but {TILES.now(view)}",
            "a table that is not interpolated (learned_fixed) is for tiles, which have one size",
            "learned_fixed" if tiles else "learned_bilinear, learned_grid_sample_bicubic",
        )


def tiles_are_whole(view: View) -> Iterator[Violation]:
    """A tile is cut along merge windows and fits a vision block."""
    if not TILES.holds(view) or not view.present(at_path("vision.position")):
        return
    at = at_path("vision.position.num_embeddings")
    class_token = view.present(at_path("vision.class_token"))
    side, merge = math.isqrt(view[at] - class_token), view[at_path("vision.merger.merge_size")]
    if side % merge:
        yield Violation(
            at,
            f"tiles of {side} x {side} patches are not cut whole by merge_size {merge}",
            "the side of a tile is a whole number of merge windows",
            f"a table of such a side, as {(side // merge + 1) * merge}",
        )
    slots = side * side + class_token * merge**2
    block_at = at_path("neuron.vision_attention_block_size")
    if slots > view[block_at]:
        yield Violation(
            block_at,
            f"block size {view[block_at]} is below the {slots} places that a tile takes",
            "a tile and its class token, which takes a merge window, fit one vision block",
            f"at least {slots}",
        )


def windows_are_whole(view: View) -> Iterator[Violation]:
    """A window is cut along merge windows; blocks that see the frame exist."""
    if not view.present(at_path("vision.attention.window")):
        return
    at = at_path("vision.attention.window.size")
    unit = (
        view[at_path("vision.patch_embed.patch_size")] * view[at_path("vision.merger.merge_size")]
    )
    if view[at] % unit:
        near = [n for n in (view[at] // unit * unit, (view[at] // unit + 1) * unit) if n]
        yield Violation(
            at,
            f"a window of {view[at]} pixels is not a multiple of {unit}",
            "a window is a whole number of merge windows (patch_size x merge_size)",
            "such as " + " or ".join(map(str, near)),
        )
    blocks_at = at_path("vision.attention.window.full_blocks")
    blocks = view[blocks_at]
    if list(blocks) != sorted(set(blocks)):
        yield Violation(
            blocks_at,
            f"full_blocks {listed(blocks)} are not ascending and distinct",
            "full_blocks are tower blocks, ascending and distinct",
            listed(sorted(set(blocks))),
        )
    yield from full_blocks_fit(view, at_path("vision.depth"))


def full_blocks_fit(view: View, depth_at: Key, whose: str = "") -> Iterator[Violation]:
    if not view.present(at_path("vision.attention.window")):
        return
    at, depth = at_path("vision.attention.window.full_blocks"), size_of(view, depth_at)
    if max(view[at]) >= depth:
        yield Violation(
            depth_at if whose else at,
            f"full_blocks {listed(view[at])} go beyond the tower's depth {depth}{whose}",
            "full_blocks are tower blocks",
            f"at least {max(view[at]) + 1} blocks" if whose else f"0 to {depth - 1}",
        )


def experts_fit(view: View) -> Iterator[Violation]:
    """A token has no more experts than there are, and some layer has experts."""
    if not view.present(at_path("text.moe")):
        return
    yield from top_k_fits(view, at_path("text.moe.num_experts"))
    dense, layers = view[at_path("text.moe.first_dense")], view[at_path("text.num_layers")]
    if dense >= layers:
        yield Violation(
            at_path("text.moe.first_dense"),
            f"first_dense {dense} leaves none of {layers} layers with experts",
            "some layer has experts",
            f"0 to {layers - 1}",
        )


def top_k_fits(view: View, experts_at: Key, whose: str = "") -> Iterator[Violation]:
    at = at_path("text.moe.top_k")
    experts, top_k = size_of(view, experts_at), view[at]
    if top_k > experts:
        yield Violation(
            experts_at if whose else at,
            f"top_k is {top_k}, but num_experts is {experts}{whose}",
            "top_k is at most num_experts",
            f"at least {top_k}" if whose else f"1 to {experts}",
        )


def patch_embedding_is_flat(view: View) -> Iterator[Violation]:
    """A two-dimensional convolution sees one frame."""
    at = at_path("vision.patch_embed.temporal_patch_size")
    if view[at_path("vision.patch_embed.kind")] == "conv2d" and view[at] != 1:
        yield Violation(
            at,
            f"temporal_patch_size is {view[at]}, but patch_embed.kind is conv2d",
            "a two-dimensional convolution sees one frame",
            "1, or patch_embed.kind conv3d",
        )


def merger_is_whole(view: View) -> Iterator[Violation]:
    """The merger's inner width is a number exactly where its MLP is gated."""
    at, op = at_path("vision.merger.inner"), view[at_path("vision.merger.op")]
    inner = view.optional(at)
    if isinstance(inner, int) != (op == "strided_conv"):
        yield Violation(
            at,
            f"merger.inner is {'joined' if inner is None else inner}, but merger.op is {op}",
            "inner is the width of the gated MLP of strided_conv, else joined or out",
            "a number" if op == "strided_conv" else "joined, out",
        )
    if view.present(at_path("vision.deepstack")) and op != "window":
        yield Violation(
            at_path("vision.deepstack"),
            f"vision.deepstack is stated, but merger.op is {op}",
            "a deepstack level is merged like a window",
            "null, or merger.op window",
        )
    if view.present(at_path("vision.deepstack")) and op == "window":
        yield from _levels_share_the_merger(view)


def _levels_share_the_merger(view: View) -> Iterator[Violation]:
    """One class merges the tower's output and its levels; only the norm before the join differs."""
    legal = {"inner": "joined", "bias": True}
    if view.optional(at_path("vision.merger.norm_position")) == "after_merge":
        for name in ("norm", "norm_eps"):
            legal[name] = view[at_path(f"vision.deepstack.merger.{name}")]
    for name, value in legal.items():
        at = at_path(f"vision.merger.{name}")
        own = view.optional(at)
        if own is not None and own != value:
            yield Violation(
                at,
                f"merger.{name} is {shown(own)}, but vision.deepstack is stated",
                "a deepstack level is merged by the tower's merger, which may norm before the join",
                f"{shown(value)}, or vision.deepstack null",
            )


def merger_has_a_prefix(view: View) -> Iterator[Violation]:
    """The merger's keys begin with a prefix of their own, or with that of the layout."""
    inside = view.present(at_path("weights.vision.merger.prefix"))
    for index in range(view.length(at_path("weights.layouts"))):
        at: Key = ("weights", "layouts", index, "projector")
        if view.present(at) == inside:
            yield Violation(
                at,
                (
                    "projector and weights.vision.merger.prefix are both stated"
                    if inside
                    else "neither projector nor weights.vision.merger.prefix is stated"
                ),
                "the merger lies in the tower (merger.prefix) or beside it (projector)",
            )
