"""Checkpoints: what the stand-in refuses that the plugin does not, and how little it reads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from vlmgen import standin

standin.activate()

from vllm_neuron.utils.checkpoints import SafetensorsCheckpoint  # noqa: E402
from vllm_neuron.utils.weight_loader import (  # noqa: E402
    SafetensorsWeightLoader,
    SliceView,
    fused_qkv_weight_loader,
    set_weight_loader,
    sharding_weight_loader,
)


def write(folder: Path, files: dict[str, dict[str, torch.Tensor]], index: bool = True) -> None:
    weight_map = {}
    for file, tensors in files.items():
        save_file(tensors, folder / file)
        weight_map |= dict.fromkeys(tensors, file)
    if index:
        text = json.dumps({"metadata": {}, "weight_map": weight_map})
        (folder / "model.safetensors.index.json").write_text(text)


def two_files(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {name: torch.randn(4, 6) for name in ("a", "b", "c")}
    write(
        folder,
        {
            "model-00001-of-00002.safetensors": {"a": tensors["a"]},
            "model-00002-of-00002.safetensors": {"b": tensors["b"], "c": tensors["c"]},
        },
    )
    return tensors


class Model(torch.nn.Module):
    def __init__(self, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            value = torch.empty(shape, device="meta")
            self.register_parameter(name, torch.nn.Parameter(value, requires_grad=False))


def test_all_files_of_a_folder_are_read(tmp_path: Path) -> None:
    tensors = two_files(tmp_path)
    checkpoint = SafetensorsCheckpoint(tmp_path)
    assert checkpoint.get_num_files() == 2
    assert checkpoint.get_tensor_names() == ["a", "b", "c"]
    model = Model(a=(4, 6), b=(4, 6), c=(4, 6))
    state, missing, unexpected = checkpoint.load_sharded(
        rank=0, world_size=1, model=model, mappings={}, device="cpu"
    )
    assert missing == [] and unexpected == []
    model.load_state_dict(state, assign=True)
    for name, tensor in tensors.items():
        assert torch.equal(getattr(model, name), tensor)


def test_stricter_missing_shard_file_is_named(tmp_path: Path) -> None:
    two_files(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"model-00002-of-00002\.safetensors \(2 tensors\)"):
        SafetensorsCheckpoint(tmp_path)


@pytest.mark.parametrize("cut", [1, 8, 100])
def test_stricter_truncated_file_is_named(tmp_path: Path, cut: int) -> None:
    two_files(tmp_path)
    file = tmp_path / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-cut])
    with pytest.raises(RuntimeError, match=r"model-00002-of-00002\.safetensors .*cut short"):
        SafetensorsCheckpoint(tmp_path)


def test_stricter_empty_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(RuntimeError, match=r"model\.safetensors \(0 bytes\)"):
        SafetensorsCheckpoint(tmp_path)


def test_stricter_git_lfs_pointer_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(RuntimeError, match="git lfs pull"):
        SafetensorsCheckpoint(tmp_path)


def test_stricter_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    write(tmp_path, {"one.safetensors": {"a": torch.ones(2)}}, index=False)
    write(tmp_path, {"two.safetensors": {"a": torch.ones(2)}}, index=False)
    with pytest.raises(RuntimeError, match=r"'a' is in two files .*one\.safetensors and two"):
        SafetensorsCheckpoint(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": []}', '{"weights": {}}'])
def test_stricter_broken_index_is_named(tmp_path: Path, text: str) -> None:
    two_files(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(RuntimeError, match=r"model\.safetensors\.index\.json is not an index"):
        SafetensorsCheckpoint(tmp_path)


def test_folder_without_safetensors(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match="no \\*.safetensors file"):
        SafetensorsCheckpoint(tmp_path)


def test_absent_folder_is_not_taken_for_a_hub_id(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        SafetensorsCheckpoint(tmp_path / "absent")


def test_unreachable_hub_id(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    asked = {}

    def refuse(name: str, **options: object) -> str:
        asked.update(name=name, **options)
        raise OSError("offline")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(FileNotFoundError, match="neither a local folder nor a reachable hub"):
        SafetensorsCheckpoint("owner/name", cache_dir=tmp_path)
    assert asked["name"] == "owner/name" and asked["cache_dir"] == tmp_path
    assert "*.safetensors" in asked["allow_patterns"]


def test_stricter_rank_outside_the_group_is_refused(tmp_path: Path) -> None:
    two_files(tmp_path)
    with pytest.raises(ValueError, match=r"rank 2 is not in range\(world_size=2\)"):
        SafetensorsCheckpoint(tmp_path).load_sharded(
            rank=2, world_size=2, model=Model(a=(4, 6)), mappings={}, device="cpu"
        )


def test_stricter_pipelined_load_needs_torch_distributed(tmp_path: Path) -> None:
    two_files(tmp_path)
    with pytest.raises(RuntimeError, match="not initialised"):
        SafetensorsCheckpoint(tmp_path).load_sharded_pipelined(
            rank=0, world_size=1, model=Model(a=(4, 6)), mappings={}, device="cpu"
        )


def test_scalars_and_empty_tensors_load(tmp_path: Path) -> None:
    write(tmp_path, {"model.safetensors": {"s": torch.tensor(3.0), "e": torch.zeros(0, 3)}})
    state = (
        SafetensorsCheckpoint(tmp_path)
        .load_sharded(0, 1, Model(s=(), e=(0, 3)), {}, "cpu")
        .state_dict
    )
    assert state["s"].item() == 3.0 and state["e"].shape == (0, 3)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("transposed", [False, True])
def test_shards_do_not_hold_on_to_the_file(tmp_path: Path, rank: int, transposed: bool) -> None:
    """A shard owns exactly its own bytes; a view of the mapped file would keep all of it."""
    weight = torch.randn(8, 6)
    write(tmp_path, {"model.safetensors": {"w": weight}})
    model = Model(w=(6, 4) if transposed else (4, 6))
    set_weight_loader(
        model.w,
        sharding_weight_loader(
            shard_dim=1 if transposed else 0,
            shard_size=4,
            num_shards=2,
            is_storage_transposed=transposed,
        ),
    )
    (shard,) = (
        SafetensorsCheckpoint(tmp_path).load_sharded(rank, 2, model, {}, "cpu").state_dict.values()
    )
    expected = weight[rank * 4 : rank * 4 + 4]
    assert torch.equal(shard, expected.t() if transposed else expected)
    assert shard.is_contiguous()
    assert shard.untyped_storage().nbytes() == shard.numel() * shard.element_size()


def test_lazy_slices_serve_views_and_fused_loaders(tmp_path: Path) -> None:
    """Loaders give the same result over files as over tensors."""
    q, k, v = torch.randn(8, 6), torch.randn(4, 6), torch.randn(4, 6)
    write(tmp_path, {"model.safetensors": {"q": q, "k": k, "v": v}})
    fused = fused_qkv_weight_loader(
        q_size=4, kv_size=2, shard_dim=1, num_shards=2, is_storage_transposed=True
    )
    picked = SafetensorsWeightLoader(
        lambda slices, rank: SliceView(slices[0], [[5, 1], slice(0, 6, 2)])[::-1]
    )
    model = Model(qkv=(6, 8), rows=(2, 3))
    set_weight_loader(model.qkv, fused)
    set_weight_loader(model.rows, picked)
    mappings = {"qkv": ["q", "k", "v"], "rows": "q"}
    state = SafetensorsCheckpoint(tmp_path).load_sharded(1, 2, model, mappings, "cpu").state_dict
    assert torch.equal(state["qkv"], fused.load([q, k, v], 1))
    assert torch.equal(state["rows"], q[[5, 1]][:, ::2].flip(0))


PEAK_MEMORY = """
import sys
from vlmgen import standin
standin.activate()
import torch
from vllm_neuron.utils.checkpoints import SafetensorsCheckpoint
from vllm_neuron.utils.weight_loader import set_weight_loader, sharding_weight_loader
folder, count, rows, columns = sys.argv[1], *map(int, sys.argv[2:5])
class Model(torch.nn.Module):
    def __init__(self, rows, columns):
        super().__init__()
        for number in range(count):
            # odd ones shard the columns, which touches every row of the stored matrix
            shape = (rows // 4, columns) if number % 2 == 0 else (rows, columns // 4)
            w = torch.nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False)
            dim = number % 2
            set_weight_loader(w, sharding_weight_loader(dim, shape[dim], 4))
            self.register_parameter(f"w{number}", w)
