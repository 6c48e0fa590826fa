"""Weight loaders: how a parameter is cut out of checkpoint tensors, one rank at a time.

A loader hangs on a parameter and is called with the lazily opened checkpoint tensors ("slices")
of that parameter's keys and with the rank. Only the bytes a rank needs are read.

Slices cut like torch tensors: bounds clamp, so a shard past the end is short or empty and never
an error. What a loader returns is not compared with the parameter's shape here; torch's
``load_state_dict`` does that.

Shape letters: ``[out, in]`` is the layout of Hugging Face checkpoints, ``[in, out]`` the layout
most parameters of a plugin model have ("transposed storage").
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

__all__ = [
    "SafetensorsWeightLoader",
    "ShardSpec",
    "SliceView",
    "expert_parallel_grouped_loader",
    "expert_parallel_interleaved_loader",
    "expert_parallel_tensor_dim_loader",
    "fused_qkv_weight_loader",
    "get_shard",
    "get_shard_deinterleaved",
    "get_shuffled_shard",
    "get_weight_loader",
    "last_dim_padding_weight_loader",
    "pad_to_shape",
    "scaled_bias_loader",
    "set_weight_loader",
    "sharding_weight_loader",
    "sharding_weight_loader_with_padding",
    "with_rank_override",
]

Transform = Callable[[Sequence[Any], int], torch.Tensor]

_LOADER_ATTRIBUTE = "weight_loader"


@dataclass
class ShardSpec:
    """Where a dimension is cut: ``dim`` into ``num_shards`` pieces of ``size`` each."""

    dim: int
    size: int
    num_shards: int


class SafetensorsWeightLoader:
    """Turns the checkpoint slices of one parameter into this rank's tensor.

    Args:
        transform: called with ``(slices, rank)`` and returning a tensor. None takes the first
            slice whole and accepts exactly one.
    """

    def __init__(self, transform: Transform | None = None) -> None:
        self.transform = transform

    def load(self, slices: Sequence[Any], rank: int) -> torch.Tensor:
        """Read this rank's part.

        Args:
            slices: lazily opened checkpoint tensors, in the order of the mapping.
            rank: rank in the group the parameter is sharded over.

        Returns:
            A contiguous tensor with the checkpoint's dtype.

        Raises:
            AssertionError: the identity loader was given more or fewer slices than one.
        """
        if self.transform is not None:
            return self.transform(slices, rank).contiguous()
        if len(slices) != 1:
            raise AssertionError(
                f"a parameter without a weight loader of its own takes exactly one checkpoint "
                f"tensor, got {len(slices)}; attach a loader that combines them"
            )
        return slices[0][:].contiguous()


def set_weight_loader(param: torch.nn.Parameter, loader: SafetensorsWeightLoader) -> None:
    """Attach a loader to a parameter, replacing the one it had."""
    setattr(param, _LOADER_ATTRIBUTE, loader)


def get_weight_loader(param: torch.nn.Parameter) -> SafetensorsWeightLoader:
    """Return the loader attached to a parameter, or the identity loader."""
    return getattr(param, _LOADER_ATTRIBUTE, None) or SafetensorsWeightLoader()


def with_rank_override(loader: SafetensorsWeightLoader, rank: int) -> SafetensorsWeightLoader:
    """Return a loader that always loads for ``rank``, whatever rank it is called with."""
    return SafetensorsWeightLoader(lambda slices, _rank: loader.load(slices, rank))


def _shape(slice_obj: Any) -> list[int]:
    get_shape = getattr(slice_obj, "get_shape", None)
    return list(get_shape()) if get_shape is not None else list(slice_obj.shape)


def _cut(slice_obj: Any, dim: int, start: int, size: int) -> torch.Tensor:
    """``slice_obj[..., start:start + size, ...]`` on ``dim``; bounds clamp."""
    num_dims = len(_shape(slice_obj))
    if not -num_dims <= dim < num_dims:
        raise IndexError(
            f"dimension {dim} does not exist in a checkpoint tensor of shape {_shape(slice_obj)}; "
            "biases must not be loaded with is_storage_transposed"
        )
    index: list[slice] = [slice(None)] * num_dims
    index[dim] = slice(start, start + size)
    return slice_obj[tuple(index)]


def _one_slice(slices: Sequence[Any], loader: str) -> Any:
    if len(slices) != 1:
        raise AssertionError(f"{loader} takes one checkpoint tensor, got {len(slices)}")
    return slices[0]


def _cut_shard(
    slice_obj: Any,
    shard_dim: int,
    shard_size: int,
    num_shards: int,
    is_storage_transposed: bool,
    rank: int,
) -> torch.Tensor:
    """This rank's shard in the parameter's layout."""
    start = (rank % num_shards) * shard_size
    if not is_storage_transposed:
        return _cut(slice_obj, shard_dim, start, shard_size)
    num_dims = len(_shape(slice_obj))
    if num_dims > 2:
        raise AssertionError(
            f"is_storage_transposed needs a tensor of at most 2 dims, got {num_dims}: "
            f"{_shape(slice_obj)}"
        )
    # Parameter dim 0 is stored dim 1 and the reverse. A negative dim is not mapped, as in the
    # plugin: -1 cuts the last stored dim, and the piece lands on the parameter's dim 0.
    stored_dim = 1 - shard_dim if shard_dim in (0, 1) else shard_dim
    return _cut(slice_obj, stored_dim, start, shard_size).t()


def _pad_dim_to(tensor: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """Append zeros on one dim up to ``size``; never truncates."""
    missing = size - tensor.shape[dim]
    if missing <= 0:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = missing
    return torch.cat([tensor, tensor.new_zeros(shape)], dim=dim)


def sharding_weight_loader(
    shard_dim: int,
    shard_size: int,
    num_shards: int,
    is_storage_transposed: bool = False,
    pad_shard: bool = False,
) -> SafetensorsWeightLoader:
    """Loader for one tensor that is split evenly over the ranks.

    Args:
        shard_dim: dimension that is split, counted in the parameter's layout.
        shard_size: length of one rank's piece on that dimension.
        num_shards: number of pieces; the rank is taken modulo this number.
        is_storage_transposed: the checkpoint holds a matrix with its two dims swapped.
        pad_shard: fill a short last piece with zeros up to ``shard_size``.

    Returns:
        A loader. It raises AssertionError for several slices and for transposed storage with
        more than 2 dims, IndexError for transposed storage of a bias.
    """

    def transform(slices: Sequence[Any], rank: int) -> torch.Tensor:
        source = _one_slice(slices, "sharding_weight_loader")
        shard = _cut_shard(source, shard_dim, shard_size, num_shards, is_storage_transposed, rank)
        return _pad_dim_to(shard, shard_dim, shard_size) if pad_shard else shard

    return SafetensorsWeightLoader(transform)


def sharding_weight_loader_with_padding(
    shard_dim: int,
    shard_size: int,
    num_shards: int,
    is_storage_transposed: bool = False,
    pad_dim: int | None = None,
    padded_size: int | None = None,
    unpadded_size: int | None = None,
) -> SafetensorsWeightLoader:
    """Loader that splits one dimension and appends zeros on another.

    Args:
        shard_dim: dimension that is split, in the parameter's layout; it is never padded.
        shard_size: length of one rank's piece.
        num_shards: number of pieces; the rank is taken modulo this number.
        is_storage_transposed: the checkpoint holds the matrix with its dims swapped.
        pad_dim: 1 appends on the last dim, 0 on the second-last one; None appends nothing.
        padded_size: size wanted on that dim.
        unpadded_size: size the checkpoint is said to have. ``padded_size - unpadded_size`` zeros
            are appended, whatever the real width is; with one of the two missing, none.

    Returns:
        A loader. It raises RuntimeError when ``pad_dim`` is 0 for a 1-D tensor.
    """
    if pad_dim not in (None, 0, 1):
        raise ValueError(f"pad_dim must be None, 0 or 1, got {pad_dim}")

    def transform(slices: Sequence[Any], rank: int) -> torch.Tensor:
        source = _one_slice(slices, "sharding_weight_loader_with_padding")
        shard = _cut_shard(source, shard_dim, shard_size, num_shards, is_storage_transposed, rank)
        if pad_dim is None or padded_size is None or unpadded_size is None:
            return shard
        if pad_dim == 0 and shard.dim() < 2:
            raise RuntimeError(
                f"pad_dim 0 pads the second-last dim, which a tensor of shape "
                f"{list(shard.shape)} lacks"
            )
        amount = padded_size - unpadded_size
        return F.pad(shard, (0, amount) if pad_dim == 1 else (0, 0, 0, amount))

    return SafetensorsWeightLoader(transform)


def last_dim_padding_weight_loader(padded_size: int) -> SafetensorsWeightLoader:
    """Loader for one whole tensor with zeros appended on the last dim up to ``padded_size``."""

    def transform(slices: Sequence[Any], rank: int) -> torch.Tensor:
        source = _one_slice(slices, "last_dim_padding_weight_loader")
        return _pad_dim_to(source[:], -1, padded_size)

    return SafetensorsWeightLoader(transform)


def scaled_bias_loader(scale: float, padded_size: int | None = None) -> SafetensorsWeightLoader:
    """Loader for a bias that every rank adds before a sum over ranks.

    Args:
        scale: the bias is divided by this number, usually the number of ranks.
        padded_size: zeros are appended up to this width, if given.
    """

    def transform(slices: Sequence[Any], rank: int) -> torch.Tensor:
        bias = _one_slice(slices, "scaled_bias_loader")[:] / scale
        return bias if padded_size is None else _pad_dim_to(bias, -1, padded_size)

    return SafetensorsWeightLoader(transform)


def fused_qkv_weight_loader(
    q_size: int,
    kv_size: int,
    shard_dim: int,
    num_shards: int,
    is_storage_transposed: bool = False,
    num_kv_replicas: int = 1,
    padded_hidden_size: int | None = None,
    unpadded_hidden_size: int | None = None,
    attention_dp_rank: int = 0,
    attention_dp_size: int = 1,
    kv_sharded_across_attention_dp: bool = False,
) -> SafetensorsWeightLoader:
    """Loader that joins this rank's rows of Q, K and V into one matrix.

    With 8 query and 2 KV heads over 4 ranks and ``num_kv_replicas=2`` the ranks get
    ``q01 k0 v0 | q23 k0 v0 | q45 k1 v1 | q67 k1 v1``.

    Args:
        q_size: width of Q per rank.
        kv_size: width of K, and of V, per rank.
        shard_dim: 0 or 1, in the parameter's layout; also the dim the pieces are joined on.
        num_shards: size of the group; the rank is taken modulo this number.
        is_storage_transposed: the checkpoint holds ``[out, in]``, the parameter ``[in, out]``.
        num_kv_replicas: how many consecutive ranks share a KV shard. Left at 1 where ranks share
            one, the result of the later ranks is narrower, without an error.
        padded_hidden_size: size to which the dim that is not sharded is filled with zeros.
        unpadded_hidden_size: its size in the checkpoint.
        attention_dp_rank: position in the attention data parallel group.
        attention_dp_size: its size; Q shards are dealt out in strides of it.
        kv_sharded_across_attention_dp: K and V are dealt out like Q.

    Returns:
        A loader over the three slices Q, K, V, all 2-D. Biases need a loader of their own.

    Raises:
        AssertionError: ``shard_dim`` is neither 0 nor 1.
    """
    if shard_dim not in (0, 1):
        raise AssertionError(f"shard_dim must be 0 or 1, got {shard_dim}")

    def transform(slices: Sequence[Any], rank: int) -> torch.Tensor:
        if len(slices) != 3:
            raise AssertionError(
                f"fused_qkv_weight_loader takes the 3 checkpoint tensors Q, K, V in this order, "
                f"got {len(slices)}"
            )
        if len(_shape(slices[0])) != 2:
            raise AssertionError(
                f"fused_qkv_weight_loader takes 2-D weights, got Q of shape {_shape(slices[0])}"
            )
        local_rank = rank % num_shards
        q_shard = attention_dp_rank + local_rank * attention_dp_size
        kv_shard = q_shard if kv_sharded_across_attention_dp else local_rank // num_kv_replicas
        stored_dim = 1 - shard_dim if is_storage_transposed else shard_dim
        plan = ((slices[0], q_shard, q_size), *((s, kv_shard, kv_size) for s in slices[1:]))
        pieces = []
        for source, shard, size in plan:
            if len(_shape(source)) != 2:
                raise RuntimeError(
                    f"Q, K and V must all be 2-D to be joined, got a shape of {_shape(source)}"
                )
            piece = _cut(source, stored_dim, shard * size, size)
            pieces.append(piece.t() if is_storage_transposed else piece)
        fused = torch.cat(pieces, dim=shard_dim)
        if padded_hidden_size is None or unpadded_hidden_size is None:
            return fused
        hidden_dim = 1 - shard_dim
        wanted = fused.shape[hidden_dim] + padded_hidden_size - unpadded_hidden_size
        return _pad_dim_to(fused, hidden_dim, wanted)

    return SafetensorsWeightLoader(transform)


# --- experts -----------------------------------------------------------------------------------


def _contiguous_experts(local_expert_indices: Sequence[int]) -> tuple[int, int]:
    indices = [int(index) for index in local_expert_indices]
    if not indices:
        raise ValueError("local_expert_indices is empty; a rank holds at least one expert")
    if indices != list(range(indices[0], indices[0] + len(indices))):
        raise ValueError(
            f"local_expert_indices must be ascending without gaps, got {indices}; "
            f"legal would be {list(range(indices[0], indices[0] + len(indices)))}"
        )
    return indices[0], indices[-1] + 1


def _inner_transform(loader: SafetensorsWeightLoader) -> Transform:
    if loader.transform is None:
        raise TypeError("the inner loader of an expert loader must have a transform")
    return loader.transform


def expert_parallel_tensor_dim_loader(
    local_expert_indices: Sequence[int],
    original_loader: SafetensorsWeightLoader,
    expert_dim: int = 0,
) -> SafetensorsWeightLoader:
    """Loader for experts stacked in one tensor: the inner loader sees the local experts only.

    Args:
        local_expert_indices: global expert numbers of this rank, ascending without gaps.
        original_loader: loader for the remaining dims; it must have a transform. It counts inside
            the local range, also on the expert dim.
        expert_dim: dimension the experts are stacked on.

    Raises:
        ValueError: the expert numbers are empty, descend or have gaps.
    """
    first, end = _contiguous_experts(local_expert_indices)

    def transform(slices: Sequence[Any], rank: int) -> torch.Tensor:
        inner = _inner_transform(original_loader)
        views = []
        for source in slices:
            index: list[slice | int] = [slice(None)] * len(_shape(source))
            index[expert_dim] = slice(first, end)
            views.append(SliceView(source, index))
        return inner(views, rank)

    return SafetensorsWeightLoader(transform)


def _num_kinds(num_slices: int, total_num_experts: int) -> int:
    if total_num_experts <= 0:
        raise ValueError(f"total_num_experts must be positive, got {total_num_experts}")
    if num_slices % total_num_experts:
        raise ValueError(
            f"{num_slices} checkpoint tensors cannot be shared out over {total_num_experts} "
            "experts: every expert must have the same number of tensors"
        )
    return num_slices // total_num_experts


def expert_parallel_grouped_loader(
    local_expert_indices: Sequence[int],
    original_loader: SafetensorsWeightLoader,
    total_num_experts: int,
) -> SafetensorsWeightLoader:
    """Loader for experts under keys of their own, listed kind by kind.

    Keys ``gate_0 gate_1 up_0 up_1`` and local expert 1 give the inner loader ``gate_1 up_1``.

    Args:
        local_expert_indices: global expert numbers of this rank, ascending without gaps.
        original_loader: called with the local experts' slices; it must have a transform.
        total_num_experts: number of experts over all ranks, not of the local ones. A wrong number
            that divides the number of keys goes unnoticed.

    Raises:
        ValueError: the expert numbers are empty, descend or have gaps. The loader raises it when
            the number of keys is not a multiple of ``total_num_experts``.
    """
    first, end = _contiguous_experts(local_expert_indices)

    def transform(slices: Sequence[Any], rank: int) -> torch.Tensor:
        kinds = _num_kinds(len(slices), total_num_experts)
        local = [
            slices[kind * total_num_experts + expert]
            for kind in range(kinds)
            for expert in range(first, end)
        ]
        return _inner_transform(original_loader)(local, rank)

    return SafetensorsWeightLoader(transform)


def expert_parallel_interleaved_loader(
    local_expert_indices: Sequence[int],
    original_loader: SafetensorsWeightLoader,
    total_num_experts: int,
) -> SafetensorsWeightLoader:
    """Loader for experts under keys of their own, listed expert by expert.

    Keys ``gate_0 up_0 gate_1 up_1`` and local expert 1 give the inner loader ``gate_1 up_1``.

    Args:
        local_expert_indices: global expert numbers of this rank, ascending without gaps.
        original_loader: called with the local experts' slices; it must have a transform.
        total_num_experts: number of experts over all ranks.

    Raises:
        ValueError: as for :func:`expert_parallel_grouped_loader`.
    """
    first, end = _contiguous_experts(local_expert_indices)

    def transform(slices: Sequence[Any], rank: int) -> torch.Tensor:
        kinds = _num_kinds(len(slices), total_num_experts)
        local = [
            slices[expert * kinds + kind] for expert in range(first, end) for kind in range(kinds)
        ]
        return _inner_transform(original_loader)(local, rank)

    return SafetensorsWeightLoader(transform)


# --- helpers for transforms --------------------------------------------------------------------


def get_shard(
    slice_obj: Any, dim: int, shard_size: int, num_shards: int, rank: int
) -> torch.Tensor:
    """Cut one rank's piece out of a slice; a piece past the end is short.

    Args:
        slice_obj: checkpoint slice or tensor.
        dim: dimension to cut.
        shard_size: length of a piece.
        num_shards: number of pieces; the rank is taken modulo this number.
        rank: rank in the group.
    """
    return _cut(slice_obj, dim, (rank % num_shards) * shard_size, shard_size)


def get_shuffled_shard(
    slice_obj: Any,
    dim: int,
    shard_size: int,
    rank: int,
    padded_dim_size: int | None = None,
) -> torch.Tensor:
    """Cut one rank's piece after interleaving the two halves of a dimension.

    Size 8 is dealt out as ``0 4 1 5 2 6 3 7``: rank 0 of two gets ``0 4 1 5``.

    Args:
        slice_obj: checkpoint slice or tensor.
        dim: dimension to cut.
        shard_size: length of a piece, an even number.
        rank: rank in the group.
        padded_dim_size: size the dimension is filled to with zeros before the two halves are made.
    """
    size = _shape(slice_obj)[dim]
    half = (padded_dim_size or size) // 2
    first = rank * shard_size // 2
    # Each half is cut on its own, so nothing but this rank's rows is read.
    halves = [
        _pad_dim_to(
            _cut(slice_obj, dim, start + first, max(0, min(shard_size // 2, size - start - first))),
            dim,
            shard_size // 2,
        )
        for start in (0, half)
    ]
    return torch.stack(halves, dim=dim + 1 if dim >= 0 else dim).flatten(
        *((dim, dim + 1) if dim >= 0 else (dim - 1, dim))
    )


def get_shard_deinterleaved(
    slice_obj: Any, dim: int, shard_size: int, num_shards: int, rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut one rank's piece of a dimension that alternates gate and up, and take it apart.

    Args:
        slice_obj: checkpoint slice or tensor with ``gate up gate up ...`` on ``dim``.
        dim: dimension to cut.
        shard_size: length of a piece, gate and up counted together.
        num_shards: number of pieces; the rank is taken modulo this number.
        rank: rank in the group.

    Returns:
        The tuple (gate, up), each half as long on ``dim``.
    """
    piece = get_shard(slice_obj, dim, shard_size, num_shards, rank)
    index: list[slice] = [slice(None)] * piece.dim()
    index[dim] = slice(0, None, 2)
    gate = piece[tuple(index)]
    index[dim] = slice(1, None, 2)
    return gate, piece[tuple(index)]


