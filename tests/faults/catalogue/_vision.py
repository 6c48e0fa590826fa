"""Wrong variants of vision towers, by what a tower has; the families' catalogues pick from them."""

from __future__ import annotations

from . import CONFIG, LOADERS, PREPROCESSING, VISION, Fault

TOWER_ROWS = "test_vision.py::test_tower_rows_of_several_images_in_shared_blocks"

FRAMES = (
    Fault(
        "bounds per item instead of per frame",
        PREPROCESSING,
        'inputs["bound_min"][block, start:end] = start',
        'inputs["bound_min"][block, start:end] = 0',
        "test_preprocessing.py::test_bounds_are_per_frame",
    ),
)

ROPE = (
    Fault(
        "row and column swapped in the tower's rotary",
        PREPROCESSING,
        "rows, cols = order // width, order % width",
        "cols, rows = order // width, order % width",
        "test_preprocessing.py::test_rotary_tables_equal_hugging_face",
    ),
    Fault(
        "the tower rotates adjacent pairs",
        VISION,
        "turned = torch.cat((-y[..., half:], y[..., :half]), dim=-1)",
        "turned = torch.stack((-y[..., 1::2], y[..., 0::2]), dim=-1).flatten(-2)",
        "test_vision.py::test_attention_stays_within_each_frame",
    ),
)

QUICK_GELU = (
    Fault(
        "exact for quick GELU in the tower's MLP",
        VISION,
        "hidden = quick_gelu(linear(",
        "hidden = gelu(linear(",
        "test_vision.py::test_mlp",
    ),
    Fault(
        "quick for exact GELU in the merger",
        VISION,
        "hidden = gelu(linear(",
        "hidden = quick_gelu(linear(",
        "test_vision.py::test_merger",
    ),
)

TANH_GELU = (
    Fault(
        "erf for tanh GELU in the tower's MLP",
        VISION,
        "hidden = gelu_tanh(linear(",
        "hidden = gelu(linear(",
        "test_vision.py::test_mlp",
    ),
)

EXACT_GELU = (
    Fault(
        "tanh for erf GELU",
        VISION,
        "1.0 + torch.erf(y * 0.7071067811865476)",
        "1.0 + torch.tanh(0.7978845608028654 * (y + 0.044715 * y * y * y))",
        "test_vision.py::test_mlp",
    ),
)

GATED_WITH_BIAS = (
    Fault(
        "gate and up projections of the tower exchanged",
        VISION,
        "gate = silu(linear(hidden, self.gate_weight, self.gate_bias))\n"
        "        hidden = gate * linear(hidden, self.up_weight, self.up_bias)",
        "gate = silu(linear(hidden, self.up_weight, self.up_bias))\n"
        "        hidden = gate * linear(hidden, self.gate_weight, self.gate_bias)",
        "test_vision.py::test_mlp",
    ),
)

SILU = (
    Fault(
        "quick GELU for SiLU",
        VISION,
        "(y * torch.sigmoid(y))",
        "(y * torch.sigmoid(1.702 * y))",
        "test_vision.py::test_mlp",
    ),
)

RMS = (
    Fault(
        "another epsilon in the tower's RMS norms",
        VISION,
        "x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)",
        "x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 4 * self.eps)",
        "test_vision.py::test_norm",
    ),
)

FUSED_QKV = (
    Fault(
        "naive column shard of the tower's fused QKV",
        LOADERS,
        "return torch.cat([slices[0][start : start + width, :].t() for start in starts], dim=1)",
        "first = rank % tp_size * 3 * width\n"
        "        return slices[0][first : first + 3 * width, :].t()",
        "test_weights.py::test_vision_qkv_takes_heads_from_each_third",
    ),
)

SEPARATE_QKV = (
    Fault(
        "keys before queries in the fused matrix",
        LOADERS,
        "[piece[start : start + width, :].t() for piece in slices]",
        "[slices[i][start : start + width, :].t() for i in (1, 0, 2)]",
        "test_weights.py::test_vision_qkv_takes_the_same_heads_of_each_matrix",
    ),
    Fault(
        "every rank loads the first heads",
        LOADERS,
        "[piece[start : start + width, :].t() for piece in slices]",
        "[piece[0:width, :].t() for piece in slices]",
        "test_weights.py::test_vision_qkv_takes_the_same_heads_of_each_matrix",
    ),
)

FINAL_NORM = (
    Fault(
        "no norm after the last block",
        VISION,
        "        hidden = self.final_norm(hidden)\n",
        "",
        TOWER_ROWS,
    ),
)

