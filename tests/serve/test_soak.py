"""Five hundred mixed requests, eight at a time, a tenth of them given up."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from tests.serve.prompts import MIXES, parts_of
from tests.serve.test_requests import chat, token_ids
from vlmgen.serve.launch import Server

REQUESTS, CONCURRENCY, ABORTED = 500, 8, 0.1
MEMORY_GROWTH = 1.05


def resident_bytes(server: Server) -> int:
    """Memory of the server's processes."""
    assert server.process is not None
    main = psutil.Process(server.process.pid)
    return sum(p.memory_info().rss for p in [main, *main.children(recursive=True)])


@pytest.mark.slow
def test_soak(server, record_property):
    client = server.client()
    draw = random.Random(0)
    kinds = [(draw.choice(MIXES), draw.randrange(8), draw.random() < ABORTED)
             for _ in range(REQUESTS)]  # fmt: skip
    wanted = {}

    def one(kind):
        mix, index, aborted = kind
        parts = parts_of(mix, index)
        if aborted:
            stream = chat(client, parts, stream=True, max_tokens=200)
            for _, _chunk in zip(range(draw.randrange(1, 6)), stream, strict=False):
                pass
            stream.close()
            return None
        return token_ids(chat(client, parts))

    def run(part):
        with ThreadPoolExecutor(CONCURRENCY) as pool:
            for kind, tokens in zip(part, pool.map(one, part), strict=True):
                if tokens is not None:
                    assert wanted.setdefault(kind[:2], tokens) == tokens, kind

    run(kinds[:100])
    before = resident_bytes(server)
    run(kinds[100:])
    after = resident_bytes(server)
    record_property("memory_mib", (before >> 20, after >> 20))
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and server.metrics()["vllm:num_requests_running"]:
        time.sleep(0.1)
    metrics = server.metrics()
    assert metrics["vllm:num_requests_running"] == metrics["vllm:num_requests_waiting"] == 0
    assert metrics["vllm:kv_cache_usage_perc"] == 0
    (state,) = server.worker_state()
    cache = state["encoder_cache"]
    assert cache["used"] + cache["free"] == cache["blocks"]
    assert cache["used"] == metrics["neuron_encoder_cache_blocks_used"]
    assert after <= before * MEMORY_GROWTH, f"{before >> 20} MiB -> {after >> 20} MiB"
