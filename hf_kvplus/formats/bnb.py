"""4-bit floating point by bitsandbytes: NF4 and FP4 codes, one scale per block of 64 numbers.

Dettmers et al. 2023, "QLoRA: Efficient Finetuning of Quantized LLMs", section 3.
"""

from typing import ClassVar

import torch

from ..errors import CacheConfigError
from .base import FormatSpec, PageFormat, Parts, import_extra, register_format

_BLOCK = 64


class BitsAndBytesFormat(PageFormat):
    """What `bitsandbytes.functional.quantize_4bit` makes of a page; its scales are stored in float16.

    Blocks run along the tokens of a channel (keys) or the channels of a token (values), and on into the next row where
    a row is shorter than 64.

    Raises:
        ImportError: bitsandbytes is not installed.
        CacheConfigError: pages that are not made of whole blocks.
    """

    kind: ClassVar[str]
    mixes_tokens = True

    def __init__(self, page_size, dim, dtype, channel_major) -> None:
        super().__init__(page_size, dim, dtype, channel_major)
        self.library = import_extra("bitsandbytes.functional", "bitsandbytes", "bitsandbytes", self.kind)
        if page_size * dim % _BLOCK:
            raise CacheConfigError(
                f"`format`: got {self.kind!r} for pages of {page_size} tokens and {dim} channels, accepted: pages of a "
                f"multiple of {_BLOCK} numbers. Use a larger `page_size`."
            )

    @property
    def parts(self):
        numbers = self.page_size * self.dim
        return {"data": ((numbers // 2,), torch.uint8), "scale": ((numbers // _BLOCK,), torch.float16)}

    def encode(self, pages: torch.Tensor) -> Parts:
        if not len(pages):
            return {
                name: torch.empty((0, *shape), dtype=dtype, device=pages.device)
                for name, (shape, dtype) in self.parts.items()
            }
        self.refuse_non_finite(pages.amin(), pages.amax())
        x = (pages.transpose(1, 2) if self.channel_major else pages).float().contiguous()
        data, state = self.library.quantize_4bit(x, blocksize=_BLOCK, quant_type=self.kind)
        scale = state.absmax.clamp(max=torch.finfo(torch.float16).max).half()
        return {"data": data.view(len(pages), -1), "scale": scale.view(len(pages), -1)}

    def decode(self, parts: Parts, dtype: torch.dtype | None = None) -> torch.Tensor:
        data, scale = parts["data"], parts["scale"].flatten().float()
        # A row for each block: with rows of other lengths the library's CPU routine pairs numbers with wrong scales.
        state = self.library.QuantState(
            scale, torch.Size((len(scale), _BLOCK)), blocksize=_BLOCK, quant_type=self.kind, dtype=torch.float32
        )
        x = self.library.dequantize_4bit(data.reshape(-1, 1), state) if len(data) else data.float()
        x = x.view(-1, *self.page_shape).to(dtype or self.dtype)
        return x.transpose(1, 2) if self.channel_major else x


class Nf4Format(BitsAndBytesFormat):
    """Codes at the quantiles of a normal distribution."""

    kind = "nf4"


class Fp4Format(BitsAndBytesFormat):
    """Codes with two bits of exponent and one of mantissa."""

    kind = "fp4"


register_format("nf4", FormatSpec(Nf4Format, Nf4Format, "4-bit normal floats of bitsandbytes", native_pages=1))
register_format("fp4", FormatSpec(Fp4Format, Fp4Format, "4-bit floating point of bitsandbytes", native_pages=1))
