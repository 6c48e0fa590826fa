"""Vision tower of InternVL3: patches in fixed-size attention blocks, merged rows into the
encoder cache.

Shapes: n vision blocks of this call (of this rank under vision data parallelism), S patches per
block (vision_attention_block_size), P values per patch, H tower width, N heads of this rank, D
head width, m patches per merged row, R = S / m merged rows per block, W width of one cache row, C
rows per cache block.

Several tiles may share a block: `bound_min` and `bound_max` keep every patch within its own tile.
Each tile follows one merge window of places, of which the last is its class token.

Rows leave the tower by (cache block, offset) pairs, so an item's rows lie in cache blocks of
its own wherever it was packed. There is no sequence parallelism here; tensor parallelism has
its own process group, data parallelism splits blocks.
"""

from typing import Any

import torch
import vllm_neuron.functional as NF
from torch import nn
from vllm_neuron.parallel.neuron_parallel_state import (
    get_neuron_vision_dp_group,
    get_neuron_vision_tp_group,
)
from vllm_neuron.utils.weight_loader import set_weight_loader

from .config import InternVLVisionConfig
from .weight_loaders import (
    column_parallel_bias_loader,
    column_parallel_loader,
    patch_embed_loader,
    row_parallel_loader,
    squeezed_loader,
    vision_qkv_bias_loader,
    vision_qkv_loader,
    whole_loader,
)


def gelu(x: torch.Tensor) -> torch.Tensor:
    """Exact GELU through erf, in float32; written out, as the device's own does not trace."""
    y = x.float()
    return (0.5 * y * (1.0 + torch.erf(y * 0.7071067811865476))).to(x.dtype)


def _parameter(*shape: int, dtype: torch.dtype, loader) -> nn.Parameter:
    parameter = nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)
    set_weight_loader(param=parameter, loader=loader)
    return parameter


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """`x @ weight + bias`, weight `[in, out]`; the bias joins the accumulator, one rounding."""
    return nn.functional.linear(x, weight.t(), bias)


