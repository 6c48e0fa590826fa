"""`--target neuron`: the commands and the environment.

No Neuron compiler was at hand. `neuronx-cc` is here A RECORDED FAKE that a test puts on PATH: it
checks how it is called, writes down what it got, and compiles nothing.
"""

from __future__ import annotations

import json
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vlmgen.cli import app

FAMILY = "qwen2_vl"  # the least layers
FAKE_COMPILER = '''#!{python}
"""A FAKE neuronx-cc: checks its arguments and environment, records them, compiles nothing."""
import json, os, pathlib, sys

if sys.argv[1:] == ["--version"]:
    print("NeuronX Compiler version 0.0 (a fake for tests)")
    sys.exit(0)
wanted = ["compile", "--framework", "XLA", "--model-type", "transformer", "--auto-cast", "none",
          "--target", os.environ["NEURON_PLATFORM_TARGET_OVERRIDE"], "--output"]
assert sys.argv[1:-2] == wanted, sys.argv
output, module = map(pathlib.Path, sys.argv[-2:])

from vlmgen.compile.hlo_module import message_class

read = message_class().FromString(module.read_bytes())
numbers = [one.id for computation in read.computations for one in computation.instructions]
assert len(numbers) > 100 and max(numbers) < 2**31, "instructions are numbered with 32 bits"
with open(os.environ["FAKE_RECORD"], "a") as record:
    record.write(json.dumps([output.name, module.name, os.environ.get("VLLM_NEURON_CPU_COMPILE")])
                 + "\\n")
if os.environ.get("FAKE_FAILS"):
    print("ERROR: [NCC_FAKE] the fake was told to fail", file=sys.stderr)
    sys.exit(70)
output.write_bytes(b"a fake NEFF of " + module.name.encode())
'''


@pytest.fixture
def fake_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Puts the fake on PATH; the file it records into."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "neuronx-cc"
    program.write_text(FAKE_COMPILER.format(python=sys.executable), encoding="utf-8")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    record = tmp_path / "record.jsonl"
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    monkeypatch.setenv("FAKE_RECORD", str(record))
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn3")
    return record


def test_without_a_compiler_one_line_says_what_is_missing(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    package = str(repository / "generated" / FAMILY)
    arguments = ["compile", package, "--checkpoint", str(tmp_path), "--target", "neuron"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 7
    line, more = result.stderr.splitlines()
    assert more == "more: vlmgen explain VG920"
    assert "neuronx-cc" in line and "vllm-neuron" in line and "vlmgen[neuron]" in line


@pytest.mark.needs_jax
@pytest.mark.slow
def test_the_compiler_gets_every_graph_and_is_not_asked_twice(
    repository: Path, tiny: Callable[[str], Path], tmp_path: Path, fake_compiler: Path
) -> None:
    package = str(repository / "generated" / FAMILY)
    arguments = [
        "compile", package, "--checkpoint", str(tiny(FAMILY)), "--target", "neuron",
        "--only", "decode-1", "--cache", str(tmp_path / "cache"), "--emit", str(tmp_path / "out"),
    ]  # fmt: skip
    first = CliRunner().invoke(app, [*arguments, "--json"])
    assert first.exit_code == 0, first.output
    (own,) = json.loads(first.stdout)
    assert own["passed"] and not own["cached"]
    module, output = tmp_path / "out" / "decode-1.hlo.pb", tmp_path / "out" / "decode-1.neff"
    assert own["command"] == (
        "env NEURON_PLATFORM_TARGET_OVERRIDE=trn3 neuronx-cc compile --framework XLA "
        f"--model-type transformer --auto-cast none --target trn3 --output {output} {module}"
    )
    assert output.read_bytes() == b"a fake NEFF of decode-1.hlo.pb"

    again = CliRunner().invoke(app, arguments)
    assert "decode-1: cached" in again.stdout
    assert len(fake_compiler.read_text(encoding="utf-8").splitlines()) == 1


@pytest.mark.needs_jax
@pytest.mark.slow
def test_what_the_compiler_says_is_shown_when_it_fails(
    repository: Path,
    tiny: Callable[[str], Path],
    tmp_path: Path,
    fake_compiler: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FAKE_FAILS", "1")
    arguments = [
        "compile", str(repository / "generated" / FAMILY), "--checkpoint",
        str(tiny(FAMILY)), "--target", "neuron", "--only", "decode-1", "--cache",
        str(tmp_path / "cache"),
    ]  # fmt: skip
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 4  # VG918
    assert "exit code 70" in result.stderr and "NCC_FAKE" in result.stderr


def test_the_plugin_compiles_without_a_device_and_without_cpu_mode(tmp_path: Path) -> None:
    from vlmgen.compile.graphs import Deployment
    from vlmgen.compile.neuron import plugin_command

    served = {
        "neuron_config": {"num_seqs_buckets": [1, 8], "on_device_sampling_config": None},
        "vision_neuron_config": {"vision_attention_block_size": 2048},
    }
    deployment = Deployment(1024, 32, (128, 1024), (1, 4), (512,), 512, cache_blocks=9)
    command = plugin_command(tmp_path / "package", tmp_path / "checkpoint", deployment, served)
    assert command.environment == {
        "NEURON_PLATFORM_TARGET_OVERRIDE": "trn2",
        "VLLM_NEURON_CPU_COMPILE": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLMGEN_SERVE_PACKAGES": str(tmp_path / "package"),
    }
    assert command.without == ("VLLM_NEURON_CPU_MODE",)
    *program, argument = command.arguments
    assert program == [sys.executable, "-m", "vlmgen.compile.neuron_engine"]
    assert json.loads(argument) == {
        "model": str(tmp_path / "checkpoint"),
        "max_model_len": 1024,
        "max_num_batched_tokens": 1024,
        "max_num_seqs": 4,
        "block_size": 32,
        "enable_prefix_caching": False,
        "additional_config": {
            "neuron_config": {
                "num_batched_tokens_buckets": [128, 1024],
                "num_seqs_buckets": [1, 4],
                "on_device_sampling_config": None,
            },
            "vision_neuron_config": {
                "vision_attention_block_size": 512,
                "num_vision_tokens_buckets": [512],
                "encoder_cache_num_blocks": 9,
            },
        },
    }
    assert command.shell().startswith("env -u VLLM_NEURON_CPU_MODE NEURON_PLATFORM")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--target", "neuron", "--html", "page.html"],
            "--html means nothing with --target neuron;",
        ),
        (["--target", "neuron", "--workers", "2"], "--workers means nothing with --target neuron"),
        (["--whole"], "--whole means nothing with --target xla-cpu"),
    ],
)
def test_options_that_would_do_nothing_are_refused(
    repository: Path, tmp_path: Path, fake_compiler: Path, options: list[str], message: str
) -> None:
    package = str(repository / "generated" / FAMILY)
    arguments = ["compile", package, "--checkpoint", str(tmp_path), *options]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2 and message in result.stderr, result.stderr


def test_sizes_alone_are_not_for_a_neuron_compiler(repository: Path, fake_compiler: Path) -> None:
    package = str(repository / "generated" / FAMILY)
    arguments = ["compile", package, "--published", "all", "--target", "neuron"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2 and "--published goes with --target xla-cpu" in result.stderr
