"""The tokens of pages, decoded, in the order of a block table."""

from collections.abc import Mapping

import torch

from ...formats import PageFormat
from ...guards import plain
from .. import _triton
from . import reference, triton


@plain
def gather_pages(
    format: PageFormat,
    parts: Mapping[str, torch.Tensor],
    block_table: torch.Tensor,
    dtype: torch.dtype | None = None,
    *,
    backend: str = "auto",
) -> torch.Tensor:
    """Decode the pages that a block table names; zeros where it names none. Waits for no device.

    Args:
        format: what wrote the pages.
        parts: of all pages, `[capacity, *shape]`.
        block_table: int `[rows, kv_heads, columns]`; -1 names no page.
        dtype: of the result; the model's if not given.
        backend: as for `decode_attention`.

    Returns:
        `[rows, kv_heads, columns * page_size, dim]`.

    Raises:
        ValueError: a backend that is not there, or does not serve these arguments.
    """
    triton_serves = _triton.serves(backend, block_table.device, triton.refuses(format, dtype))
    return (triton if triton_serves else reference).gather_pages(format, parts, block_table, dtype)


__all__ = ["gather_pages"]
