"""GLM-4.5V for vLLM Neuron: the text decoder and the model that joins both towers.

Shapes: T padded tokens of a prefill, B padded requests of a decode step, H hidden size, D head
width, N query heads and K key/value heads of this rank, F = (N + 2K) * D, I MLP width of this
rank, V vocabulary, L = T / tp tokens of this rank (sequence parallel), P cache blocks readable by
one request, C merged rows per cache block, W width of one cache row, E experts.

A prefill is sequence parallel: between attention and MLP every rank holds L rows of the residual
stream; the full T rows are gathered before each of the two and scattered, summed, afterwards. A
decode step is not: partial results are summed over all ranks.
"""

import logging
from collections.abc import Sequence
from typing import Any

import torch
import vllm_neuron.functional as NF
import vllm_neuron.nn as neuron_nn
from nkilib.core.moe.moe_cte.moe_cte import MoECTEImplementation
from nkilib.core.utils.common_types import ExpertAffinityScaleMode
from torch import nn
from transformers import PretrainedConfig
from vllm.distributed.parallel_state import get_tp_group
from vllm_neuron.model.kv_cache import KVSpec, LayerSpec
from vllm_neuron.model.neuron_config import NeuronConfig, VisionNeuronConfig
from vllm_neuron.nn.embedding import VocabDimShardedEmbedding
from vllm_neuron.parallel.neuron_parallel_state import (
    get_neuron_ep_degree,
    get_neuron_ep_rank,
    get_neuron_vision_dp_group,
)
from vllm_neuron.utils.weight_loader import set_weight_loader
from vllm_neuron.vllm.worker.encoder_cache_blocks import EncoderCacheBlocks

from .config import Glm4vMoeConfig, Glm4vMoeTextConfig
from .utils.block_packing import VisionInputError, plan_vision_batch, select_vision_blocks
from .utils.merge_vision_embeds import merge_vision_embeddings
from .utils.mrope import compute_mrope_positions
from .utils.preprocessing import build_tower_inputs, warmup_tower_inputs
from .vision_encoder import Glm4vMoeVisionModel
from .weight_loaders import (
    column_parallel_loader,
    expert_down_loader,
    expert_gate_up_loader,
    fused_qkv_bias_loader,
    fused_qkv_loader,
    load_tower,
    open_checkpoint,
    row_parallel_loader,
    vocabulary_loader,
    whole_loader,
)

logger = logging.getLogger(__name__)

# One fork measured wrong results of the fused QKV kernel for widths from 3072 up, inside its own
# size gate, and nobody has confirmed or cleared it. Wider projections use a plain matrix product.
QKV_KERNEL_MAX_WIDTH = 3072

# Places of a block of tokens that one expert works on in a prefill.
EXPERT_BLOCK_SIZE = 256


