"""After every forward pass of a generation the cache that it was given holds the tokens, whatever the model does.

A model that drops the cache to compute all tokens anew (Phi-3 with longrope) computes them into ours, emptied; one that
puts a cache of its own in the place (Whisper's decoder) has that one's tokens moved into ours; any other is refused.
"""

from typing import Any

from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer, EncoderDecoderCache
from transformers.utils import ModelOutput

from . import _compat
from .attention import padding_of
from .caches import PagedCache
from .errors import UnsupportedModelError
from .standin import TENSORS_ALONE

PREPARE_INPUTS = "prepare_inputs_for_generation"


def refused(given: str, model, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{given} cannot serve {type(model).__name__}, which {reason}. Leave `cache_implementation` out for this model."
    )


def kwargs_with_cache(args: tuple, kwargs: dict) -> dict | None:
    """The model kwargs among these arguments, if they hold a cache of ours."""
    for each in (*args, *kwargs.values()):
        if isinstance(each, dict) and not isinstance(each, ModelOutput) and cache_of(each) is not None:
            return each
    return None


def cache_of(model_kwargs: dict) -> PagedCache | None:
    """The cache of ours that model kwargs (or outputs) hold, alone or beside a cross-attention's."""
    key = _compat.cache_key(model_kwargs)
    cache = model_kwargs.get(key)
    cache = getattr(cache, "self_attention_cache", cache)
    if not isinstance(cache, PagedCache):
        return None
    return cache if cache.paged_layers or not cache.layers else None  # of Mamba, say, it holds states alone


def prepare_inputs(original, self, *args, **kwargs):
    """In the place of a model's own way to prepare the inputs of a pass: one without the cache starts over in it."""
    inputs = original(self, *args, **kwargs)
    if cache_of(kwargs) is None or kwargs.get("use_cache") is False or not isinstance(inputs, dict):
        return inputs
    key = _compat.cache_key(kwargs)
    if _compat.cache_key(inputs) is None and not any(value is kwargs[key] for value in inputs.values()):
        if kwargs.get("next_sequence_length") is not None:  # 5.17 gives the newest tokens alone, with no past
            inputs = original(self, *args, **{**kwargs, "next_sequence_length": None})
        kwargs[key].reset()
        inputs[key] = kwargs[key]
    return inputs


def prefill(original, self, *args, **kwargs):
    model_kwargs = kwargs_with_cache(args, kwargs)
    if model_kwargs is None:
        return original(self, *args, **kwargs)
    cache = cache_of(model_kwargs)
    before = _seen(cache)
    try:
        outputs = original(self, *args, **kwargs)
    except (TypeError, ValueError, RuntimeError) as error:
        if TENSORS_ALONE in str(error):
            raise refused(repr(cache), self, "reads its keys by code that takes nothing but tensors") from error
        raise
    _keep(self, cache, outputs, model_kwargs)
    if _seen(cache) <= before:
        raise _unused(self, cache)
    return outputs


def update_model_kwargs(original, self, *args, **kwargs):
    model_kwargs = kwargs_with_cache(args, kwargs)
    if model_kwargs is not None:
        outputs = next((each for each in (*args, *kwargs.values()) if isinstance(each, ModelOutput)), None)
        _keep(self, cache_of(model_kwargs), outputs, model_kwargs)
    return original(self, *args, **kwargs)


def _keep(model, cache: PagedCache, outputs: Any, model_kwargs: dict) -> None:
    """Have `outputs` and `model_kwargs` go on with `cache`, filled."""
    key = _compat.cache_key(outputs) if isinstance(outputs, ModelOutput) else None
    theirs = outputs[key] if key else None
    if theirs is not None and cache_of(outputs) is None:
        nested = isinstance(theirs, EncoderDecoderCache)
        mask = model_kwargs.get("decoder_attention_mask" if model.config.is_encoder_decoder else "attention_mask")
        if not _moved(theirs.self_attention_cache if nested else theirs, cache, mask):
            raise refused(repr(cache), model, f"goes on with a {type(theirs).__name__} of its own")
        if nested:
            theirs.self_attention_cache = cache
        else:
            outputs[key] = cache
        model_kwargs[key] = outputs[key]
    elif not any(layer.is_initialized for layer in cache.paged_layers):
        raise _unused(model, cache)


def _moved(theirs: Any, cache: PagedCache, mask) -> bool:
    """Whether `cache` could take all tokens of `theirs`, in the place of those that it held."""
    layers = theirs.layers if isinstance(theirs, Cache) else []
    whole = bool(layers) and all(
        type(layer) in (DynamicLayer, DynamicSlidingWindowLayer)
        and layer.is_initialized
        and layer.keys.shape[-2] == layer.get_seq_length()
        for layer in layers
    )
    kinds = [layer.is_sliding for layer in cache.paged_layers[: len(layers)]]
    if not whole or kinds != [layer.is_sliding for layer in layers]:
        return False
    cache.reset()
    cache.reserve_layers(None)  # its steps would not be the ones that `generate` planned
    del cache.layers[len(layers) :]
    for layer, given in zip(cache.layers, layers):
        layer.update(given.keys, given.values)
        layer.commit(padding_of(mask, layer, given.keys.shape[-2]))
    return True


def _seen(cache: PagedCache) -> int:
    return max((int(layer.get_seq_length()) for layer in cache.paged_layers), default=0)


def _unused(model, cache: PagedCache) -> UnsupportedModelError:
    return refused(repr(cache), model, "stores no keys in the cache that it is given")
