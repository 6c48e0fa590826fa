"""The command line of `vllm serve` for a package and a checkpoint."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlmgen import standin
from vlmgen.errors import CheckpointError, UsageError
from vlmgen.serve.packages import PACKAGES_VARIABLE, PLUGINS_VARIABLE, plugins_without_rivals
from vlmgen.serve.settings import settings_for


@dataclass(frozen=True)
class ServeCommand:
    """A command and the environment it needs.

    Args:
        arguments: `vllm`, `serve` and what follows.
        environment: Variables to set.
        uses: `plugin` or `standin`.
    """

    arguments: list[str]
    environment: dict[str, str]
    uses: str

    def shell(self) -> str:
        """One line to copy into a shell."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*variables, *map(shlex.quote, self.arguments)])

    def run(self) -> None:
        """Become the server; signals and the exit code are then the server's."""
        program = Path(sys.executable).with_name("vllm")
        start = [str(program)] if program.is_file() else [sys.executable, "-m", _VLLM_MAIN]
        sys.stdout.flush()
        os.execve(start[0], [*start, *self.arguments[1:]], {**os.environ, **self.environment})


_VLLM_MAIN = "vllm.entrypoints.cli.main"


def serve_command(package: Path, checkpoint: Path, options: Sequence[str]) -> ServeCommand:
    """Build the command.

    Args:
        package: Folder of a generated package.
        checkpoint: Folder of a checkpoint.
        options: The user's options for `vllm serve`; they win over what is worked out here, and
            `--additional-config` is merged key by key.

    Raises:
        UsageError: The package or an option is not usable.
        CheckpointError: The package does not serve the checkpoint, with the package's own words.
        PluginMissingError: Neither plugin nor stand-in can be imported.
    """
    if not (checkpoint / "config.json").is_file():
        raise UsageError(
            f"{checkpoint} holds no checkpoint: config.json is missing",
            hint="build a tiny one with `vlmgen tiny SPEC DIR`",
        )
    environment = {PACKAGES_VARIABLE: str(package.resolve())}
    if standin.activate() != "plugin":
        os.environ[standin.CPU_MODE_VARIABLE] = "1"
        environment[standin.CPU_MODE_VARIABLE] = "1"
    # The plugin's runner has vLLM's older interface.
    environment["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    uses = standin.require()
    from vlmgen.validate.package import load_factory, load_package_spec

    factory, spec = load_factory(package), load_package_spec(package)
    plugins = plugins_without_rivals(spec.architecture, os.environ.get(PLUGINS_VARIABLE))
    if plugins is not None:  # an installed package of the same architecture must not answer
        environment[PLUGINS_VARIABLE] = plugins

    own, rest = _take(options, ("max-model-len", "max-num-seqs", "additional-config"))
    try:
        settings = settings_for(
            factory,
            checkpoint,
            spec=spec,
            max_model_len=_integer(own, "max-model-len"),
            max_num_seqs=_integer(own, "max-num-seqs"),
            additional_config=_object(own, "additional-config"),
        )
    except ValueError as error:
        if type(error).__module__.partition(".")[0] != factory.__module__.partition(".")[0]:
            raise
        raise CheckpointError(
            f"{checkpoint}: {error}", hint=f"`vlmgen import {checkpoint}` names the family"
        ) from None
    arguments = ["vllm", "serve", str(checkpoint.resolve())]
    defaults: dict[str, str | None] = {
        "host": "127.0.0.1",
        "max-model-len": str(settings.max_model_len),
        "max-num-batched-tokens": str(settings.max_model_len),
        "max-num-seqs": str(settings.max_num_seqs),
        "no-enable-prefix-caching": None,
    }
    if settings.mm_processor_kwargs:
        defaults["mm-processor-kwargs"] = json.dumps(settings.mm_processor_kwargs)
    named = {option.partition("=")[0].replace("_", "-") for option in rest}
    for name, value in defaults.items():
        if f"--{name}" in named or name.startswith("no-") and f"--{name[3:]}" in named:
            continue
        arguments += [f"--{name}"] if value is None else [f"--{name}", value]
    arguments += ["--additional-config", json.dumps(settings.additional_config), *rest]
    return ServeCommand(arguments, environment, uses)


def _take(options: Sequence[str], names: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Options of these names, in both spellings of vLLM, and the others in order."""
    taken, rest = {}, []
    pending = list(options)
    while pending:
        option = pending.pop(0)
        name, equals, value = option.partition("=")
        name = name.removeprefix("--").replace("_", "-")
        if not option.startswith("--") or name not in names:
            rest.append(option)
            continue
        if not equals:
            if not pending:
                raise UsageError(f"--{name} needs a value")
            value = pending.pop(0)
        taken[name] = value
    return taken, rest


def _integer(options: Mapping[str, str], name: str) -> int | None:
    if name not in options:
        return None
    try:
        number = int(options[name])
    except ValueError:
        number = 0
    if number < 1:
        raise UsageError(f"--{name} must be a positive integer, got {options[name]!r}")
    return number


def _object(options: Mapping[str, str], name: str) -> dict[str, Any]:
    try:
        value = json.loads(options.get(name, "{}"))
    except ValueError as error:
        raise UsageError(f"--{name} is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise UsageError(f"--{name} must be a JSON object, got {options[name]}")
    for key in ("neuron_config", "vision_neuron_config"):
        if not isinstance(value.get(key, {}), dict):
            raise UsageError(f"--{name}: {key} must be an object, got {value[key]!r}")
    return value
