"""Imported once by the process that ranks are forked from: pays for the slow imports."""

from vlmgen.standin import ranks  # noqa: F401, activates the stand-in

import vllm_neuron.parallel.neuron_parallel_state  # noqa: E402, F401
