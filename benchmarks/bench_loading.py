"""Memory of a rank while it loads its share of a checkpoint, at text and vision TP 1, 2 and 4.

A synthetic checkpoint of Qwen3-VL in bfloat16, over 1 GB in several files, is written to a
temporary folder, tensor by tensor. Each rank is a process of its own with real process groups, as
in serving. What counts is anonymous memory (`RssAnon`): pages of the mapped checkpoint files are
the page cache's and can be dropped at any time. The parent samples it, so that nothing runs in the
rank but its loading; the figure is the largest sample less the one before loading. The peak of the
resident set, those pages included, is shown as well: the kernel keeps it (`VmHWM`), so it cannot
miss what lies between two samples.

The peer is `from_pretrained` of transformers on the same checkpoint, one process, measured alike.
"""

from __future__ import annotations

import json
import os
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measure import Row, finish
from package import package_module

os.environ.setdefault("VLLM_NEURON_CPU_MODE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from vlmgen.standin.ranks import RankProcesses  # noqa: E402  (reads the variables above)

WORLD_SIZES = (1, 2, 4)
ALLOWANCE = 1.10
SAMPLE_SECONDS = 0.002
TIMEOUT = 600.0
SHARD_FILE_BYTES = 300_000_000
MB = 1_000_000
PAGE_VALUES = 2048  # bfloat16 values of a page
CONFIG = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "model_type": "qwen3_vl",
    "dtype": "bfloat16",
    "tie_word_embeddings": False,
    "image_token_id": 32000,
    "video_token_id": 32001,
    "vision_start_token_id": 32002,
    "vision_end_token_id": 32003,
    "text_config": {
        "model_type": "qwen3_vl_text",
        "dtype": "bfloat16",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 32768,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5000000.0,
            "mrope_section": [24, 20, 20],
            "mrope_interleaved": True,
        },
    },
    "vision_config": {
        "model_type": "qwen3_vl",
        "dtype": "bfloat16",
        "depth": 6,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_heads": 16,
        "patch_size": 16,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "out_hidden_size": 2048,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [1, 3, 5],
    },
}


def main() -> None:
    """Measure and print."""
    rows: list[Row] = []
    gaps: list[float] = []
    with tempfile.TemporaryDirectory(prefix="vlmgen-bench-") as name:
        folder = Path(name)
        checkpoint = write_checkpoint(folder)
        largest = checkpoint.largest_tensor
        peer = load(folder, 1, load_with_transformers)[0]
        for world_size in WORLD_SIZES:
            for rank, run in enumerate(load(folder, world_size, load_with_package)):
                allowed = run.shard + largest
                gaps.append(run.longest_gap)
                rows.append(
                    Row(
                        f"TP {world_size}, rank {rank}: anonymous, shard {run.shard / MB:.0f} MB",
                        run.anonymous / MB,
                        "MB",
                        "shard + largest tensor",
                        allowed / MB,
                        run.anonymous / allowed,
                        f"<= {ALLOWANCE:.2f}x",
                        run.anonymous <= ALLOWANCE * allowed,
                    )
                )
                rows.append(resident_row(run, peer if world_size == 1 else None))
    finish(
        "bench_loading: peak memory of a rank while loading, above what it held before",
        rows,
        [
            f"checkpoint: {checkpoint.total_bytes / MB:.0f} MB bfloat16, {checkpoint.files} files, "
            f"largest tensor {largest / MB:.0f} MB",
            f"anonymous: RssAnon, sampled every {1000 * SAMPLE_SECONDS:g} ms (longest gap "
            f"{1000 * max(gaps):.0f} ms); with pages of files: VmHWM, the kernel's own peak",
            "from_pretrained leaves weights in the mapped files: anonymous "
            f"{peer.anonymous / MB:.0f} MB; one thread per rank",
        ],
    )


def resident_row(run: Run, peer: Run | None) -> Row:
    """The resident set of a rank, with that of transformers where the two hold the same."""
    return Row(
        f"  with pages of files, {run.seconds:.1f} s",
        run.resident / MB,
        "MB",
        f"from_pretrained, {peer.seconds:.1f} s" if peer else "",
        peer.resident / MB if peer else None,
        run.resident / peer.resident if peer else None,
    )


# -------------------------------------------------------------------------------------- checkpoint


@dataclass(frozen=True)
class Checkpoint:
    """What was written.

    Args:
        total_bytes: Bytes of all tensors.
        largest_tensor: Bytes of the largest one.
        files: Number of safetensors files.
    """

    total_bytes: int
    largest_tensor: int
    files: int


def write_checkpoint(folder: Path) -> Checkpoint:
    """Write config.json and the weights under their published names, one tensor in memory."""
    import torch
    import transformers

    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    with torch.device("meta"):
        config = transformers.AutoConfig.from_pretrained(folder)
        model = transformers.Qwen3VLForConditionalGeneration(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    for name, shape in shapes.items():
        if shards[-1] and sum(map(num_bytes, shards[-1].values())) > SHARD_FILE_BYTES:
            shards.append({})
        shards[-1][name] = shape
    index: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        path = folder / f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_safetensors(path, shard)
        index |= dict.fromkeys(shard, path.name)
    sizes = [num_bytes(shape) for shape in shapes.values()]
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": sum(sizes)}, "weight_map": index}), encoding="utf-8"
    )
    return Checkpoint(sum(sizes), max(sizes), len(shards))


