"""Runs a function in several processes with the stand-in's process groups.

Imported first in every child, so that ``import vllm_neuron`` works there before anything else is
unpickled.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from vlmgen import standin

if standin.cpu_mode():
    standin.activate()

__all__ = ["RankError", "RankProcesses", "one_rank", "run_ranks"]


class RankError(RuntimeError):
    """A rank raised, died or did not answer in time; the message holds its traceback."""


def _child_environment(overrides: Mapping[str, str] | None) -> dict[str, str]:
    environment = dict(os.environ)
    environment[standin.CPU_MODE_VARIABLE] = os.environ.get(standin.CPU_MODE_VARIABLE, "1")
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    environment.update(overrides or {})
    return environment


def _serve(
    connection: Connection,
    environment: Mapping[str, str],
    num_threads: int,
    groups: Mapping[str, Any],
    start: tuple[Callable[..., Any], tuple[Any, ...]],
) -> None:
    """Life of one rank: make the groups, call ``start``, then answer calls until told to stop.

    ``start`` returns the function that answers, so that a rank can keep a model between calls.
    """
    os.environ.clear()
    os.environ.update(environment)
    standin.activate()
    try:
        import torch

        torch.set_num_threads(num_threads)
        # vLLM calls collectives under names that this torch renames.
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed.*")
        from vllm_neuron.parallel import neuron_parallel_state

        neuron_parallel_state.init_neuron_distributed_environment(**groups)
        function, arguments = start
        answer = function(groups["rank"], *arguments)
        _send(connection, ("ready", None))
        while True:
            call = pickle.loads(connection.recv_bytes())
            if call is None:
                break
            _send(connection, ("result", answer(*call)))
        neuron_parallel_state.destroy_neuron_distributed_environment()
    except (KeyboardInterrupt, EOFError):
        pass
    except BaseException:
        with contextlib.suppress(OSError):
            _send(connection, ("error", traceback.format_exc()))


def _send(connection: Connection, message: tuple[str, Any]) -> None:
    connection.send_bytes(pickle.dumps(message))


class RankProcesses:
    """``world_size`` processes with process groups, each answering calls.

    Args:
        world_size: number of ranks.
        start: called once per rank as ``start(rank, *start_arguments)``; returns the function
            that answers calls. It must be importable by name.
        start_arguments: further arguments of ``start``.
        tensor_parallel_size: text TP; None is the world size.
        start_method: ``"spawn"`` starts fresh interpreters; ``"forkserver"`` pays for the imports
            once and forks, which is what repeated tests want.
        num_threads: threads of torch per rank.
        environment: variables to set in the ranks on top of this process's.
        startup_timeout: seconds until every rank must be ready.
        **group_sizes: further sizes for ``init_neuron_distributed_environment``.

    Raises:
        RankError: a rank failed to start.
    """

    def __init__(
        self,
        world_size: int,
        start: Callable[..., Callable[..., Any]],
        start_arguments: tuple[Any, ...] = (),
        *,
        tensor_parallel_size: int | None = None,
        start_method: str = "spawn",
        num_threads: int = 1,
        environment: Mapping[str, str] | None = None,
        startup_timeout: float = 180.0,
        **group_sizes: int,
    ) -> None:
        context: Any = multiprocessing.get_context(start_method)
        if start_method == "forkserver":
            context.set_forkserver_preload(["vlmgen.standin.rank_imports"])
        self.world_size = world_size
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        self._folder = tempfile.TemporaryDirectory(prefix="vlmgen-ranks-")
        meeting_point = Path(self._folder.name) / "rendezvous"
        child_environment = _child_environment(environment)
        inherited = {key: os.environ.get(key) for key in child_environment}
        try:
            # A fresh interpreter reads some variables before _serve can set them.
            os.environ.update(child_environment)
            for rank in range(world_size):
                ours, theirs = context.Pipe()
                groups = {
                    "world_size": world_size,
                    "rank": rank,
                    "local_rank": rank,
                    "distributed_init_method": f"file://{meeting_point}",
                    "backend": "gloo",
                    "tensor_parallel_size": tensor_parallel_size or world_size,
                    **group_sizes,
                }
                process = context.Process(
                    target=_serve,
                    args=(theirs, child_environment, num_threads, groups, (start, start_arguments)),
                    daemon=True,
                    name=f"rank{rank}",
                )
                process.start()
                theirs.close()
                self._processes.append(process)
                self._connections.append(ours)
        except BaseException:
            self.shutdown()
            raise
        finally:
            for key, value in inherited.items():
                if value is None:
                    os.environ.pop(key, None)
                else:
                    os.environ[key] = value
        self._collect("ready", startup_timeout)

    def call(self, arguments_per_rank: Sequence[tuple[Any, ...]]) -> None:
        """Send one call to every rank without waiting for the answers.

        Args:
            arguments_per_rank: arguments of each rank's call.

        Raises:
            ValueError: not one entry per rank.
            RankError: the ranks are shut down.
        """
        if len(arguments_per_rank) != self.world_size:
            raise ValueError(
                f"{len(arguments_per_rank)} argument lists for {self.world_size} ranks"
            )
        if not self._connections:
            raise RankError("the ranks are shut down")
        for connection, arguments in zip(self._connections, arguments_per_rank, strict=True):
            connection.send_bytes(pickle.dumps(tuple(arguments)))

    def collect(self, timeout: float) -> list[Any]:
        """Wait for every rank's answer to the oldest call.

        Args:
            timeout: seconds.

        Returns:
            The answers by rank.

        Raises:
            RankError: a rank raised, died or did not answer; the ranks are shut down.
        """
        return self._collect("result", timeout)

    def _collect(self, kind: str, timeout: float) -> list[Any]:
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + timeout
        try:
            while len(answers) < self.world_size:
                waiting: dict[Any, int] = {
                    connection: rank
                    for rank, connection in enumerate(self._connections)
                    if rank not in answers
                }
                ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
                if not ready:
                    ranks = sorted(waiting.values())
                    raise RankError(f"ranks {ranks} did not answer within {timeout:g} s")
                connection: Any
                for connection in ready:
                    rank = waiting[connection]
                    try:
                        got, value = pickle.loads(connection.recv_bytes())
                    except (EOFError, OSError):
                        self._processes[rank].join(1.0)
                        code = self._processes[rank].exitcode
                        raise RankError(f"rank {rank} died with exit code {code}") from None
                    if got == "error":
                        raise RankError(f"rank {rank} of {self.world_size} failed:\n{value}")
                    assert got == kind, (got, kind)
                    answers[rank] = value
        except BaseException:
            self._stop(graceful=False)
            raise
        return [answers[rank] for rank in range(self.world_size)]

    def shutdown(self) -> None:
        """Stop every rank; may be called twice."""
        self._stop(graceful=True)

    def terminate(self) -> None:
        """End every rank's process; another thread that waits for an answer gets a RankError."""
        for process in list(self._processes):
            with contextlib.suppress(ValueError, OSError):  # closed, or gone
                process.terminate()

    def _stop(self, graceful: bool) -> None:
        for connection in self._connections:
            with contextlib.suppress(OSError):
                if graceful:
                    connection.send_bytes(pickle.dumps(None))
        for process in self._processes:
            process.join(10.0 if graceful else 0.0)
            if process.is_alive():
                process.terminate()
                process.join(5.0)
        for connection in self._connections:
            connection.close()
        self._connections, self._processes = [], []
        self._folder.cleanup()

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()


