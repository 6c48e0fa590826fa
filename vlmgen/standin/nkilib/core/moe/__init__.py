"""Mixture-of-experts kernels: names only."""
