"""The Triton kernel (`triton_kernels.py`) as `torch.ops.hf_kvplus.gather_pages_triton`."""

import torch

from .._triton import DTYPES, KINDS, kind

_WIDEST = 256

_library = torch.library.Library("hf_kvplus", "FRAGMENT")
_library.define(
    "gather_pages_triton(Tensor[] parts, Tensor block_table, str kind, bool channel_major, int page_size, int dim,"
    " int rotation, int group, ScalarType dtype) -> Tensor"
)


@torch.library.register_fake("hf_kvplus::gather_pages_triton", lib=_library)
def _(parts, block_table, kind, channel_major, page_size, dim, rotation, group, dtype):
    rows, heads, columns = block_table.shape
    return block_table.new_empty((rows, heads, columns * page_size, dim), dtype=dtype)


@torch.library.impl("hf_kvplus::gather_pages_triton", "CompositeExplicitAutograd", lib=_library)
def _(*args):
    from . import triton_kernels

    out, launches = triton_kernels.plan(*args)
    for launch in launches:
        launch.run()
    return out


def refuses(format, dtype) -> str | None:
    """`None` if the kernel reads this format, else why not."""
    if format.layout not in KINDS:
        return f"`format` has the layout {format.layout!r}, read are {sorted(KINDS)}"
    for given in (dtype or format.dtype, format.dtype):
        if given not in DTYPES:
            return f"`dtype` is {given}, given and written are float32, bfloat16, float16"
    return f"`format` has {format.dim} channels, read are up to {_WIDEST}" if format.dim > _WIDEST else None


def gather_pages(format, parts, block_table, dtype):
    group = format.group if format.layout in ("int4", "int2") else 0
    shape = format.channel_major, format.page_size, format.dim, format.rotation, group
    return torch.ops.hf_kvplus.gather_pages_triton(
        list(parts.values()), block_table, kind(format), *shape, dtype or format.dtype
    )