def pad_to_shape(tensor: torch.Tensor, target_shape: Sequence[int]) -> torch.Tensor:
    """Append zeros on every dim up to a shape. A smaller target crops."""
    amounts: list[int] = []
    for size, target in zip(reversed(tensor.shape), reversed(list(target_shape)), strict=True):
        amounts += [0, target - size]
    return F.pad(tensor, amounts)


class SliceView:
    """Part of a checkpoint tensor that is not read before it is indexed.

    Args:
        base: checkpoint slice, tensor or another view.
        index: one slice, integer or list per base dim; an integer collapses its dim. None is the
            whole tensor.

    Raises:
        ValueError: ``index`` does not name every base dim.
        TypeError: an element is none of slice, int, list.
        IndexError: an integer lies outside its dim.
    """

    def __init__(self, base: Any, index: Sequence[Any] | None = None) -> None:
        sizes = _shape(base)
        if index is None:
            index = [slice(None)] * len(sizes)
        if len(index) != len(sizes):
            raise ValueError(
                f"the index of a view names {len(index)} dims, the base has {len(sizes)}"
            )
        self._base = base
        # Per base dim either one position (collapsed) or the positions it still has.
        self._positions: list[int | Sequence[int]] = [
            _select(range(size), element) for size, element in zip(sizes, index, strict=True)
        ]

    def get_shape(self) -> list[int]:
        """Return the shape without reading anything."""
        return [len(kept) for kept in self._positions if not isinstance(kept, int)]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the view."""
        return tuple(self.get_shape())

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Read ``view[index]``.

        Args:
            index: slices, integers, lists and at most one Ellipsis, as for a tensor; missing
                trailing dims are taken whole.

        Returns:
            The tensor that indexing the base twice would give.
        """
        elements = list(index) if isinstance(index, tuple) else [index]
        open_dims = [dim for dim, kept in enumerate(self._positions) if not isinstance(kept, int)]
        named = sum(element is not Ellipsis for element in elements)
        if named > len(open_dims):
            raise IndexError(f"{named} indices for a view of {len(open_dims)} dims")
        fill = [slice(None)] * (len(open_dims) - named)
        if Ellipsis in elements:
            place = elements.index(Ellipsis)
            elements[place : place + 1] = fill
        else:
            elements += fill
        positions = list(self._positions)
        for dim, element in zip(open_dims, elements, strict=True):
            positions[dim] = _select(positions[dim], element)
        return _read(self._base, positions)


