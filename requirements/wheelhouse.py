"""Fetch vlmgen's own few dependencies for every Python it supports, for the tests to install from.

    python requirements/wheelhouse.py DIRECTORY

Tests use no network; those that install vlmgen into an empty environment, or run it under another
Python, take the wheels from here. `make install` calls it once.
"""

import subprocess
import sys
import tomllib
from pathlib import Path

VERSIONS = ("3.11", "3.12", "3.13")


def main() -> None:
    """Download the wheels that are not there yet."""
    target = sys.argv[1]
    pyproject = Path(__file__).resolve().parent.parent / "pyproject.toml"
    dependencies = tomllib.loads(pyproject.read_text())["project"]["dependencies"]
    for version in VERSIONS:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:"]
        command += ["--python-version", version, "--dest", target, *dependencies]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
