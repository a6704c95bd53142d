"""Integers: 8 bits with one scale per token; 4 and 2 bits with a scale and a zero per group, rotated and packed.

Keys are grouped along the tokens of a channel and values along the channels of a token: Liu et al. 2024, "KIVI: A
Tuning-Free Asymmetric 2bit Quantization for KV Cache", section 3. The bytes are written down in `docs/layouts.md`.
"""

from typing import ClassVar

import torch

from ..errors import CacheConfigError
from .base import FormatSpec, PageFormat, Parts, register_format
from .rotation import rotate, rotate_rows, rotation_block

_LARGEST = torch.finfo(torch.float16).max
_TINY = torch.finfo(torch.float32).tiny
_HALF_STEP = 2.0**-11  # float16 rounds to within this, relatively


class Int8Format(PageFormat):
    """`rotate(x) ≈ data * scale`: int8 codes in -127..127, and per token `scale = max |rotate(x)| / 127` in float16.

    Unrotated, the few channels in which keys are large would set the scale of all others.

    Args:
        rotation: whether to rotate the channels (`hf_kvplus.formats.rotation`).
    """

    layout = "int8"

    def __init__(self, page_size, dim, dtype, channel_major, rotation: bool = True) -> None:
        super().__init__(page_size, dim, dtype, channel_major)
        self.rotation = rotation_block(dim, rotation)

    @property
    def parts(self):
        return {"data": (self.page_shape, torch.int8), "scale": ((self.page_size,), torch.float16)}

    def encode(self, pages: torch.Tensor) -> Parts:
        pages = rotate(pages.float(), self.rotation)
        largest = pages.abs().amax(-1)
        self.refuse_non_finite(largest)
        scale = (largest / 127).clamp(max=_LARGEST).half()
        # Divide by the scale as it is stored, so that rounding it to float16 adds no error of its own.
        # A scale of zero (tokens below float16's reach) encodes as zeros.
        inverse = torch.where(scale > 0, scale.float().reciprocal(), 0.0)
        codes = (pages * inverse[..., None]).round_().clamp_(-127, 127).to(torch.int8)
        return {"data": codes.transpose(1, 2) if self.channel_major else codes, "scale": scale}

    def decode(self, parts: Parts, dtype: torch.dtype | None = None) -> torch.Tensor:
        dtype = dtype or self.dtype
        scale = parts["scale"].float()
        if self.channel_major:
            return rotate_rows(parts["data"] * scale[:, None, :], self.rotation).to(dtype).transpose(1, 2)
        return rotate(parts["data"] * scale[:, :, None], self.rotation).to(dtype)


