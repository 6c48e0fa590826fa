"""Comparison of a generated package with Hugging Face transformers, on a CPU."""