def _select(kept: Any, element: Any) -> int | Sequence[int]:
    """Apply one index element to the positions a dim still has."""
    if isinstance(element, slice):
        return kept[element]
    if isinstance(element, list):
        return [_pick(kept, position) for position in element]
    if isinstance(element, int) and not isinstance(element, bool):
        return _pick(kept, element)
    raise TypeError(
        f"a view is indexed with slices, integers, lists and Ellipsis, got "
        f"{type(element).__name__}"
    )


def _pick(kept: Sequence[int], position: int) -> int:
    if not -len(kept) <= position < len(kept):
        raise IndexError(f"index {position} lies outside a dim of {len(kept)}")
    return kept[position]


def _read(base: Any, positions: Sequence[int | Sequence[int]]) -> torch.Tensor:
    """Read the smallest box that holds the positions, then pick them out of it."""
    box: list[slice] = []
    inside: list[Any] = []
    for kept in positions:
        wanted = [kept] if isinstance(kept, int) else kept
        low, high = (min(wanted), max(wanted) + 1) if len(wanted) else (0, 0)
        box.append(slice(low, high))
        inside.append([position - low for position in wanted])
    tensor = base[tuple(box)]
    for dim, wanted in enumerate(inside):
        if wanted != list(range(tensor.shape[dim])):
            tensor = tensor.index_select(dim, torch.tensor(wanted, dtype=torch.int64))
    collapsed = [dim for dim, kept in enumerate(positions) if isinstance(kept, int)]
    for dim in reversed(collapsed):
        tensor = tensor.squeeze(dim)
    return tensor
