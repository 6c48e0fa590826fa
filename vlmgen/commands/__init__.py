"""Commands that have a module of their own; `vlmgen/cli.py` registers them.

A command is a function `command` with typer's annotations and an `EXAMPLE` for its help.
"""
