"""Vision tower of GLM-4.1V: patches in fixed-size attention blocks, merged rows into the
encoder cache.

Shapes: n vision blocks of this call (of this rank under vision data parallelism), S patches per
block (vision_attention_block_size), P values per patch, H tower width, N heads of this rank, D
head width, m patches per merged row, R = S / m merged rows per block, W width of one cache row, C
rows per cache block.

Several images may share a block: `bound_min` and `bound_max` keep every patch within its own
frame.

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

from .config import Glm4vVisionConfig
from .weight_loaders import (
    column_parallel_bias_loader,
    column_parallel_loader,
    merge_conv_loader,
    patch_embed_loader,
    row_parallel_loader,
    vision_qkv_loader,
    whole_loader,
)


def silu(x: torch.Tensor) -> torch.Tensor:
    """SiLU, in float32."""
    y = x.float()
    return (y * torch.sigmoid(y)).to(x.dtype)


def gelu(x: torch.Tensor) -> torch.Tensor:
    """Exact GELU through erf, in float32; written out, as the device's own does not trace."""
    y = x.float()
    return (0.5 * y * (1.0 + torch.erf(y * 0.7071067811865476))).to(x.dtype)


def _parameter(*shape: int, dtype: torch.dtype, loader) -> nn.Parameter:
    parameter = nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)
    set_weight_loader(param=parameter, loader=loader)
    return parameter


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x @ weight + bias`, weight `[in, out]`; the bias joins the accumulator, one rounding."""
    return nn.functional.linear(x, weight.t(), bias)


def row_parallel_linear(group: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`linear` over this rank's inputs, summed over the group."""
    return x @ weight if group.world_size == 1 else group.all_reduce(x @ weight)


class Glm4vVisionRMSNorm(nn.Module):
    """Root mean square norm: float32 statistics, rounded to the input's dtype, times the weight."""

    def __init__(self, width: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = _parameter(width, dtype=dtype, loader=whole_loader((width,)))
        self.eps = eps

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension: `[..., width]` -> `[..., width]`, same dtype."""
        x = hidden.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * x.to(hidden.dtype)


def layer_norm(width: int, eps: float, dtype: torch.dtype) -> nn.LayerNorm:
    """Layer norm over `width` with weight and bias."""
    norm = nn.LayerNorm(width, eps=eps, dtype=dtype)
    norm.requires_grad_(False)
    set_weight_loader(param=norm.weight, loader=whole_loader((width,)))
    set_weight_loader(param=norm.bias, loader=whole_loader((width,)))
    return norm


class Glm4vVisionPatchEmbed(nn.Module):
    """Patch embedding; the checkpoint's Conv3d has stride = kernel: one matrix product a patch."""

    def __init__(self, config: Glm4vVisionConfig) -> None:
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

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """`[n, S, P]` -> `[n, S, H]`."""
        return linear(pixel_values, self.proj_weight, self.proj_bias)


class Glm4vVisionPositionEmbedding(nn.Module):
    """Learned square table of positions, sixteen rows weighted for each patch."""

    def __init__(self, config: Glm4vVisionConfig) -> None:
        super().__init__()
        shape = (config.num_position_embeddings, config.hidden_size)
        self.pos_embed_weight = _parameter(*shape, dtype=config.dtype, loader=whole_loader(shape))

    def forward(self, index: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Table rows `[16, n, S]` and float32 weights `[16, n, S]` -> `[n, S, H]` in the table's
        dtype.
        """
        rows = nn.functional.embedding(index, self.pos_embed_weight)  # [16, n, S, H]
        return (rows * weight[..., None]).sum(0).to(self.pos_embed_weight.dtype)


class Glm4vVisionAttention(nn.Module):
    """Bidirectional attention within bounds, from one matrix [Q of all heads | K | V]."""

    def __init__(self, config: Glm4vVisionConfig) -> None:
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
        self.proj_weight = _parameter(
            self.width,
            hidden_size,
            dtype=dtype,
            loader=row_parallel_loader((hidden_size, hidden_size), tp_size),
        )

    def forward(
        self,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        bound_min: torch.Tensor,
        bound_max: torch.Tensor,
    ) -> torch.Tensor:
        """`[n, S, H]` -> `[n, S, H]`, complete on every rank."""
        blocks, patches = hidden.shape[:2]
        qkv = linear(hidden, self.qkv_weight)
        query = self._heads(qkv[..., : self.width])
        key = self._heads(qkv[..., self.width : 2 * self.width])
        value = self._heads(qkv[..., 2 * self.width :])
        cos, sin = cos[:, None], sin[:, None]  # [n, 1, S, D]
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
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
        return row_parallel_linear(self.tp_group, joined, self.proj_weight)

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        """`[n, S, N * D]` -> `[n, N, S, D]`."""
        return x.view(*x.shape[:2], self.num_heads, self.head_dim).transpose(1, 2)

    def _per_head(self, bound: torch.Tensor) -> torch.Tensor:
        """`[n, S, 1]` -> `[n * N, S, 1]`."""
        blocks, patches = bound.shape[:2]
        return bound[:, None].expand(blocks, self.num_heads, patches, 1).reshape(-1, patches, 1)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate pairs (i, i + D/2) of `x` `[n, N, S, D]` in float32; tables `[n, 1, S, D]`."""
    y = x.float()
    half = y.shape[-1] // 2
    turned = torch.cat((-y[..., half:], y[..., :half]), dim=-1)
    return (y * cos + turned * sin).to(x.dtype)


class Glm4vVisionMLP(nn.Module):
    """Gated MLP, down(silu(gate(x)) * up(x)); matrices are stored `[in, out]`."""

    def __init__(self, config: Glm4vVisionConfig) -> None:
        super().__init__()
        self.tp_group = get_neuron_vision_tp_group()
        tp_size = self.tp_group.world_size
        wide, width, hidden_size = (
            config.intermediate_size,
            config.intermediate_size // tp_size,
            config.hidden_size,
        )
        self.gate_weight = _parameter(
            hidden_size,
            width,
            dtype=config.dtype,
            loader=column_parallel_loader((wide, hidden_size), tp_size),
        )
        self.up_weight = _parameter(
            hidden_size,
            width,
            dtype=config.dtype,
            loader=column_parallel_loader((wide, hidden_size), tp_size),
        )
        self.down_weight = _parameter(
            width,
            hidden_size,
            dtype=config.dtype,
            loader=row_parallel_loader((hidden_size, wide), tp_size),
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[n, S, H]` -> `[n, S, H]`, complete on every rank."""
        gate = silu(linear(hidden, self.gate_weight))
        hidden = gate * linear(hidden, self.up_weight)
        return row_parallel_linear(self.tp_group, hidden, self.down_weight)


class Glm4vVisionBlock(nn.Module):
    """Pre-norm residual block: attention, then MLP."""

    def __init__(self, config: Glm4vVisionConfig) -> None:
        super().__init__()
        self.norm1 = Glm4vVisionRMSNorm(config.hidden_size, config.rms_norm_eps, config.dtype)
        self.norm2 = Glm4vVisionRMSNorm(config.hidden_size, config.rms_norm_eps, config.dtype)
        self.attn = Glm4vVisionAttention(config)
        self.mlp = Glm4vVisionMLP(config)

    def forward(
        self,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        bound_min: torch.Tensor,
        bound_max: torch.Tensor,
    ) -> torch.Tensor:
        """`[n, S, H]` -> `[n, S, H]`; arguments as in `Glm4vVisionModel.forward`."""
        hidden = hidden + self.attn(self.norm1(hidden), cos, sin, bound_min, bound_max)
        return hidden + self.mlp(self.norm2(hidden))


class Glm4vVisionPatchMerger(nn.Module):
    """Convolve each merge window into one row of the text width, then a projection and a gated MLP.

    Kernel and stride are the window, whose patches are adjacent: one matrix product over the
    joined window. The projection is sharded so that a single sum over ranks precedes the norm.
    """

    def __init__(self, config: Glm4vVisionConfig) -> None:
        super().__init__()
        self.tp_group = get_neuron_vision_tp_group()
        tp_size = self.tp_group.world_size
        self.merge_area = config.merge_area
        joined, out, wide = (
            config.hidden_size * config.merge_area,
            config.out_hidden_size,
            config.merger_intermediate_size,
        )
        own, width, dtype = out // tp_size, wide // tp_size, config.dtype
        self.conv_weight = _parameter(
            joined, own, dtype=dtype, loader=merge_conv_loader(config, tp_size)
        )
        self.conv_bias = _parameter(
            own, dtype=dtype, loader=column_parallel_bias_loader(out, tp_size)
        )
        self.fc1_weight = _parameter(
            own, out, dtype=dtype, loader=row_parallel_loader((out, out), tp_size)
        )
        self.norm = layer_norm(out, 1e-05, config.dtype)
        self.gate_weight = _parameter(
            out, width, dtype=dtype, loader=column_parallel_loader((wide, out), tp_size)
        )
        self.up_weight = _parameter(
            out, width, dtype=dtype, loader=column_parallel_loader((wide, out), tp_size)
        )
        self.down_weight = _parameter(
            width, out, dtype=dtype, loader=row_parallel_loader((out, wide), tp_size)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[n, S, H]` -> `[n, S / m, text width]`, complete on every rank."""
        blocks, patches, width = hidden.shape
        hidden = hidden.reshape(blocks, patches // self.merge_area, width * self.merge_area)
        hidden = linear(hidden, self.conv_weight, self.conv_bias)
        hidden = gelu(self.norm(row_parallel_linear(self.tp_group, hidden, self.fc1_weight)))
        gate = silu(linear(hidden, self.gate_weight))
        hidden = gate * linear(hidden, self.up_weight)
        return row_parallel_linear(self.tp_group, hidden, self.down_weight)


class Glm4vVisionModel(nn.Module):
    """The complete tower; compiled by the runner as one graph per vision bucket."""

    def __init__(self, config: Glm4vVisionConfig) -> None:
        super().__init__()
        self.tp_group = get_neuron_vision_tp_group()
        self.dp_group = get_neuron_vision_dp_group()
        self.patch_embed = Glm4vVisionPatchEmbed(config)
        self.embed_norm = Glm4vVisionRMSNorm(config.hidden_size, config.rms_norm_eps, config.dtype)
        self.pos_embed = Glm4vVisionPositionEmbedding(config)
        self.blocks = nn.ModuleList(Glm4vVisionBlock(config) for _ in range(config.depth))
        self.final_norm = Glm4vVisionRMSNorm(config.hidden_size, config.rms_norm_eps, config.dtype)
        self.merger = Glm4vVisionPatchMerger(config)

    def forward(
        self,
        pixel_values: torch.Tensor,
        pos_emb_idx: torch.Tensor,
        pos_emb_weight: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
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
            pos_emb_idx: int32 `[16, n, S]`, rows of the position table around each patch.
            pos_emb_weight: float32 `[16, n, S]`, their weights.
            cos, sin: float32 `[n, S, D]`, both halves equal.
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
            pixel_values, cos, sin, bound_min, bound_max = (
                self._own_blocks(x, 0) for x in (pixel_values, cos, sin, bound_min, bound_max)
            )
            pos_emb_idx, pos_emb_weight = (
                self._own_blocks(x, 1) for x in (pos_emb_idx, pos_emb_weight)
            )
        hidden = self.patch_embed(pixel_values)
        hidden = self.embed_norm(hidden)
        hidden = hidden + self.pos_embed(pos_emb_idx, pos_emb_weight)
        for block in self.blocks:
            hidden = block(hidden, cos, sin, bound_min, bound_max)
        hidden = self.final_norm(hidden)
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
