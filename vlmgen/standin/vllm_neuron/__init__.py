"""Stand-in for the vLLM Neuron plugin: its names and signatures in plain PyTorch on a CPU.

It answers ``import vllm_neuron`` through :mod:`vlmgen.standin`, and only on machines without the
plugin and with ``VLLM_NEURON_CPU_MODE`` on. It computes what the plugin's CPU fallback computes;
where it is stricter, the function says so.
"""
