"""Weight loaders of GLM-4.5V, and what guards a checkpoint before and while it is read.

Every loader states the shape it expects in the checkpoint and refuses another one: slices clamp
at the end of a tensor, so a wrong shape would otherwise load as a shorter or wrong piece without
an error.
"""

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn
from vllm_neuron.parallel.neuron_parallel_state import (
    get_neuron_ep_degree,
    get_neuron_ep_rank,
    get_neuron_ep_tp_group,
)
from vllm_neuron.utils.checkpoints import SafetensorsCheckpoint
from vllm_neuron.utils.weight_loader import (
    SafetensorsWeightLoader,
    expert_parallel_interleaved_loader,
    fused_qkv_weight_loader,
    get_weight_loader,
    set_weight_loader,
    sharding_weight_loader,
    with_rank_override,
)

from .config import Glm4vMoeConfig, Glm4vMoeTextConfig, Glm4vMoeVisionConfig
from .weight_mapping import IGNORED, LAYOUTS, build_mappings, find_layout

Shape = tuple[int, ...]

PLAIN_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class CheckpointError(ValueError):
    """A checkpoint whose keys or shapes do not fit its configuration."""


def expecting(shapes: Sequence[Shape], load: Callable) -> SafetensorsWeightLoader:
    """A loader that checks shapes and dtypes of its slices and then calls `load(slices, rank)`."""

    def transform(slices: Sequence, rank: int) -> torch.Tensor:
        found = [tuple(piece.get_shape()) for piece in slices]
        if found != [tuple(shape) for shape in shapes]:
            raise CheckpointError(
                f"shape in the checkpoint {found}, expected {[tuple(s) for s in shapes]}"
            )
        stored = [piece[:1].dtype for piece in slices]
        if not set(stored) <= set(PLAIN_DTYPES):  # a cast would drop the scales in silence
            raise CheckpointError(
                f"stored as {stored}; quantised tensors are not supported, only float32, "
                "bfloat16 and float16"
            )
        return load(slices, rank)

    return SafetensorsWeightLoader(transform=transform)


def whole_loader(shape: Shape) -> SafetensorsWeightLoader:
    """The tensor as it is, on every rank."""
    return expecting([shape], lambda slices, rank: slices[0][:])


def column_parallel_loader(shape: Shape, tp_size: int) -> SafetensorsWeightLoader:
    """`[out, in]` in the checkpoint -> this rank's columns, `[in, out / tp]`."""
    shard = sharding_weight_loader(
        shard_dim=1, shard_size=shape[0] // tp_size, num_shards=tp_size, is_storage_transposed=True
    )
    return expecting([shape], shard.load)


def row_parallel_loader(shape: Shape, tp_size: int) -> SafetensorsWeightLoader:
    """`[out, in]` in the checkpoint -> this rank's rows, `[in / tp, out]`."""
    shard = sharding_weight_loader(
        shard_dim=0, shard_size=shape[1] // tp_size, num_shards=tp_size, is_storage_transposed=True
    )
    return expecting([shape], shard.load)


