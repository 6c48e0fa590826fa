"""Loading, checkpoints, process helpers."""