WINDOWS = (
    Fault(
        "every block sees the whole frame",
        VISION,
        "bounds = (bound_min, bound_max) if whole else (window_min, window_max)",
        "bounds = (bound_min, bound_max)",
        TOWER_ROWS,
    ),
    Fault(
        "the whole frame is seen one block too early",
        VISION,
        "whole = index in self.fullatt_block_indexes",
        "whole = index + 1 in self.fullatt_block_indexes",
        TOWER_ROWS,
    ),
    Fault(
        "the order of the windows is not undone",
        PREPROCESSING,
        "rows = frame.first_row + order",
        "rows = frame.first_row + order.sort().values",
        "test_preprocessing.py::test_rows_go_to_their_items_cache_blocks",
    ),
    Fault(
        "the smaller windows at the right edge run into the next line",
        PREPROCESSING,
        "own = (lines * (int(columns[-1]) + 1) + columns).flatten()",
        "own = (lines * max(1, int(columns[-1])) + columns).flatten()",
        "test_preprocessing.py::test_attention_windows_equal_hugging_face",
    ),
    Fault(
        "rotary tables in the processor's order",
        PREPROCESSING,
        "return merge_windows[window_order(height, width, merge_size, window)[0]].flatten()",
        "return merge_windows.flatten()",
        "test_preprocessing.py::test_rotary_tables_equal_hugging_face",
    ),
    Fault(
        "pixels in the processor's order",
        PREPROCESSING,
        "own.view(-1, area, config.patch_dim)[order]",
        "own.view(-1, area, config.patch_dim)[order.sort().values]",
        "test_preprocessing.py::test_every_patch_lies_where_its_frame_was_placed",
    ),
    Fault(
        "window size counted in merge windows",
        PREPROCESSING,
        "window = config.window_size // config.patch_size",
        "window = config.window_size // config.patch_size // merge",
        TOWER_ROWS,
    ),
    Fault(
        "window bounds of a frame that begins its block",
        PREPROCESSING,
        'inputs["window_min"][block, start:end] = start + low',
        'inputs["window_min"][block, start:end] = low',
        "test_preprocessing.py::test_window_bounds_lie_where_the_frame_was_placed",
    ),
)

RASTER = (
    Fault(
        "patches left row by row",
        PREPROCESSING,
        "own[patch_order(h, w, merge)].flatten(1)",
        "own.flatten(1)",
        "test_preprocessing.py::test_every_patch_lies_where_its_frame_was_placed",
    ),
)

BILINEAR = (
    Fault(
        "corners not aligned, as in vLLM",
        PREPROCESSING,
        "source = place.float() * (side - 1) / max(size - 1, 1)",
        "source = ((place.float() + 0.5) * side / size - 0.5).clamp(min=0)",
        "test_vision.py::test_position_embedding",
    ),
)

GRID_SAMPLE = (
    Fault(
        "corners aligned",
        PREPROCESSING,
        "source = (place.float() + 0.5) * side / size - 0.5",
        "source = place.float() * (side - 1) / max(size - 1, 1)",
        "test_vision.py::test_position_embedding",
    ),
    Fault(
        "another cubic kernel",
        PREPROCESSING,
        "a = -0.75",
        "a = -0.5",
        "test_vision.py::test_position_embedding",
    ),
    Fault(
        "lines beyond the table taken from its other side",
        PREPROCESSING,
        "lines.clamp(0, side - 1)",
        "lines % side",
        "test_preprocessing.py::test_lines_beyond_the_table_repeat_the_outermost",
    ),
)

EMBED_NORM = (
    Fault(
        "positions before the norm of the embedding",
        VISION,
        "hidden = self.embed_norm(hidden)\n"
        "        hidden = hidden + self.pos_embed(pos_emb_idx, pos_emb_weight)",
        "hidden = self.embed_norm(hidden + self.pos_embed(pos_emb_idx, pos_emb_weight))",
        TOWER_ROWS,
    ),
)

CROSSED_WIDTHS = (
    Fault(
        "the MLP's width under the merger's key",
        CONFIG,
        'intermediate_size=_size(vision, where, "out_hidden_size", problems)',
        'intermediate_size=_size(vision, where, "intermediate_size", problems)',
        "test_config.py::test_the_towers_sizes_are_read_where_the_checkpoint_states_them",
    ),
)

