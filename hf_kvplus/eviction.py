"""Letting a layer's policy choose, and storing what it keeps: the survivors sealed anew, or all but whole pages."""

import functools

import torch

from .retention import LayerState
from .segment import NO_TOKEN


def outgrown(layer, stored: int, slack: int = 0) -> bool:
    """Whether `stored` tokens per row exceed the budget of the longest row by more than `slack`."""
    longest = layer.seen - int(layer.padding.own_first.min())
    return min(stored, longest) > layer.retention.capacity(longest) + slack


def seal_survivors(layer, keys, values, padding, rows: torch.Tensor | None = None, copies: int = 1) -> None:
    """Seal what the policy keeps of all tokens but the format's residual: in all rows, or in `rows`.

    Args:
        keys, values, padding: the unsealed tokens, `[rows, heads, n, dim]` and bool `[rows, n]` or `None`.
        rows: numbers of the rows to choose in.
        copies: rows come in groups of so many that hold the same tokens.
    """
    old = max(0, keys.shape[-2] - layer.format.residual)
    some = slice(None) if rows is None else rows
    start = layer.seen - keys.shape[-2]
    positions = torch.arange(start, start + old, dtype=torch.int32, device=layer.device)
    positions = positions.expand(*keys[some].shape[:2], -1)
    if padding is not None:
        positions = positions.masked_fill(padding[some, None, :old], NO_TOKEN)
    positions = torch.cat([layer.sealed.slot_positions(some), positions], dim=-1)
    exact = torch.float32 if layer.sealed.slots else None  # what is sealed again is not rounded in between
    tokens = {
        name: torch.cat([layer.sealed.read(name, some, exact), unsealed[some, :, :old]], dim=-2)
        for name, unsealed in (("keys", keys), ("values", values))
    }
    numbers = torch.arange(layer.rows, device=layer.device)[some]
    own, first = layer.own_positions(positions, some), layer.padding.own_first[some]
    state = LayerState(own, layer.seen, first, keys.shape[-2] - old, lambda: tokens["keys"], numbers)
    keep = layer.retention.select(state) & (positions != NO_TOKEN)
    layer.sealed.repack(tokens["keys"], tokens["values"], positions, keep, rows, copies)
    if rows is None:
        layer.tail.replace(keys[:, :, old:], values[:, :, old:], None if padding is None else padding[:, old:])
    else:
        slots = torch.zeros((layer.rows, layer.tail.length), dtype=torch.bool, device=layer.device)
        slots[rows, :old] = True
        layer.tail.hide(slots)
    layer.evicted_at = layer.seen


def evict_tokens(layer) -> None:
    """Let the policy choose in the rows that exceed their budget by a page.

    A row's own tokens decide when, so that it fares as it would without the other rows of its batch.
    """
    least, slack = layer.format.residual, layer.page_size - 1
    if layer.slots <= max(layer.retention.capacity(1), least) + slack:
        return
    own_lengths = (layer.seen - layer.padding.own_first).tolist()
    budgets = [max(layer.retention.capacity(length), least) for length in own_lengths]
    held = (layer.slot_positions() != NO_TOKEN).float().sum(-1).mean(-1)
    due = (held > torch.tensor(budgets, device=layer.device) + slack).nonzero().flatten()
    if len(due):
        rows = None if len(due) == layer.rows else due
        seal_survivors(layer, *layer.unsealed(), layer.tail.padding, rows=rows)


def evict_pages(layer) -> None:
    """Drop the pages of which the policy keeps nothing, if the layer exceeds its budget by a page."""
    if not outgrown(layer, layer.slots, slack=layer.page_size - 1):
        return
    positions = layer.sealed.slot_positions()
    rows = torch.arange(layer.rows, device=layer.device)
    read = functools.partial(layer.sealed.read, "keys")
    own = layer.own_positions(positions)
    state = LayerState(own, layer.seen, layer.padding.own_first, layer.tail.length, read, rows)
    if layer.sealed.drop_empty(layer.retention.select(state) & (positions != NO_TOKEN)):
        layer.evicted_at = layer.seen