def row_parallel_linear(
    group: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    """`linear` over this rank's inputs, summed over the group; the bias is added once."""
    if group.world_size == 1:
        return linear(x, weight, bias)
    return group.all_reduce(x @ weight) + bias


def layer_norm(width: int, eps: float, dtype: torch.dtype) -> nn.LayerNorm:
    """Layer norm over `width` with weight and bias."""
    norm = nn.LayerNorm(width, eps=eps, dtype=dtype)
    norm.requires_grad_(False)
    set_weight_loader(param=norm.weight, loader=whole_loader((width,)))
    set_weight_loader(param=norm.bias, loader=whole_loader((width,)))
    return norm


class InternVLVisionPatchEmbed(nn.Module):
    """Patch embedding; the checkpoint's Conv2d has stride = kernel: one matrix product a patch.
    A learned token stands before the patches of every tile.
    """

    def __init__(self, config: InternVLVisionConfig) -> None:
        super().__init__()
        self.proj_weight = _parameter(
            config.patch_dim,
            config.hidden_size,
            dtype=config.dtype,
            loader=patch_embed_loader(config),
        )
        self.proj_bias = _parameter(
            config.hidden_size, dtype=config.dtype, loader=whole_loader((config.hidden_size,))
        )
        self.class_token = _parameter(
            config.hidden_size, dtype=config.dtype, loader=squeezed_loader((config.hidden_size,))
        )

    def forward(self, pixel_values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """`[n, S, P]` and places in the tile `[n, S]`, 0 for the class token -> `[n, S, H]`."""
        patches = linear(pixel_values, self.proj_weight, self.proj_bias)
        return torch.where((index == 0)[..., None], self.class_token, patches)


class InternVLVisionPositionEmbedding(nn.Module):
    """Learned positions of a tile, one row per place."""

    def __init__(self, config: InternVLVisionConfig) -> None:
        super().__init__()
        shape = (config.num_position_embeddings, config.hidden_size)
        self.pos_embed_weight = _parameter(
            *shape, dtype=config.dtype, loader=squeezed_loader(shape)
        )

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        """Table rows `[n, S]` -> `[n, S, H]`."""
        return nn.functional.embedding(index, self.pos_embed_weight)


class InternVLVisionAttention(nn.Module):
    """Bidirectional attention within bounds, from one matrix [Q of all heads | K | V],
    which the checkpoint holds as three."""

    def __init__(self, config: InternVLVisionConfig) -> None:
        super().__init__()
        self.tp_group = get_neuron_vision_tp_group()
        tp_size = self.tp_group.world_size
        self.num_heads, self.head_dim = config.num_heads // tp_size, config.head_dim
        self.width = self.num_heads * self.head_dim
        self.scale = config.head_dim**-0.5
        hidden_size, dtype = config.hidden_size, config.dtype
        self.qkv_weight = _parameter(
            hidden_size, 3 * self.width, dtype=dtype, loader=vision_qkv_loader(config, tp_size)
        )
        self.qkv_bias = _parameter(
            3 * self.width, dtype=dtype, loader=vision_qkv_bias_loader(config, tp_size)
        )
        self.proj_weight = _parameter(
            self.width,
            hidden_size,
            dtype=dtype,
            loader=row_parallel_loader((hidden_size, hidden_size), tp_size),
        )
        self.proj_bias = _parameter(hidden_size, dtype=dtype, loader=whole_loader((hidden_size,)))

    def forward(
        self,
        hidden: torch.Tensor,
        bound_min: torch.Tensor,
        bound_max: torch.Tensor,
    ) -> torch.Tensor:
        """`[n, S, H]` -> `[n, S, H]`, complete on every rank."""
        blocks, patches = hidden.shape[:2]
        qkv = linear(hidden, self.qkv_weight, self.qkv_bias)
        query = self._heads(qkv[..., : self.width])
        key = self._heads(qkv[..., self.width : 2 * self.width])
        value = self._heads(qkv[..., 2 * self.width :])
        rows = blocks * self.num_heads
        attended = NF.flash_attention(
            q=query.reshape(rows, patches, self.head_dim),
            k=key.reshape(rows, patches, self.head_dim),
            v=value.reshape(rows, patches, self.head_dim),
            scale=self.scale,
            causal_mask=False,
            tp_q=True,
            tp_k=True,
            tp_out=False,
            bound_min=self._per_head(bound_min),
            bound_max=self._per_head(bound_max),
        )
        attended = attended.view(blocks, self.num_heads, patches, self.head_dim).transpose(1, 2)
        joined = attended.reshape(blocks, patches, self.width)
        return row_parallel_linear(self.tp_group, joined, self.proj_weight, self.proj_bias)

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        """`[n, S, N * D]` -> `[n, N, S, D]`."""
        return x.view(*x.shape[:2], self.num_heads, self.head_dim).transpose(1, 2)

    def _per_head(self, bound: torch.Tensor) -> torch.Tensor:
        """`[n, S, 1]` -> `[n * N, S, 1]`."""
        blocks, patches = bound.shape[:2]
        return bound[:, None].expand(blocks, self.num_heads, patches, 1).reshape(-1, patches, 1)


class InternVLVisionMLP(nn.Module):
    """Two matrices with bias, exact GELU between; stored `[in, out]`."""

    def __init__(self, config: InternVLVisionConfig) -> None:
        super().__init__()
        self.tp_group = get_neuron_vision_tp_group()
        tp_size = self.tp_group.world_size
        wide, width, hidden_size = (
            config.intermediate_size,
            config.intermediate_size // tp_size,
            config.hidden_size,
        )
        self.fc1_weight = _parameter(
            hidden_size,
            width,
            dtype=config.dtype,
            loader=column_parallel_loader((wide, hidden_size), tp_size),
        )
        self.fc2_weight = _parameter(
            width,
            hidden_size,
            dtype=config.dtype,
            loader=row_parallel_loader((hidden_size, wide), tp_size),
        )
        self.fc1_bias = _parameter(
            width, dtype=config.dtype, loader=column_parallel_bias_loader(wide, tp_size)
        )
        self.fc2_bias = _parameter(
            hidden_size, dtype=config.dtype, loader=whole_loader((hidden_size,))
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[n, S, H]` -> `[n, S, H]`, complete on every rank."""
        hidden = gelu(linear(hidden, self.fc1_weight, self.fc1_bias))
        return row_parallel_linear(self.tp_group, hidden, self.fc2_weight, self.fc2_bias)


class InternVLVisionBlock(nn.Module):
    """Pre-norm residual block: attention, then MLP."""

    def __init__(self, config: InternVLVisionConfig) -> None:
        super().__init__()
        self.norm1 = layer_norm(config.hidden_size, config.layer_norm_eps, config.dtype)
        self.norm2 = layer_norm(config.hidden_size, config.layer_norm_eps, config.dtype)
        self.attn = InternVLVisionAttention(config)
        self.mlp = InternVLVisionMLP(config)
        self.scale1 = _parameter(
            config.hidden_size, dtype=config.dtype, loader=whole_loader((config.hidden_size,))
        )
        self.scale2 = _parameter(
            config.hidden_size, dtype=config.dtype, loader=whole_loader((config.hidden_size,))
        )

    def forward(
        self,
        hidden: torch.Tensor,
        bound_min: torch.Tensor,
        bound_max: torch.Tensor,
    ) -> torch.Tensor:
        """`[n, S, H]` -> `[n, S, H]`; arguments as in `InternVLVisionModel.forward`."""
        hidden = hidden + self.scale1 * self.attn(self.norm1(hidden), bound_min, bound_max)
        return hidden + self.scale2 * self.mlp(self.norm2(hidden))


class InternVLVisionPatchMerger(nn.Module):
    """Join the m patches of a merge window into one row of the text width.

    The patches of a window are adjacent, so the join is a view. The joined row is normalised.
    """

    def __init__(self, config: InternVLVisionConfig) -> None:
        super().__init__()
        self.tp_group = get_neuron_vision_tp_group()
        tp_size = self.tp_group.world_size
        self.merge_area = config.merge_area
        joined, out = config.hidden_size * config.merge_area, config.out_hidden_size
        width, dtype = out // tp_size, config.dtype
        self.norm = layer_norm(joined, 1e-05, config.dtype)
        self.fc1_weight = _parameter(
            joined, width, dtype=dtype, loader=column_parallel_loader((out, joined), tp_size)
        )
        self.fc2_weight = _parameter(
            width, out, dtype=dtype, loader=row_parallel_loader((out, out), tp_size)
        )
        self.fc1_bias = _parameter(
            width, dtype=dtype, loader=column_parallel_bias_loader(out, tp_size)
        )
        self.fc2_bias = _parameter(out, dtype=dtype, loader=whole_loader((out,)))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[n, S, H]` -> `[n, S / m, text width]`, complete on every rank."""
        blocks, patches, width = hidden.shape
        joined = (blocks, patches // self.merge_area, width * self.merge_area)
        hidden = self.norm(hidden.reshape(joined))
        hidden = gelu(linear(hidden, self.fc1_weight, self.fc1_bias))
        return row_parallel_linear(self.tp_group, hidden, self.fc2_weight, self.fc2_bias)


class InternVLVisionModel(nn.Module):
    """The complete tower; compiled by the runner as one graph per vision bucket."""

    def __init__(self, config: InternVLVisionConfig) -> None:
        super().__init__()
        self.tp_group = get_neuron_vision_tp_group()
        self.dp_group = get_neuron_vision_dp_group()
        self.patch_embed = InternVLVisionPatchEmbed(config)
        self.pos_embed = InternVLVisionPositionEmbedding(config)
        self.blocks = nn.ModuleList(InternVLVisionBlock(config) for _ in range(config.depth))
        self.merger = InternVLVisionPatchMerger(config)

    def forward(
        self,
        pixel_values: torch.Tensor,
        pos_emb_idx: torch.Tensor,
        bound_min: torch.Tensor,
        bound_max: torch.Tensor,
        row_block_ids: torch.Tensor,
        row_offsets: torch.Tensor,
        encoder_cache_buffer: torch.Tensor,
        write_block_ids: torch.Tensor,
    ) -> torch.Tensor:
        """Encode packed patches and write the merged rows into the cache, in place.

        Args:
            pixel_values: `[n, S, P]`, model dtype; merge windows adjacent.
            pos_emb_idx: int32 `[n, S]`, row of the position table; 0 is the class token's.
            bound_min, bound_max: int32 `[n, S, 1]`, half-open range of patches of the same block
                that a patch sees.
            row_block_ids: int64 `[n, R]`, cache block of every merged row, -1 for padding.
            row_offsets: int64 `[n, R]`, its place in that block.
            encoder_cache_buffer: `[cache blocks, C, W]`.
            write_block_ids: int64 `[n]`, per vision block, the cache block that takes its padding
                rows (scratch).

        Returns:
            `encoder_cache_buffer`.
        """
        total = pixel_values.shape[0]
        if self.dp_group is not None:
            pixel_values, pos_emb_idx, bound_min, bound_max = (
                self._own_blocks(x, 0) for x in (pixel_values, pos_emb_idx, bound_min, bound_max)
            )
        hidden = self.patch_embed(pixel_values, pos_emb_idx)
        hidden = hidden + self.pos_embed(pos_emb_idx)
        for block in self.blocks:
            hidden = block(hidden, bound_min, bound_max)
        rows = self.merger(hidden)  # [n, R, W]
        if self.dp_group is not None:
            rows = self.dp_group.all_gather(rows, 0)
        blocks = torch.where(row_block_ids < 0, write_block_ids.view(total, 1), row_block_ids)
        encoder_cache_buffer.index_put_((blocks, row_offsets), rows.to(encoder_cache_buffer.dtype))
        return encoder_cache_buffer

    def _own_blocks(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """This data-parallel rank's share of the blocks along `dim`."""
        count = tensor.shape[dim] // self.dp_group.world_size
        return tensor.narrow(dim, self.dp_group.rank_in_group * count, count)
