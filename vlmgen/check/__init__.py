"""Proofs that need no weights: plugin contract, device rules, weight coverage, parallelism."""
