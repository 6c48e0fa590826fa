"""The process that ranks are forked from: it pays for the imports once."""

from __future__ import annotations

import multiprocessing.forkserver

_IMPORTS = ("vlmgen.standin.rank_imports", "vlmgen.validate.parallel")


def start_fork_server() -> None:
    """Start it, unless it runs; does not wait until it has imported everything."""
    multiprocessing.forkserver.set_forkserver_preload(list(_IMPORTS))
    multiprocessing.forkserver.ensure_running()
