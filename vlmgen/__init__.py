"""vlmgen: vision-language model packages for the vLLM Neuron plugin, generated from one YAML spec.

Importing this package imports nothing else, so that tools can read the version for free.
"""

__version__ = "0.1.0"

__all__ = ["__version__"]
