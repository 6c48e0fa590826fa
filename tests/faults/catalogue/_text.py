"""Wrong variants of text decoders, by what a decoder has; the catalogues pick from them."""

from __future__ import annotations

from . import CONFIG, LOADERS, MODEL, Fault

PREFILL = "test_text.py::test_attention_prefill"
TABLES = "test_text.py::test_rotary_tables"
LAYER = "test_text.py::test_decoder_layer"
ROUTER = "test_text.py::test_router"
EXPERTS = "test_text.py::test_experts"
DECODE = "test_text.py::test_experts_of_a_decode_step"
SHARDS = "test_weights.py::test_expert_shards_of_all_ranks_are_the_experts"

BIAS = (
    Fault(
        "the bias of Q, K and V forgotten in a decode step",
        MODEL,
        "            bias_qkv=self.qkv_proj_bias,\n",
        "",
        "test_text.py::test_attention_decode_reads_what_prefill_wrote",
    ),
    Fault(
        "the bias of Q, K and V forgotten where the projection goes around the kernel",
        MODEL,
        "qkv = hidden @ self.qkv_proj_weight + self.qkv_proj_bias",
        "qkv = hidden @ self.qkv_proj_weight",
        "test_text.py::test_a_wide_projection_goes_around_the_kernel",
    ),
    Fault(
        "the bias of K and V of the wrong rank, where ranks share a head",
        LOADERS,
        "local // replicas * kv_width, local // replicas * kv_width)",
        "local * kv_width, local * kv_width)",
        "test_weights.py::test_fused_qkv_holds_each_ranks_own_heads",
    ),
)

NO_HEAD_NORM = (
    Fault(
        "queries normalised per head in a family without that norm",
        MODEL,
        "query = rotate(heads[:n], cos, sin)",
        "query = rotate(nn.functional.rms_norm(heads[:n], (d,)), cos, sin)",
        PREFILL,
    ),
)

HEAD_NORM = (
    Fault(
        "queries rotated before they are normalised",
        MODEL,
        "query = rotate(self.q_layernorm(heads[:n]), cos, sin)",
        "query = self.q_layernorm(rotate(heads[:n], cos, sin))",
        PREFILL,
    ),
    Fault(
        "the norm of the queries used for the keys",
        MODEL,
        "key = rotate(self.k_layernorm(heads[n : n + k]), cos, sin)",
        "key = rotate(self.q_layernorm(heads[n : n + k]), cos, sin)",
        PREFILL,
    ),
    Fault(
        "head norms with the default eps in a decode step",
        MODEL,
        "rmsnorm_QK_pre_rope_eps=self.q_layernorm.eps,",
        "rmsnorm_QK_pre_rope_eps=1e-6,",
        "test_text.py::test_decode_uses_the_checkpoints_eps",
    ),
)

CONTIGUOUS = (
    Fault(
        "interleaved sections instead of one after another",
        MODEL,
        "is_height = (index >= time) & (index < time + height)\n"
        "        is_width = index >= time + height",
        "is_height = (index % 3 == 1) & (index < 3 * height)\n"
        "        is_width = (index % 3 == 2) & (index < 3 * height)",
        TABLES,
    ),
    Fault(
        "height and width exchanged",
        MODEL,
        "is_height = (index >= time) & (index < time + height)\n"
        "        is_width = index >= time + height",
        "is_width = (index >= time) & (index < time + height)\n"
        "        is_height = index >= time + height",
        TABLES,
    ),
)

# Of every rope that rotates the second half of a head against the first.
HALVES = (
    Fault(
        "frequencies cast with the module",
        MODEL,
        "if self.inv_freq.dtype != torch.float32:",
        "if self.inv_freq.is_meta:",
        "test_text.py::test_frequencies_stay_float32_when_the_model_is_cast",
    ),
    Fault(
        "adjacent pairs rotated instead of halves",
        MODEL,
        "first, second = x[..., :half], x[..., half:]",
        "first, second = x[..., 0::2], x[..., 1::2]",
        PREFILL,
    ),
)

PLAIN_ROPE = (
    Fault(
        "angles of the place after a token's own",
        MODEL,
        "angle = positions[:, None].float() * self.inv_freq",
        "angle = (positions[:, None] + 1).float() * self.inv_freq",
        TABLES,
    ),
    Fault(
        "angles multiplied in bfloat16",
        MODEL,
        "angle = positions[:, None].float() * self.inv_freq",
        "angle = (positions[:, None].bfloat16() * self.inv_freq.bfloat16()).float()",
        TABLES,
    ),
    *HALVES,
)