def _call_with_rank(rank: int, function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments: function(rank, *arguments)


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *arguments: Any,
    tensor_parallel_size: int | None = None,
    ep_degree: int = 1,
    vision_tp_size: int = 1,
    vision_dp_size: int = 1,
    timeout: float = 120.0,
    start_method: str = "forkserver",
    environment: Mapping[str, str] | None = None,
) -> list[Any]:
    """Call ``function(rank, *arguments)`` in ``world_size`` processes with process groups.

    Args:
        function: importable by name (a function at the top of a module); what it returns must
            pickle, tensors included.
        world_size: number of ranks.
        *arguments: passed to every rank.
        tensor_parallel_size: text TP; None is the world size.
        ep_degree: parts into which the text ranks share out the experts.
        vision_tp_size: vision TP.
        vision_dp_size: vision DP.
        timeout: seconds for the call, after the ranks are up.
        start_method: see :class:`RankProcesses`.
        environment: variables to set in the ranks.

    Returns:
        The results by rank.

    Raises:
        RankError: a rank failed; the message holds its traceback.
    """
    with RankProcesses(
        world_size,
        _call_with_rank,
        (function,),
        tensor_parallel_size=tensor_parallel_size,
        ep_degree=ep_degree,
        vision_tp_size=vision_tp_size,
        vision_dp_size=vision_dp_size,
        start_method=start_method,
        environment=environment,
    ) as ranks:
        ranks.call([arguments] * world_size)
        return ranks.collect(timeout)


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    """Make this process a world of one rank for the duration of a ``with`` block."""
    standin.require()
    from vllm_neuron.parallel import neuron_parallel_state

    with tempfile.TemporaryDirectory(prefix="vlmgen-ranks-") as folder:
        neuron_parallel_state.init_neuron_distributed_environment(
            world_size=1,
            rank=0,
            local_rank=0,
            distributed_init_method=f"file://{Path(folder) / 'rendezvous'}",
            backend="gloo",
            tensor_parallel_size=1,
        )
        try:
            yield
        finally:
            neuron_parallel_state.destroy_neuron_distributed_environment()
