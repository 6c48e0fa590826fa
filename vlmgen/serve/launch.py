"""A server as a child process: started, waited for, and ended with everything it started."""

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
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from vlmgen.serve.client import ServerError

if TYPE_CHECKING:
    import openai

START_SECONDS = 300.0
STOP_SECONDS = 20.0
POLL_SECONDS = 0.25


class Server:
    """A running server; use as a context manager.

    Args:
        arguments: Program and arguments; `--port` is added.
        folder: For the log and caches.
        environment: Further variables.
        log: The log's file; by default `server.log` in the folder.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        folder: Path,
        environment: Mapping[str, str] | None = None,
        log: Path | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.log = log or folder / "server.log"
        self._environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CACHE_ROOT": str(folder / "cache"),
            **(environment or {}),
        }
        self._arguments = [*arguments, "--port", str(self.port)]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> Server:
        """Start and wait until it answers.

        Raises:
            ServerError: It ended, or did not answer in time; the message has the end of its log.
        """
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                self._arguments,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_SECONDS
        try:
            while time.monotonic() < deadline:
                code = self.process.poll()
                if code is not None:
                    raise ServerError(f"the server ended with {code}; its log {self._end_of_log()}")
                if self.healthy():
                    return self
                time.sleep(POLL_SECONDS)
            raise ServerError(
                f"the server did not answer in {START_SECONDS:.0f} s; its log {self._end_of_log()}"
            )
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End the server and everything it started."""
        if self.process is None:
            return
        for kind in (signal.SIGINT, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, kind)
            except ProcessLookupError:
                break
            try:
                self.process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                continue
        self.process.wait()

    __enter__ = start

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    # --------------------------------------------------------------------------------- requests

    @property
    def url(self) -> str:
        """Base address of the OpenAI API."""
        return f"http://127.0.0.1:{self.port}/v1"

    def client(self) -> openai.OpenAI:
        """A client that does not try again."""
        import openai

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
        """`cache_state` of every rank; needs `VLLM_SERVER_DEV_MODE=1`."""
        body = json.dumps({"method": "cache_state"}).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/collective_rpc",
            data=body,
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            results: list[dict[str, Any]] = json.load(response)["results"]
        return results

    def tail(self, lines: int = 40) -> str:
        """End of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def _end_of_log(self) -> str:
        return f"({self.log}) ends with:\n{self.tail()}"

    def _get(self, path: str) -> bytes:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30) as response:
            content: bytes = response.read()
        return content


def package_server(
    package: Path, checkpoint: Path, folder: Path, *options: str, **environment: str
) -> Server:
    """`vlmgen serve` for a package, in float32.

    Args:
        package: Folder of a generated package.
        checkpoint: Folder of a checkpoint.
        folder: For the log and caches.
        options: Further options of `vllm serve`.
        environment: Further variables.
    """
    command = [sys.executable, "-m", "vlmgen", "serve", str(package)]
    options = ("--checkpoint", str(checkpoint), "--dtype", "float32", *options)
    return Server([*command, *options], folder, environment)


def free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port
