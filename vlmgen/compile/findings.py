"""What compiling finds, with the line of the generated package that it comes from."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SEVERITIES = ("error", "warning", "note")

CODES = {
    "float64": "VG601",
    "complex": "VG602",
    "dynamic-shape": "VG603",
    "custom-call": "VG604",
    "control-flow": "VG605",
    "random": "VG606",
    "sort": "VG607",
    "linear-algebra": "VG608",
    "dynamic-slice": "VG609",
    "rank-5-permute": "VG610",
    "gather-of-elements": "VG611",
    "scatter-of-elements": "VG612",
    "gather-of-rows": "VG613",
    "scalar-from-tensor": "VG614",
    "value-dependent-branch": "VG615",
    "value-dependent-shape": "VG616",
    "no-lowering": "VG617",
    "export": "VG618",
    "cache-by-copy": "VG619",
    "specialised-layer": "VG620",
}
"""Code of every rule, with a page in `vlmgen/explain`; the first thirteen are in `denied.yaml`."""

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)')


@dataclass(frozen=True, order=True)
class Place:
    """A line of source.

    Args:
        path: File, relative to the package's folder where it is in there.
        line: 1-based; 0 if unknown.
        function: The function it is in.
        code: The text of the line.
    """

    path: str = ""
    line: int = 0
    function: str = ""
    code: str = ""

    def __str__(self) -> str:
        return f"{self.path}:{self.line}" if self.line else "(no line)"


@dataclass(frozen=True)
class Finding:
    """One thing that a device compiler would not take, or would take badly.

    Args:
        rule: Name of the rule, one of `CODES`.
        severity: `error`, `warning` or `note`.
        graph: Name of the graph.
        message: What was found.
        why: Why it matters.
        legal: What would be legal.
        place: The package's line; empty where none is known.
        inside: The plugin's function that the line calls, if the operator is in there.
        count: How often, at this line.
    """

    rule: str
    severity: str
    graph: str
    message: str
    why: str
    legal: str
    place: Place
    inside: str = ""
    count: int = 1

    @property
    def code(self) -> str:
        """Stable code of the rule."""
        return CODES[self.rule]

    def __str__(self) -> str:
        inside = f" (inside {self.inside})" if self.inside else ""
        times = f" x{self.count}" if self.count > 1 else ""
        return (
            f"{self.place}: {self.severity} {self.code} {self.rule}: {self.message}{inside}{times} "
            f"[{self.graph}] ({self.why}) -> {self.legal}"
        )

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"code": self.code, **asdict(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Finding:
        """Back from JSON."""
        fields = {name: value for name, value in data.items() if name != "code"}
        return cls(**{**fields, "place": Place(**data["place"])})


def frames_of(trace: str) -> list[Place]:
    """Frames of a stack trace as torch writes it, outermost first."""
    found, lines = [], trace.splitlines()
    for index, text in enumerate(lines):
        match = _FRAME.search(text)
        if match is None:
            continue
        code = lines[index + 1].strip() if index + 1 < len(lines) else ""
        found.append(Place(match["file"], int(match["line"]), match["function"], code))
    return found


@dataclass(frozen=True)
class Sources:
    """Tells the package's own lines from the plugin's and from torch's.

    Args:
        package: Folder of the package.
    """

    package: Path

    def place(self, trace: str) -> Place:
        """The innermost frame that lies in the package; empty if there is none."""
        return next((self._short(f) for f in reversed(frames_of(trace)) if self._own(f)), Place())

    def inside(self, trace: str) -> str:
        """The plugin's function that the package's line calls, or empty."""
        frames = frames_of(trace)
        own = [index for index, frame in enumerate(frames) if self._own(frame)]
        after = frames[own[-1] + 1 :] if own else frames
        for frame in after:
            if "vllm_neuron" in Path(frame.path).parts and not self._own(frame):
                return frame.function
        return ""

    def _own(self, frame: Place) -> bool:
        path = Path(frame.path)
        return path.is_relative_to(self.package.resolve())

    def _short(self, frame: Place) -> Place:
        path = Path(frame.path).relative_to(self.package.resolve())
        return Place(path.as_posix(), frame.line, frame.function, frame.code)
