"""Wrong variants of the Qwen3-VL-MoE package: its experts. The towers are those of Qwen3-VL."""

from . import CONFIG, LOADERS, MODEL, Fault
from . import _text as text

FAULTS = (
    *text.HEAD_NORM,
    *text.SOFTMAX_ROUTER,
    *text.EXPERT_SHARES,
    Fault(
        "one expert less for a token of a prefill",
        MODEL,
        "router_weights=self.router_weight, top_k=self.top_k)",
        "router_weights=self.router_weight, top_k=self.top_k - 1)",
        "test_text.py::test_experts",
    ),
    Fault(
        "weights of the experts left out",
        MODEL,
        "        affinities = self.route(hidden)\n",
        "        affinities = (self.route(hidden) > 0).float()\n",
        "test_text.py::test_experts",
    ),
    Fault(
        "sigmoid for softmax in a decode step",
        MODEL,
        "router_act_fn=RouterActFnType.SOFTMAX,",
        "router_act_fn=RouterActFnType.SIGMOID,",
        "test_text.py::test_experts_of_a_decode_step",
    ),
    Fault(
        "default eps before the experts of a decode step",
        MODEL,
        "            eps=norm.eps,\n            router_act_fn",
        "            eps=1e-2,\n            router_act_fn",
        "test_text.py::test_experts_of_a_decode_step",
    ),
    Fault(
        "up before gate",
        LOADERS,
        "for first in (start, wide + start)]",
        "for first in (wide + start, start)]",
        "test_text.py::test_experts",
    ),
    Fault(
        "a square matrix of the experts taken as transposed",
        LOADERS,
        "parts = [slices[0][:, :, first : first + width] for",
        "stored = slices[0][:]\n"
        "        if stored.shape[1] == stored.shape[2]:\n"
        "            stored = stored.transpose(1, 2)\n"
        "        parts = [stored[:, :, first : first + width] for",
        "test_weights.py::test_experts_are_read_as_declared_where_their_shape_does_not_tell",
    ),
    Fault(
        "every rank holds the first rank's width of the experts",
        LOADERS,
        "        start = rank * width % wide\n        parts =",
        "        start = 0\n        parts =",
        "test_weights.py::test_expert_shards_of_all_ranks_are_the_experts",
    ),
    Fault(
        "router in the model's dtype",
        MODEL,
        "torch.empty(hidden_size, experts, dtype=torch.float32), requires_grad=False",
        "torch.empty(hidden_size, experts, dtype=config.dtype), requires_grad=False",
        "test_weights.py::test_a_router_stays_float32_in_a_bfloat16_model",
    ),
    Fault(
        "expert width under another key",
        CONFIG,
        '"moe_intermediate_size"',
        '"intermediate_size"',
        "test_text.py::test_experts",
    ),
)
