"""Mixture-of-experts operators: routing, block mapping, prefill and decode."""