def text_type(name: str) -> Fault:
    """A decoder of another kind under the same architecture is not noticed.

    Args:
        name: model_type of the text config.
    """
    return Fault(
        "a text tower of another kind taken for this one",
        CONFIG,
        f'    ("model_type", "{name}", "text.model_type"),\n',
        "",
        "test_config.py::test_a_contradiction_names_the_field",
    )


FLAT_CONFIG = (
    Fault(
        "only the nested form of the configuration read",
        CONFIG,
        'if raw.get("text_config") is not None:\n        return',
        "if True:\n        return",
        "test_config.py::test_the_flat_form_parses_alike",
    ),
    Fault(
        "windowed attention in the configuration not noticed",
        CONFIG,
        '    ("use_sliding_window", False, "text.attention.kind"),\n',
        "",
        "test_config.py::test_a_contradiction_names_the_field",
    ),
)

PARTIAL = (
    Fault(
        "the rest of a head rotated with frequency one",
        MODEL,
        "unrotated = torch.zeros(",
        "unrotated = torch.ones(",
        TABLES,
    ),
    Fault(
        "frequencies spread over the whole head",
        MODEL,
        'device="cpu") / rotary_dim',
        'device="cpu") / head_dim',
        TABLES,
    ),
    Fault(
        "the bias of queries and keys left in the checkpoint's order",
        LOADERS,
        "return _in_head_order(fused, config, tp_size)",
        "return fused",
        PREFILL,
    ),
    Fault(
        "values put into the order of queries and keys",
        LOADERS,
        "heads[..., -values:, :]",
        "heads[..., -values:, head_order(config)]",
        PREFILL,
    ),
)

HALVES_OF_A_PART = (
    Fault(
        "the rotated part joined as if it were the whole head",
        LOADERS,
        "return [*rotated[:half], *unrotated[:rest], *rotated[half:], *unrotated[rest:]]",
        "return [*rotated, *unrotated]",
        PREFILL,
    ),
)

ADJACENT = (
    Fault(
        "halves rotated instead of adjacent pairs",
        LOADERS,
        "return [*rotated[0::2], *unrotated[:rest], *rotated[1::2], *unrotated[rest:]]",
        "middle = len(rotated) // 2\n"
        "    return [*rotated[:middle], *unrotated[:rest], *rotated[middle:], *unrotated[rest:]]",
        PREFILL,
    ),
)

SANDWICH = (
    Fault(
        "no norm on the output of attention",
        MODEL,
        "hidden = hidden + self.post_self_attn_layernorm(attended)",
        "hidden = hidden + attended",
        LAYER,
    ),
    Fault(
        "no norm on the output of the MLP",
        MODEL,
        "return hidden + self.post_mlp_layernorm(self._reduce(partial, prefill))",
        "return hidden + self._reduce(partial, prefill)",
        LAYER,
    ),
    Fault(
        "the attention's output normalised after it was added",
        MODEL,
        "hidden = hidden + self.post_self_attn_layernorm(attended)",
        "hidden = self.post_self_attn_layernorm(hidden + attended)",
        LAYER,
    ),
    Fault(
        "the MLP's output normalised before ranks are summed",
        MODEL,
        "self.post_mlp_layernorm(self._reduce(partial, prefill))",
        "self._reduce(self.post_mlp_layernorm(partial), prefill)",
        "test_parallel.py::test_text_layer",
    ),
)

FUSED_GATE_UP = (
    Fault(
        "gate and up exchanged",
        LOADERS,
        "start = part * wide + rank % tp_size * width",
        "start = (1 - part) * wide + rank % tp_size * width",
        "test_text.py::test_mlp",
    ),
    Fault(
        "a naive shard of the fused gate and up",
        LOADERS,
        "start = part * wide + rank % tp_size * width",
        "start = (2 * (rank % tp_size) + part) * width",
        "test_weights.py::test_gate_and_up_are_cut_out_of_one_matrix",
    ),
)

