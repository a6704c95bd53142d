"""Attention when the keys are a stand-in: read the pages where we can, the dense tensor where we must.

Masks come from transformers with one column per position. `slot_mask` leaves out the columns of evicted tokens and adds
what the policy hides, so that one mask serves any attention function.
"""

import functools
from collections.abc import Callable
from weakref import ref

import torch

from . import _compat, functions, step
from .errors import UnsupportedModelError
from .guards import carries_gradient, outside_autocast
from .layer import PagedLayer
from .masks import by_position, of_slots, visible
from .ops.decode_attention import decode_attention, has_kernel
from .standin import Handle, StandIn
from .step import MAX_DECODE_TOKENS


def precede(inner: Callable) -> Callable:
    """`inner`, which leaves calls whose key is a stand-in to `attend`.

    Where `inner` is a wrapper around an attention function of transformers, it is the wrapped one that does so, as long
    as the wrapper hands the stand-ins on without a look at what they hold.
    """
    wrapper, looks_inside = functions.around(inner, precede), False

    @functools.wraps(inner)
    def attention(module, query, key, value, *args, **kwargs):
        nonlocal looks_inside
        if type(key) is not StandIn and type(key) is not Handle:
            return inner(module, query, key, value, *args, **kwargs)
        wrapped, failed = type(key) is Handle, False
        if wrapper is not None and not looks_inside and not functions.is_declared(inner):
            try:
                result = wrapper(module, query, _held(key), _held(value), *args, **kwargs)
                return result if wrapped else _without_handles(result)
            except Exception:  # it reads what it is given, or fails whatever that is: then again with tensors
                if wrapped:
                    raise
                failed = True
        if len(args) > 1:
            kwargs |= zip(functions.names_behind_mask(inner), args[1:])
        out, weights = attend(inner, module, query, _released(key), _released(value), *args[:1], **kwargs)
        if failed:
            looks_inside = True
        if wrapped and weights is None and functions.gives_weights(inner):  # who reads those needs the real ones
            shape = torch.Size((*query.shape[:3], key.shape[2]))
            weights = Handle(StandIn(key.layer, "weights", shape, query.dtype))
        return out, weights

    return attention


def _held(given):
    return Handle(given) if type(given) is StandIn else given


def _released(given):
    return given.standin if type(given) is Handle else given


def _without_handles(result):
    return tuple(None if type(each) is Handle else each for each in result)


def attend(inner: Callable, module: torch.nn.Module, query, key, value, attention_mask, **kwargs):
    """What the wrapped attention functions do when `key` is a stand-in.

    Args:
        inner: the attention function that the model asked for.
        query: `[rows, heads, new, dim]`.
        key: a stand-in.
        value: a stand-in too, unless the model has worked on the values.
        attention_mask: as transformers made it.
        kwargs: the rest of the call.

    Returns:
        What `inner` returns: the output `[rows, new, heads, value_dim]`, and the weights or `None`.
    """
    if type(value) is not StandIn:
        return inner(module, query, key.dense(), value, attention_mask, **kwargs)
    trains = carries_gradient(query, attention_mask, *kwargs.values())  # a step has no backward
    if key.layer.reservation is not None and key.fresh is None and not trains:
        heard, unheeded = functions.heard(inner, kwargs)
        standard = functions.is_standard(inner)
        full = isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 4
        fused = standard and not unheeded and not _wants_weights(kwargs)
        if fused and (attention_mask is None or isinstance(attention_mask, torch.Tensor)):
            return _attend_in_step(module, query, key, attention_mask, heard), None
        # Others may compute with the keys that the mask hides: outside of a graph, those are taken away.
        if full and key.layer.masked_by_positions and (standard or step.within_graph(query.device)):
            functions.tell_of_dense_reads(inner, unheeded, attention_mask, _wants_weights(kwargs))
            return inner(module, query, key.dense(), value.dense(), attention_mask, **kwargs)
    return _attend_on_host(inner, module, query, key, value, attention_mask, kwargs, trains)


def _attend_in_step(module, query, key: StandIn, mask, heard: dict) -> torch.Tensor:
    """The fused path over the tensors of a reservation."""
    reservation = key.layer.reservation
    if mask is None and reservation.padded:
        raise _no_mask()
    if not torch.compiler.is_compiling() and reservation.padded and step.on_host(query.device):
        _refuse_unpadding(mask, key.layer)
    full, new = mask is not None and mask.ndim == 4, query.shape[2]
    return reservation.attend(
        query,
        mask,
        scale=heard.get("scaling") or query.shape[-1] ** -0.5,
        softcap=heard.get("softcap"),
        sinks=heard.get("s_aux"),
        window=None if full else heard.get("sliding_window"),
        causal=not full and new > 1 and _is_causal(module, heard),
    )


