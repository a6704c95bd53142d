"""Pages in the model's own dtype: nothing is lost, pages are still shared, evicted and offloaded."""

import torch

from .base import FormatSpec, PageFormat, Parts, register_format


class NativeFormat(PageFormat):
    """Every number as it came."""

    layout = "native"

    @property
    def parts(self):
        return {"data": (self.page_shape, self.dtype)}

    def encode(self, pages: torch.Tensor) -> Parts:
        pages = pages.to(self.dtype)
        return {"data": pages.transpose(1, 2) if self.channel_major else pages}

    def decode(self, parts: Parts, dtype: torch.dtype | None = None) -> torch.Tensor:
        data = parts["data"].to(dtype or self.dtype)
        return data.transpose(1, 2) if self.channel_major else data


register_format("native", FormatSpec(NativeFormat, NativeFormat, "the model's dtype, exact"))
