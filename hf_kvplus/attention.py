"""Attention when the keys are a stand-in: read the pages where we can, the dense tensor where we must.

Masks come from transformers with one column per position. `slot_mask` leaves out the columns of evicted tokens and adds
what the policy hides, so that one mask serves any attention function.
"""

from collections.abc import Callable
from weakref import ref

import torch

from . import _compat
from .errors import UnsupportedModelError
from .layer import MAX_DECODE_TOKENS, PagedLayer
from .ops.decode_attention import decode_attention
from .segment import NO_TOKEN

# Arguments of attention functions that the fused path honours, or that do not change what it computes.
_HONOURED = {"scaling", "softcap", "s_aux", "sliding_window", "is_causal", "dropout"}
_WITHOUT_EFFECT = {"position_ids", "cache_position", "cache", "past_key_values", "use_cache", "kwargs", "layer_idx"}
_WITHOUT_EFFECT |= {"output_attentions", "output_hidden_states", "return_dict", "logits_to_keep", "token_type_ids"}
_WITHOUT_EFFECT |= {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "num_items_in_batch"}


def attend(inner: Callable, module: torch.nn.Module, query, key, value, mask, **kwargs):
    """What the wrapped attention functions do when `key` is a stand-in.

    Args:
        inner: the attention function that the model asked for.
        query: `[rows, heads, new, dim]`.
        key, value: stand-ins.
        mask: as transformers made it.
        kwargs: the rest of the call.

    Returns:
        What `inner` returns: the output `[rows, new, heads, value_dim]`, and the weights or `None`.
    """
    layer: PagedLayer = key.layer
    new, evicts = query.shape[2], layer.retention is not None
    if key.fresh is not None:
        out = inner(module, query, key.fresh, value.fresh, mask, **kwargs)
        layer.commit(padding_of(mask, layer, new))
        return out

    readable = mask is None or (isinstance(mask, torch.Tensor) and mask.ndim in (2, 4))
    if evicts and not readable:
        raise UnsupportedModelError(
            f"The attention mask is a {type(mask).__name__}, which a cache that evicts tokens cannot apply. "
            "Load the model with attn_implementation='sdpa' or 'eager'."
        )
    if readable and not evicts and layer.sealed.has_null:
        _refuse_unpadding(mask, layer)

    if readable and new <= MAX_DECODE_TOKENS and _fused_serves(kwargs):
        out = decode_attention(
            query,
            layer.sealed.view(),
            *layer.unsealed(),
            slot_mask(layer, mask, new, module, kwargs),
            scale=kwargs.get("scaling") or query.shape[-1] ** -0.5,
            softcap=kwargs.get("softcap"),
            sinks=kwargs.get("s_aux"),
        )
        result = out, None
    else:
        slots = mask
        if evicts:
            slots = slot_mask(layer, mask, new, module, kwargs)
            if slots is not None and slots.shape[1] not in (1, query.shape[1]):
                slots = slots.repeat_interleave(query.shape[1] // slots.shape[1], dim=1)
        result = inner(module, query, layer.dense("keys"), layer.dense("values"), slots, **kwargs)
    layer.commit(padding_of(mask, layer, new))
    return result


def _fused_serves(kwargs: dict) -> bool:
    """Whether the fused path computes all that the call asks for."""
    unknown = {name for name, value in kwargs.items() if value is not None} - _HONOURED - _WITHOUT_EFFECT
    return not unknown and not kwargs.get("dropout") and not _compat.wants_attentions(kwargs)


def slot_mask(layer: PagedLayer, mask, new: int, module, kwargs) -> torch.Tensor | None:
    """The mask over the slots of `layer`, `[rows or 1, 1 or heads, new, slots]`, or `None` if all is visible.

    Args:
        mask: `None`, `[rows, positions]` (which are no padding) or `[rows or 1, 1 or heads, new, positions]`.
    """
    evicts, full = layer.retention is not None, mask is not None and mask.ndim == 4
    if full and not evicts:
        return mask[..., : layer.slots]
    causal = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    order = not full and new > 1 and causal  # a full mask has causality and windows in it already
    window = None if full else kwargs.get("sliding_window")
    if not evicts and mask is None and not order and (window is None or layer.seen <= window):
        return None

    if evicts:
        positions = layer.slot_positions()
        positions = positions if layer.retention.per_head else positions[:, :1]
    else:
        positions = torch.arange(layer.seen, device=layer.device)[None, None]
    queries = torch.arange(layer.seen - new, layer.seen, device=layer.device)
    allowed = (positions != NO_TOKEN)[:, :, None].expand(-1, -1, new, -1)
    if order:
        allowed = allowed & (positions[:, :, None] <= queries[:, None])
    if window is not None:
        allowed = allowed & (positions[:, :, None] > queries[:, None] - window)
    if evicts and not layer.masked_by_model:
        hidden = layer.retention.visible(queries, positions, layer.first)
        allowed = allowed if hidden is None else allowed & hidden
    if mask is None:
        return allowed
    if not full:
        mask = mask[:, None, None].bool().expand(-1, -1, new, -1)

    rows, heads = max(mask.shape[0], positions.shape[0]), max(mask.shape[1], positions.shape[1])
    if positions.shape[1] not in (1, heads):
        positions, allowed = (t.repeat_interleave(heads // t.shape[1], dim=1) for t in (positions, allowed))
    columns = positions.clamp(min=0).long()[:, :, None].expand(rows, heads, new, -1)
    mask = mask.expand(rows, heads, -1, -1).gather(-1, columns)
    if mask.dtype == torch.bool:
        return mask & allowed
    return mask.masked_fill(~allowed, torch.finfo(mask.dtype).min)


def padding_of(mask, layer: PagedLayer, new: int) -> torch.Tensor | None:
    """Bool `[rows, new]`: which of the newest tokens are padding by this mask; `None` if none is.

    Without a policy only the columns before a row's first token count: a mask of the caller's own may show any other
    column again later. A cache that evicts drops every column that no query of its own forward pass sees.
    """
    if not isinstance(mask, torch.Tensor) or mask.ndim not in (2, 4) or layer._pending is None:
        return None
    hidden = ~_seen_columns(mask)[:, : layer.seen]
    if layer.retention is None:
        hidden = hidden.long().cumprod(dim=1).bool()
    hidden = hidden[:, -new:]
    return hidden.expand(layer.rows, -1) if bool(hidden.any()) else None


_last: tuple = (lambda: None, None)


def _seen_columns(mask: torch.Tensor) -> torch.Tensor:
    """Bool `[rows, positions]`: the columns that some query sees. All layers of a pass share one mask: ask once."""
    global _last
    known, columns = _last
    if known() is not mask:
        shown = (
            mask.bool()
            if mask.dtype in (torch.bool, torch.int64, torch.int32)
            else mask > torch.finfo(mask.dtype).min / 2
        )
        columns = shown if mask.ndim == 2 else shown.flatten(1, 2).any(dim=1)
        _last = ref(mask), columns
    return columns


def _refuse_unpadding(mask, layer: PagedLayer) -> None:
    """A page of padding was never stored, so a mask that shows it (or no mask) cannot be honoured."""
    if mask is None:
        raise ValueError(
            "`attention_mask` is missing: this cache was filled with a padded batch. Pass the mask of all tokens, "
            "past and new."
        )
    absent = layer.sealed.missing()[:, 0]
    if bool((_seen_columns(mask)[:, : absent.shape[1]] & absent).any()):
        raise ValueError(
            "`attention_mask` shows tokens that were padding when this cache was filled, and padding is not stored. "
            "Pass a mask that hides them, as the first one did."
        )
