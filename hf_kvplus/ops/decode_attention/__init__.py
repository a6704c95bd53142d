"""Attention of new tokens over paged keys and values, without building the dense cache."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...formats import PageFormat
from ...guards import carries_gradient, plain
from . import cpu, reference, triton

#: Kernels by the name that `backend` gives them. Each is a module with `DEVICE` (the type it runs on), `missing()` and
#: `refuses(query, pages, tail_keys, tail_values, mask)` (why it cannot run here, or not on these arguments),
#: `by_default()` (whether it runs without being asked for) and `decode_attention`.
KERNELS = {"cpu": cpu, "triton": triton}


@dataclass
class PageView:
    """The sealed pages that a call reads.

    Attributes:
        keys, values: parts of all pages of the layer, `[capacity, *shape]`, as `key_format`, `value_format` wrote them.
        block_table: int32 `[rows, kv_heads, columns]`, page numbers in the order of the tokens; -1 holds none.
        has_null: whether any entry of the table is -1.
    """

    keys: dict[str, torch.Tensor]
    values: dict[str, torch.Tensor]
    key_format: PageFormat
    value_format: PageFormat
    block_table: torch.Tensor
    has_null: bool = False

    @property
    def tokens(self) -> int:
        """Slots that the table spans, per row and head."""
        return self.block_table.shape[-1] * self.key_format.page_size


@plain
def decode_attention(
    query: torch.Tensor,
    pages: Sequence[PageView],
    tail_keys: torch.Tensor,
    tail_values: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """`softmax(query · keysᵀ · scale + mask) · values` over the pages, then the tail.

    Args:
        query: `[rows, heads, q, dim]`; `heads` is a multiple of the `kv_heads` of the keys.
        pages: the sealed tokens, oldest first; each view in a format of its own.
        tail_keys, tail_values: `[rows, kv_heads, t, dim]` and `[rows, kv_heads, t, value_dim]`, unsealed tokens. They,
            the query and the pages may each have a floating-point dtype of their own.
        mask: bool (true: attend) or additive, `[rows or 1, 1 or kv_heads or heads, q, slots]` over the slots of
            all views and then the tail.
            Tokens of null pages are never attended to. A query with nothing to attend to yields zeros.
        scale: factor of the scores.
        softcap: if given, scores become `softcap · tanh(scores / softcap)` before the mask.
        sinks: if given, `[heads]` learned logits that take part in the softmax without a value.
        backend: `"auto"` (the kernel of the device, or the reference where there is none), `"torch"` (the reference) or
            the name of a kernel, `"cpu"` or `"triton"`. `"auto"` takes the Triton kernels only where the environment
            variable `HF_KVPLUS_TRITON` is 1.

    Returns:
        `[rows, q, heads, value_dim]` in the dtype of `query`. Sums are accumulated in float32.

    Raises:
        ValueError: shapes that do not belong together; a backend that is not there, or does not serve these arguments.
    """
    rows, heads, q_len, _ = query.shape
    kv_heads, tail_len = tail_keys.shape[1], tail_keys.shape[2]
    if heads % kv_heads:
        raise ValueError(f"`query` has {heads} heads, which is no multiple of the {kv_heads} heads of `tail_keys`.")
    for view in pages:
        if view.block_table.shape[:2] != (rows, kv_heads):
            given = tuple(view.block_table.shape[:2])
            raise ValueError(f"`pages`: got a block table for {given} rows and heads, expected {(rows, kv_heads)}.")
    if mask is not None:
        slots = sum(view.tokens for view in pages) + tail_len
        accepted = mask.ndim == 4 and mask.shape[0] in (1, rows) and mask.shape[1] in (1, kv_heads, heads)
        if not accepted or mask.shape[2] not in (1, q_len) or mask.shape[3] != slots:
            raise ValueError(
                f"`mask` is {tuple(mask.shape)}, expected [1 or {rows}, 1, {kv_heads} or {heads}, {q_len}, {slots}]."
            )
    chosen = _backend(backend, query, pages, tail_keys, tail_values, mask, sinks)
    return chosen.decode_attention(query, pages, tail_keys, tail_values, mask, scale, softcap, sinks)


def has_kernel(query: torch.Tensor, pages: Sequence[PageView], tail_keys, tail_values) -> bool:
    """Whether a kernel would serve this call: prompts too are then faster read from pages than from dense tensors."""
    return _backend("auto", query, pages, tail_keys, tail_values, None) is not reference


def _backend(name: str, query, pages, tail_keys, tail_values, mask, sinks=None):
    """The module that serves a call."""
    if name == "auto":
        device = query.device.type
        for kernel in KERNELS.values():
            if device != kernel.DEVICE or not kernel.by_default():
                continue
            if carries_gradient(query, tail_keys, tail_values, mask, sinks):
                continue  # kernels have no backward
            reason = kernel.missing()
            if reason:
                _warn_once(f"Decoding runs on plain torch, slower than the {device} kernel, because {reason}.")
            elif not kernel.refuses(query, pages, tail_keys, tail_values, mask):
                return kernel
        return reference
    if name == "torch":
        return reference
    if name not in KERNELS:
        raise ValueError(f"`backend`: got {name!r}, accepted: 'auto', 'torch', {', '.join(map(repr, KERNELS))}.")
    kernel = KERNELS[name]
    reason = kernel.missing() or kernel.refuses(query, pages, tail_keys, tail_values, mask)
    if not reason and query.device.type != kernel.DEVICE:
        reason = f"`query` is on {query.device}, and this kernel runs on {kernel.DEVICE}"
    if reason:
        raise ValueError(f"`backend`: got {name!r}, which cannot serve here, because {reason}. 'torch' serves always.")
    return kernel


_warned: set[str] = set()


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, stacklevel=4)


__all__ = ["PageView", "decode_attention", "has_kernel"]