class Glm4vMoeTextRMSNorm(nn.Module):
    """Root mean square norm: float32 statistics, rounded to the input's dtype, times the weight."""

    def __init__(self, width: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, dtype=dtype), requires_grad=False)
        set_weight_loader(param=self.weight, loader=whole_loader((width,)))
        self.eps = eps

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension: `[..., width]` -> `[..., width]`, same dtype."""
        x = hidden.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * x.to(hidden.dtype)


def rotary_inv_freq(head_dim: int, rotary_dim: int, theta: float) -> torch.Tensor:
    """Inverse frequencies, float32 `[D/2]`, on the CPU even while the model is built on meta.

    The pairs beyond the rotated part of a head have frequency zero: cosine 1 and sine 0 leave
    them as they are.
    """
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device="cpu") / rotary_dim
    unrotated = torch.zeros((head_dim - rotary_dim) // 2, dtype=torch.float32, device="cpu")
    return torch.cat([1.0 / (theta**exponents), unrotated])


class Glm4vMoeTextRotaryEmbedding(nn.Module):
    """Cosine and sine tables of the three-axis rotary embedding, sections one after another.

    The first frequencies take their angle from time, the next from height, the last from width:
    `8, 12, 12 -> t t ... h h ... w w ...`.
    Source: `recomposition_frequencies` in transformers.models.glm4v_moe.modeling_glm4v_moe.
    """

    def __init__(self, config: Glm4vMoeTextConfig) -> None:
        super().__init__()
        self.dtype = config.dtype
        self.mrope_section = config.mrope_section
        self.frequency_settings = (config.head_dim, config.rotary_dim, config.rope_theta)
        self.register_buffer(
            "inv_freq", rotary_inv_freq(*self.frequency_settings), persistent=False
        )

    def _apply(self, fn, recurse: bool = True):
        """Moves follow the module, casts do not: angles stay float32 whatever the model's dtype."""
        super()._apply(fn, recurse)
        if self.inv_freq.dtype != torch.float32:
            self.inv_freq = rotary_inv_freq(*self.frequency_settings).to(self.inv_freq.device)
        return self

    def forward(self, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cos and sin in model dtype, `[T, D/2]` each, for positions `[3, T]` (axes t, h, w)."""
        angles = position_ids[:, :, None].float() * self.inv_freq  # [3, T, D/2]
        picked = [angles[axis] * mask for axis, mask in enumerate(self._axis_masks(angles.device))]
        angle = picked[0] + picked[1] + picked[2]
        return angle.cos().to(self.dtype), angle.sin().to(self.dtype)

    def _axis_masks(self, device: torch.device) -> list[torch.Tensor]:
        """Per axis a float32 mask `[D/2]`; each frequency belongs to exactly one axis."""
        index = torch.arange(self.inv_freq.shape[0], device=device)
        time, height, _ = self.mrope_section
        is_height = (index >= time) & (index < time + height)
        is_width = index >= time + height
        return [(~(is_height | is_width)).float(), is_height.float(), is_width.float()]


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate pairs (i, i + D/2) of `x` `[heads, T, D]` by the angles of `cos`, `sin` `[T, D/2]`.

    The loader brings the two elements of a pair to these places (`head_order`).
    """
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Glm4vMoeTextAttention(nn.Module):
    """Grouped-query attention; prefill and decode share the weights.

    With more ranks than key/value heads, each head is held by tp / K ranks: rank r
    holds head r // (tp / K). Weights are stored `[in, out]`, as the kernels read them.
    """

    def __init__(self, config: Glm4vMoeTextConfig) -> None:
        super().__init__()
        self.tp_group = get_tp_group()
        tp_size = self.tp_group.world_size
        self.head_dim = config.head_dim
        self.num_heads = config.num_attention_heads // tp_size
        self.num_kv_heads = max(1, config.num_key_value_heads // tp_size)
        self.scale = config.head_dim**-0.5
        q_width, kv_width = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.fused_width = q_width + 2 * kv_width
        hidden_size = config.hidden_size

        self.qkv_proj_weight = nn.Parameter(
            torch.empty(hidden_size, self.fused_width, dtype=config.dtype), requires_grad=False
        )
        set_weight_loader(param=self.qkv_proj_weight, loader=fused_qkv_loader(config, tp_size))
        self.qkv_proj_bias = nn.Parameter(
            torch.empty(1, self.fused_width, dtype=config.dtype), requires_grad=False
        )
        set_weight_loader(param=self.qkv_proj_bias, loader=fused_qkv_bias_loader(config, tp_size))
        self.o_proj_weight = nn.Parameter(
            torch.empty(q_width, hidden_size, dtype=config.dtype), requires_grad=False
        )
        set_weight_loader(
            param=self.o_proj_weight,
            loader=row_parallel_loader(
                (hidden_size, config.num_attention_heads * self.head_dim), tp_size
            ),
        )
        self.k_cache: torch.Tensor | None = None  # [blocks, K, block size, D], bound by the runner
        self.v_cache: torch.Tensor | None = None

    def forward(
        self,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        positions: torch.Tensor,
        metadata: dict[str, Any],
    ) -> torch.Tensor:
        """Attend, and write the new keys and values into the cache.

        Args:
            hidden: normalised `[T, H]` or `[B, H]`.
            cos, sin: `[T, D/2]` or `[B, D/2]`.
            positions: int64 `[T]` or `[B]`, places in the sequence; in decode, how many earlier
                keys are visible.
            metadata: the runner's attention metadata of this layer.

        Returns:
            Partial sums `[T, H]` or `[B, H]`; the caller adds them over ranks.
        """
        if is_prefill(metadata):
            return self._prefill(hidden, cos, sin, metadata)
        return self._decode(hidden, cos, sin, positions, metadata)

    def _prefill(
        self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, metadata: dict[str, Any]
    ) -> torch.Tensor:
        tokens, d, n, k = hidden.shape[0], self.head_dim, self.num_heads, self.num_kv_heads
        if self.fused_width < QKV_KERNEL_MAX_WIDTH:
            qkv = NF.qkv_proj(
                hidden=hidden[None], qkv_weights=self.qkv_proj_weight, bias=self.qkv_proj_bias
            )[0]
        else:
            qkv = hidden @ self.qkv_proj_weight + self.qkv_proj_bias
        heads = qkv.view(tokens, n + 2 * k, d).transpose(0, 1)  # queries, keys, values
        query = rotate(heads[:n], cos, sin)
        key = rotate(heads[n : n + k], cos, sin)
        value = heads[n + k :].contiguous()
        self._write_cache(key.transpose(0, 1), value.transpose(0, 1), metadata)
        attended = NF.flash_attention(
            q=query.transpose(1, 2),  # [N, D, T]
            k=key.transpose(1, 2),  # [K, D, T]; query head i reads key head i // (N / K)
            v=value,
            scale=self.scale,
            causal_mask=True,
            tp_q=False,
            tp_k=False,
            tp_out=True,
        )
        return NF.o_proj(active=attended[None], weight=self.o_proj_weight)[0]

    def _decode(
        self,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        positions: torch.Tensor,
        metadata: dict[str, Any],
    ) -> torch.Tensor:
        table = metadata["block_table_tensor"]
        batch, d, k = table.shape[0], self.head_dim, self.num_kv_heads
        steps = hidden.shape[0] // batch
        cos, sin = (x.transpose(0, 1).reshape(d // 2, batch, steps) for x in (cos, sin))
        k_cache, v_cache, table = decode_cache_views(self.k_cache, self.v_cache, table)
        output, new_key, new_value = NF.attention_decode(
            X=hidden.view(batch, steps, -1),
            W_qkv=self.qkv_proj_weight,
            bias_qkv=self.qkv_proj_bias,
            cos=cos,
            sin=sin,
            rope_contiguous_layout=True,
            active_blocks_table=table,
            K_cache=k_cache,
            V_cache=v_cache,
            pos_ids=positions.view(batch, steps).float(),
            softmax_scale=self.scale,
            update_cache=False,
            W_out=self.o_proj_weight,
        )
        key = new_key.reshape(d, batch, k, steps).permute(1, 3, 2, 0).reshape(-1, k, d)
        value = new_value.transpose(1, 2).reshape(-1, k, d)
        self._write_cache(key, value, metadata)
        return output

    def _write_cache(
        self, key: torch.Tensor, value: torch.Tensor, metadata: dict[str, Any]
    ) -> None:
        """Write `[tokens, K, D]` at the tokens' slots; padding (0 or -1) lands in null block 0."""
        slots = metadata["slot_mapping"].clamp(min=0)[:, None]
        block_size = self.k_cache.shape[2]
        head = torch.arange(self.num_kv_heads, device=slots.device)
        index = (slots // block_size, head, slots % block_size)
        self.k_cache.index_put_(index, key.to(self.k_cache.dtype))
        self.v_cache.index_put_(index, value.to(self.v_cache.dtype))


def decode_cache_views(
    k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Caches and block table as the decode kernel takes them for this number of KV heads.

    One head: caches `[blocks, block size, D]` and the table `[B, n]`. Several: caches as they
    are, and on a device the table `[B, K, n]` with entries `block * K + head`, -1 kept; the CPU
    path takes the plain table.
    """
    kv_heads = k_cache.shape[1]
    if kv_heads == 1:
        return k_cache[:, 0], v_cache[:, 0], block_table
    if k_cache.device.type == "cpu":
        return k_cache, v_cache, block_table
    head = torch.arange(kv_heads, device=block_table.device, dtype=torch.int32)[None, :, None]
    table = torch.where(block_table[:, None] < 0, -1, block_table[:, None] * kv_heads + head)
    return k_cache, v_cache, table.to(torch.int32)


class Glm4vMoeTextMLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)). Weights are stored `[in, out]`."""

    def __init__(self, config: Glm4vMoeTextConfig, intermediate_size: int) -> None:
        super().__init__()
        tp_size = get_tp_group().world_size
        hidden_size, wide = config.hidden_size, intermediate_size
        width = wide // tp_size
        self.gate_proj_weight = nn.Parameter(
            torch.empty(hidden_size, width, dtype=config.dtype), requires_grad=False
        )
        self.up_proj_weight = nn.Parameter(
            torch.empty(hidden_size, width, dtype=config.dtype), requires_grad=False
        )
        self.down_proj_weight = nn.Parameter(
            torch.empty(width, hidden_size, dtype=config.dtype), requires_grad=False
        )
        set_weight_loader(
            param=self.gate_proj_weight, loader=column_parallel_loader((wide, hidden_size), tp_size)
        )
        set_weight_loader(
            param=self.up_proj_weight, loader=column_parallel_loader((wide, hidden_size), tp_size)
        )
        set_weight_loader(
            param=self.down_proj_weight, loader=row_parallel_loader((hidden_size, wide), tp_size)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[T, H]` -> partial sums `[T, H]`; the caller adds them over ranks."""
        return NF.mlp(
            hidden=hidden,
            gate_w=self.gate_proj_weight,
            up_w=self.up_proj_weight,
            down_w=self.down_proj_weight,
        )


class Glm4vMoeTextMoE(nn.Module):
    """Experts in the place of the MLP: a router chooses some of E SwiGLU experts for every token.

    The router's weight is float32. Experts are stored `[E, in, out]`, gate before up.
    Every token also passes the shared experts, which are one MLP.
    """

    def __init__(self, config: Glm4vMoeTextConfig) -> None:
        super().__init__()
        experts, hidden_size = config.num_experts, config.hidden_size
        self.top_k, self.ep_degree = config.num_experts_per_tok, get_neuron_ep_degree()
        # This rank's experts, and how much of the width of each it holds.
        self.num_local_experts = experts // self.ep_degree
        width = config.moe_intermediate_size // (get_tp_group().world_size // self.ep_degree)
        ep_rank = get_neuron_ep_rank()
        first = ep_rank * self.num_local_experts
        local_experts = torch.arange(
            first, first + self.num_local_experts, dtype=torch.int64, device="cpu"
        )
        self.register_buffer("local_experts", local_experts, persistent=False)
        self.routed_scale = config.routed_scale
        self.router_weight = nn.Parameter(
            torch.empty(hidden_size, experts, dtype=torch.float32), requires_grad=False
        )
        set_weight_loader(
            param=self.router_weight, loader=column_parallel_loader((experts, hidden_size), 1)
        )
        self.correction_bias = nn.Parameter(
            torch.empty(experts, dtype=torch.float32), requires_grad=False
        )
        set_weight_loader(param=self.correction_bias, loader=whole_loader((experts,)))
        self.gate_up_weight = nn.Parameter(
            torch.empty(self.num_local_experts, hidden_size, 2, width, dtype=config.dtype),
            requires_grad=False,
        )
        set_weight_loader(param=self.gate_up_weight, loader=expert_gate_up_loader(config, width))
        self.down_weight = nn.Parameter(
            torch.empty(self.num_local_experts, width, hidden_size, dtype=config.dtype),
            requires_grad=False,
        )
        set_weight_loader(param=self.down_weight, loader=expert_down_loader(config, width))
        self.shared = Glm4vMoeTextMLP(
            config, config.num_shared_experts * config.moe_intermediate_size
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normalised `[T, H]` -> partial sums `[T, H]`; the caller adds them over ranks."""
        affinities = self.route(hidden)
        if self.ep_degree > 1:
            affinities = NF.get_local_expert_affinities(
                expert_affinities=affinities, local_expert_indices=self.local_experts
            )
        affinities, token_of_place, expert_of_block, _ = NF.build_blockwise_mapping(
            expert_affinities=affinities,
            num_local_experts=self.num_local_experts,
            num_experts_per_token=self.top_k,
            block_size=EXPERT_BLOCK_SIZE,
            moe_group=None,
        )
        routed = NF.moe_cte(
            hidden_states=hidden,
            expert_affinities_masked=affinities,
            gate_up_proj_weight=self.gate_up_weight,
            down_proj_weight=self.down_weight,
            token_position_to_id=token_of_place,
            block_to_expert=expert_of_block,
            block_size=EXPERT_BLOCK_SIZE,
            implementation=MoECTEImplementation.shard_on_block,
            skip_token=True,
            compute_dtype=hidden.dtype,
            expert_affinities_scaling_mode=ExpertAffinityScaleMode.POST_SCALE,
        )
        return routed + self.shared(hidden)

    def route(self, hidden: torch.Tensor) -> torch.Tensor:
        """Weights of the chosen experts, float32 `[T, E]`, zero elsewhere: sigmoid scores, of which
        the best with the correction bias added count, without it.
        """
        scores = torch.sigmoid(hidden.float() @ self.router_weight)
        chosen = torch.topk(scores + self.correction_bias, self.top_k, dim=-1).indices
        # By a mask and not by index: on a device every element taken by index is a transfer.
        expert = torch.arange(scores.shape[-1], device=scores.device)
        weights = scores * (chosen[..., None] == expert).any(1)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * self.routed_scale


class Glm4vMoeTextDecoderLayer(nn.Module):
    """Pre-norm residual layer: attention, then MLP or experts."""

    def __init__(self, config: Glm4vMoeTextConfig, index: int) -> None:
        super().__init__()
        self.tp_group = get_tp_group()
        self.input_layernorm = Glm4vMoeTextRMSNorm(
            config.hidden_size, config.rms_norm_eps, config.dtype
        )
        self.self_attn = Glm4vMoeTextAttention(config)
        self.post_attention_layernorm = Glm4vMoeTextRMSNorm(
            config.hidden_size, config.rms_norm_eps, config.dtype
        )
        self.has_experts = index >= config.first_dense
        self.mlp = (
            Glm4vMoeTextMoE(config)
            if self.has_experts
            else Glm4vMoeTextMLP(config, config.intermediate_size)
        )

    def forward(
        self,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        positions: torch.Tensor,
        metadata: dict[str, Any],
    ) -> torch.Tensor:
        """One layer on `[L, H]` (prefill, this rank's rows) or `[B, H]` (decode)."""
        prefill = is_prefill(metadata)
        full = self._gather(self.input_layernorm(hidden), prefill)
        hidden = hidden + self._reduce(self.self_attn(full, cos, sin, positions, metadata), prefill)
        partial = self.mlp(self._gather(self.post_attention_layernorm(hidden), prefill))
        return hidden + self._reduce(partial, prefill)

    def _gather(self, hidden: torch.Tensor, prefill: bool) -> torch.Tensor:
        """Prefill: all rows of all ranks, `[L, H]` -> `[T, H]`. Decode: they are here already."""
        return (
            self.tp_group.all_gather(hidden, 0)
            if prefill and self.tp_group.world_size > 1
            else hidden
        )

    def _reduce(self, partial: torch.Tensor, prefill: bool) -> torch.Tensor:
        """Sum over ranks; in prefill each rank keeps its own rows, `[T, H]` -> `[L, H]`."""
        if self.tp_group.world_size == 1:
            return partial
        return (
            self.tp_group.reduce_scatter(partial, 0)
            if prefill
            else self.tp_group.all_reduce(partial)
        )


class Glm4vMoeTextModel(nn.Module):
    """The stack of decoder layers, from token ids to normalised hidden states."""

    def __init__(self, config: Glm4vMoeTextConfig) -> None:
        super().__init__()
        self.tp_group = get_tp_group()
        tp_size = self.tp_group.world_size
        self.embed_tokens = VocabDimShardedEmbedding(
            vocab_size=config.padded_vocab_size(tp_size),
            embed_dim=config.hidden_size,
            dtype=config.dtype,
            tp_group=self.tp_group.device_group,
        )
        set_weight_loader(param=self.embed_tokens.weight, loader=vocabulary_loader(config, tp_size))
        self.layers = nn.ModuleList(
            Glm4vMoeTextDecoderLayer(config, index) for index in range(config.num_hidden_layers)
        )
        self.norm = Glm4vMoeTextRMSNorm(config.hidden_size, config.rms_norm_eps, config.dtype)
        self.rotary_emb = Glm4vMoeTextRotaryEmbedding(config)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        rotary_position_ids: torch.Tensor,
        attn_metadata: dict[str, dict[str, Any]],
        rank: torch.Tensor | None,
        vision_embedding_blocks: Sequence[torch.Tensor] | None,
        vision_positions: torch.Tensor | None,
    ) -> torch.Tensor:
        """Run all layers.

        Args:
            input_ids: int32 `[T]` (prefill) or `[B]` (decode).
            positions: int64 `[T]` or `[B]`, places in the sequence.
            rotary_position_ids: int64 `[3, T]` or `[3, B]`, axes t, h, w.
            attn_metadata: per layer name, the runner's attention metadata.
            rank: int32 scalar, this rank in the text group; a tensor, so that no rank is baked
                into a graph.
            vision_embedding_blocks: P tensors `[C, W]` (prefill of a multimodal model), else None.
            vision_positions: int64 `[P, C]`, token index of every row, T where a row has no place.

        Returns:
            Normalised hidden states `[T, H]` or `[B, H]`, complete on every rank.
        """
        first = attn_metadata[layer_name(0)]
        prefill = is_prefill(first)
        if prefill:
            _check_prefill_length(input_ids.shape[0], self.tp_group.world_size)
        cos, sin = self.rotary_emb(rotary_position_ids)
        hidden = self.embed_tokens(input_ids, scatter_tokens=prefill, rank=rank)
        if vision_embedding_blocks is not None:
            hidden = merge_vision_embeddings(
                hidden, vision_embedding_blocks, vision_positions, rank
            )
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, cos, sin, positions, attn_metadata[layer_name(index)])
        hidden = self.norm(hidden)
        return self.tp_group.all_gather(hidden, 0) if prefill else hidden


class Glm4vMoeNeuronModel(nn.Module):
    """Both towers and the output head; the object that the runner drives.

    The runner compiles `visual` on its own; `forward` is the text decoder with the vision merge.
    """

    def __init__(self, config: Glm4vMoeConfig) -> None:
        super().__init__()
        self.config = config
        text = config.text_config
        self.tp_group = get_tp_group()
        self.tp_size = self.tp_group.world_size
        self.neuron_config = text.neuron_config or NeuronConfig()
        self.vision_neuron_config = config.vision_config.neuron_config
        sampling = self.neuron_config.on_device_sampling_config

        self.visual = (
            None if self.vision_neuron_config is None else Glm4vMoeVisionModel(config.vision_config)
        )
        self.language_model = Glm4vMoeTextModel(text)
        self.lm_head = neuron_nn.ColumnParallelLinear(
            in_features=text.hidden_size,
            out_features=text.padded_vocab_size(self.tp_size),
            bias=False,
            gather_output=sampling is None,
            dtype=text.dtype,
            tp_group=self.tp_group.device_group,
        )
        set_weight_loader(param=self.lm_head.weight, loader=vocabulary_loader(text, self.tp_size))
        self.sampler = (
            None
            if sampling is None
            else neuron_nn.Sampler(
                sampling_config=sampling, process_group=self.tp_group.device_group
            )
        )

    @classmethod
    def from_configs(
        cls,
        hf_config: PretrainedConfig,
        neuron_config: NeuronConfig | None = None,
        *,
        text_neuron_config: NeuronConfig | None = None,
        vision_neuron_config: VisionNeuronConfig | None = None,
    ) -> "Glm4vMoeNeuronModel":
        """Build from a Hugging Face configuration; see `Glm4vMoeConfig.from_configs`."""
        config = Glm4vMoeConfig.from_configs(
            hf_config,
            neuron_config,
            text_neuron_config=text_neuron_config,
            vision_neuron_config=vision_neuron_config,
        )
        return cls(config)

    # ------------------------------------------------------------------ text

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        rotary_position_ids: torch.Tensor,
        attn_metadata: dict[str, dict[str, Any]] | None = None,
        sampling_positions: torch.Tensor | None = None,
        sampling_params: torch.Tensor | None = None,
        spec_decode_metadata: Any = None,
        logit_mask: torch.Tensor | None = None,
        rank: torch.Tensor | None = None,
        vision_embedding_blocks: Sequence[torch.Tensor] | None = None,
        vision_positions: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor | None]:
        """One prefill or one decode step, as the runner calls it (all arguments by keyword).

        Args:
            input_ids: int32 `[T]` or `[B]`.
            positions: int64 `[T]` or `[B]`, places in the sequence; only the decode attention
                uses them.
            rotary_position_ids: int64 `[3, T]` or `[3, B]`; mandatory, they differ from
                `positions` after an image.
            attn_metadata: layer name -> metadata of its cache group.
            sampling_positions: int64 `[R]`, rows whose logits are wanted.
            sampling_params: float32 `[R, 3]`: top-k, top-p, temperature; None without on-device
                sampling.
            spec_decode_metadata: must be None; speculative decoding is not implemented.
            logit_mask: bool, True where a token is allowed; full width or this rank's shard.
            rank: int32 scalar tensor, rank in the text tensor-parallel group.
            vision_embedding_blocks: P tensors `[C, W]`, in every prefill of a multimodal model.
            vision_positions: int64 `[P, C]`.

        Returns:
            Logits `[R, V]` without on-device sampling, else token ids int32 `[R]` and the
            gathered logits
            `[R, V]` (None unless log-probabilities or a logits dump were configured).

        Raises:
            ValueError: speculative decoding was asked for, or a prefill length that the ranks
                cannot share.
        """
        if spec_decode_metadata is not None:
            raise ValueError("speculative decoding is not implemented by the glm4v_moe package")
        hidden = self.language_model(
            input_ids,
            positions,
            rotary_position_ids,
            attn_metadata,
            rank,
            vision_embedding_blocks,
            vision_positions,
        )
        logits = self.lm_head(hidden[sampling_positions])
        vocab_size = self.config.text_config.vocab_size
        if self.sampler is None:
            logits = logits[:, :vocab_size]
            return (
                logits
                if logit_mask is None
                else logits.masked_fill(~logit_mask[:, :vocab_size], float("-inf"))
            )
        logits = self._mask_padded_vocabulary(logits, rank)
        token_ids = self.sampler(
            logits, sampling_params=sampling_params, logit_mask=logit_mask, tp_rank=rank
        )
        if not self.neuron_config.max_logprobs and self.neuron_config.debug_logits_dir is None:
            return token_ids, None
        return token_ids, self.tp_group.all_gather(logits, 1)[:, :vocab_size]

    def _mask_padded_vocabulary(
        self, logits: torch.Tensor, rank: torch.Tensor | None
    ) -> torch.Tensor:
        """Rows added to make the vocabulary divisible must never be sampled: `[R, V/tp]`, tail
        set to -inf.
        """
        text = self.config.text_config
        if text.padded_vocab_size(self.tp_size) == text.vocab_size:
            return logits
        columns = torch.arange(logits.shape[-1], device=logits.device) + rank * logits.shape[-1]
        return logits.masked_fill(columns >= text.vocab_size, float("-inf"))

    # ---------------------------------------------------------------- vision

    def embed_multimodal(
        self,
        pixel_values: torch.Tensor | None = None,
        image_grid_thw: torch.Tensor | None = None,
        encoder_cache: EncoderCacheBlocks | None = None,
        mm_hashes: Sequence[str] | None = None,
        pixel_values_videos: torch.Tensor | None = None,
        video_grid_thw: torch.Tensor | None = None,
        **_: Any,
    ) -> None:
        """Run the tower on the items of one modality and write their rows into the encoder cache.

        Everything that can be refused is refused before a cache block is taken.

        Args:
            pixel_values, pixel_values_videos: `[sum of t*h*w, patch_dim]` from the Hugging Face
                processor, merge windows adjacent; exactly one of the two.
            image_grid_thw, video_grid_thw: int64 `[items, 3]`, in patches.
            encoder_cache: the runner's cache; each of its blocks holds C rows of one item.
            mm_hashes: one cache key per item; a key that occurs twice is encoded once.

        Raises:
            VisionInputError: with the numbers and the legal values.
        """
        if (pixel_values is None) == (pixel_values_videos is None):
            raise VisionInputError(
                "exactly one of pixel_values and pixel_values_videos must be given"
            )
        pixels = pixel_values if pixel_values is not None else pixel_values_videos
        grid = image_grid_thw if pixel_values is not None else video_grid_thw
        vision = self.config.vision_config
        neuron = self.vision_neuron_config
        batch = plan_vision_batch(
            grid_thw=grid,
            keys=mm_hashes,
            pixels_shape=tuple(pixels.shape),
            config=vision,
            block_size=neuron.vision_attention_block_size,
        )
        num_blocks = select_vision_blocks(
            batch,
            buckets=neuron.num_vision_tokens_buckets,
            dp_size=self._vision_dp_size(),
            free_blocks=encoder_cache.buffer.shape[0] - 1,
        )
        block_ids = {
            item.key: encoder_cache.allocate(
                mm_hash=item.key, tokens_per_block=item.rows_per_cache_block
            )
            for item in batch.items
        }
        inputs = build_tower_inputs(
            batch,
            pixels,
            num_blocks=num_blocks,
            block_ids=block_ids,
            scratch_block_id=encoder_cache.scratch_block_id,
            config=vision,
        )
        device = encoder_cache.buffer.device
        self.visual(
            **{name: tensor.to(device) for name, tensor in inputs.items()},
            encoder_cache_buffer=encoder_cache.buffer,
        )

    @staticmethod
    def _vision_dp_size() -> int:
        group = get_neuron_vision_dp_group()
        return 1 if group is None else group.world_size

    def build_vision_synthetic_inputs(
        self, bucket: int, vision_neuron_config: VisionNeuronConfig, device: torch.device
    ) -> dict[str, torch.Tensor]:
        """Tower inputs of one bucket for warm-up: shapes and dtypes of `embed_multimodal`'s,
        values zero.

        The runner adds `encoder_cache_buffer` and `write_block_ids`.
        """
        block_size = vision_neuron_config.vision_attention_block_size
        dp_size = self._vision_dp_size()
        num_blocks = -(-bucket // (block_size * dp_size)) * dp_size
        return warmup_tower_inputs(num_blocks, block_size, self.config.vision_config, device)

    def get_mrope_input_positions(
        self, input_tokens: Sequence[int], mm_features: Sequence[Any]
    ) -> tuple[torch.Tensor, int]:
        """Three-axis positions of a new request; see `utils/mrope.py`.

        Returns:
            int64 `[3, n]` with axes t, h, w, and the number to add to a token's place for its
            position in decode.
        """
        return compute_mrope_positions(input_tokens, mm_features, self.config)

    # ------------------------------------------------------- cache and weights

    def get_kv_spec(self) -> KVSpec:
        """One cache per decoder layer; head counts are per rank."""
        attention = self.language_model.layers[0].self_attn
        return KVSpec(
            layers=[
                LayerSpec(
                    name=layer_name(index),
                    num_kv_heads=attention.num_kv_heads,
                    head_size=attention.head_dim,
                    dtype=self.config.text_config.dtype,
                )
                for index in range(len(self.language_model.layers))
            ]
        )

    def bind_kv_cache(self, kv_caches: dict[str, Sequence[torch.Tensor]]) -> None:
        """Hand each layer its key and value cache, `[blocks, K, block size, D]` each.

        Raises:
            KeyError: names missing or unknown.
        """
        wanted = {layer_name(index) for index in range(len(self.language_model.layers))}
        if set(kv_caches) != wanted:
            missing, unknown = sorted(wanted - set(kv_caches)), sorted(set(kv_caches) - wanted)
            raise KeyError(f"kv caches: missing {missing}, unknown {unknown}")
        for index, layer in enumerate(self.language_model.layers):
            layer.self_attn.k_cache, layer.self_attn.v_cache = kv_caches[layer_name(index)]

    def load_weights(
        self, checkpoint_path: str, device: torch.device, cache_dir: str | None = None
    ) -> None:
        """Load both towers from a local folder or a hub id.

        Names are checked before anything is read, shapes while reading; on an error the model is
        left as it was.

        Raises:
            CheckpointError: keys missing or unknown, a wrong shape, a head that contradicts the
                tie flag.
        """
        checkpoint, mappings = open_checkpoint(
            checkpoint_path, cache_dir, self.config, self.visual is not None
        )
        loaded = [
            load_tower(
                checkpoint, module, mappings[name], device=device, rank=rank, world_size=world_size
            )
            for name, module, rank, world_size in self._towers()
        ]
        for (_, module, _, _), state in zip(self._towers(), loaded, strict=True):
            module.load_state_dict(state, strict=True, assign=True)

    def _towers(self) -> list[tuple[str, nn.Module, int, int]]:
        """(name, module, rank, world size) of everything that is loaded as a unit."""
        rank, world_size = self.tp_group.rank_in_group, self.tp_group.world_size
        towers = [
            ("text", self.language_model, rank, world_size),
            ("head", self.lm_head, rank, world_size),
        ]
        if self.visual is not None:
            group = self.visual.tp_group
            towers.append(("vision", self.visual, group.rank_in_group, group.world_size))
        return towers


def layer_name(index: int) -> str:
    """Name of a decoder layer's cache, shared by the cache spec and the attention metadata."""
    return f"layers.{index}.self_attn"


def is_prefill(metadata: dict[str, Any]) -> bool:
    """Prefill or decode: decided by Python integers of the metadata, so each is a graph of its
    own.
    """
    return metadata["max_query_len"] > metadata["decode_token_threshold"]


def _check_prefill_length(num_tokens: int, tp_size: int) -> None:
    if tp_size > 1 and (num_tokens % tp_size or num_tokens <= tp_size):
        raise ValueError(
            f"a prefill of {num_tokens} tokens cannot be shared by {tp_size} ranks: the padded "
            "length must be a "
            f"multiple of {tp_size} and larger than it; choose num_batched_tokens_buckets "
            "accordingly"
        )
