"""Builds a vLLM engine and ends: with the plugin's compile mode, that compiles every graph.

python -m vlmgen.compile.neuron_engine '{"model": ..., "additional_config": ...}'
"""

from __future__ import annotations

import json
import sys


def main() -> None:
    """Build the engine that the only argument describes."""
    from vllm import LLM

    LLM(**json.loads(sys.argv[1]))


if __name__ == "__main__":
    main()
