"""Checkpoints of headers alone: config.json and a safetensors file without weights."""

from __future__ import annotations

import copy
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Shape = tuple[int, ...]


@dataclass
class Headers:
    """A checkpoint that a test may change before it is written.

    Args:
        config: config.json.
        shapes: Tensor name -> shape; None writes no tensors.
    """

    config: dict[str, Any]
    shapes: dict[str, Shape] | None

    def copy(self) -> Headers:
        """A copy to change."""
        return copy.deepcopy(self)

    def write(self, folder: Path) -> Path:
        """Write the files and return the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        if self.shapes is not None:
            (folder / "model.safetensors").write_bytes(safetensors(self.shapes))
        return folder

    def rename(self, old: str, new: str) -> None:
        """Replace text in every tensor name; it must stand in one."""
        assert self.shapes is not None and any(old in key for key in self.shapes), old
        self.shapes = {key.replace(old, new): shape for key, shape in self.shapes.items()}

    def drop(self, part: str) -> None:
        """Take away every tensor with this text in its name; there must be one."""
        assert self.shapes is not None and any(part in key for key in self.shapes), part
        self.shapes = {key: shape for key, shape in self.shapes.items() if part not in key}

    def add_bias(self, part: str) -> None:
        """Give every weight with this text in its name a bias."""
        assert self.shapes is not None
        for key, shape in list(self.shapes.items()):
            if part in key and key.endswith(".weight"):
                self.shapes[key.removesuffix("weight") + "bias"] = shape[:1]


def safetensors(shapes: Mapping[str, Shape]) -> bytes:
    """A safetensors file whose tensors take no bytes."""
    entries = {
        name: {"dtype": "BF16", "shape": list(shape), "data_offsets": [0, 0]}
        for name, shape in shapes.items()
    }
    header = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    return struct.pack("<Q", len(header)) + header


def read_headers(folder: Path) -> Headers:
    """Config and shapes of a checkpoint on disk."""
    shapes: dict[str, Shape] = {}
    for path in folder.glob("*.safetensors"):
        content = path.read_bytes()
        (length,) = struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + length])
        shapes |= {k: tuple(v["shape"]) for k, v in header.items() if k != "__metadata__"}
    return Headers(json.loads((folder / "config.json").read_text()), shapes)
