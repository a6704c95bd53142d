"""The Triton kernels (`triton_kernels.py`) as `torch.ops.hf_kvplus.decode_attention_triton`.

Nothing below looks at the contents of a tensor: a step can be captured in a CUDA graph. Its tables and tails have room
for tokens to come, and the mask hides what does not count yet; pages that it hides wholly are not read.
"""

import torch

from .._triton import DEVICE, DTYPES, by_default, kind, missing

#: Channels must fill whole 16-bit words of the packed axis of values.
_MULTIPLE = {"native": 1, "int8": 2, "fp8": 2, "int4": 4, "int2": 8}
_WIDEST = 256

_library = torch.library.Library("hf_kvplus", "FRAGMENT")
_library.define(
    "decode_attention_triton(Tensor query, Tensor[] tables, Tensor[] parts, str[] kinds, int[] numbers,"
    " Tensor tail_keys, Tensor tail_values, Tensor? mask, float scale, float? softcap, Tensor? sinks) -> Tensor"
)


@torch.library.register_fake("hf_kvplus::decode_attention_triton", lib=_library)
def _(query, tables, parts, kinds, numbers, tail_keys, tail_values, *_):
    rows, heads, q_len, _ = query.shape
    return query.new_empty((rows, q_len, heads, tail_values.shape[-1]))


@torch.library.impl("hf_kvplus::decode_attention_triton", "CompositeExplicitAutograd", lib=_library)
def _(*args):
    from . import triton_launch

    return triton_launch.decode_attention(*args)


def refuses(query, pages, tail_keys, tail_values, mask) -> str | None:
    """`None` if the kernels read these arguments, else the argument that they do not."""
    for name, given in (("query", query), ("tail_keys", tail_keys), ("tail_values", tail_values)):
        if given.dtype not in DTYPES:
            return f"`{name}` is {given.dtype}, read are float32, bfloat16, float16"
    if query.shape[-1] > _WIDEST:
        return f"`query` has {query.shape[-1]} channels, read are up to {_WIDEST}"
    for view in pages:
        for format in (view.key_format, view.value_format):
            multiple = _MULTIPLE.get(format.layout)
            if multiple is None:
                return f"`pages` has the layout {format.layout!r}, read are {sorted(_MULTIPLE)}"
            if format.dim > _WIDEST or (not format.channel_major and format.dim % multiple):
                return f"`pages` has {format.dim} channels, read are multiples of {multiple} up to {_WIDEST}"
    return None


def decode_attention(query, pages, tail_keys, tail_values, mask, scale, softcap, sinks):
    return torch.ops.hf_kvplus.decode_attention_triton.default(
        query, *flattened(pages), tail_keys, tail_values, mask, scale, softcap, sinks
    )


def flattened(pages) -> tuple[list[torch.Tensor], list[torch.Tensor], list[str], list[int]]:
    """Views as an operator takes them: tables, parts, kinds, and per format page size, rotation, number of parts."""
    formats = [format for view in pages for format in (view.key_format, view.value_format)]
    return (
        [view.block_table for view in pages],
        [part for view in pages for parts in (view.keys, view.values) for part in parts.values()],
        [kind(format) for format in formats],
        [number for format in formats for number in (format.page_size, format.rotation, len(format.parts))],
    )


__all__ = ["DEVICE", "by_default", "decode_attention", "missing", "refuses"]
