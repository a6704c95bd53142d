"""Integers by optimum-quanto, in groups of 64 as transformers' QuantizedCache has them."""

import math
from typing import ClassVar

import torch

from ..errors import CacheConfigError
from .base import FormatSpec, PageFormat, Parts, import_extra, register_format

_GROUP = 64
_SMALLEST, _LARGEST = 2.0**-24, torch.finfo(torch.float16).max


class QuantoFormat(PageFormat):
    """What `optimum.quanto.quantize_weight` makes of a page, in groups along the tokens of a channel (keys) or the
    channels of a token (values).

    The library computes in float32; scales and shifts are stored in float16. To unpack 4 and 2 bits on the CPU it needs
    a C++ compiler: it builds a routine of its own on first use.

    Raises:
        ImportError: optimum-quanto is not installed.
        CacheConfigError: groups that do not fill whole bytes.
    """

    bits: ClassVar[int]
    mixes_tokens = True

    def __init__(self, page_size, dim, dtype, channel_major) -> None:
        super().__init__(page_size, dim, dtype, channel_major)
        self.quanto = import_extra("optimum.quanto", "optimum-quanto", "quanto", f"quanto_int{self.bits}")
        self.qtype = getattr(self.quanto, f"qint{self.bits}")
        self.rows, self.axis = self.page_shape
        self.group = math.gcd(self.axis, _GROUP)
        if self.group * self.bits % 8:
            raise CacheConfigError(
                f"`format`: got 'quanto_int{self.bits}' for values of {dim} channels, accepted: multiples of "
                f"{8 // self.bits}. Use 'quanto_int8' or 'native' for this model."
            )

    @property
    def parts(self):
        groups = (self.rows, self.axis // self.group), torch.float16
        if self.bits == 8:
            return {"data": (self.page_shape, torch.int8), "scale": groups}
        return {"data": ((self.rows, self.axis * self.bits // 8), torch.uint8), "scale": groups, "shift": groups}

    def encode(self, pages: torch.Tensor) -> Parts:
        x = (pages.transpose(1, 2) if self.channel_major else pages).float()
        x = x.reshape(-1, self.group).T.contiguous()  # a column per group: quanto packs along the first dimension
        if self.bits == 8:
            ranges = {"scale": self.quanto.AbsmaxOptimizer()(x, self.qtype, -1)}
        else:
            ranges = dict(zip(("scale", "shift"), self.quanto.MaxOptimizer()(x, self.qtype, -1)))
        self.refuse_non_finite(*ranges.values())
        # As they are stored, so that the codes make up for the rounding; a constant group must not be divided by zero.
        ranges = {name: part.clamp(-_LARGEST, _LARGEST).half() for name, part in ranges.items()}
        ranges["scale"].clamp_(min=_SMALLEST)
        codes = self.quanto.quantize_weight(
            x, self.qtype, -1, **{name: part.float() for name, part in ranges.items()}, optimized=False
        )
        data = codes._data if self.bits == 8 else codes._data._data
        encoded = {"data": data, **ranges}
        return {name: encoded[name].T.reshape(len(pages), *shape) for name, (shape, _) in self.parts.items()}

    def decode(self, parts: Parts, dtype: torch.dtype | None = None) -> torch.Tensor:
        data, scale = (
            parts[name].reshape(-1, width) for name, width in (("data", self.group * self.bits // 8), ("scale", 1))
        )
        columns = data.T.contiguous(), scale.T.float()
        size, stride = (self.group, len(data)), (len(data), 1)
        if self.bits == 8:
            codes = self.quanto.WeightQBytesTensor(self.qtype, -1, size, stride, *columns, None)
        else:
            packed = self.quanto.tensor.packed.PackedTensor(columns[0], self.bits, size, stride)
            shift = parts["shift"].reshape(1, -1).float()
            codes = self.quanto.WeightQBitsTensor(self.qtype, -1, None, size, stride, packed, columns[1], shift)
        x = codes.dequantize().T.reshape(-1, *self.page_shape).to(dtype or self.dtype)
        return x.transpose(1, 2) if self.channel_major else x


class QuantoInt8Format(QuantoFormat):
    """8 bits, symmetric."""

    bits = 8


class QuantoInt4Format(QuantoFormat):
    """4 bits, with a shift per group."""

    bits = 4


class QuantoInt2Format(QuantoFormat):
    """2 bits, with a shift per group."""

    bits = 2


for _kind, _counts in (
    (QuantoInt8Format, {}),
    (QuantoInt4Format, {"native_pages": 1}),
    (QuantoInt2Format, {"native_pages": 1, "residual": 64}),
):
    _summary = f"{_kind.bits}-bit integers of optimum-quanto in groups of {_GROUP}"
    register_format(f"quanto_int{_kind.bits}", FormatSpec(_kind, _kind, _summary, **_counts))
