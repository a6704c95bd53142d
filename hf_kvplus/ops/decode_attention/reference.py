"""The definition of correct: plain torch, in float32, a block of pages at a time."""

import torch

from ..gather_pages.reference import gather_pages

_BLOCK = 2**18  # numbers that are decoded at a time: few calls for little memory


def decode_attention(query, pages, tail_keys, tail_values, mask, scale, softcap, sinks):
    rows, heads, q_len, dim = query.shape
    kv_heads = tail_keys.shape[1]
    # All query heads of a KV head are one matrix: [rows, kv_heads, group * q, dim].
    queries = (query.float() * scale).reshape(rows, kv_heads, -1, dim)
    page_slots = sum(view.tokens for view in pages)
    if not page_slots + tail_keys.shape[2]:
        return query.new_zeros((rows, q_len, heads, tail_values.shape[-1]))

    scores = queries.new_empty((*queries.shape[:3], page_slots + tail_keys.shape[2]))
    for view, ids, slots in _blocks(pages):
        keys = gather_pages(view.key_format, view.keys, ids, torch.float32)
        scores[..., slots] = queries @ keys.transpose(-1, -2)
    scores[..., page_slots:] = queries @ tail_keys.float().transpose(-1, -2)

    weights = _softmax(scores.view(rows, heads, q_len, -1), pages, mask, softcap, sinks)
    weights = weights.reshape(rows, kv_heads, -1, weights.shape[-1])

    out = weights[..., page_slots:] @ tail_values.float()
    for view, ids, slots in _blocks(pages):
        out += weights[..., slots] @ gather_pages(view.value_format, view.values, ids, torch.float32)
    return out.view(rows, heads, q_len, -1).transpose(1, 2).to(query.dtype)


def _blocks(pages):
    """Runs of table columns: their view, their page numbers `[rows, kv_heads, n]`, the slots they fill."""
    start = 0
    for view in pages:
        page, widest = view.key_format.page_size, max(view.key_format.dim, view.value_format.dim)
        rows, heads, _ = view.block_table.shape
        step = max(1, _BLOCK // (rows * heads * page * widest))
        for ids in view.block_table.split(step, dim=-1):
            stop = start + ids.shape[-1] * page
            yield view, ids, slice(start, stop)
            start = stop


def _softmax(scores, pages, mask, softcap, sinks):
    """Attention weights `[rows, heads, q, slots]`, summing to one (less what the sinks take)."""
    heads = scores.shape[1]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        if mask.shape[1] not in (1, heads):
            mask = mask.repeat_interleave(heads // mask.shape[1], dim=1)
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask.float()
    start = 0
    for view in pages:
        if view.has_null:
            missing = (view.block_table < 0).repeat_interleave(view.key_format.page_size, dim=-1)
            missing = missing.repeat_interleave(heads // missing.shape[1], dim=1)[:, :, None]
            scores[..., start : start + view.tokens].masked_fill_(missing, float("-inf"))
        start += view.tokens

    top = scores.amax(-1, keepdim=True)
    if sinks is not None:
        sinks = sinks.float().reshape(1, heads, 1, 1)
        top = torch.maximum(top, sinks)
    top = top.masked_fill(top == float("-inf"), 0.0)
    weights = (scores - top).exp_()
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + (sinks - top).exp()
    return weights / total.masked_fill(total == 0, 1.0)