@torch.compiler.disable
def _attend_on_host(inner: Callable, module, query, key: StandIn, value: StandIn, attention_mask, kwargs, trains: bool):
    layer: PagedLayer = key.layer
    if key.fresh is None and layer.reservation is not None:
        layer.reserve(None)  # what a step cannot serve would take it back every time
    mask, new, evicts = attention_mask, query.shape[2], layer.retention is not None
    readable = mask is None or (isinstance(mask, torch.Tensor) and mask.ndim in (2, 4))
    heard, unheeded = functions.heard(inner, kwargs)
    by_position = not readable or bool(unheeded)  # what is given cannot be rearranged as the slots are
    standard, wants_weights = functions.is_standard(inner), _wants_weights(kwargs)
    unmasked = mask is None and not standard and not _compat.takes_masks(module)
    if evicts and (by_position or unmasked) and not layer.masked_by_model:
        _refuse_eviction(None if readable else mask, unheeded)
    if key.fresh is not None:
        if evicts and layer._pending is not None and key.shape[2] != new:
            raise UnsupportedModelError(
                "This model keeps the keys of an image (or of another input) in the same cache as those of its tokens, "
                "and a policy would evict those too. Use a string without a retention policy, such as 'paged_int8'."
            )
        out = inner(module, query, key.fresh, value.fresh, mask, **kwargs)
        layer.commit(padding_of(mask, layer, new))
        layer.resume()
        return out

    if readable and not evicts and layer.sealed.has_null:
        _refuse_unpadding(mask, layer)
    layer.learn_padding(padding_of(mask, layer, new))
    pages, tail = layer.sealed.view(), layer.unsealed()
    from_pages = new <= MAX_DECODE_TOKENS or has_kernel(query, pages, *tail)
    from_pages = from_pages or (evicts and not _compat.takes_slot_masks(inner))
    fused = standard and not by_position and not wants_weights
    if from_pages and not fused:
        functions.tell_of_dense_reads(inner, unheeded, mask, wants_weights)
    if evicts and (by_position or unmasked):
        # Without a mask, exactly the tokens that a layer of transformers would hold.
        span = slice(1 - layer.retention.window - new, None) if unmasked else slice(None)
        keys, values = (layer.contiguous(each.name)[:, :, span].to(each.dtype) for each in (key, value))
        result = inner(module, query, keys, values, mask, **kwargs)
    elif from_pages and fused:
        if trains:
            tail = tuple(tokens.clone() for tokens in tail)  # backward reads them when others are written beside them
        out = decode_attention(
            query,
            pages,
            *tail,
            slot_mask(layer, mask, new, module, heard),
            scale=heard.get("scaling") or query.shape[-1] ** -0.5,
            softcap=heard.get("softcap"),
            sinks=heard.get("s_aux"),
        )
        result = out, None
    else:
        slots = mask
        if readable and mask is not None and mask.shape[-1] > layer.seen:  # made for a reservation, taken back since
            slots = mask[..., : layer.seen]
        if evicts:
            slots = slot_mask(layer, mask, new, module, heard)
            if slots is not None and slots.shape[1] not in (1, query.shape[1]):
                slots = slots.repeat_interleave(query.shape[1] // slots.shape[1], dim=1)
            if slots is not None and slots.dtype == torch.bool:  # not every function takes those
                slots = torch.zeros_like(slots, dtype=query.dtype).masked_fill(~slots, torch.finfo(query.dtype).min)
            kwargs.pop("position_bias", None)  # the mask has it
        keys, values = layer.dense("keys").to(key.dtype), layer.dense("values").to(value.dtype)
        result = inner(module, query, keys, values, slots, **kwargs)
        if evicts and result[1] is not None:
            result = result[0], _weights_by_position(result[1], layer, new)
    layer.commit()
    layer.resume()
    return result


def _is_causal(module, kwargs: dict) -> bool:
    causal = kwargs.get("is_causal")
    return getattr(module, "is_causal", True) if causal is None else causal


def _weights_by_position(weights: torch.Tensor, layer: PagedLayer, new: int) -> torch.Tensor:
    """Attention weights `[rows, heads, new, slots]` with the columns that transformers' own layer would have."""
    positions = layer.slot_positions()
    positions = positions.repeat_interleave(weights.shape[1] // positions.shape[1], dim=1)
    columns = by_position(weights.transpose(2, 3), positions, layer.seen).transpose(2, 3)
    return columns[..., 1 - layer.retention.window - new :] if layer.masked_by_model else columns


def _wants_weights(kwargs: dict) -> bool:
    """Whether the call asks for attention weights (given back, or dropped out), which the fused path does not build."""
    return bool(kwargs.get("dropout")) or _compat.wants_attentions(kwargs)


def slot_mask(layer: PagedLayer, mask, new: int, module, kwargs) -> torch.Tensor | None:
    """The mask over the slots of `layer`, `[rows or 1, 1 or heads, new, slots]`, or `None` if all is visible.

    It includes the `position_bias` of `kwargs`, if there is one.

    Args:
        mask: `None`, `[rows, positions]` (which are no padding) or `[rows or 1, 1 or heads, new, positions]`.
    """
    shown, bias = _visible_slots(layer, mask, new, module, kwargs), kwargs.get("position_bias")
    if bias is None:
        return shown
    bias = bias[..., : layer.seen]
    if layer.retention is not None:
        bias, shown = of_slots(bias, layer.slot_positions(), shown)
    if shown is None:
        return bias
    return torch.where(shown, bias, torch.finfo(bias.dtype).min) if shown.dtype == torch.bool else bias + shown


def _visible_slots(layer: PagedLayer, mask, new: int, module, kwargs) -> torch.Tensor | None:
    """As `slot_mask`, of the masks alone."""
    evicts, full = layer.retention is not None, mask is not None and mask.ndim == 4
    if full and not evicts:
        return mask[..., : layer.slots]
    order = not full and new > 1 and _is_causal(module, kwargs)  # a full mask has causality and windows in it already
    window = None if full else kwargs.get("sliding_window")
    if not evicts and mask is None and not order and (window is None or layer.seen <= window):
        return None

    if evicts:
        positions = layer.slot_positions()
        positions = positions if layer.retention.per_head else positions[:, :1]
    else:
        positions = torch.arange(layer.seen, device=layer.device)[None, None]
    queries, kept = torch.arange(layer.seen - new, layer.seen, device=layer.device), None
    if evicts:
        # Where the model masks for itself, hide what a layer of transformers would not hold: some models rely on that.
        own = queries[:1] if layer.masked_by_model else layer.own_positions(queries.expand(layer.rows, 1, -1))
        with outside_autocast(layer.device):
            kept = layer.retention.visible(own, layer.own_positions(positions), layer.padding.own_first)
    return visible(positions, queries, mask, causal=order, window=window, kept=kept)


def _refuse_eviction(mask, unknown: set[str]) -> None:
    given = ", ".join(sorted(unknown)) or ("no mask" if mask is None else f"a {type(mask).__name__} as its mask")
    raise UnsupportedModelError(
        f"The attention of this model takes {given}, which a cache that evicts tokens cannot apply. Use a string "
        "without a retention policy, such as 'paged_int8'"
        + ("." if unknown else ", or load the model with attn_implementation='sdpa' or 'eager'.")
    )


def padding_of(mask, layer: PagedLayer, new: int) -> torch.Tensor | None:
    """Bool `[rows, new]`: which of the newest tokens are padding by this mask; `None` if none is.

    Without a policy only the columns before a row's first token count: a mask of the caller's own may show any other
    column again later. A cache that evicts drops every column that no query of its own forward pass sees.
    """
    if not isinstance(mask, torch.Tensor) or mask.ndim not in (2, 4):
        return None
    if layer.retention is None and layer._pending is None:
        return None
    hidden = ~_seen_columns(mask)[:, : layer.seen]
    if layer.retention is None:
        hidden = hidden.long().cumprod(dim=1).bool()
    hidden = hidden[:, -new:]
    return hidden.expand(layer.rows, -1) if bool(hidden.any()) else None


_last: tuple = (lambda: None, None, None)


def _seen_columns(mask: torch.Tensor) -> torch.Tensor:
    """Bool `[rows, positions]`: the columns that some query sees. All layers of a pass share one mask: ask once."""
    global _last
    known, version, columns = _last
    current = None if mask.is_inference() else mask._version  # those do not tell whether they were written to
    if known() is not mask or current is None or current != version:
        shown = (
            mask.bool()
            if mask.dtype in (torch.bool, torch.int64, torch.int32)
            else mask > torch.finfo(mask.dtype).min / 2
        )
        columns = shown if mask.ndim == 2 else shown.flatten(1, 2).any(dim=1)
        _last = ref(mask), current, columns
    return columns


def _no_mask() -> ValueError:
    return ValueError(
        "`attention_mask` is missing: this cache was filled with a padded batch. Pass the mask of all tokens, past and "
        "new."
    )


def _refuse_unpadding(mask, layer: PagedLayer) -> None:
    """A page of padding was never stored, so a mask that shows it (or no mask) cannot be honoured."""
    if mask is None:
        raise _no_mask()
    absent = layer.sealed.missing()[:, 0]
    if bool((_seen_columns(mask)[:, : absent.shape[1]] & absent).any()):
        raise ValueError(
            "`attention_mask` shows tokens that were padding when this cache was filled, and padding is not stored. "
            "Pass a mask that hides them, as the first one did."
        )
