"""Writing one file so that it is whole at every moment."""

from __future__ import annotations

import os
from pathlib import Path

from vlmgen.errors import OutputError


def replace_file(path: Path, content: bytes) -> None:
    """Write a file by way of a new one beside it, which then takes its name and its mode.

    Args:
        path: The file; a symbolic link is followed.
        content: What it will hold.

    Raises:
        OutputError: It cannot be written; what was there is still there.
    """
    target = path.resolve()
    staged = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with open(staged, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        if target.exists():
            staged.chmod(target.stat().st_mode)
        staged.replace(target)
    except OSError as error:
        staged.unlink(missing_ok=True)
        raise OutputError(f"{path}: cannot be written: {error.strerror}") from None
