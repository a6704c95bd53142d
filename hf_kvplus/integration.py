"""Every hook into transformers, and nothing else: five places, put back by `unregister()`.

- `GenerationConfig` accepts the strings (its own list stays as it is, for models that copy it and build caches of their
  own), and a misspelt one is told its nearest neighbour.
- A model that would never ask for the cache of a string is refused before it generates (two places).
- `generate` builds its cache as ever, for "dynamic"; then its attention layers become pages.
- Attention functions are preceded by one test: is the key a stand-in?
"""

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any

from transformers import GenerationConfig
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.utils import GenerationMixin
from transformers.modeling_utils import AttentionInterface

from . import _compat, registry
from .attention import attend
from .caches import PagedCache
from .errors import UnsupportedModelError, invalid, nearest
from .standin import StandIn

_originals: dict[str, Any] = {}


def register() -> None:
    """Make transformers know our strings and caches. Importing hf_kvplus does this; once more changes nothing."""
    if _originals:
        return
    for owner, name, ours in _HOOKS:
        _originals[name] = vars(owner)[name]
        setattr(owner, name, ours)


def unregister() -> None:
    """Leave transformers as it was before `register()`."""
    if not _originals:
        return
    for owner, name, _ in _HOOKS:
        setattr(owner, name, _originals[name])
    _originals.clear()


def register_cache_implementation(name: str, factory: Callable[..., Any]) -> None:
    """Let `generate(cache_implementation=name)` use a cache of your own.

    Args:
        name: the string. Not one of transformers' or of ours.
        factory: called as `factory(config, **cache_config)` with the decoder's config; returns a `transformers.Cache`.
    """
    taken = (set(registry.names()) - set(registry.FACTORIES)) | {"paged", *_compat.valid_strings()}
    if not isinstance(name, str) or name in taken:
        raise invalid("name", name, "a string that neither transformers nor hf_kvplus uses")
    if not callable(factory):
        raise invalid("factory", factory, "a function of (config, **cache_config) that returns a Cache")
    registry.FACTORIES[name] = factory


@functools.wraps(GenerationConfig.validate)
def _validate(self, *args, **kwargs):
    given, ours, theirs = self.cache_implementation, registry.names(), ("paged", *_compat.valid_strings())
    if given in ours:
        self = copy.copy(self)
        self.cache_implementation = "dynamic"
    elif isinstance(given, str) and given not in theirs:
        meant = nearest(given, ours + theirs)
        if "paged_" in given or (meant and meant == nearest(given, ours)):
            raise registry.unknown_string(given)
    return _originals["validate"](self, *args, **kwargs)


@functools.wraps(GenerationMixin._validate_generation_mode)
def _validate_mode(self, generation_mode, generation_config, *args, **kwargs):
    name, method = generation_config.cache_implementation, "_prepare_cache_for_generation"
    overriding = type(self).__mro__[: type(self).__mro__.index(GenerationMixin)]
    overrides = [vars(kind)[method] for kind in overriding if method in vars(kind)]
    # An override that does not call the one it overrides never comes to ours.
    if name in registry.names() and any(method not in inspect.unwrap(each).__code__.co_names for each in overrides):
        raise _refused(name, self, "builds a cache of its own")
    return _originals["_validate_generation_mode"](self, generation_mode, generation_config, *args, **kwargs)


@functools.wraps(GenerationMixin._prepare_static_cache)
def _prepare_static(self, cache_implementation, *args, **kwargs):
    if cache_implementation in registry.names():  # Janus asks for whatever it was given when it draws an image
        raise _refused(cache_implementation, self, "insists on a StaticCache")
    return _originals["_prepare_static_cache"](self, cache_implementation, *args, **kwargs)


@functools.wraps(GenerationMixin._prepare_cache_for_generation)
def _prepare_cache(self, generation_config, model_kwargs, *args, **kwargs):
    arguments = self, generation_config, model_kwargs, *args
    original = functools.partial(_originals["_prepare_cache_for_generation"], *arguments, **kwargs)
    name, given = generation_config.cache_implementation, _compat.cache_key(model_kwargs)
    copies = max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
    if name not in registry.names() or (given and not generation_config.is_assistant):
        result = original()
        if given:
            cache = getattr(model_kwargs[given], "self_attention_cache", model_kwargs[given])
            if isinstance(cache, PagedCache):
                cache.expand_prompt(copies)
                _reserve(cache, **_named(*arguments, **kwargs))
        return result

    spec = None if name in registry.FACTORIES else registry.parse(name, generation_config.cache_config)
    generation_config.cache_implementation = None if generation_config.is_assistant else "dynamic"
    try:
        result = original()
    finally:
        generation_config.cache_implementation = _Name(name)
    key = _compat.cache_key(model_kwargs)
    # An assistant keeps transformers' own cache, as it does in the versions that give it no string of its model's.
    if generation_config.is_assistant or (key is None and generation_config.use_cache is False):
        return result
    built = model_kwargs.get(key)
    nested = isinstance(built, EncoderDecoderCache)
    decoder_cache = built.self_attention_cache if nested else built
    if type(decoder_cache) is not DynamicCache:
        reason = "keeps no cache that transformers could replace"
        raise _refused(name, self, reason if built is None else f"insists on a {type(decoder_cache).__name__}")
    if spec is None:
        config = self.config.get_text_config(decoder=True)
        cache = registry.FACTORIES[name](config, **(generation_config.cache_config or {}))
    else:
        cache = PagedCache.from_cache(decoder_cache, spec)
        cache.expand_prompt(copies)
    if nested:
        built.self_attention_cache = cache
    else:
        model_kwargs[key] = cache
    if spec is not None:
        _reserve(cache, **_named(*arguments, **kwargs))
    return result


