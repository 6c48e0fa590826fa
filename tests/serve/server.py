"""A server started by `vlmgen serve` for a test, and what is asked of it beside the OpenAI API."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import openai

START_SECONDS = 300.0


class Server:
    """A running server; use as a context manager.

    Args:
        arguments: Program and arguments; `--port` is added.
        folder: For the log and caches.
        environment: Further variables.
    """

    def __init__(
        self, arguments: list[str], folder: Path, environment: dict[str, str] | None = None
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.log = folder / "server.log"
        self._environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_SERVER_DEV_MODE": "1",  # for collective_rpc
            "VLLM_CACHE_ROOT": str(folder / "cache"),
            **(environment or {}),
        }
        self._arguments = [*arguments, "--port", str(self.port)]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> Server:
        """Start and wait until it answers."""
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                self._arguments,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(
                    f"the server ended with {self.process.returncode}:\n{self.tail()}"
                )
            if self.healthy():
                return self
            time.sleep(0.25)
        self.stop()
        raise RuntimeError(f"the server did not answer in {START_SECONDS:.0f} s:\n{self.tail()}")

    def stop(self) -> None:
        """End the server and everything it started."""
        if self.process is None:
            return
        group, wait = self.process.pid, 20.0
        for kind in (signal.SIGINT, signal.SIGKILL):
            try:
                os.killpg(group, kind)
            except ProcessLookupError:
                break
            try:
                self.process.wait(wait)
            except subprocess.TimeoutExpired:
                continue
        self.process.wait()

    __enter__ = start

    def __exit__(self, *_: object) -> None:
        self.stop()

    # --------------------------------------------------------------------------------- requests

    @property
    def url(self) -> str:
        """Base address of the OpenAI API."""
        return f"http://127.0.0.1:{self.port}/v1"

    def client(self) -> openai.OpenAI:
        """A client that does not try again."""
        return openai.OpenAI(base_url=self.url, api_key="none", max_retries=0, timeout=120)

    def healthy(self) -> bool:
        """Whether it answers."""
        try:
            self._get("/health")
        except (urllib.error.URLError, OSError):
            return False
        return True

    def metrics(self) -> dict[str, float]:
        """Name -> value of every metric, labels left away and summed."""
        values: dict[str, float] = {}
        for line in self._get("/metrics").decode().splitlines():
            if line and not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                name = name.partition("{")[0]
                values[name] = values.get(name, 0.0) + float(value)
        return values

    def worker_state(self) -> list[dict[str, Any]]:
        """`cache_state` of every rank."""
        body = json.dumps({"method": "cache_state"}).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/collective_rpc",
            data=body,
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.load(response)["results"]

    def memory(self) -> int:
        """Resident bytes of the server's processes."""
        import psutil

        assert self.process is not None
        main = psutil.Process(self.process.pid)
        return sum(p.memory_info().rss for p in [main, *main.children(recursive=True)])

    def tail(self, lines: int = 40) -> str:
        """End of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def _get(self, path: str) -> bytes:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30) as response:
            return response.read()


def package_server(
    package: Path, checkpoint: Path, folder: Path, *options: str, **environment: str
) -> Server:
    """`vlmgen serve` for a package, in float32."""
    command = [sys.executable, "-m", "vlmgen", "serve", str(package)]
    options = ("--checkpoint", str(checkpoint), "--dtype", "float32", *options)
    return Server([*command, *options], folder, environment)


STOCK_START = """
import sys
from vlmgen.standin.torchvision_ops import TorchvisionFinder
from vlmgen.standin.vllm_metadata import VllmMetadataFinder
sys.meta_path.insert(0, TorchvisionFinder())
sys.meta_path.append(VllmMetadataFinder())
"""


def stock_server(checkpoint: Path, folder: Path, *options: str, **environment: str) -> Server:
    """`vllm serve` with vLLM's own model class on its own CPU platform, in float32."""
    hook = folder / "stock"
    hook.mkdir(parents=True, exist_ok=True)
    # Every process of vLLM must import torchvision, whose operators do not load here.
    (hook / "sitecustomize.py").write_text(STOCK_START)
    command = [
        sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(checkpoint),
        "--host", "127.0.0.1", "--dtype", "float32", *options,
    ]  # fmt: skip
    stock = {
        "PYTHONPATH": str(hook),
        "VLLM_NEURON_CPU_MODE": "0",
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    return Server(command, folder, {**stock, **environment})


def free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
