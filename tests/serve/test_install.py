"""`pip install PACKAGE` alone makes `vllm serve` use it, in the front end and in every worker."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.serve.conftest import CONFIG, OPTIONS, ROOT
from tests.serve.prompts import image, video
from tests.serve.test_equality import check_prompts
from tests.serve.test_requests import chat, hugging_face, token_ids
from vlmgen.serve.launch import Server

MODULE = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"]
TP_CONFIG = {
    "neuron_config": {
        **CONFIG["neuron_config"],
        "on_device_sampling_config": {},
        "max_logprobs": 5,
        "enable_structured_outputs": True,
    }
}


@pytest.fixture(scope="module")
def installed(package, tmp_path_factory) -> Path:
    """Folder with the package and a second one, as pip installs them."""
    folder = tmp_path_factory.mktemp("installed")
    spec = folder / "other.yaml"
    text = (ROOT / "specs" / "qwen3_vl.yaml").read_text()
    text = text.replace("family: qwen3_vl\n", "family: other_vl\n", 1)
    name = "ForConditionalGeneration"
    text = text.replace(f"architecture: Qwen3VL{name}", f"architecture: OtherVL{name}", 1)
    text = text.replace("class_prefix: Qwen3VL", "class_prefix: OtherVL", 1)
    spec.write_text(text)
    other = folder / "other_vl"
    subprocess.run(
        [sys.executable, "-m", "vlmgen", "new", str(spec), "--out", str(other)], check=True
    )
    target = folder / "site"
    for source in (package, other):
        subprocess.run(
            [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index",
             "--no-build-isolation", "--target", str(target), "--upgrade", str(source)],
            check=True,
        )  # fmt: skip
    assert (target / "vllm_neuron_other_vl").is_dir()
    assert (target / "vllm_neuron_qwen3_vl").is_dir()
    return target


def served(installed, checkpoint, folder, *options, config):
    environment = {"PYTHONPATH": str(installed), "VLLM_NEURON_CPU_MODE": "1"}
    command = [
        *MODULE, str(checkpoint), "--host", "127.0.0.1", "--dtype", "float32",
        "--no-enable-prefix-caching", "--max-num-batched-tokens", "1024",
        *OPTIONS, json.dumps(config), *options,
    ]  # fmt: skip
    return Server(command, folder, environment)


@pytest.mark.slow
@pytest.mark.parametrize(("tp_size", "dp_size"), [(2, 1), (1, 2)])
def test_an_installed_package_serves_over_two_ranks(
    installed, checkpoint, tmp_path, reference, tp_size, dp_size
):
    """With on-device sampling; text TP 2, vision TP x DP 2x1 and 1x2."""
    vision = {**CONFIG["vision_neuron_config"], "tp_size": tp_size, "dp_size": dp_size}
    config = {**TP_CONFIG, "vision_neuron_config": vision}
    prompts = [
        ["The capital of France is"],
        [image(0), "What is that?"],
        [image(0), "one", image(1), "two", image(4), "Which is the widest?"],
        [video(3), "then", image(2), "What moves?"],
    ]
    with served(
        installed, checkpoint, tmp_path, "--tensor-parallel-size", "2", config=config
    ) as server:
        client = server.client()
        for parts in prompts:
            answer = chat(client, parts, logprobs=True, top_logprobs=1)
            assert token_ids(answer) == hugging_face(reference, *parts)
        states = server.worker_state()
        assert len(states) == 2
        assert states[0]["items_encoded"] == states[1]["items_encoded"] == 5
        check_prompts(client, reference, at_once=8)
        log = server.log.read_text()
    assert log.count("Loaded Qwen3VLNeuronModel") == 2


def test_a_missing_processor_is_an_error_and_no_fall_back_to_text(package, checkpoint, monkeypatch):
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models import qwen3_vl

    from vlmgen.validate.package import import_package

    import_package(package).register()
    monkeypatch.delattr(qwen3_vl.Qwen3VLForConditionalGeneration, "_processor_factory")
    with pytest.raises(RuntimeError, match="no multimodal processor"):
        config = EngineArgs(
            model=str(checkpoint),
            dtype="float32",
            max_model_len=512,
            max_num_batched_tokens=512,
            max_num_seqs=4,
            enable_prefix_caching=False,
            additional_config=CONFIG | {"neuron_config": {}},
        ).create_engine_config()
        # Where vLLM looks for the processor, in the front end and in the scheduler.
        assert config.model_config.supports_multimodal_inputs
