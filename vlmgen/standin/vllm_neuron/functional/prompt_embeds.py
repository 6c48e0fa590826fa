"""Prompt embeddings given by the caller in place of token embeddings."""

import torch

__all__ = ["merge_prompt_embeds"]


def merge_prompt_embeds(
    hidden_states: torch.Tensor,
    inputs_embeds: torch.Tensor | None,
    is_token_ids: torch.Tensor | None,
) -> torch.Tensor:
    """Keep token embeddings where the prompt has tokens and take the caller's rows elsewhere.

    Args:
        hidden_states: ``[T, H]``.
        inputs_embeds: ``[T, H]`` or None; cast to the dtype of hidden_states.
        is_token_ids: bool ``[T]`` or None; True keeps hidden_states.

    Returns:
        ``[T, H]``; hidden_states itself if either of the others is None.
    """
    if inputs_embeds is None or is_token_ids is None:
        return hidden_states
    keep = is_token_ids.reshape(-1, *[1] * (hidden_states.dim() - 1)).bool()
    return torch.where(keep, hidden_states, inputs_embeds.to(hidden_states.dtype))
