"""The cache objects: `PagedCache`, named presets of it, and `make_cache`, which builds what a string stands for."""

import copy
import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedConfig
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from . import registry
from .errors import UnsupportedModelError, invalid
from .formats import FormatSpec
from .guards import detached_copy
from .hybrid import HybridPagedLayer
from .layer import PagedLayer
from .registry import CacheSpec
from .retention import Retention
from .retention.sliding import Sliding
from .stats import CacheStats, collect


class PagedCache(DynamicCache):
    """A cache of pages that are sealed once: shared by beams and forks, encoded, evicted and offloaded as asked.

    Args:
        config: the model's config (or an iterable of `(keys, values, ...)` per layer, as DataParallel rebuilds caches).
        format: how pages are written: `"native"`, `"int8"` or another name (`hf_kvplus.available()` lists them).
        retention: which tokens stay: `None` (all), a name (`"sliding"`, `"keydiff"`) or a `Retention`.
        placement: where pages live: `None` (where their layer runs), `"offloaded"` or a `Placement`.
        page_size: tokens in a page, a power of two from 8 to 256.
        reserve: tokens per sequence to have room for from the first step on, so that steps can be compiled (see
            `docs/compile.md`); by default pages are allocated as they are needed.
        options: options of the format, such as `k_format` or `format_by_layer`, and fields of the retention policy and
            the placement that were given by name, such as `window` or `budget`.

    Raises:
        CacheConfigError: an argument that is not accepted, with what is.

    Example:
        >>> cache = PagedCache(model.config, format="int8")
        >>> out = model.generate(**inputs, cache=cache, return_dict_in_generate=True)
        >>> print(cache.stats())
    """

    def __init__(
        self,
        config: PreTrainedConfig | Iterable | None = None,
        *,
        format: str = "native",
        retention: str | Retention | None = None,
        placement: Any = None,
        page_size: int = 64,
        reserve: int | None = None,
        **options: Any,
    ) -> None:
        spec = registry.compose(format, retention, placement, {"page_size": page_size, "reserve": reserve, **options})
        if isinstance(config, PreTrainedConfig):
            super().__init__(config=config)
            self._pave(spec)
        elif config is None or (isinstance(config, Iterable) and not isinstance(config, str)):
            if spec.format.format_by_layer:
                raise invalid("config", config, "with `format_by_layer`, the config of a model (`model.config`)")
            Cache.__init__(self, layers=[])
            self.layer_class_to_replicate = lambda: _paged(DynamicLayer(), self.spec, self.spec.format.spec)
            self.spec = spec
            for layer_idx, (keys, values, *_) in enumerate(config or ()):
                if keys is None:
                    self.layers.append(self.layer_class_to_replicate())
                else:
                    self.update(keys, values, layer_idx)
        else:
            raise invalid("config", type(config).__name__, "the config of a model (`model.config`)")

    @classmethod
    def from_cache(cls, cache: DynamicCache, spec: CacheSpec) -> "PagedCache":
        """The layers of an empty `cache`, with its attention layers in pages."""
        paged = cls.__new__(cls)
        Cache.__init__(paged, layers=list(cache.layers))
        paged._pave(spec)
        return paged

    def _pave(self, spec: CacheSpec) -> None:
        # Linear, indexed and dummy layers stay transformers' own: only a few exact types become pages.
        self.spec = spec
        formats = spec.format.of(len(self.layers))
        self.layers = [_paged(layer, spec, format) for layer, format in zip(self.layers, formats)]
        kinds = {type(layer).__name__ for layer in self.layers if isinstance(layer, CacheLayerMixin)}
        if kinds and not self.paged_layers:
            raise UnsupportedModelError(
                f"The layers of this model ({', '.join(sorted(kinds))}) keep more than keys and values and "
                "cannot be held in pages. Leave the cache out for this model."
            )

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args, **kwargs):
        """As `Cache.update`; what comes back stands for the dense tensors (see `hf_kvplus.standin`)."""
        result = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        self.layers[(layer_idx + 1) % len(self.layers)].prefetch()
        return result

    @property
    def is_initialized(self) -> bool:
        """Whether tokens have come to every layer: what models ask to tell the first call from later ones."""
        layers = [layer for layer in self.layers if layer.supports_early_init or isinstance(layer, PagedLayer)]
        return len(layers) > 0 and all(layer.is_initialized for layer in layers)

    @property
    def is_compileable(self) -> bool:
        """Whether every step is the same tensor operations: all layers are reserved, and none decides on the host."""
        return bool(self.paged_layers) and super().is_compileable

    def reserve(self, tokens: int | None) -> None:
        """From the next tokens on, have room for so many per sequence (padding included); `None`: grow as needed.

        With a reservation, decoding can be compiled. `generate` makes one whenever transformers would compile.

        Raises:
            CacheConfigError: a policy that decides on the host, or pages that move, cannot reserve.
        """
        self.spec = dataclasses.replace(self.spec, reserve=tokens)
        self.reserve_layers(tokens)

    def reserve_layers(self, tokens: int | None) -> None:
        """As `reserve`, until `generate` decides anew."""
        for layer in self.paged_layers:
            layer.reserve(tokens)

    def expand_prompt(self, copies: int) -> None:
        """Announce that the next prompt's rows come in groups of `copies` equal ones, whose pages are stored once."""
        for layer in self.paged_layers:
            layer.expansion = copies

    @property
    def paged_layers(self) -> list[PagedLayer]:
        return [layer for layer in self.layers if isinstance(layer, PagedLayer)]

    def fork(self, repeats: int = 1) -> "PagedCache":
        """An independent cache with every sequence `repeats` times, sharing the pages of this one.

        Neither cache sees what the other goes on to store. Only the tails are copied.
        """
        if isinstance(repeats, bool) or not isinstance(repeats, int) or repeats < 1:
            raise invalid("repeats", repeats, "a whole number from 1")
        twin = copy.copy(self)
        twin.layers = []
        for layer in self.layers:
            if isinstance(layer, PagedLayer):
                twin.layers.append(layer.fork(repeats))
                continue
            layer = copy.copy(layer)
            vars(layer).update(detached_copy(vars(layer)))
            held = [leaf for leaf in tree_leaves(vars(layer)) if isinstance(leaf, torch.Tensor) and leaf.ndim > 1]
            if repeats > 1 and held:
                layer.reorder_cache(torch.arange(held[0].shape[0], device=held[0].device).repeat_interleave(repeats))
            twin.layers.append(layer)
        return twin

    def __deepcopy__(self, memo: dict) -> "PagedCache":
        """A fork: pages never change, so an independent copy need not copy them."""
        return self.fork()

    def stats(self) -> CacheStats:
        """What the cache holds and occupies now."""
        return collect(self.layers)

    def __repr__(self) -> str:
        spec = self.spec
        return (
            f"{type(self).__name__}(format={spec.format}, retention={spec.retention}, placement={spec.placement}, "
            f"page_size={spec.page_size}, layers={len(self.layers)})"
        )


