"""Imported once by the process that ranks are forked from: pays for the slow imports.

An import that fails here must not end that process; the rank that needs the module says why.
"""

import contextlib
import importlib

from vlmgen.standin import ranks  # noqa: F401, activates the stand-in

_SLOW_MODULES = (
    "vllm.config",  # vLLM's groups read it: two thirds of the time
    "vllm.distributed.device_communicators.cpu_communicator",
    "vllm.distributed.device_communicators.shm_broadcast",
    "vllm_neuron.parallel.neuron_parallel_state",
)

for _name in _SLOW_MODULES:
    with contextlib.suppress(Exception):
        importlib.import_module(_name)