SOFTMAX_ROUTER = (
    Fault(
        "router in bfloat16",
        MODEL,
        "router_weights=self.router_weight, top_k=self.top_k)",
        "router_weights=self.router_weight, top_k=self.top_k, computation_dtype=torch.bfloat16)",
        ROUTER,
    ),
    Fault(
        "sigmoid for softmax in the router",
        MODEL,
        "router_weights=self.router_weight, top_k=self.top_k)",
        'router_weights=self.router_weight, top_k=self.top_k, activation="sigmoid")',
        ROUTER,
    ),
    Fault(
        "weights of a decode step not renormalised",
        MODEL,
        "router_pre_norm=False",
        "router_pre_norm=True",
        DECODE,
    ),
    Fault(
        "a decode step without the norm's weight",
        MODEL,
        "gamma=norm.weight[None]",
        "gamma=torch.ones_like(norm.weight)[None]",
        DECODE,
    ),
    Fault(
        "a decode step that counts every chosen expert as one",
        MODEL,
        "            expert_affinities_scaling_mode=ExpertAffinityScaleMode.POST_SCALE,\n"
        "            router_mm_dtype=torch.float32,",
        "            router_mm_dtype=torch.float32,",
        DECODE,
    ),
    Fault(
        "the weight of an expert applied to its input",
        MODEL,
        "compute_dtype=hidden.dtype,\n"
        "            expert_affinities_scaling_mode=ExpertAffinityScaleMode.POST_SCALE,",
        "compute_dtype=hidden.dtype,\n"
        "            expert_affinities_scaling_mode=ExpertAffinityScaleMode.PRE_SCALE,",
        EXPERTS,
    ),
)

EXPERT_SHARES = (
    Fault(
        "every rank holds the first experts",
        LOADERS,
        "first = get_neuron_ep_rank() * count",
        "first = 0",
        "test_parallel.py::test_experts_shared_out_over_ranks",
    ),
    Fault(
        "ranks that share experts cut them by their place among all ranks",
        LOADERS,
        "place = get_neuron_ep_tp_group().rank_in_group",
        "place = 0",
        "test_parallel.py::test_experts_shared_out_over_ranks",
    ),
)

PER_EXPERT = (
    Fault(
        "gates listed before all ups",
        LOADERS,
        "return parts.unflatten(0, (-1, 2)).transpose(1, 2)",
        "return parts.unflatten(0, (2, -1)).permute(1, 2, 0, 3)",
        EXPERTS,
    ),
    Fault(
        "every rank takes the first rows of an expert's down projection",
        LOADERS,
        "return torch.stack([piece[:, start : start + width].t() for piece in slices])",
        "return torch.stack([piece[:, :width].t() for piece in slices])",
        SHARDS,
    ),
)

SIGMOID_ROUTER = (
    Fault(
        "the correction bias enters the weights",
        MODEL,
        "weights = scores * (chosen",
        "weights = (scores + self.correction_bias) * (chosen",
        ROUTER,
    ),
    Fault(
        "experts chosen without the correction bias",
        MODEL,
        "torch.topk(scores + self.correction_bias, self.top_k, dim=-1)",
        "torch.topk(scores, self.top_k, dim=-1)",
        ROUTER,
    ),
    Fault(
        "softmax for sigmoid in the router",
        MODEL,
        "scores = torch.sigmoid(hidden.float() @ self.router_weight)",
        "scores = torch.softmax(hidden.float() @ self.router_weight, dim=-1)",
        ROUTER,
    ),
    Fault(
        "the factor on the routed experts forgotten",
        MODEL,
        "weights * self.routed_scale",
        "weights",
        ROUTER,
    ),
    Fault(
        "weights not renormalised",
        MODEL,
        "weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)",
        "weights = weights / 1.0",
        ROUTER,
    ),
    Fault(
        "router in the model's dtype",
        MODEL,
        "torch.sigmoid(hidden.float() @ self.router_weight)",
        "torch.sigmoid((hidden @ self.router_weight.to(hidden.dtype)).float())",
        "test_text.py::test_a_router_computes_in_float32",
    ),
)

SHARED_EXPERTS = (
    Fault(
        "shared experts forgotten",
        MODEL,
        "return routed + self.shared(hidden)",
        "return routed",
        EXPERTS,
    ),
    Fault(
        "one dense layer too many",
        MODEL,
        "self.has_experts = index >= config.first_dense",
        "self.has_experts = index > config.first_dense",
        "test_weights.py::test_mapping_names_every_parameter_once",
    ),
)
