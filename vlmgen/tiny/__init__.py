"""Tiny random checkpoints of a family, complete with tokenizer and processor."""
