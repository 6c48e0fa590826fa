"""The decode mask in the order in which the decode kernel walks its context.

Shapes: S_ctx context slots, B requests, n_q query heads per rank, S new tokens per request.
"""

import math

import torch

__all__ = ["gen_attention_decode_mask", "plain_decode_mask", "slot_order"]

TILE = 128


def gen_attention_decode_mask(
    pos_ids: torch.Tensor,
    bs: int,
    q_head: int,
    s_active: int,
    s_prior: int,
    start_pos: torch.Tensor | None = None,
    block_len: int = 0,
    local_filled_slots: torch.Tensor | None = None,
    dcp_active_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Build the 0/1 mask of one decode step in the kernel's slot order.

    Slots below a request's smallest position are visible, and the last ``s_active`` slots carry
    the causal triangle of the new tokens. Only :func:`attention_decode` understands the order.

    Args:
        pos_ids: ``[1, bs*s_active]``, number of earlier tokens per new token.
        bs: requests.
        q_head: query heads per rank.
        s_active: new tokens per request.
        s_prior: context slots, a multiple of 128.
        start_pos: ``[1, bs*s_active]``, first visible position per token, inclusive; a start above
            the position wraps around.
        block_len: tokens per cache block.
        local_filled_slots: one threshold for all or one per request, instead of pos_ids; then the
            last ``s_active`` rows are visible to every new token.
        dcp_active_mask: ``[bs]``, switches those last rows off; with local_filled_slots only.

    Returns:
        float32 ``[s_prior, bs, q_head, s_active]``.

    Raises:
        ValueError: s_prior is no multiple of 128.
        NotImplementedError: block_len 0 without local_filled_slots.
        IndexError: s_prior cannot be laid out in whole tiles.
    """
    if s_prior % TILE:
        raise ValueError(f"gen_attention_decode_mask: s_prior must be k*{TILE}, not {s_prior}")
    order = slot_order(s_prior, bs, q_head, s_active, block_len).to(pos_ids.device)
    if local_filled_slots is not None:
        filled = local_filled_slots.reshape(-1).expand(bs)
        slots = torch.arange(s_prior, device=pos_ids.device)
        visible = (slots[:, None] < filled[None, :])[order]  # [S_ctx, B]
        active = torch.ones(s_active, bs, device=pos_ids.device)
        if dcp_active_mask is not None:
            active = active * dcp_active_mask.reshape(1, bs)
        rows = torch.cat([visible.float()[: s_prior - s_active], active.float()])
        return rows[:, :, None, None].expand(s_prior, bs, q_head, s_active).contiguous()
    if block_len == 0:
        raise NotImplementedError(
            "gen_attention_decode_mask: block_len 0 (a flat cache) has no CPU path"
        )
    start = None if start_pos is None else start_pos.reshape(bs, s_active)
    plain = plain_decode_mask(pos_ids.reshape(bs, s_active), s_prior, start)
    rows = plain[order].float()  # [S_ctx, B, S]
    return rows[:, :, None, :].expand(s_prior, bs, q_head, s_active).contiguous()


def plain_decode_mask(
    pos_ids: torch.Tensor, s_prior: int, start_pos: torch.Tensor | None
) -> torch.Tensor:
    """Tell which slot each new token sees, slots in their plain order.

    Args:
        pos_ids: ``[B, S]``, number of earlier tokens per new token.
        s_prior: context slots; the last S of them belong to the new tokens.
        start_pos: ``[B, S]`` or None, first visible position, inclusive.

    Returns:
        bool ``[s_prior, B, S]``.
    """
    new_tokens = pos_ids.shape[1]
    slots = torch.arange(s_prior, device=pos_ids.device)[:, None, None]
    end = pos_ids.amin(dim=1, keepdim=True)  # [B, 1]: one end per request
    below_end = slots < end
    if start_pos is None:
        prior = below_end.expand(-1, -1, new_tokens)
    else:
        from_start = slots >= start_pos
        prior = torch.where(start_pos > end, from_start | below_end, from_start & below_end)
    # New token a sits in slot s_prior - S + a and is seen by new tokens a, a+1, ...
    new_index = slots - (s_prior - new_tokens)
    seen_by = torch.arange(new_tokens, device=pos_ids.device)
    return torch.where(new_index >= 0, new_index <= seen_by, prior)


def slot_order(s_prior: int, bs: int, q_head: int, s_active: int, block_len: int) -> torch.Tensor:
    """Return int64 ``[s_prior]``: the logical position that row i of the kernel's mask holds.

    # 256 slots, even batch, block 16 -> runs of r = 2: rows 0 1 2 .. 128 129 -> 0 2 4 .. 1 3
    """
    run = _run_length(s_prior, bs, q_head, s_active, block_len)
    rows = torch.arange(s_prior)
    tile = torch.div(rows, TILE, rounding_mode="floor")
    return torch.div(tile, run, rounding_mode="floor") * TILE * run + rows % TILE * run + tile % run


def core_split(s_prior: int, bs: int, q_head: int, s_active: int) -> int:
    """Return into how many parts (1 or 2) the kernel cuts the context between its two cores."""
    batch_is_split = bs % 2 == 0 and (bs * q_head * s_active >= TILE or s_prior <= 2 * TILE)
    return 2 if s_prior >= 2 * TILE and not batch_is_split else 1


def _run_length(s_prior: int, bs: int, q_head: int, s_active: int, block_len: int) -> int:
    if block_len == 0:
        return 1
    parts = core_split(s_prior, bs, q_head, s_active)
    if s_prior % (TILE * parts):
        raise IndexError(
            f"{s_prior} context slots cannot be laid out for {bs} requests: legal are {TILE}, "
            f"multiples of {2 * TILE}, and other multiples of {TILE} only with an even batch and "
            f"batch*heads*tokens >= {TILE}"
        )
    return math.gcd(block_len, s_prior // (TILE * parts))
