"""Writing one file so that it is whole at every moment."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from vlmgen.errors import OutputError


def replace_file(path: Path, content: bytes, *, parents: bool = False) -> None:
    """Write a file by way of a new one beside it, which then takes its name and its mode.

    Args:
        path: The file; a symbolic link is followed.
        content: What it will hold.
        parents: Make the folders that lead to it.

    Raises:
        OutputError: It cannot be written; what was there is still there.
    """
    target = path.resolve()
    # In a folder that machines share, two of them may have a process of this number.
    staged = target.with_name(f".{target.name}.{os.getpid()}.{os.urandom(4).hex()}.tmp")
    try:
        if parents:
            target.parent.mkdir(parents=True, exist_ok=True)
        with open(staged, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        if target.exists():
            staged.chmod(target.stat().st_mode)
        staged.replace(target)
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {error.strerror}") from None
    finally:
        with contextlib.suppress(OSError):
            staged.unlink(missing_ok=True)
