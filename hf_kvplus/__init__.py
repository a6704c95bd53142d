"""Paged, quantized, offloaded, sliding and pruned KV caches for transformers, by name.

Importing this package registers its `cache_implementation` strings:

    model.generate(**inputs, cache_implementation="paged_int8")
"""

from .caches import (
    OffloadedPagedCache,
    PagedCache,
    PrunedPagedCache,
    QuantizedPagedCache,
    SlidingPagedCache,
    make_cache,
)
from .errors import CacheConfigError, UnsupportedModelError
from .functions import treat_as_standard
from .integration import register, register_cache_implementation, unregister
from .registry import available
from .stats import CacheStats
from .version import __version__ as __version__

__all__ = [
    "CacheConfigError",
    "CacheStats",
    "OffloadedPagedCache",
    "PagedCache",
    "PrunedPagedCache",
    "QuantizedPagedCache",
    "SlidingPagedCache",
    "UnsupportedModelError",
    "available",
    "make_cache",
    "register",
    "register_cache_implementation",
    "treat_as_standard",
    "unregister",
]

register()
