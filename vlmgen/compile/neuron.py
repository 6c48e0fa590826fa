"""The same graphs through a Neuron compiler, where one is installed.

With the plugin, its own compile mode without a device: an engine is built, which loads no weights
and compiles every graph of its warm-up. Without it, `neuronx-cc`, the compiler that torch-neuronx
and neuronx-distributed call: every graph is handed to it as the HLO module that vlmgen lowered, so
that what it gets is what was run and compared. Neither was at hand when this was written; commands
and environment follow what their documentation says.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlmgen import standin
from vlmgen.compile import artifacts
from vlmgen.compile.artifacts import ArtifactCache, CacheMissError
from vlmgen.errors import VlmgenError

if TYPE_CHECKING:
    from vlmgen.compile.calls import Call
    from vlmgen.compile.graphs import Deployment

EXIT_NO_COMPILER = 7
PLATFORM_VARIABLE = "NEURON_PLATFORM_TARGET_OVERRIDE"
PLUGIN, COMPILER = "plugin", "neuronx-cc"
FLAGS = ("--framework", "XLA", "--model-type", "transformer", "--auto-cast", "none")
_LAST_LINES = 12


class NoNeuronError(VlmgenError):
    """No compiler for Neuron devices is installed."""

    code = "VG920"
    exit_code = EXIT_NO_COMPILER


@dataclass(frozen=True)
class Command:
    """A command and the environment that it needs.

    Args:
        arguments: Program and arguments.
        environment: Variables to set.
        without: Variables that must not be set.
    """

    arguments: tuple[str, ...]
    environment: dict[str, str]
    without: tuple[str, ...] = ()

    def shell(self) -> str:
        """One line to copy into a shell."""
        unset = [part for name in self.without for part in ("-u", name)]
        variables = [f"{name}={value}" for name, value in sorted(self.environment.items())]
        prefix = ["env", *unset, *variables] if unset or variables else []
        return shlex.join([*prefix, *self.arguments])

    def run(self) -> subprocess.CompletedProcess[str]:
        """Run it to its end, its output kept."""
        kept = {name: value for name, value in os.environ.items() if name not in self.without}
        return subprocess.run(
            self.arguments, env={**kept, **self.environment}, capture_output=True, text=True
        )


@dataclass(frozen=True)
class NeuronResult:
    """What became of one command.

    Args:
        name: A graph, or `all graphs` with the plugin.
        command: As it can be copied.
        passed: It ended well and left what it should.
        cached: It was not run: its result was in the cache.
        detail: The end of its output where it failed.
        seconds: How long it took.
    """

    name: str
    command: str
    passed: bool
    cached: bool = False
    detail: str = ""
    seconds: float = 0.0


def installed() -> str:
    """`PLUGIN` or `COMPILER`, whichever is there; the plugin goes first.

    Raises:
        NoNeuronError: Neither.
    """
    if standin.which() == PLUGIN:
        return PLUGIN
    if shutil.which(COMPILER):
        return COMPILER
    raise NoNeuronError(
        f"no Neuron compiler: neither the plugin vllm-neuron nor {COMPILER} (of torch-neuronx) is "
        "installed; pip install 'vlmgen[neuron]' where AWS's package repository is configured"
    )


def platform() -> str:
    """The device to compile for; `trn2` unless the environment says otherwise."""
    return os.environ.get(PLATFORM_VARIABLE, "trn2")


def plugin_command(
    package: Path, checkpoint: Path, deployment: Deployment, served: Mapping[str, Any]
) -> Command:
    """Builds an engine in the plugin's compile mode, which ends when every graph is compiled.

    Args:
        package: Folder of the package.
        checkpoint: Folder of the checkpoint.
        deployment: Buckets and sizes.
        served: The plugin's settings that `vlmgen serve` gives.
    """
    from vlmgen.serve.packages import PACKAGES_VARIABLE

    engine = {
        "model": str(checkpoint.resolve()),
        "max_model_len": deployment.max_model_len,
        "max_num_batched_tokens": deployment.max_model_len,
        "max_num_seqs": max(deployment.seq_buckets),
        "block_size": deployment.kv_block_size,
        "enable_prefix_caching": False,
        "additional_config": deployment.additional_config(served),
    }
    return Command(
        (sys.executable, "-m", "vlmgen.compile.neuron_engine", json.dumps(engine)),
        {
            PACKAGES_VARIABLE: str(package.resolve()),
            PLATFORM_VARIABLE: platform(),
            "VLLM_NEURON_CPU_COMPILE": "1",
            "VLLM_USE_V2_MODEL_RUNNER": "0",
        },
        (standin.CPU_MODE_VARIABLE,),
    )


def compiler_command(module: Path, output: Path) -> Command:
    """Compiles one HLO module.

    Args:
        module: A serialized HLO module.
        output: Where the compiled graph goes.
    """
    arguments = (COMPILER, "compile", *FLAGS, "--target", platform(), "--output", str(output))
    return Command((*arguments, str(module)), {PLATFORM_VARIABLE: platform()})


def compile_calls(
    calls: Sequence[Call],
    cache: ArtifactCache,
    *,
    offline: bool = False,
    emit: Path | None = None,
) -> Iterator[NeuronResult]:
    """Every graph through `neuronx-cc`.

    Args:
        calls: Warm-up calls of the graphs.
        cache: Keeps the compiled graphs.
        offline: Use the cache alone.
        emit: Folder for the HLO modules and the compiled graphs; None keeps them in the cache.
    """
    from vlmgen.compile.hlo_module import with_narrow_ids
    from vlmgen.compile.lower import export, lower

    version = Command((COMPILER, "--version"), {}).run().stdout.strip()
    for call in calls:
        name = call.graph.name
        lowered = lower(export(call))
        module = with_narrow_ids(lowered.compiler_ir("hlo").as_serialized_hlo_module_proto())
        with tempfile.TemporaryDirectory(prefix="vlmgen-neuron-") as temporary:
            folder = emit or Path(temporary)
            folder.mkdir(parents=True, exist_ok=True)
            source, output = folder / f"{name}.hlo.pb", folder / f"{name}.neff"
            command = compiler_command(source, output)
            key = artifacts.digest(
                lowered.as_text(), COMPILER, version, platform(), json.dumps(FLAGS)
            )
            stored = cache.get("neuron", key)
            if stored is not None:
                cache.statistics.hits += 1
                output.write_bytes(stored[1])
                yield NeuronResult(name, command.shell(), True, cached=True)
                continue
            if offline:
                raise CacheMissError(f"{name} for {platform()} is not in the cache")
            cache.statistics.misses += 1
            source.write_bytes(module)
            started = time.perf_counter()
            result = command.run()
            seconds = time.perf_counter() - started
            passed = result.returncode == 0 and output.is_file()
            if passed:
                cache.put("neuron", key, {"command": command.shell()}, output.read_bytes())
            yield NeuronResult(name, command.shell(), passed, detail=_end(result), seconds=seconds)


def compile_with_plugin(command: Command) -> NeuronResult:
    """Every graph through the plugin's compile mode: :func:`plugin_command`, run."""
    started = time.perf_counter()
    result = command.run()
    seconds = time.perf_counter() - started
    passed = result.returncode == 0
    return NeuronResult("all graphs", command.shell(), passed, detail=_end(result), seconds=seconds)


def _end(result: subprocess.CompletedProcess[str]) -> str:
    """The end of what a failed command said."""
    if result.returncode == 0:
        return ""
    lines = (result.stderr or result.stdout).strip().splitlines()
    return "\n".join([f"exit code {result.returncode}", *lines[-_LAST_LINES:]])