def write_safetensors(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """One file in the safetensors format: length of the header, header, then the tensors' bytes.

    The library writes a file from tensors that are all in memory; here one is at a time.
    """
    import torch

    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + num_bytes(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    noise = torch.empty(1 << 20).normal_(0, 0.02, generator=torch.Generator().manual_seed(0))
    noise = noise.to(torch.bfloat16).view(torch.int16)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for shape in shapes.values():
            count = num_bytes(shape) // 2
            file.write(noise.repeat(-(-count // len(noise)))[:count].numpy())  # cheap, not new


def num_bytes(shape: Iterable[int]) -> int:
    """Bytes of a bfloat16 tensor."""
    size = 2
    for length in shape:
        size *= length
    return size


# ------------------------------------------------------------------------------------------ ranks


class Loading:
    """One rank: the model is built on the meta device at once, and loaded when asked to."""

    def __init__(self, rank: int, folder: str, world_size: int, how: Callable[..., Any]) -> None:
        self._load = how(folder, world_size)

    def __call__(self, step: str) -> Any:
        """`pid`, or `load`: (bytes of the shard, growth of the peak resident set, seconds)."""
        if step == "pid":
            return os.getpid()
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # forget the peak so far
        before, start = read_memory("self")["VmRSS"], time.perf_counter()
        model = self._load()
        # A mapped weight counts from when it is read: read one value of every page.
        for parameter in model.parameters():
            parameter.detach().reshape(-1)[::PAGE_VALUES].sum()
        seconds = time.perf_counter() - start
        shard = sum(parameter.nbytes for parameter in model.parameters())
        return shard, read_memory("self")["VmHWM"] - before, seconds


def load_with_package(folder: str, world_size: int) -> Callable[[], Any]:
    """The package's model on the meta device; call the result to load it."""
    import torch
    from vllm_neuron.model.neuron_config import NeuronConfig, VisionNeuronConfig

    config = read_config(folder)
    with torch.device("meta"):
        model = package_module("factory").Qwen3VLForConditionalGeneration.from_configs(
            hf_config=config,
            text_neuron_config=NeuronConfig(on_device_sampling_config=None),
            vision_neuron_config=VisionNeuronConfig(
                num_vision_tokens_buckets=[1024],
                vision_attention_block_size=1024,
                tp_size=world_size,
            ),
        )

    def run() -> Any:
        model.load_weights(folder, torch.device("cpu"), None)
        return model

    return run


def load_with_transformers(folder: str, world_size: int) -> Callable[[], Any]:
    """Everything imported that `from_pretrained` needs; call the result to load."""
    import torch
    import transformers

    config = read_config(folder)
    with torch.device("meta"):
        transformers.Qwen3VLForConditionalGeneration(config)
    transformers.utils.logging.disable_progress_bar()
    return lambda: transformers.Qwen3VLForConditionalGeneration.from_pretrained(
        folder, dtype=torch.bfloat16
    )


def read_config(folder: str) -> Any:
    """The checkpoint's configuration, as transformers reads it."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(folder)


# ------------------------------------------------------------------------------------------ memory


@dataclass(frozen=True)
class Run:
    """What one rank took, in bytes above what it held before loading.

    Args:
        shard: Bytes of its parameters.
        anonymous: Largest anonymous memory, of the samples.
        resident: Largest resident set, as the kernel kept it.
        seconds: Wall-clock time of loading.
        longest_gap: Longest time between two samples, in seconds.
    """

    shard: int
    anonymous: int
    resident: int
    seconds: float
    longest_gap: float


def load(folder: Path, world_size: int, how: Callable[..., Any]) -> list[Run]:
    """Load in `world_size` processes and watch them."""
    with RankProcesses(
        world_size,
        Loading,
        (str(folder), world_size, how),
        tensor_parallel_size=world_size,
        vision_tp_size=world_size,
        vision_dp_size=1,
        start_method="spawn",
    ) as ranks:
        ranks.call([("pid",)] * world_size)
        watch = Watch(ranks.collect(TIMEOUT))
        with watch:
            ranks.call([("load",)] * world_size)
            answers = ranks.collect(TIMEOUT)
    return [
        Run(shard, anonymous, resident, seconds, watch.longest_gap)
        for (shard, resident, seconds), anonymous in zip(answers, watch.growth(), strict=True)
    ]


class Watch:
    """Samples the anonymous memory of processes for the duration of a `with` block."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self._first = self._largest = self._read()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self.longest_gap = 0.0

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._done.set()
        self._thread.join()

    def growth(self) -> list[int]:
        """Bytes of the largest sample of each process above its first."""
        return [largest - first for largest, first in zip(self._largest, self._first, strict=True)]

    def _read(self) -> list[int]:
        return [read_memory(str(pid))["RssAnon"] for pid in self._pids]

    def _watch(self) -> None:
        last = time.perf_counter()
        while not self._done.wait(SAMPLE_SECONDS):
            self._largest = list(map(max, self._largest, self._read()))
            now = time.perf_counter()
            self.longest_gap, last = max(self.longest_gap, now - last), now


def read_memory(pid: str) -> dict[str, int]:
    """Memory figures of a process in bytes, such as `RssAnon`, `VmRSS` and its peak `VmHWM`."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    fields = (line.split() for line in lines if line.endswith(" kB"))
    return {name.rstrip(":"): 1024 * int(value) for name, value, _ in fields}


if __name__ == "__main__":
    main()