def _paged(layer, spec: CacheSpec, format: FormatSpec):
    """The paged layer to stand in `layer`'s place, or `layer` itself if it is of a kind that we leave alone."""
    build = {"format": format, "placement": spec.placement, "page_size": spec.page_size, "reserve": spec.reserve}
    kind = PagedLayer
    if isinstance(layer, LinearAttentionLayer):
        kind = functools.partial(HybridPagedLayer, layer.number_of_states)
    if type(layer) in (DynamicLayer, LinearAttentionAndFullAttentionLayer):
        return kind(**build, retention=spec.retention)
    if type(layer) in (DynamicSlidingWindowLayer, LinearAttentionAndSlidingWindowAttentionLayer):
        # The model's own window bounds the layer already: a window of the user's may narrow it.
        own, narrower = Sliding(window=layer.sliding_window, sink_tokens=0), spec.retention
        if isinstance(narrower, Sliding) and narrower.window < own.window:
            return kind(**build, retention=narrower, is_sliding=True)
        return kind(**build, retention=own, is_sliding=True, masked_by_model=True)
    return layer


class QuantizedPagedCache(PagedCache):
    """A `PagedCache` with quantized pages (`format="int8"` unless given)."""

    def __init__(self, config=None, *, format: str = "int8", **options: Any) -> None:
        super().__init__(config, format=format, **options)


class SlidingPagedCache(PagedCache):
    """A `PagedCache` that keeps attention sinks and a window (`retention="sliding"`)."""

    def __init__(self, config=None, *, window: int = 1024, sink_tokens: int = 4, **options: Any) -> None:
        super().__init__(config, retention=Sliding(window, sink_tokens), **options)


class PrunedPagedCache(PagedCache):
    """A `PagedCache` that keeps the most important tokens (`retention="keydiff"` unless given)."""

    def __init__(self, config=None, *, retention: str | Retention = "keydiff", **options: Any) -> None:
        super().__init__(config, retention=retention, **options)


class OffloadedPagedCache(PagedCache):
    """A `PagedCache` whose pages live in CPU memory or in files (`placement="offloaded"`)."""

    def __init__(self, config=None, **options: Any) -> None:
        super().__init__(config, placement="offloaded", **options)


def make_cache(name: str, model_or_config: Any, **cache_config: Any) -> Cache:
    """The cache that `generate(cache_implementation=name, cache_config=cache_config)` would build.

    Args:
        name: a string such as `"paged_int8"` (`available()` lists them).
        model_or_config: the model, or its config.
        cache_config: what else the string accepts, such as `page_size`, `window` or `budget`.

    Raises:
        CacheConfigError: a string, key or value that is not accepted, with what is and the nearest spelling.
    """
    config = getattr(model_or_config, "config", model_or_config)
    if not isinstance(config, PreTrainedConfig):
        raise invalid("model_or_config", type(model_or_config).__name__, "a model or its config")
    if name in registry.FACTORIES:
        return registry.FACTORIES[name](config, **cache_config)
    return PagedCache.from_cache(DynamicCache(config=config), registry.parse(name, cache_config))
