"""The command of `vlmgen serve`, the client's messages, and what `vlmgen doctor` says."""

from __future__ import annotations

import base64
import json
import shlex
import subprocess
import sys

import pytest
from PIL import Image

from vlmgen.errors import UsageError
from vlmgen.serve.client import ServerError, ask, media_part, message
from vlmgen.serve.command import serve_command
from vlmgen.serve.packages import PACKAGES_VARIABLE, register_named_packages


def run(*arguments, **environment):
    import os

    return subprocess.run(
        [sys.executable, "-m", "vlmgen", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=False,
    )


def option(command, name):
    index = command.arguments.index(f"--{name}")
    return command.arguments[index + 1]


def additional(command):
    return json.loads(option(command, "additional-config"))


def test_the_command_follows_from_the_checkpoint(package, checkpoint):
    command = serve_command(package, checkpoint, [])
    assert command.arguments[:2] == ["vllm", "serve"]
    assert command.uses == "standin"
    assert command.environment[PACKAGES_VARIABLE] == str(package)
    assert command.environment["VLLM_NEURON_CPU_MODE"] == "1"
    assert "--no-enable-prefix-caching" in command.arguments
    assert option(command, "max-model-len") == option(command, "max-num-batched-tokens") == "4096"
    config = additional(command)
    assert config["neuron_config"]["num_batched_tokens_buckets"][-1] == 4096
    assert config["neuron_config"]["num_seqs_buckets"] == [1, 2, 4, 8]
    vision = config["vision_neuron_config"]
    # 65536 pixels are 256 patches; the thinnest strip of that many has 113 windows of 4 patches.
    assert vision["vision_attention_block_size"] == 512
    assert vision["num_vision_tokens_buckets"] == [512, 1024, 2048]


def test_what_is_printed_is_what_runs(package, checkpoint):
    command = serve_command(package, checkpoint, ["--port", "1234", "--dtype", "float32"])
    words = shlex.split(command.shell())
    count = len(command.environment)
    assert dict(word.split("=", 1) for word in words[:count]) == command.environment
    assert words[count:] == command.arguments
    assert command.arguments[-4:] == ["--port", "1234", "--dtype", "float32"]


@pytest.mark.parametrize("spelling", [["--max-model-len", "512"], ["--max_model_len=512"]])
def test_options_of_the_user_win(package, checkpoint, spelling):
    own = {"neuron_config": {"quantization": "bf16", "num_seqs_buckets": [1, 2]}}
    command = serve_command(
        package,
        checkpoint,
        [*spelling, "--max-num-seqs", "2", "--additional-config", json.dumps(own)],
    )
    assert option(command, "max-model-len") == "512"
    config = additional(command)
    assert config["neuron_config"]["num_batched_tokens_buckets"] == [128, 256, 512]
    assert config["neuron_config"]["num_seqs_buckets"] == [1, 2]
    assert config["neuron_config"]["quantization"] == "bf16"
    assert command.arguments.count("--max-model-len") == 1


def test_a_large_processor_limit_is_lowered_to_the_block(package, checkpoint, tmp_path):
    import shutil

    copy = tmp_path / "checkpoint"
    shutil.copytree(checkpoint, copy)
    path = copy / "processor_config.json"
    config = json.loads(path.read_text())
    config["image_processor"]["size"]["longest_edge"] = 16777216
    path.write_text(json.dumps(config))
    command = serve_command(package, copy, [])
    assert json.loads(option(command, "mm-processor-kwargs")) == {"max_pixels": 2048 * 256}
    assert additional(command)["vision_neuron_config"]["vision_attention_block_size"] == 2048


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--max-model-len", "many"], "positive integer"),
        (["--max-num-seqs", "0"], "positive integer"),
        (["--additional-config", "{"], "no JSON"),
        (["--additional-config", "[]"], "JSON object"),
        (["--additional-config", '{"neuron_config": 3}'], "neuron_config must be an object"),
        (["--additional-config"], "needs a value"),
    ],
)
def test_bad_options_are_refused(package, checkpoint, options, words):
    with pytest.raises(UsageError, match=words):
        serve_command(package, checkpoint, options)


def test_a_folder_without_a_checkpoint_is_refused(package, tmp_path):
    with pytest.raises(UsageError, match="config.json is missing"):
        serve_command(package, tmp_path, [])


def test_a_folder_without_a_package_is_refused(checkpoint, tmp_path, monkeypatch):
    with pytest.raises(UsageError, match="0 modules"):
        serve_command(tmp_path, checkpoint, [])
    monkeypatch.setenv(PACKAGES_VARIABLE, str(tmp_path))
    with pytest.raises(UsageError, match="0 modules"):
        register_named_packages()


def test_a_named_package_is_registered(package, monkeypatch):
    from vllm_neuron.model import registry

    monkeypatch.setattr(registry, "get_models", lambda: [])
    monkeypatch.setenv(PACKAGES_VARIABLE, str(package))
    assert register_named_packages() == ["Qwen3VLForConditionalGeneration"]
    assert [name for name, _ in registry.get_models()] == ["Qwen3VLForConditionalGeneration"]


def test_pictures_and_videos_come_before_the_question(tmp_path):
    picture, clip = tmp_path / "a.png", tmp_path / "b.mp4"
    Image.new("RGB", (2, 2)).save(picture)
    clip.write_bytes(b"clip")
    content = message("What?", [picture], [clip])["content"]
    assert [part["type"] for part in content] == ["image_url", "video_url", "text"]
    header, data = content[0]["image_url"]["url"].split(",")
    assert header == "data:image/png;base64"
    assert base64.b64decode(data) == picture.read_bytes()
    assert content[1]["video_url"]["url"].startswith("data:video/mp4;base64,")


def test_a_missing_picture_is_refused(tmp_path):
    with pytest.raises(UsageError, match="no.jpg"):
        media_part(tmp_path / "no.jpg", "image")


def test_without_a_server_the_client_says_how_to_start_one():
    with pytest.raises(ServerError, match="no server answers") as caught:
        list(ask("Hello?", url="http://127.0.0.1:9/v1"))
    assert "vlmgen serve" in caught.value.render()


def test_the_client_streams_an_answer(server, tmp_path):
    picture = tmp_path / "a.png"
    Image.new("RGB", (64, 64), "red").save(picture)
    done = run("ask", "--url", server.url, "--image", str(picture), "--max-tokens", "8", "Colour?")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    text = "".join(ask("Colour?", [picture], url=server.url, max_tokens=8))
    assert done.stdout == f"{text}\n"


def test_the_client_passes_the_servers_refusal_on(server, tmp_path):
    picture = tmp_path / "a.png"
    Image.new("RGB", (6000, 32)).save(picture)
    done = run("ask", "--url", server.url, "--image", str(picture), "What?")
    assert done.returncode == 6
    assert "vision_attention_block_size" in done.stderr


def test_doctor_says_what_is_there():
    done = run("doctor", "--json", VLLM_NEURON_CPU_MODE="1")
    assert done.returncode == 0, done.stdout + done.stderr
    data = json.loads(done.stdout)
    assert data["healthy"] and data["backend"] == "standin"
    found = {line["name"]: line for line in data["lines"]}
    assert "neuron-standin" in found["vllm"]["found"]
    assert found["torch"]["state"] == "ok"


def test_doctor_names_what_serving_would_refuse():
    done = run("doctor", VLLM_NEURON_CPU_MODE="1", VLLM_USE_V2_MODEL_RUNNER="1")
    assert done.returncode == 4
    assert "unset it" in done.stdout
