"""The contract of a page format, and the table of formats by name."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

Parts = dict[str, torch.Tensor]


class PageFormat(ABC):
    """Writes pages of one head's keys or values, and reads them back.

    Args:
        page_size: tokens in a page.
        dim: channels of a token.
        dtype: the model's dtype, which `decode` gives back unless asked otherwise.
        channel_major: whether the codes of a page are stored `[dim, page_size]` (keys, so that a decode kernel runs
            along tokens) or `[page_size, dim]` (values).
    """

    def __init__(self, page_size: int, dim: int, dtype: torch.dtype, channel_major: bool) -> None:
        self.page_size, self.dim, self.dtype, self.channel_major = page_size, dim, dtype, channel_major

    @property
    def page_shape(self) -> tuple[int, int]:
        """The shape in which the codes of a page are stored."""
        return (self.dim, self.page_size) if self.channel_major else (self.page_size, self.dim)

    @property
    @abstractmethod
    def parts(self) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape (of one page) and dtype of every tensor that a page consists of."""

    @abstractmethod
    def encode(self, pages: torch.Tensor) -> Parts:
        """Write `pages [n, page_size, dim]`; every part comes back as `[n, *shape]`."""

    @abstractmethod
    def decode(self, parts: Parts, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Read `[n, page_size, dim]` in `dtype` (by default the model's)."""

    def bytes_per_page(self) -> int:
        """The bytes that the parts of one page occupy."""
        return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in self.parts.values())


@dataclass(frozen=True)
class FormatSpec:
    """A named pair of formats.

    Attributes:
        key, value: build the format of keys and of values, called as `PageFormat` is.
        summary: one line for `available()`.
        residual: recent tokens that are never sealed.
        native_pages: first pages (attention sinks) that are kept in the model's dtype.
    """

    key: Callable[..., PageFormat]
    value: Callable[..., PageFormat]
    summary: str
    residual: int = 0
    native_pages: int = 0


FORMATS: dict[str, FormatSpec] = {}


def register_format(name: str, spec: FormatSpec) -> None:
    """Make `name` a format that cache strings and `PagedCache(format=...)` accept."""
    FORMATS[name] = spec