def column_parallel_bias_loader(width: int, tp_size: int) -> SafetensorsWeightLoader:
    """`[out]` -> this rank's `[out / tp]`."""
    shard = sharding_weight_loader(shard_dim=0, shard_size=width // tp_size, num_shards=tp_size)
    return expecting([(width,)], shard.load)


def vocabulary_loader(config: Glm4vMoeTextConfig, tp_size: int) -> SafetensorsWeightLoader:
    """`[vocab, H]` -> this rank's rows; the last rank's are filled up with zeros."""
    rows = config.padded_vocab_size(tp_size) // tp_size
    shard = sharding_weight_loader(shard_dim=0, shard_size=rows, num_shards=tp_size, pad_shard=True)
    return expecting([(config.vocab_size, config.hidden_size)], shard.load)


def fused_qkv_loader(config: Glm4vMoeTextConfig, tp_size: int) -> SafetensorsWeightLoader:
    """Separate Q, K, V `[out, in]` -> `[H, (N + 2K) * D]` of this rank: its query heads, then
    keys, then values.

    With more ranks than key/value heads, `replicas` neighbouring ranks hold the same head:
    `8 heads, tp 16 -> replicas 2 -> head = rank // 2`.
    The columns of each query and key head are put into `head_order`.
    """
    d, heads, kv_heads = config.head_dim, config.num_attention_heads, config.num_key_value_heads
    fuse = fused_qkv_weight_loader(
        q_size=heads // tp_size * d,
        kv_size=max(1, kv_heads // tp_size) * d,
        shard_dim=1,
        num_shards=tp_size,
        is_storage_transposed=True,
        num_kv_replicas=max(1, tp_size // kv_heads),
    )
    shapes = [(n * d, config.hidden_size) for n in (heads, kv_heads, kv_heads)]
    return expecting(
        shapes, lambda slices, rank: _in_head_order(fuse.load(slices, rank), config, tp_size)
    )


def fused_qkv_bias_loader(config: Glm4vMoeTextConfig, tp_size: int) -> SafetensorsWeightLoader:
    """Biases of Q, K, V `[out]` -> `[1, (N + 2K) * D]`, as `fused_qkv_loader`."""
    d, heads, kv_heads = config.head_dim, config.num_attention_heads, config.num_key_value_heads
    q_width, kv_width = heads // tp_size * d, max(1, kv_heads // tp_size) * d
    replicas = max(1, tp_size // kv_heads)

    def load(slices: Sequence, rank: int) -> torch.Tensor:
        local = rank % tp_size
        starts = (local * q_width, local // replicas * kv_width, local // replicas * kv_width)
        widths = (q_width, kv_width, kv_width)
        parts = zip(slices, starts, widths, strict=True)
        fused = torch.cat([piece[start : start + width] for piece, start, width in parts])[None]
        return _in_head_order(fused, config, tp_size)

    return expecting([(n * d,) for n in (heads, kv_heads, kv_heads)], load)


def head_order(config: Glm4vMoeTextConfig) -> list[int]:
    """Which element of a head in the checkpoint stands at each place of a head here.

    The rotation joins elements (i, i + D/2). In the checkpoint the first R elements are rotated,
    i with i + R/2; the others pass as they are. Scores do not change, since queries and
    keys are put into the same order, which is also that of the key cache.

    `D 8, R 4 -> 0 1 4 5 | 2 3 6 7`
    """
    rotated = list(range(config.rotary_dim))
    unrotated = list(range(config.rotary_dim, config.head_dim))
    rest = len(unrotated) // 2
    half = len(rotated) // 2
    return [*rotated[:half], *unrotated[:rest], *rotated[half:], *unrotated[rest:]]


def _in_head_order(fused: torch.Tensor, config: Glm4vMoeTextConfig, tp_size: int) -> torch.Tensor:
    """Put each query and key head of a rank's `[..., (N + 2K) * D]` into `head_order`."""
    heads = fused.unflatten(-1, (-1, config.head_dim))
    values = max(1, config.num_key_value_heads // tp_size)
    rotated = heads[..., :-values, head_order(config)]
    return torch.cat([rotated, heads[..., -values:, :]], dim=-2).flatten(-2)


def expert_gate_up_loader(config: Glm4vMoeTextConfig, width: int) -> SafetensorsWeightLoader:
    """Gate and up `[I, H]` of each expert in turn -> `width` columns, `[E, H, 2, width]`."""
    experts, hidden_size, wide = (
        config.num_experts,
        config.hidden_size,
        config.moe_intermediate_size,
    )

    def load(slices: Sequence, rank: int) -> torch.Tensor:
        start = rank * width % wide
        parts = torch.stack([piece[start : start + width].t() for piece in slices])
        return parts.unflatten(0, (-1, 2)).transpose(1, 2)

    return expecting([(wide, hidden_size)] * (2 * experts), _of_local_experts(load, experts))


def expert_down_loader(config: Glm4vMoeTextConfig, width: int) -> SafetensorsWeightLoader:
    """`[H, I]` of each expert in turn -> `width` rows, `[E, width, H]`."""
    experts, hidden_size, wide = (
        config.num_experts,
        config.hidden_size,
        config.moe_intermediate_size,
    )

    def load(slices: Sequence, rank: int) -> torch.Tensor:
        start = rank * width % wide
        return torch.stack([piece[:, start : start + width].t() for piece in slices])

    return expecting([(hidden_size, wide)] * experts, _of_local_experts(load, experts))


def _of_local_experts(load: Callable, num_experts: int) -> Callable:
    """`load` on the experts that this rank holds; with expert parallelism, ranks that share
    experts cut them by their place in that group.
    """
    ep_degree = get_neuron_ep_degree()
    if ep_degree == 1:
        return load
    count = num_experts // ep_degree
    first = get_neuron_ep_rank() * count
    place = get_neuron_ep_tp_group().rank_in_group
    return expert_parallel_interleaved_loader(
        local_expert_indices=list(range(first, first + count)),
        original_loader=with_rank_override(
            loader=SafetensorsWeightLoader(transform=load), rank=place
        ),
        total_num_experts=num_experts,
    ).load


def vision_qkv_loader(config: Glm4vMoeVisionConfig, tp_size: int) -> SafetensorsWeightLoader:
    """`[3H, H]`, thirds Q, K, V of all heads -> `[H, 3 * N * D]`: this rank's heads out of each
    third.

    A plain column shard would hand rank 0 queries only.
    """
    hidden_size, width = config.hidden_size, config.hidden_size // tp_size

    def load(slices: Sequence, rank: int) -> torch.Tensor:
        starts = (third * hidden_size + rank % tp_size * width for third in range(3))
        return torch.cat([slices[0][start : start + width, :].t() for start in starts], dim=1)

    return expecting([(3 * hidden_size, hidden_size)], load)


def patch_embed_loader(config: Glm4vMoeVisionConfig) -> SafetensorsWeightLoader:
    """Conv3d kernel `[H, C, T, p, p]` -> `[C * T * p * p, H]`."""
    side = config.patch_size
    shape = (config.hidden_size, config.in_channels, config.temporal_patch_size, side, side)
    return expecting([shape], lambda slices, rank: slices[0][:].reshape(config.hidden_size, -1).t())


def merge_conv_loader(config: Glm4vMoeVisionConfig, tp_size: int) -> SafetensorsWeightLoader:
    """Kernel `[out, H, m, m]` over a merge window -> this rank's `[m * m * H, out / tp]`.

    The joined window lists its patches one after the other, the kernel has channels outermost.
    """
    side, width = config.spatial_merge_size, config.out_hidden_size // tp_size

    def load(slices: Sequence, rank: int) -> torch.Tensor:
        start = rank % tp_size * width
        kernel = slices[0][start : start + width]
        return kernel.permute(2, 3, 1, 0).reshape(-1, width)

    return expecting([(config.out_hidden_size, config.hidden_size, side, side)], load)


def open_checkpoint(
    path: str, cache_dir: str | None, config: Glm4vMoeConfig, has_vision: bool
) -> tuple[SafetensorsCheckpoint, dict[str, dict[str, list[str]]]]:
    """Open a checkpoint and check its names against the configuration; no tensor is read.

    Returns:
        The checkpoint and, per tower, parameter -> checkpoint keys.

    Raises:
        CheckpointError: with the lists of missing and unknown keys, or the contradiction about
            the output head.
    """
    checkpoint = SafetensorsCheckpoint(model_name_or_path=path, cache_dir=cache_dir)
    names = set(checkpoint.get_tensor_names())
    layout_name = find_layout(names)
    layout = LAYOUTS[layout_name]
    # A head in the file is the head, whatever the flag says: where the file leaves it out, the flag
    # is the default of transformers' class, and a tied file may hold a copy.
    mappings = build_mappings(config, layout, has_head=layout.head + "weight" in names)
    known = {key for mapping in mappings.values() for keys in mapping.values() for key in keys}
    wanted = (
        known if has_vision else known - {k for keys in mappings["vision"].values() for k in keys}
    )
    (head_key,) = build_head_keys(mappings)
    if head_key in wanted - names and not config.text_config.tie_word_embeddings:
        raise CheckpointError(
            f"tie_word_embeddings is false, but the checkpoint holds no {head_key!r}: either the "
            "flag is wrong "
            "(set it to true in config.json to use the embedding as the head) or a file is missing"
        )
    missing = sorted(wanted - names)
    unknown = sorted(
        name for name in names - known if not any(fnmatchcase(name, pattern) for pattern in IGNORED)
    )
    if missing or unknown:
        raise CheckpointError(
            f"checkpoint keys do not fit the configuration (naming {layout_name!r}):\n"
            f"  missing ({len(missing)}): {_some(missing)}\n  unknown ({len(unknown)}): "
            f"{_some(unknown)}"
        )
    return checkpoint, mappings


def build_head_keys(mappings: dict[str, dict[str, list[str]]]) -> list[str]:
    """Checkpoint keys of the output head."""
    return [key for keys in mappings["head"].values() for key in keys]


def load_tower(
    checkpoint: SafetensorsCheckpoint,
    module: nn.Module,
    mapping: dict[str, list[str]],
    *,
    device: torch.device,
    rank: int,
    world_size: int,
) -> dict[str, torch.Tensor]:
    """Read this rank's share of one tower, in the dtype of its parameters.

    Raises:
        CheckpointError: a tensor whose shape is not what the configuration asks for, or tensors
            that are stored quantised, with their keys.
    """
    parameters = dict(module.named_parameters())
    plain = {name: get_weight_loader(param=parameter) for name, parameter in parameters.items()}
    for name, parameter in parameters.items():
        set_weight_loader(param=parameter, loader=_naming(plain[name], mapping[name]))
    try:
        result = checkpoint.load_sharded(
            rank=rank,
            world_size=world_size,
            model=module,
            mappings=mapping,
            device=device,
            strict=True,
        )
    finally:
        for name, parameter in parameters.items():
            set_weight_loader(param=parameter, loader=plain[name])
    loaded, state = result.state_dict, {}
    for name in list(loaded):
        state[name] = loaded.pop(name).to(
            parameters[name].dtype
        )  # one at a time: never two copies of the tower
    return state


def _naming(loader: SafetensorsWeightLoader, keys: Sequence[str]) -> SafetensorsWeightLoader:
    """The same loader; its errors say which checkpoint keys they are about."""

    def transform(slices: Sequence, rank: int) -> torch.Tensor:
        try:
            return loader.load(slices, rank)
        except CheckpointError as error:
            raise CheckpointError(f"{', '.join(keys)}: {error}") from None

    return SafetensorsWeightLoader(transform=transform)


def _some(names: Sequence[str], limit: int = 8) -> str:
    shown = ", ".join(names[:limit]) or "none"
    return shown if len(names) <= limit else f"{shown}, and {len(names) - limit} more"
