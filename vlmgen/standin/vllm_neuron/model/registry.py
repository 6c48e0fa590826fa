"""The plugin's own table of models.

The worker puts every entry into vLLM's ``ModelRegistry``, and the vision helpers look classes up
here and nowhere else. The plugin's table is fixed; a package outside its tree adds itself by
replacing ``get_models`` on this module with a function that returns the old list and its own
entry. The helpers read the attribute at each call, so the replacement counts from then on. Code
that imported the function by name keeps the old one.
"""

from __future__ import annotations

__all__ = ["get_models"]


def get_models() -> list[tuple[str, type]]:
    """Return (architecture name, factory class) pairs.

    Returns:
        An empty list: the stand-in brings no models of its own.
    """
    return []
