"""8-bit floating point with a scale of one: no range to look for, half the bytes of 16-bit numbers."""

import warnings

import torch

from ..errors import invalid
from .base import FormatSpec, PageFormat, Parts, checking, register_format

_TYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


class Fp8Format(PageFormat):
    """`x ≈ data`, saturated at what the type holds (with a warning).

    Args:
        fp8_type: `"e4m3"` (3 bits of mantissa, up to 448) or `"e5m2"` (2 bits, up to 57,344).
    """

    layout = "fp8"

    def __init__(self, page_size, dim, dtype, channel_major, fp8_type: str = "e4m3") -> None:
        super().__init__(page_size, dim, dtype, channel_major)
        if fp8_type not in _TYPES:
            raise invalid("fp8_type", fp8_type, _TYPES)
        self.type = _TYPES[fp8_type]

    @property
    def parts(self):
        return {"data": (self.page_shape, self.type)}

    def encode(self, pages: torch.Tensor) -> Parts:
        largest = torch.finfo(self.type).max
        if len(pages):
            low, high = torch.aminmax(pages)
            self.refuse_non_finite(low, high)
            if checking() and bool(torch.maximum(-low, high) > largest):
                self._tell_saturated(largest)
        codes = pages.clamp(-largest, largest).to(self.type)
        return {"data": codes.transpose(1, 2) if self.channel_major else codes}

    def _tell_saturated(self, largest: float) -> None:
        which, option = ("keys", "k_format") if self.channel_major else ("values", "v_format")
        warnings.warn(
            f"Some {which} are beyond ±{largest:,.0f} and are cached as that: {str(self.type)[6:]} holds no more. Use "
            f"'int8', which has a scale for each token: cache_config={{'{option}': 'int8'}}.",
            stacklevel=3,
        )

    def decode(self, parts: Parts, dtype: torch.dtype | None = None) -> torch.Tensor:
        data = parts["data"]
        data = (_widened(data) if data.dtype == _TYPES["e4m3"] else data).to(dtype or self.dtype)
        return data.transpose(1, 2) if self.channel_major else data


def _widened(data: torch.Tensor) -> torch.Tensor:
    """Numbers of type e4m3 as float32, on the CPU eight times as fast as PyTorch's own conversion."""
    if data.device.type != "cpu":
        return data.float()
    # Moved by seven places, the bits are those of a float16 (sign, 5 bits of exponent) that is 2^8 times too small.
    bits = data.view(torch.int8).to(torch.int16)
    return ((bits << 7) & ~0x4000).view(torch.float16).float().mul_(256)


register_format(
    "fp8",
    FormatSpec(Fp8Format, Fp8Format, "8-bit floating point, scale 1", native_pages=1, options=("fp8_type",)),
)
