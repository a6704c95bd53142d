"""Writing tokens to pages, encoded."""

from collections.abc import Mapping

import torch

from ...formats import PageFormat
from ...guards import plain
from .. import _triton
from . import reference, triton


@plain
def seal_pages(
    format: PageFormat,
    parts: Mapping[str, torch.Tensor],
    tokens: torch.Tensor,
    ids: torch.Tensor,
    *,
    backend: str = "auto",
) -> None:
    """Encode whole pages of tokens and write them in place. Waits for no device.

    Args:
        format: how pages are written.
        parts: of all pages, `[capacity, *shape]`, contiguous; written to.
        tokens: `[n, page_size, dim]`, a view with any strides.
        ids: int64 `[n]`, the pages to write. A number that stands here twice ends up as any one of them.
        backend: as for `decode_attention`.

    Raises:
        ValueError: shapes that do not belong together; a backend that is not there, or does not serve these arguments;
            on the CPU, infinities or NaN in formats where one would spoil its neighbours.
    """
    expected = (len(ids), format.page_size, format.dim)
    if tuple(tokens.shape) != expected:
        raise ValueError(f"`tokens` is {tuple(tokens.shape)}, expected {expected} for {len(ids)} `ids`.")
    triton_serves = _triton.serves(backend, tokens.device, triton.refuses(format, tokens))
    (triton if triton_serves else reference).seal_pages(format, parts, tokens, ids)


__all__ = ["seal_pages"]
