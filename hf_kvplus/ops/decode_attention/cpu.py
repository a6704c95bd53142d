"""The CPU kernel (`cpu.cpp`) as `torch.ops.hf_kvplus.decode_attention`."""

from pathlib import Path

import torch

from .. import _build

DEVICE = "cpu"

_SOURCE = Path(__file__).with_name("cpu.cpp")
_LAYOUTS = {"native", "int8", "int4", "int2", "fp8"}
_DTYPES = {torch.float32, torch.bfloat16, torch.float16}

_library = torch.library.Library("hf_kvplus", "FRAGMENT")
_library.define(
    "decode_attention(Tensor query, Tensor[] tables, Tensor[] parts, str[] layouts, int[] rotations, Tensor tail_keys,"
    " Tensor tail_values, Tensor? mask, float scale, float? softcap, Tensor? sinks) -> Tensor"
)


@torch.library.register_fake("hf_kvplus::decode_attention", lib=_library)
def _(query, tables, parts, layouts, rotations, tail_keys, tail_values, mask, scale, softcap, sinks):
    rows, heads, q_len, _ = query.shape
    return query.new_empty((rows, q_len, heads, tail_values.shape[-1]))


@torch.compiler.assume_constant_result
def missing() -> str | None:
    """`None` if the kernel can run here (the first call compiles it), else why not and what to install."""
    return _build.load(_SOURCE)


def by_default() -> bool:
    return True


def refuses(query, pages, tail_keys, tail_values, mask) -> str | None:
    """`None` if the kernel reads these arguments, else the argument that it does not."""
    for name, given in (("query", query), ("tail_keys", tail_keys), ("tail_values", tail_values)):
        if given.dtype not in _DTYPES:
            return f"`{name}` is {given.dtype}, read are float32, bfloat16, float16"
    if mask is not None and mask.dtype is not torch.bool and mask.dtype not in _DTYPES:
        return f"`mask` is {mask.dtype}, read are bool, float32, bfloat16, float16"
    for view in pages:
        for format in (view.key_format, view.value_format):
            if format.layout not in _LAYOUTS or (format.layout == "native" and format.dtype not in _DTYPES):
                return f"`pages` has the layout {format.layout!r} of {format.dtype}, read are {sorted(_LAYOUTS)}"
    return None


def decode_attention(query, pages, tail_keys, tail_values, mask, scale, softcap, sinks):
    formats = [format for view in pages for format in (view.key_format, view.value_format)]
    return torch.ops.hf_kvplus.decode_attention.default(
        query,
        [view.block_table for view in pages],
        [part for view in pages for parts in (view.keys, view.values) for part in parts.values()],
        [format.layout for format in formats],
        [format.rotation for format in formats],
        tail_keys,
        tail_values,
        mask,
        scale,
        softcap,
        sinks,
    )