class PackedFormat(PageFormat):
    """`rotate(x) ≈ code * scale + zero`, codes of a few bits, several to a byte, `scale` and `zero` per group.

    Args:
        rotation: whether to rotate the channels (`hf_kvplus.formats.rotation`).

    Raises:
        CacheConfigError: a number of channels that does not fill whole bytes.
    """

    bits: ClassVar[int]
    mixes_tokens = True

    def __init__(self, page_size, dim, dtype, channel_major, rotation: bool = True) -> None:
        super().__init__(page_size, dim, dtype, channel_major)
        self.rotation = rotation_block(dim, rotation)
        self.rows, self.axis = self.page_shape  # codes are packed, and grouped, along the second
        self.per_byte = 8 // self.bits
        if self.axis % self.per_byte:
            raise CacheConfigError(
                f"`format`: got {self.layout!r} for values of {dim} channels, accepted: multiples of {self.per_byte}. "
                "Use 'int8' or 'native' for this model."
            )

    @property
    def group(self) -> int:
        """Numbers along the packed axis that share a scale and a zero."""
        return self.axis

    @property
    def parts(self):
        shared = (self.rows,), torch.float16
        return {"data": ((self.rows, self.axis // self.per_byte), torch.uint8), "scale": shared, "zero": shared}

    def encode(self, pages: torch.Tensor) -> Parts:
        x = pages.float()
        x = rotate_rows(x.transpose(1, 2), self.rotation) if self.channel_major else rotate(x, self.rotation)
        x = self._grouped(x)
        scale, zero = self._fit(x)
        # Codes are chosen for scale and zero as they are stored, so that rounding those adds no error of its own. A
        # scale of zero (groups as good as constant) encodes as zeros.
        inverse = torch.where(scale != 0, scale.float().reciprocal(), 0.0)
        codes = (x * inverse).add_(0.5 - zero.float() * inverse).clamp_(0, 2**self.bits - 0.5).to(torch.uint8)
        codes = codes.flatten(-2)[..., : self.axis]
        data, *rest = codes.chunk(self.per_byte, dim=-1)
        for place, run in enumerate(rest, start=1):
            data = torch.add(data, run, alpha=2 ** (self.bits * place))
        shape = self.parts["scale"][0]
        return {"data": data, "scale": scale.reshape(-1, *shape), "zero": zero.reshape(-1, *shape)}

    def decode(self, parts: Parts, dtype: torch.dtype | None = None) -> torch.Tensor:
        data, top = parts["data"], 2**self.bits - 1
        x = torch.cat([(data >> self.bits * place) & top for place in range(self.per_byte)], dim=-1)
        shape = (len(data), self.rows, -(-self.axis // self.group), 1)
        x = self._grouped(x) * parts["scale"].float().view(shape) + parts["zero"].float().view(shape)
        x = x.flatten(-2)[..., : self.axis]
        x = rotate_rows(x, self.rotation).transpose(1, 2) if self.channel_major else rotate(x, self.rotation)
        return x.to(dtype or self.dtype)

    def _grouped(self, x: torch.Tensor) -> torch.Tensor:
        """`[n, rows, axis]` as `[n, rows, groups, group]`; a last group that is short repeats its last number."""
        short = -x.shape[-1] % self.group
        if short:
            x = torch.cat([x, x[..., -1:].expand(*x.shape[:-1], short)], dim=-1)
        return x.unflatten(-1, (-1, self.group))

    def _fit(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scale and zero, float16 `[n, rows, groups, 1]`, of groups `x`."""
        low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)  # `aminmax` takes eight times as long
        self.refuse_non_finite(low, high)
        low, high = self._narrowed(x, low, high)
        top = 2**self.bits - 1
        low, high = (end.clamp(-_LARGEST * (top + 1), _LARGEST * (top + 1)) for end in (low, high))
        # Codes count from the end that is nearer to 0: float16 is finest there, and ends before rotated channels do,
        # which may be √dim times as large as the tokens. Ends are rounded outwards, so that the codes span the group.
        down = low.abs() > high.abs()
        zero, far = torch.where(down, high, low), torch.where(down, low, high)
        zero = (zero + zero.abs() * torch.where(down, _HALF_STEP, -_HALF_STEP)).clamp(-_LARGEST, _LARGEST).half()
        scale = ((far - zero.float()) * ((1 + _HALF_STEP) / top)).clamp(-_LARGEST, _LARGEST).half()
        return scale, zero

    def _narrowed(self, x: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Where the outermost codes of groups `x` lie, given their extremes: there, unless a format knows better."""
        return low, high


class Int4Format(PackedFormat):
    """4 bits: keys with a scale and a zero per channel of the page, values per token."""

    layout, bits = "int4", 4


class Int2Format(PackedFormat):
    """2 bits, a scale and a zero per group of 32: tokens of a channel for keys, channels of a token for values."""

    layout, bits = "int2", 2

    @property
    def group(self) -> int:
        return min(32, self.axis)

    @property
    def parts(self):
        shared = (self.rows, -(-self.axis // self.group)), torch.float16
        return {**super().parts, "scale": shared, "zero": shared}

    def _narrowed(self, x: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # Four codes spread over the whole range leave the outer ones to the extremes alone. Measured: KL falls by 60 %
        # with the outer codes 7.5 % of the range inside (small groups have tamer extremes), less where most numbers are
        # extremes: all of them in a rotated constant. Fitting for least squares instead makes it worse: it shrinks the
        # numbers, and so flattens the attention.
        place = (x - low) / (high - low).clamp(min=_TINY)
        between = (place * (1 - place)).mean(-1, keepdim=True).nan_to_num(0.0)  # 0.19 in normal groups of 32
        inset = (8 * between).clamp(max=1) * (0.075 * self.group / 32)
        return low.lerp(high, inset), high.lerp(low, inset)


register_format(
    "int8",
    FormatSpec(Int8Format, Int8Format, "8 bits, rotated; one scale per token and head", options=("rotation",)),
)
register_format(
    "int4",
    FormatSpec(Int4Format, Int4Format, "4 bits, rotated; keys per channel", native_pages=1, options=("rotation",)),
)
register_format(
    "k4v2",
    FormatSpec(Int4Format, Int2Format, "4-bit keys, 2-bit values, rotated", native_pages=1, options=("rotation",)),
)
register_format(
    "int2",
    FormatSpec(
        Int2Format, Int2Format, "2 bits in groups of 32, rotated", residual=64, native_pages=1, options=("rotation",)
    ),
)