def _named(*args, **kwargs) -> dict[str, Any]:
    """The arguments of `_prepare_cache_for_generation` by the names that this version of transformers gives them."""
    return inspect.signature(_originals["_prepare_cache_for_generation"]).bind(*args, **kwargs).arguments


def _reserve(cache, *, self, generation_config, model_kwargs, generation_mode, max_cache_length, **_) -> None:
    """Have the pages of the whole generation reserved if transformers would compile its steps then, or if asked to."""
    alone = model_kwargs[_compat.cache_key(model_kwargs)] is cache  # not half of an encoder-decoder's
    fixed = alone and cache.spec.has_fixed_step and generation_mode in _COMPILED and _takes_fixed_steps(self, cache)
    if not fixed or generation_config.output_attentions:  # their columns are the tokens seen
        cache.reserve_layers(None)
        return
    past, given = int(cache.get_seq_length()), _compat.mask_length(generation_config, model_kwargs)
    if past and given and generation_config.max_new_tokens:
        needed = given + generation_config.max_new_tokens  # the length counts new tokens alone, or the past again
    else:
        needed = past + max_cache_length
    needed = max(needed, generation_config.max_cache_len or 0, cache.spec.reserve or 0)
    step = max(512, 2 ** (needed.bit_length() - 4))  # generations that differ by little share their graphs
    cache.reserve_layers(-(-needed // step) * step)
    # Without a compiler, only what was asked for is worth its memory; a layer of another kind may forbid fixed steps.
    if not self._valid_auto_compile_criteria(model_kwargs, generation_config):
        cache.reserve_layers(needed if cache.spec.reserve and cache.is_compileable else None)


def _takes_fixed_steps(model, cache) -> bool:
    """Whether `model` reads keys that are longer than what was seen as it would read those alone."""
    config = model.config.get_text_config(decoder=True)
    alibi = getattr(config, "alibi", config.model_type == "bloom")  # biases as long as the 2-D mask
    masked = config._attn_implementation != "flex_attention" and _compat.makes_masks_of_steps(config)
    return model._can_compile_fullgraph and masked and not alibi and bool(cache.paged_layers)


def _refused(name: str, model, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"`cache_implementation`: {name!r} cannot serve {type(model).__name__}, which {reason}. "
        "Leave `cache_implementation` out for this model."
    )


class _Name(str):
    """A cache string that contains nothing: T5Gemma looks for "offloaded" in it, so that transformers offloads too."""

    def __contains__(self, part: str) -> bool:
        return False


@functools.wraps(AttentionInterface.get_interface)
def _get_interface(self, *args, **kwargs):
    inner = _originals["get_interface"](self, *args, **kwargs)
    if inner not in _preceded:  # no `functools.cache`: torch.compile warns of those
        _preceded[inner] = _precede(inner)
    return _preceded[inner]


_preceded: dict[Callable, Callable] = {}


def _precede(inner: Callable) -> Callable:
    """`inner`, which leaves calls whose key is a stand-in to `attend`."""

    @functools.wraps(inner)
    def attention(module, query, key, value, *args, **kwargs):
        if type(key) is StandIn:
            return attend(inner, module, query, key, value, *args, **kwargs)
        return inner(module, query, key, value, *args, **kwargs)

    return attention


#: Modes whose steps transformers may compile.
_COMPILED = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)

#: What is replaced: the class, the name of its method, and our method.
_HOOKS = (
    (GenerationConfig, "validate", _validate),
    (GenerationMixin, "_validate_generation_mode", _validate_mode),
    (GenerationMixin, "_prepare_static_cache", _prepare_static),
    (GenerationMixin, "_prepare_cache_for_generation", _prepare_cache),
    (AttentionInterface, "get_interface", _get_interface),
)
