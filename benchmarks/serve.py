"""The generated package against vLLM's own model class, both served by vLLM on this CPU.

    python benchmarks/serve.py [--size tiny|medium] [--requests N]

The same checkpoint and the same requests (`vllm bench serve`, data set random-mm): time to first
token, time per output token, tokens per second, as ratios package / stock; and what the stand-in's
runner spends per decode step outside of the model. A tiny model measures overhead; `medium` has the
widths of the real 2B model in few layers, about 0.4 billion parameters.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ["VLLM_NEURON_CPU_MODE"] = "1"
os.environ["VLLM_SERVER_DEV_MODE"] = "1"  # for `Server.worker_state`

from vlmgen.serve.launch import Server, package_server  # noqa: E402
from vlmgen.serve.stock import stock_server  # noqa: E402

MEDIUM = {
    "text": {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 6,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_parameters": {
            "rope_type": "default",
            "mrope_section": [24, 20, 20],
            "mrope_interleaved": True,
            "rope_theta": 5000000.0,
        },
    },
    "vision": {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_heads": 16,
        "depth": 4,
        "out_hidden_size": 2048,
        "num_position_embeddings": 2304,
    },
}
MODEL_LEN, BATCH, INPUT_TOKENS, OUTPUT_TOKENS = 1024, 8, 64, 32
CONFIG = {
    "neuron_config": {
        "num_batched_tokens_buckets": [256, MODEL_LEN],
        "num_seqs_buckets": [1, BATCH],
        "enable_structured_outputs": False,
    },
    "vision_neuron_config": {
        "vision_attention_block_size": 256,
        "num_vision_tokens_buckets": [256, 1024],
    },
}
METRICS = ("mean_ttft_ms", "mean_tpot_ms", "output_throughput")


def main() -> None:
    """Build the checkpoint, serve it twice, print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=("tiny", "medium"), default="tiny")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--package", type=Path, default=ROOT / "generated" / "qwen3_vl")
    options = parser.parse_args()
    from vlmgen.tiny.build import build_tiny

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sizes = MEDIUM if options.size == "medium" else {}
        checkpoint = build_tiny("qwen3_vl", folder / "checkpoint", **sizes)
        common = ("--served-model-name", "bench", "--max-model-len", str(MODEL_LEN),
                  "--max-num-seqs", str(BATCH))  # fmt: skip
        config = ("--additional-config", json.dumps(CONFIG))
        package = package_server(options.package, checkpoint, folder / "package", *common, *config)
        ours, step = measured(package, folder, checkpoint, options.requests)
        stock = stock_server(
            checkpoint, folder / "vllm", *common, "--no-enable-prefix-caching",
            "--max-num-batched-tokens", str(MODEL_LEN), "--enforce-eager",
        )  # fmt: skip
        theirs, _ = measured(stock, folder, checkpoint, options.requests)
    print(f"{options.size} checkpoint, {options.requests} requests of one picture, "
          f"{OUTPUT_TOKENS} tokens each, {BATCH} at a time")  # fmt: skip
    print(f"{'':20} {'package':>10} {'stock':>10} {'ratio':>7}")
    for metric in METRICS:
        a, b = ours[metric], theirs[metric]
        print(f"{metric:20} {a:10.2f} {b:10.2f} {a / b:7.2f}")
    if step is not None:
        print(f"runner outside the model, per decode step: {step:.2f} ms")


def measured(
    server: Server, folder: Path, checkpoint: Path, requests: int
) -> tuple[dict[str, Any], float | None]:
    """Figures of `vllm bench serve`, and the runner's own milliseconds per decode step."""
    with server:
        bench(server, folder, checkpoint, BATCH)  # first requests fill caches
        before = decode_times(server)
        result = bench(server, folder, checkpoint, requests)
        after = decode_times(server)
    if before is None or after is None:
        return result, None
    steps, seconds, model = (after[key] - before[key] for key in before)
    return result, 1000 * (seconds - model) / max(1, steps)


def decode_times(server: Server) -> dict[str, float] | None:
    """Steps, seconds and seconds in the model since the start; None for stock vLLM."""
    if "package" not in server.log.parts:
        return None
    return server.worker_state()[0]["decode"]


def bench(server: Server, folder: Path, checkpoint: Path, requests: int) -> dict[str, Any]:
    """One run of `vllm bench serve`."""
    result = folder / "result.json"
    command = [
        sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve",
        "--backend", "openai-chat", "--endpoint", "/v1/chat/completions",
        "--base-url", f"http://127.0.0.1:{server.port}", "--model", "bench",
        "--tokenizer", str(checkpoint), "--dataset-name", "random-mm", "--seed", "0",
        "--num-prompts", str(requests), "--max-concurrency", str(BATCH), "--ignore-eos",
        "--random-input-len", str(INPUT_TOKENS), "--random-output-len", str(OUTPUT_TOKENS),
        "--random-mm-base-items-per-request", "1", "--random-mm-num-mm-items-range-ratio", "0",
        "--random-mm-limit-mm-per-prompt", json.dumps({"image": 1, "video": 0}),
        "--random-mm-bucket-config", "{(128, 192, 1): 1.0}",
        "--save-result", "--result-dir", str(folder), "--result-filename", result.name,
    ]  # fmt: skip
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode or not result.is_file():
        raise RuntimeError(f"vllm bench serve failed:\n{done.stdout[-2000:]}{done.stderr[-3000:]}")
    figures = json.loads(result.read_text())
    if figures["completed"] != requests:
        raise RuntimeError(f"{figures['completed']} of {requests} requests were answered")
    return figures


if __name__ == "__main__":
    main()
