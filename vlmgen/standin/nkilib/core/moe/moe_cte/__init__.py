"""Mixture-of-experts prefill kernel: names only."""