def load(folder, rows, columns):
    return SafetensorsCheckpoint(folder).load_sharded(1, 4, Model(rows, columns), {}, "cpu")
load(sys.argv[5], 8, 4)  # what the code itself takes when it runs first is not the question
def status(field):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak starts again from here
before = status("VmRSS")
state = load(folder, rows, columns).state_dict
after = status("VmHWM")
own = sum(t.numel() * t.element_size() for t in state.values())
print(after - before, own)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
def test_peak_memory_is_the_shard_and_one_tensor(tmp_path: Path, repository: Path) -> None:
    count, rows, columns = 12, 2048, 1024  # 8 MiB each, 96 MiB in one file
    for folder, shape in (("large", (rows, columns)), ("small", (8, 4))):
        (tmp_path / folder).mkdir()
        tensors = {f"w{number}": torch.randn(shape) for number in range(count)}
        write(tmp_path / folder, {"model.safetensors": tensors})
    arguments = [tmp_path / "large", *map(str, (count, rows, columns)), tmp_path / "small"]
    done = subprocess.run(
        [sys.executable, "-c", PEAK_MEMORY, *arguments],
        capture_output=True,
        text=True,
        cwd=repository,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    grown, own = map(int, done.stdout.split())
    print(f"peak grew by {grown / 2**20:.1f} MiB, own shards {own / 2**20:.1f} MiB")
    tensor = rows * columns * 4
    assert own == count * tensor // 4
    assert grown <= 1.1 * (own + tensor), f"{grown / 2**20:.1f} MiB for {own / 2**20:.1f} MiB"
