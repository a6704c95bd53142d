"""What `generate` meets on its way to a cache: a string of ours becomes pages, or is refused.

A hook takes whatever the method takes and looks for the string in it; what the arguments are called is asked only once
a cache of ours is meant. `integration.py` puts the hooks in.
"""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from transformers import GenerationConfig
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.utils import GenerationMixin

from . import _compat, hooks, registry
from .caches import PagedCache
from .errors import UnsupportedModelError
from .keeping import PREPARE_INPUTS, cache_of, kwargs_with_cache, prepare_inputs, refused

PREPARE = "_prepare_cache_for_generation"

#: Modes whose steps transformers may compile.
_COMPILED = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)


def validate_mode(original, self, *args, **kwargs):
    if _string_in(args, kwargs):
        _hook_into_own(self, PREPARE, _watch)
    return original(self, *args, **kwargs)


def _hook_into_own(model, name: str, serve: Callable) -> None:
    """Hook into a method of `model`'s class, if that has one in the place of transformers' general one."""
    kind = next((kind for kind in type(model).__mro__ if name in vars(kind)), GenerationMixin)
    if kind is not GenerationMixin:
        hooks.put(kind, name, serve)


def _watch(original, self, *args, **kwargs):
    """In the place of a model's own way to prepare its cache: with a string of ours, that has to come to ours too."""
    name = _string_in(args, kwargs)
    if name is None:
        return original(self, *args, **kwargs)
    came: list[str] = []
    token = _came.set(came)
    try:
        result = original(self, *args, **kwargs)
    finally:
        _came.reset(token)
    if not came:
        raise _refused(name, self, "builds a cache of its own")
    return result


#: The strings that came to `prepare_cache` within a `_watch`.
_came: ContextVar[list[str]] = ContextVar("hf_kvplus_came")


def prepare_static(original, self, *args, **kwargs):
    for given in (*args, *kwargs.values()):
        if isinstance(given, str) and given in registry.names():  # Janus asks for the string when it draws an image
            raise _refused(given, self, "insists on a StaticCache")
    return original(self, *args, **kwargs)


def prepare_cache(original, self, *args, **kwargs):
    name, given = _string_in(args, kwargs), kwargs_with_cache(args, kwargs)
    if name is None and given is None:
        return original(self, *args, **kwargs)
    _hook_into_own(self, PREPARE_INPUTS, prepare_inputs)
    _came.get([]).append(name)
    call = _compat.prepare_call(original, (self, *args), kwargs)
    if call is None and name is not None:
        raise UnsupportedModelError(f"`cache_implementation`: {name!r}: {_compat.unknown_version(PREPARE)}")
    if name is not None and (given is None or call.generation_config.is_assistant):
        return _prepare_string(name, call, lambda: original(self, *args, **kwargs))
    result = original(self, *args, **kwargs)
    if given is not None and call is not None:
        cache_of(given).expand_prompt(_copies(call))
        _reserve(cache_of(given), call)
    return result


def _string_in(args: tuple, kwargs: dict) -> str | None:
    """The string of ours in the generation config among these arguments, if there is one."""
    for each in (*args, *kwargs.values()):
        if isinstance(each, GenerationConfig) and each.cache_implementation in registry.names():
            return each.cache_implementation
    return None


def _prepare_string(name: str, call: _compat.PrepareCall, original: Callable[[], Any]) -> Any:
    """Have `original` prepare the cache of "dynamic", and put that of `name` in its place."""
    model, generation_config, model_kwargs = call.model, call.generation_config, call.model_kwargs
    spec = None if name in registry.FACTORIES else registry.parse(name, generation_config.cache_config)
    generation_config.cache_implementation = None if generation_config.is_assistant else "dynamic"
    try:
        result = original()
    finally:
        looked_into = model.config.model_type in _LOOK_INTO_STRINGS
        generation_config.cache_implementation = _Name(name) if looked_into else name
    key = _compat.cache_key(model_kwargs)
    # An assistant keeps transformers' own cache, as it does in the versions that give it no string of its model's.
    if generation_config.is_assistant or (key is None and generation_config.use_cache is False):
        return result
    built = model_kwargs.get(key)
    nested = isinstance(built, EncoderDecoderCache)
    decoder_cache = built.self_attention_cache if nested else built
    if type(decoder_cache) is not DynamicCache:
        reason = "keeps no cache that transformers could replace"
        raise _refused(name, model, reason if built is None else f"insists on a {type(decoder_cache).__name__}")
    if spec is None:
        config = model.config.get_text_config(decoder=True)
        cache = registry.FACTORIES[name](config, **(generation_config.cache_config or {}))
    else:
        cache = PagedCache.from_cache(decoder_cache, spec)
        cache.expand_prompt(_copies(call))
    if nested:
        built.self_attention_cache = cache
    else:
        model_kwargs[key] = cache
    if spec is not None:
        _reserve(cache, call)
    return result


def _copies(call: _compat.PrepareCall) -> int:
    """Rows that each prompt becomes."""
    return max(call.generation_config.num_beams or 1, call.generation_config.num_return_sequences or 1)


def _reserve(cache: PagedCache, call: _compat.PrepareCall) -> None:
    """Have the pages of the whole generation reserved if transformers would compile its steps then, or if asked to."""
    model, generation_config, model_kwargs = call.model, call.generation_config, call.model_kwargs
    alone = model_kwargs[_compat.cache_key(model_kwargs)] is cache  # not half of an encoder-decoder's
    fixed = alone and cache.spec.has_fixed_step and call.generation_mode in _COMPILED
    fixed = fixed and not generation_config.output_attentions  # their columns are the tokens seen
    if not (fixed and _takes_fixed_steps(model, cache)):
        cache.reserve_layers(None)
        return
    past, given = int(cache.get_seq_length()), _compat.mask_length(generation_config, model_kwargs)
    if past and given and generation_config.max_new_tokens:
        needed = given + generation_config.max_new_tokens  # the length counts new tokens alone, or the past again
    else:
        needed = past + call.max_cache_length
    needed = max(needed, generation_config.max_cache_len or 0, cache.spec.reserve or 0)
    step = max(512, 2 ** (needed.bit_length() - 4))  # generations that differ by little share their graphs
    cache.reserve_layers(-(-needed // step) * step)
    # Without a compiler, only what was asked for is worth its memory; a layer of another kind may forbid fixed steps.
    if not model._valid_auto_compile_criteria(model_kwargs, generation_config):
        cache.reserve_layers(needed if cache.spec.reserve and cache.is_compileable else None)


def _takes_fixed_steps(model, cache) -> bool:
    """Whether `model` reads keys that are longer than what was seen as it would read those alone."""
    config = model.config.get_text_config(decoder=True)
    alibi = getattr(config, "alibi", config.model_type == "bloom")  # biases as long as the 2-D mask
    masked = config._attn_implementation != "flex_attention" and _compat.makes_masks_of_steps(config)
    return model._can_compile_fullgraph and masked and not alibi and bool(cache.paged_layers)


def _refused(name: str, model, reason: str) -> UnsupportedModelError:
    return refused(f"`cache_implementation`: {name!r}", model, reason)


class _Name(str):
    """A cache string that contains nothing."""

    def __contains__(self, part: str) -> bool:
        return False


#: Model types that look for "offloaded" in any string, to have transformers offload their cross-attention.
_LOOK_INTO_STRINGS = {"t5gemma", "t5gemma2"}
