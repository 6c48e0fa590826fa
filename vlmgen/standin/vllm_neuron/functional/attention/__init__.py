"""Attention operators: QKV projection, prefill, decode and output projection."""
