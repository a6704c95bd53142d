"""Ways to lose less at the same number of bits, to be tried by `quality.py --variants`. None is part of the package.

The variants of int4 and int2 pages that are read as the originals are differ in how scales, zeros and codes are chosen.
"""

import torch

from hf_kvplus.formats import FormatSpec, PageFormat, register_format
from hf_kvplus.formats.integer import Int2Format, Int4Format
from hf_kvplus.formats.rotation import rotate, rotation_block


class Searched:
    """Clipping searched per group: of five ranges, up to 10 % inside of the extremes, that of least squared error."""

    def _narrowed(self, x, low, high):
        best = torch.full_like(low, torch.inf), low, high
        for inset in (0, 0.025, 0.05, 0.075, 0.1):
            ends = low.lerp(high, inset), high.lerp(low, inset)
            step = ((ends[1] - ends[0]) / (2**self.bits - 1)).clamp(min=1e-30)
            rounded = ((x - ends[0]) / step).round().clamp(0, 2**self.bits - 1) * step + ends[0]
            found = (rounded - x).square().sum(-1, keepdim=True), *ends
            best = tuple(torch.where(found[0] < best[0], new, old) for new, old in zip(found, best))
        return best[1:]


class FixedInset:
    """Outer codes 7.5 % of the range inside of every group's extremes, however its numbers are spread."""

    def _narrowed(self, x, low, high):
        return low.lerp(high, 0.075), high.lerp(low, 0.075)


class MeanKept:
    """The zero is moved so that the rounded numbers of a group have the mean of the numbers."""

    def encode(self, pages):
        parts = super().encode(pages)
        lost = rotate(pages.float(), self.rotation) - rotate(self.decode(parts, torch.float32), self.rotation)
        lost = self._grouped(lost.mT if self.channel_major else lost).mean(-1)
        return {**parts, "zero": (parts["zero"].float() + lost.reshape(parts["zero"].shape)).half()}


class Normalised(PageFormat):
    """KVarN: rows and columns of a page divided by their deviations, over and over, before rounding.

    The factors of the groups' rows are part of their scales; those of the columns are stored besides (16 bits for each
    token of a page of keys, for each channel of one of values): 0.25 bits more in pages of 64 by 64.
    """

    mixes_tokens = True
    rounds = 16

    def __init__(self, page_size, dim, dtype, channel_major, rotation=True):
        super().__init__(page_size, dim, dtype, channel_major)
        self.block = rotation_block(dim, rotation)
        self.codes = self.kind(page_size, dim, torch.float32, channel_major, rotation=False)

    @property
    def parts(self):
        return {**self.codes.parts, "column": ((self.page_shape[1],), torch.float16)}

    def encode(self, pages):
        x = rotate(pages.float(), self.block)
        over = 2 if self.channel_major else 1  # a factor for each token of keys, for each channel of values
        factor, rest = 1.0, x
        for _ in range(self.rounds):
            rest = rest / rest.std(3 - over, keepdim=True).clamp(min=1e-8)
            deviation = rest.std(over, keepdim=True).clamp(min=1e-8)
            factor, rest = factor * deviation, rest / deviation
        factor = (factor / factor.mean((1, 2), keepdim=True)).half()
        return {**self.codes.encode(x / factor.float()), "column": factor.flatten(1)}

    def decode(self, parts, dtype=None):
        factor = parts["column"].float().unsqueeze(2 if self.channel_major else 1)
        return rotate(self.codes.decode(parts) * factor, self.block).to(dtype or self.dtype)


def register() -> dict[str, tuple[str, dict]]:
    """Make the variants formats of the package; the caches to be built of them, as in `quality.CACHES`."""
    caches = {
        "paged_int4, 2 native pages": ("paged_int4", {"native_pages": 2}),
        "paged_int4, last 64 native": ("paged_int4", {"residual": 64}),
        "paged_int2, 2 native pages": ("paged_int2", {"native_pages": 2}),
        "paged_int2, last 128 native": ("paged_int2", {"residual": 128}),
    }
    for original, residual in ((Int4Format, 0), (Int2Format, 64)):
        for change in (Searched, MeanKept, Normalised, *([FixedInset] if original is Int2Format else [])):
            name = f"{original.layout}_{change.__name__.lower()}"
            if change is Normalised:
                variant = type(name, (Normalised,), {"kind": original})
            else:
                variant = type(name, (change, original), {})
            register_format(name, FormatSpec(variant, variant, "a trial", residual, native_pages=1))
            caches[f"paged_{original.layout}, {_NAMES[change]}"] = (f"paged_{name}", {})
    return caches


_NAMES = {
    Searched: "clipping searched",
    MeanKept: "means kept",
    Normalised: "variances normalised",
    FixedInset: "fixed inset",
}
