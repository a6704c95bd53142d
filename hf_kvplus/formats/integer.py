"""Symmetric 8-bit integers with one scale per token and head."""

import torch

from .base import FormatSpec, PageFormat, Parts, register_format


class Int8Format(PageFormat):
    """`x ≈ data * scale`: int8 codes in -127..127, and per token `scale = max |x| / 127` in float16."""

    @property
    def parts(self):
        return {"data": (self.page_shape, torch.int8), "scale": ((self.page_size,), torch.float16)}

    def encode(self, pages: torch.Tensor) -> Parts:
        pages = pages.float()
        scale = (pages.abs().amax(-1) / 127).clamp(max=torch.finfo(torch.float16).max).half()
        # Divide by the scale as it is stored, so that rounding it to float16 adds no error of its own.
        # A scale of zero (tokens below float16's reach) encodes as zeros.
        inverse = torch.where(scale > 0, scale.float().reciprocal(), 0.0)
        codes = pages.mul_(inverse[..., None]) if pages.dtype != self.dtype else pages * inverse[..., None]
        codes = codes.round_().clamp_(-127, 127).to(torch.int8)
        return {"data": codes.transpose(1, 2) if self.channel_major else codes, "scale": scale}

    def decode(self, parts: Parts, dtype: torch.dtype | None = None) -> torch.Tensor:
        dtype = dtype or self.dtype
        scale = parts["scale"].float()
        if self.channel_major:
            return (parts["data"] * scale[:, None, :]).to(dtype).transpose(1, 2)
        return (parts["data"] * scale[:, :, None]).to(dtype)


register_format("int8", FormatSpec(Int8Format, Int8Format, "8 bits, one scale per token and head"))
