"""Masks over the token slots of a layer, from the masks over positions that transformers makes."""

import torch

from .segment import NO_TOKEN


def visible(
    positions: torch.Tensor,
    queries: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    causal: bool = False,
    window: int | None = None,
    kept: torch.Tensor | None = None,
) -> torch.Tensor:
    """Which slots each query sees, `[rows or 1, heads or 1, q, slots]`: bool, or additive if `mask` is.

    Args:
        positions: int `[rows or 1, heads or 1, slots]`, the position of each slot's token; -1 where there is none.
        queries: int `[q]`, positions of the query tokens.
        mask: `[rows or 1, 1 or heads, q, positions]` (bool or additive), or `[rows, positions]` (nonzero: no padding).
        causal: whether a query sees no token behind its own position.
        window: if given, a query sees itself and the `window - 1` tokens before it.
        kept: bool `[rows or 1, heads or 1, 1 or q, slots]`, what a retention policy shows; all if not given.
    """
    allowed = (positions != NO_TOKEN)[:, :, None].expand(-1, -1, len(queries), -1)
    if causal:
        allowed = allowed & (positions[:, :, None] <= queries[:, None])
    if window is not None:
        allowed = allowed & (positions[:, :, None] > queries[:, None] - window)
    if kept is not None:
        allowed = allowed & kept
    if mask is None:
        return allowed
    if mask.ndim == 2:
        mask = mask[:, None, None].bool().expand(-1, -1, len(queries), -1)
    mask, allowed = of_slots(mask, positions, allowed)
    if mask.dtype == torch.bool:
        return mask & allowed
    return mask.masked_fill(~allowed, torch.finfo(mask.dtype).min)


def by_position(tokens: torch.Tensor, positions: torch.Tensor, length: int) -> torch.Tensor:
    """Slots put where they belong: `tokens [rows, heads, slots, dim]` as `[rows, heads, length, dim]`, zeros elsewhere.

    Args:
        positions: int `[rows or 1, heads or 1, slots]`; -1 where a slot holds no token.
    """
    where = positions.long().expand(tokens.shape[:3])
    where = where.masked_fill(where == NO_TOKEN, length)[..., None].expand_as(
        tokens
    )  # the last place takes empty slots
    out = tokens.new_zeros((*tokens.shape[:2], length + 1, tokens.shape[-1]))
    return out.scatter_(2, where, tokens)[:, :, :length]


def of_slots(table: torch.Tensor, positions: torch.Tensor, shown: torch.Tensor):
    """The columns of `table [rows or 1, heads or 1, q, positions]` that belong to the slots at `positions`.

    Also `shown [rows or 1, heads or 1, q, slots]`, with as many heads.
    """
    rows, heads = max(table.shape[0], positions.shape[0]), max(table.shape[1], positions.shape[1])
    if positions.shape[1] not in (1, heads):
        positions = positions.repeat_interleave(heads // positions.shape[1], dim=1)
    if shown.shape[1] not in (1, heads):
        shown = shown.repeat_interleave(heads // shown.shape[1], dim=1)
    columns = positions.clamp(min=0).long()[:, :, None].expand(rows, heads, table.shape[2], -1)
    return table.expand(rows, heads, -1, -1).gather(-1, columns), shown
