"""The contract of a page format, and the table of formats by name."""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any, ClassVar

import torch

from ..errors import invalid

Parts = dict[str, torch.Tensor]


class PageFormat(ABC):
    """Writes pages of one head's keys or values, and reads them back.

    Args:
        page_size: tokens in a page.
        dim: channels of a token.
        dtype: the model's dtype, which `decode` gives back unless asked otherwise.
        channel_major: whether the codes of a page are stored `[dim, page_size]` (keys, so that a decode kernel runs
            along tokens) or `[page_size, dim]` (values).

    Attributes:
        layout: the heading in `docs/layouts.md` that says what the parts mean; empty if only `decode` can read them.
        rotation: channels that are rotated together in the pages (`decode` un-rotates them); 0 if none are.
        mixes_tokens: whether what a token becomes depends on the other tokens of its page.
    """

    layout: ClassVar[str] = ""
    mixes_tokens: ClassVar[bool] = False
    rotation: int = 0

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
        """Write `pages [n, page_size, dim]`; every part comes back as `[n, *shape]`. There may be none (`n` of 0).

        Raises:
            ValueError: infinities or NaN, in formats where one of them would spoil its neighbours.
        """

    @abstractmethod
    def decode(self, parts: Parts, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Read `[n, page_size, dim]` in `dtype` (by default the model's)."""

    def bytes_per_page(self) -> int:
        """The bytes that the parts of one page occupy."""
        return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in self.parts.values())

    def refuse_non_finite(self, *ranges: torch.Tensor) -> None:
        """Raise if a smallest or largest number of some group, which stands for the whole group, is not finite."""
        if not checking():
            return
        if all(bool(torch.isfinite(r).all()) for r in ranges):
            return
        which = "keys" if self.channel_major else "values"
        name = f"the format {self.layout!r}" if self.layout else "this format"
        raise ValueError(
            f"The {which} to be cached hold infinities or NaN, which {name} would spread over a "
            "whole page. Find where the model overflows (float16 is the usual cause: load it with "
            "dtype=torch.bfloat16), or use a 'native' format, which stores them as they are."
        )


_checks: ContextVar[bool] = ContextVar("_checks", default=True)


def checking() -> bool:
    """Whether `encode` may look at its numbers, which waits for the device."""
    return _checks.get()


@contextmanager
def unchecked() -> Iterator[None]:
    """Encode without looking for infinities and NaN, which cannot be done while a graph is captured."""
    token = _checks.set(False)
    try:
        yield
    finally:
        _checks.reset(token)


@dataclass(frozen=True)
class FormatSpec:
    """A named pair of formats.

    Attributes:
        key, value: build the format of keys and of values, called as `PageFormat` is.
        summary: one line for `available()`.
        residual: recent tokens that are never sealed.
        native_pages: first pages (attention sinks) that are kept in the model's dtype.
        options: names of further arguments that `key` and `value` take.

    `residual`, `native_pages` and the options are `cache_config` keys.
    """

    key: Callable[..., PageFormat]
    value: Callable[..., PageFormat]
    summary: str
    residual: int = 0
    native_pages: int = 0
    options: tuple[str, ...] = ()

    def with_options(self, **given: Any) -> "FormatSpec":
        """The same pair with `residual`, `native_pages` and options as given; what it does not take is ignored.

        Raises:
            CacheConfigError: a value that is not accepted.
            ImportError: a library that the formats need is not installed.
        """
        counts = {name: given[name] for name in ("residual", "native_pages") if name in given}
        for name, count in counts.items():
            if isinstance(count, bool) or not isinstance(count, int) or count < 0:
                unit = "tokens" if name == "residual" else "pages"
                raise invalid(name, count, f"a whole number of {unit} from 0")
        options = {name: given[name] for name in self.options if name in given}
        spec = replace(self, **counts, key=partial(self.key, **options), value=partial(self.value, **options))
        for build in (spec.key, spec.value):
            build(64, 64, torch.float32, channel_major=False)  # what is wrong with them is told now, not in mid-prompt
        return spec


def import_extra(module: str, package: str, extra: str, format: str) -> ModuleType:
    """The optional `module` that `format` needs.

    Raises:
        ImportError: it is not installed, and which extra of this package brings it.
    """
    try:
        importlib.import_module(module.partition(".")[0])
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"The format {format!r} needs {package}: pip install hf-kvplus[{extra}]") from error


FORMATS: dict[str, FormatSpec] = {}


def register_format(name: str, spec: FormatSpec) -> None:
    """Make `name` a format that cache strings and `PagedCache(format=...)` accept."""
    FORMATS[name] = spec
