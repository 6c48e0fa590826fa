"""Imported once by the process that ranks are forked from: pays for the slow imports."""

from vlmgen.standin import ranks  # noqa: F401, activates the stand-in

import vllm.config  # noqa: E402, F401, vLLM's groups read it: two thirds of the time
import vllm.distributed.device_communicators.cpu_communicator  # noqa: E402, F401
import vllm.distributed.device_communicators.shm_broadcast  # noqa: E402, F401
import vllm_neuron.parallel.neuron_parallel_state  # noqa: E402, F401
