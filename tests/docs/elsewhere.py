"""Commands of README and docs that are not run with the pages: why, and where they are run.

A command that is not listed here is run; one that then fails, or whose output is not what the page
shows, fails the test.
"""

from __future__ import annotations

import re

# Pages whose blocks are not for running one after another.
PAGES = {
    "docs/codes.md": ("examples of faults", "tests/explain/test_examples.py"),
}

DEVICE = ("needs a Neuron device and the plugin", "nowhere: none was available")
SERVER = ("a server that runs until it is stopped", "tests/serve/test_requests.py")
INSTALL = ("installs packages", "tests/test_wheel.py")

# A pattern for the whole command -> (why it is not run with the pages, where it is run).
COMMANDS: dict[str, tuple[str, str]] = {
    r"make demo\b.*": ("minutes", "tests/serve/test_equality.py"),
    r"make bench\b.*": ("minutes", "Makefile"),
    r"make test\b.*": ("what CI runs", ".ci/run"),
    r"pip install (\.|'\.\[(cpu|cpu,compile)\]'|'\.\[neuron\]'|--no-deps -r .*)( .*)?": INSTALL,
    r"pip install generated/qwen3_vl": ("installs a package", "tests/serve/test_install.py"),
    r"pip install vlmgen-.*": INSTALL,
    r"vlmgen serve (?!.*--dry-run).*": SERVER,
    r"vlmgen ask .*": ("needs a running server", "tests/serve/test_command.py"),
    r"vlmgen check .* --plugin installed": DEVICE,
    r"vlmgen check (path/to/package|generated/my_family)": (
        "a package of the reader's", "tests/check/test_run.py"
    ),
    r"vlmgen import (path/to/checkpoint|checkpoints/[\w-]+)\b.*": (
        "a checkpoint of the reader's", "tests/importer/test_command.py"
    ),
    r"vlmgen new specs/my_family\.yaml": (
        "a spec of the reader's", "tests/render/test_generate.py"
    ),
    r"python tests/faults/seed\.py .*": ("minutes", "tests/faults/test_seeded_faults.py"),
    r"vlmgen validate .*": ("minutes", "tests/validate/test_run.py"),
    r"vlmgen compile .*": ("minutes", "tests/compile/test_run.py"),
    r"vlmgen watch .*": ("runs until it is stopped", "tests/test_watch.py"),
    r"vlmgen --(install|show)-completion": (
        "changes or asks for the shell around it", "tests/test_completion.py"
    ),
    r"neuron-ls": DEVICE,
    r"python -c \"from vllm\.platforms import current_platform.*": DEVICE,
    r"(VLLM_NEURON_CPU_MODE=1 )?python benchmarks/.*": ("a benchmark", "Makefile"),
}  # fmt: skip

# Commands that load torch or vLLM, or prove the weights: run with their pages, in the slow tests.
SLOW = re.compile(r"vlmgen (tiny|serve|doctor|check (generated/qwen3_vl|edited))\b.*")

# Slow commands of a page that README.md shows too, with their output: run there.
REPEATED = {"docs/deploy-on-trainium.md": ("vlmgen check generated/qwen3_vl", "vlmgen doctor")}


def elsewhere(command: str) -> tuple[str, str] | None:
    """(reason, where) of a command that is not run with its page."""
    bare = re.sub(r"\s+# .*$", "", command)
    for pattern, known in COMMANDS.items():
        if re.fullmatch(pattern, bare):
            return known
    return None
