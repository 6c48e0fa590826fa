"""Acceptance of speculated tokens: the names only.

What the plugin's function returns is not on record, and the stand-in's runner does not
speculate, so the function refuses to run.
"""

import torch

__all__ = ["PLACEHOLDER_TOKEN_ID", "rejection_sampler"]

PLACEHOLDER_TOKEN_ID = -1  # vLLM's mark for a rejected position


def rejection_sampler(spec_decode_metadata: object, sampled_tokens: torch.Tensor) -> torch.Tensor:
    """Refuse to run: the stand-in has no speculative decoding.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError("rejection_sampler: the stand-in has no speculative decoding")