STRIDED_CONV = (
    Fault(
        "channels of the merging kernel innermost of a patch's place",
        LOADERS,
        "kernel.permute(2, 3, 1, 0)",
        "kernel.permute(1, 2, 3, 0)",
        "test_weights.py::test_the_merging_kernel_is_a_matrix_over_the_joined_window",
    ),
    Fault(
        "bias of the merging convolution dropped",
        VISION,
        "linear(hidden, self.conv_weight, self.conv_bias)",
        "linear(hidden, self.conv_weight)",
        "test_vision.py::test_merger",
    ),
    Fault(
        "the merger activates before its norm",
        VISION,
        "gelu(self.norm(row_parallel_linear(self.tp_group, hidden, self.fc1_weight)))",
        "self.norm(gelu(row_parallel_linear(self.tp_group, hidden, self.fc1_weight)))",
        "test_vision.py::test_merger",
    ),
)

TILES = (
    Fault(
        "patches do not see the class token",
        PREPROCESSING,
        'inputs["bound_min"][block, start - 1 : end] = start - 1',
        'inputs["bound_min"][block, start - 1 : end] = start',
        "test_preprocessing.py::test_bounds_are_per_tile_with_its_class_token",
    ),
    Fault(
        "no class token",
        VISION,
        "return torch.where((index == 0)[..., None], self.class_token, patches)",
        "return patches",
        "test_vision.py::test_patch_embedding",
    ),
    Fault(
        "positions without the place of the class token",
        PREPROCESSING,
        "patch_order(h, w, merge) + 1",
        "patch_order(h, w, merge)",
        "test_preprocessing.py::test_the_class_token_stands_before_its_tile_and_positions_follow",
    ),
    Fault(
        "patches of a tile row by row",
        PREPROCESSING,
        "cut.permute(0, 2, 5, 3, 6, 1, 4, 7)",
        "cut.permute(0, 2, 3, 5, 6, 1, 4, 7)",
        "test_preprocessing.py::test_every_patch_lies_where_its_tile_was_placed",
    ),
    Fault(
        "rows of a tile counted with its class token",
        PREPROCESSING,
        "place = slice(start // area, end // area)",
        "place = slice(start // area - 1, end // area - 1)",
        "test_preprocessing.py::test_rows_go_to_their_items_cache_blocks",
    ),
    Fault(
        "the merger normalises each patch before the join",
        VISION,
        "hidden = self.norm(hidden.reshape(joined))",
        "hidden = nn.functional.layer_norm(hidden, hidden.shape[-1:]).reshape(joined)\n"
        "        hidden = hidden * self.norm.weight + self.norm.bias",
        "test_vision.py::test_merger",
    ),
)

LAYER_SCALE = (
    Fault(
        "layer scale of attention dropped",
        VISION,
        "self.scale1 * self.attn(",
        "self.attn(",
        "test_vision.py::test_block",
    ),
    Fault(
        "layer scale of attention on the MLP",
        VISION,
        "self.scale2 * self.mlp(",
        "self.scale1 * self.mlp(",
        "test_vision.py::test_block",
    ),
)

FULL_WIDTH_NORM = (
    Fault(
        "queries and keys normalised per head",
        VISION,
        "squares = torch.stack((q.pow(2).sum(-1, keepdim=True), k.pow(2).sum(-1, keepdim=True)))",
        "heads = (*q.shape[:2], self.num_heads, self.head_dim)\n"
        "        squares = torch.stack((q, k)).view(2, *heads).pow(2).sum(-1, keepdim=True)\n"
        "        squares = (self.num_heads * squares).expand(2, *heads).reshape(2, *q.shape)",
        "test_vision.py::test_attention_stays_within_each_tile",
    ),
    Fault(
        "queries normalised with the weight of the keys",
        VISION,
        "query = self.q_norm_weight * (q * scale[0])",
        "query = self.k_norm_weight * (q * scale[0])",
        "test_vision.py::test_attention_stays_within_each_tile",
    ),
    Fault(
        "each rank normalises by its own heads",
        VISION,
        "if self.tp_group.world_size > 1:\n"
        "            squares = self.tp_group.all_reduce(squares)\n"
        "        scale = torch.rsqrt(squares / (self.width * self.tp_group.world_size) + 1e-6)",
        "scale = torch.rsqrt(squares / self.width + 1e-6)",
        "test_parallel.py::test_vision_module",
    ),
)


def merger_epsilon(width: str, right: str, wrong: str) -> Fault:
    """Another epsilon in the merger's layer norm.

    Args:
        width: The norm's width in the source.
        right: Its epsilon there.
        wrong: Another.
    """
    return Fault(
        "epsilon of the tower's norms in the merger",
        VISION,
        f"self.norm = layer_norm({width}, {right}, config.dtype)",
        f"self.norm = layer_norm({width}, {wrong}, config.dtype)",
        "test_vision.py::test_norm",
    )
