"""Safetensors checkpoints, read one rank's shard at a time.

A checkpoint tensor is opened when a loader cuts it and closed again at once, so that a rank's
memory holds its own shards and, for a moment, one checkpoint tensor, never whole matrices that
it does not need.

Stricter than the plugin: a file that is cut short, is not a safetensors file, or is named in
``model.safetensors.index.json`` without being there ends in an error with the file's name before
anything is loaded, and so does a tensor that two files hold.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from vllm_neuron.utils.weight_loader import get_weight_loader

__all__ = ["CheckpointLoadResult", "SafetensorsCheckpoint"]

INDEX_SUFFIX = ".safetensors.index.json"


class CheckpointLoadResult(NamedTuple):
    """What a load produced.

    Attributes:
        state_dict: parameter name -> tensor, for ``load_state_dict(..., assign=True)``.
        missing_keys: names of parameters whose checkpoint tensors do not exist, sorted.
        unexpected_keys: checkpoint tensors no parameter asked for, sorted.
    """

    state_dict: dict[str, torch.Tensor]
    missing_keys: list[str]
    unexpected_keys: list[str]


class _CheckpointSlice:
    """A checkpoint tensor that is read when it is indexed, and only where it is indexed."""

    def __init__(self, path: Path, key: str) -> None:
        self._path = path
        self._key = key

    def get_shape(self) -> list[int]:
        with safe_open(self._path, framework="pt") as file:
            return list(file.get_slice(self._key).get_shape())

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.get_shape())

    def __getitem__(self, index: Any) -> torch.Tensor:
        with safe_open(self._path, framework="pt", device="cpu") as file:
            lazy = file.get_slice(self._key)
            # The library cannot slice a scalar; its result elsewhere is a view of the mapped
            # file, and the copy lets go of that.
            scalar = not lazy.get_shape()
            view = file.get_tensor(self._key) if scalar else lazy[index]
            return view.clone(memory_format=torch.contiguous_format)


class SafetensorsCheckpoint:
    """A folder of safetensors files, or a hub repository's.

    Args:
        model_name_or_path: local folder, of which every ``*.safetensors`` file is used, or the id
            of a hub repository.
        cache_dir: where downloads are kept; None is the hub's default.

    Raises:
        FileNotFoundError: no such folder, no safetensors files in it, or a file named in the
            index that is not there.
        RuntimeError: a file that cannot be read (cut short, not safetensors), or a tensor that
            two files hold.
    """

    def __init__(self, model_name_or_path: str | Path, cache_dir: str | Path | None = None) -> None:
        self._folder = _local_folder(model_name_or_path, cache_dir)
        self._files = sorted(self._folder.glob("*.safetensors"))
        _check_index(self._folder, {path.name for path in self._files})
        if not self._files:
            raise FileNotFoundError(
                f"no *.safetensors file in {self._folder}; a checkpoint in another format must be "
                "saved as safetensors first"
            )
        self._file_of: dict[str, Path] = {}
        for path in self._files:
            for key in _keys(path):
                if key in self._file_of:
                    raise RuntimeError(
                        f"tensor {key!r} is in two files of {self._folder}: "
                        f"{self._file_of[key].name} and {path.name}; remove the stale one"
                    )
                self._file_of[key] = path

    def get_tensor_names(self) -> list[str]:
        """Return the names of all tensors, sorted."""
        return sorted(self._file_of)

    def get_num_files(self) -> int:
        """Return the number of safetensors files."""
        return len(self._files)

    def load_sharded(
        self,
        rank: int,
        world_size: int,
        model: torch.nn.Module,
        mappings: Mapping[str, str | Sequence[str]],
        device: torch.device | str,
        strict: bool = True,
    ) -> CheckpointLoadResult:
        """Load this rank's parameters with the dtypes of the checkpoint.

        Args:
            rank: rank in the group the parameters are sharded over, handed to their loaders.
            world_size: size of that group.
            model: its named parameters are walked, on any device (meta included); buffers are not.
            mappings: parameter name -> checkpoint key, or a list of keys in the order the
                parameter's loader takes them. A parameter without an entry uses its own name.
            device: where the tensors go.
            strict: a missing checkpoint tensor is an error; otherwise the parameter is left out
                and named in ``missing_keys``.

        Returns:
            The loaded tensors. Shapes are not compared with the parameters'.

        Raises:
            RuntimeError: strict and a checkpoint tensor is missing; the message names parameter
                and key.
            ValueError: ``rank`` is not in ``range(world_size)``.
        """
        return self._load(rank, world_size, model, mappings, device, strict, dtypes=None)

    def load_sharded_pipelined(
        self,
        rank: int,
        world_size: int,
        model: torch.nn.Module,
        mappings: Mapping[str, str | Sequence[str]],
        device: torch.device | str,
        dtype_override: Mapping[str, torch.dtype] | None = None,
        strict: bool = True,
    ) -> CheckpointLoadResult:
        """Load this rank's parameters, cast to the parameters' dtypes.

        The plugin overlaps the ranks' reading through torch.distributed's default store; the
        stand-in reads without overlap but needs the same set-up.

        Args:
            rank: as in :meth:`load_sharded`.
            world_size: as in :meth:`load_sharded`.
            model: as in :meth:`load_sharded`.
            mappings: as in :meth:`load_sharded`.
            device: as in :meth:`load_sharded`.
            dtype_override: parameter name -> dtype that wins over the parameter's own.
            strict: as in :meth:`load_sharded`.

        Returns:
            The loaded tensors. A cast is announced by one warning that counts the parameters.

        Raises:
            RuntimeError: torch.distributed is not initialised, or as in :meth:`load_sharded`.
        """
        if not torch.distributed.is_initialized():
            raise RuntimeError(
                "load_sharded_pipelined works through the default store of torch.distributed, "
                "which is not initialised; call init_neuron_distributed_environment first"
            )
        override = dtype_override or {}
        dtypes = {
            name: override.get(name, parameter.dtype)
            for name, parameter in model.named_parameters()
        }
        return self._load(rank, world_size, model, mappings, device, strict, dtypes)

    def _load(
        self,
        rank: int,
        world_size: int,
        model: torch.nn.Module,
        mappings: Mapping[str, str | Sequence[str]],
        device: torch.device | str,
        strict: bool,
        dtypes: Mapping[str, torch.dtype] | None,
    ) -> CheckpointLoadResult:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not in range(world_size={world_size})")
        keys_of = {name: _as_list(mappings.get(name, name)) for name, _ in model.named_parameters()}
        missing = {
            name: [key for key in keys if key not in self._file_of]
            for name, keys in keys_of.items()
        }
        missing = {name: keys for name, keys in missing.items() if keys}
        if strict and missing:
            listing = "; ".join(
                f"parameter {name!r} needs {', '.join(map(repr, keys))}"
                for name, keys in sorted(missing.items())
            )
            raise RuntimeError(f"checkpoint {self._folder} lacks tensors: {listing}")

        state_dict: dict[str, torch.Tensor] = {}
        cast: list[str] = []
        for name, parameter in model.named_parameters():
            if name in missing:
                continue
            slices = [_CheckpointSlice(self._file_of[key], key) for key in keys_of[name]]
            tensor = get_weight_loader(parameter).load(slices, rank)
            if dtypes is not None and tensor.dtype != dtypes[name]:
                cast.append(f"{name} ({tensor.dtype} -> {dtypes[name]})")
                tensor = tensor.to(dtypes[name])
            state_dict[name] = tensor.to(device)
        if cast:
            warnings.warn(
                f"{len(cast)} parameters were cast while loading, first {cast[0]}", stacklevel=3
            )
        asked_for = {key for keys in keys_of.values() for key in keys}
        unexpected = sorted(set(self._file_of) - asked_for)
        return CheckpointLoadResult(state_dict, sorted(missing), unexpected)


def _as_list(keys: str | Sequence[str]) -> list[str]:
    return [keys] if isinstance(keys, str) else list(keys)


def _keys(path: Path) -> list[str]:
    try:
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    except (SafetensorError, OSError) as error:
        with path.open("rb") as file:
            start = file.read(64)
        if start.startswith(b"version https://git-lfs"):
            reason = "it is a Git LFS pointer; fetch the real file with `git lfs pull`"
        else:
            reason = f"it is cut short or not a safetensors file ({error})"
        raise RuntimeError(f"cannot read {path} ({path.stat().st_size} bytes): {reason}") from error


def _check_index(folder: Path, present: set[str]) -> None:
    """Every file an index names must be there."""
    for index_path in sorted(folder.glob(f"*{INDEX_SUFFIX}")):
        try:
            weight_map = json.loads(index_path.read_text(encoding="utf-8"))["weight_map"]
            named = set(weight_map.values())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RuntimeError(
                f"{index_path} is not an index of safetensors files: it needs an object "
                f"'weight_map' of tensor name -> file name ({type(error).__name__}: {error})"
            ) from error
        absent = sorted(named - present)
        if absent:
            counts = [sum(file == name for file in weight_map.values()) for name in absent]
            listing = ", ".join(
                f"{name} ({count} tensors)" for name, count in zip(absent, counts, strict=True)
            )
            raise FileNotFoundError(
                f"{index_path.name} names {len(named)} files, of which {len(absent)} are not in "
                f"{folder}: {listing}"
            )


def _local_folder(model_name_or_path: str | Path, cache_dir: str | Path | None) -> Path:
    folder = Path(model_name_or_path)
    if folder.is_dir():
        return folder
    text = str(model_name_or_path)
    # A hub id is "name" or "owner/name"; everything else can only be a path.
    looks_like_path = folder.is_absolute() or text.startswith((".", "~")) or text.count("/") > 1
    if looks_like_path or folder.exists():
        raise FileNotFoundError(f"{text} is not a folder with safetensors files")
    from huggingface_hub import snapshot_download

    try:
        downloaded = snapshot_download(
            text,
            cache_dir=cache_dir,
            allow_patterns=["*.safetensors", f"*{INDEX_SUFFIX}"],
            ignore_patterns=["*/*"],
        )
    except Exception as error:
        raise FileNotFoundError(
            f"{text} is neither a local folder nor a reachable hub repository "
            f"({type(error).__name__}: {error})"
        ) from error
    return Path(downloaded)
