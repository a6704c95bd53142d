"""What stands in for a method of transformers takes all that the installed version's method takes."""

import inspect

import pytest
import torch
from conftest import tiny_llama
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
)

import hf_kvplus
from hf_kvplus import integration
from hf_kvplus.layer import PagedLayer

PAIRS = [
    (CacheLayerMixin, PagedLayer),
    (DynamicLayer, PagedLayer),
    (DynamicSlidingWindowLayer, PagedLayer),
    (DynamicCache, hf_kvplus.PagedCache),
    (EncoderDecoderCache, hf_kvplus.PagedCache),  # which asks its two caches by its own names
]
OF_A_PAIR = {"check_dynamic_cache"}  # about the two caches, not of one


def public(kind: type) -> list[str]:
    return [name for name in dir(kind) if not name.startswith("_")]


NAMES = [(theirs, ours, name) for theirs, ours in PAIRS for name in public(theirs) if name not in OF_A_PAIR]


def assert_takes_as_much(ours: inspect.Signature, theirs) -> None:
    """Calls by position, calls by name, and whatever else `theirs` takes."""
    theirs = inspect.signature(theirs).parameters.values()
    kinds = {kind: [p.name for p in theirs if p.kind is kind] for kind in inspect._ParameterKind}
    positional = kinds[inspect.Parameter.POSITIONAL_OR_KEYWORD]
    more = ("more",) if kinds[inspect.Parameter.VAR_POSITIONAL] else ()
    named = dict.fromkeys(kinds[inspect.Parameter.KEYWORD_ONLY])
    named |= {"unheard_of": None} if kinds[inspect.Parameter.VAR_KEYWORD] else {}
    ours.bind(*positional, *more, **named)
    ours.bind(positional[0], **dict.fromkeys(positional[1:]), **named)


@pytest.mark.parametrize(("theirs", "ours", "name"), NAMES, ids=[f"{kind.__name__}.{name}" for kind, _, name in NAMES])
def test_public_names_of_caches_and_layers(theirs, ours, name):
    # Some are set by `__init__` alone.
    if ours is PagedLayer and not hasattr(ours, name):
        ours = hf_kvplus.make_cache("paged_int8", tiny_llama()).layers[0]
        assert hasattr(ours, name)
        return
    assert callable(getattr(ours, name)) == callable(getattr(theirs, name))
    if callable(getattr(theirs, name)):
        assert_takes_as_much(inspect.signature(getattr(ours, name)), getattr(theirs, name))


def test_what_a_cache_answers_about_the_past():
    """Drafts of recurrent states are for linear layers: ours keep none, and record only what they were told to."""
    paged = hf_kvplus.make_cache("paged_int8", tiny_llama())
    for cache in (paged, EncoderDecoderCache(paged.fork(), DynamicCache())):
        own = getattr(cache, "self_attention_cache", cache)
        assert own.is_croppable
        if not hasattr(cache, "get_recurrent_states_to_keep"):  # before transformers 5.25
            cache.activate_past_recording()
            continue
        assert not own.is_recording_past(0)
        assert own.get_recurrent_states_to_keep() == own.get_recurrent_states_to_keep(0) == 0
        cache.activate_past_recording(recurrent_states_to_keep=3)
        assert own.is_recording_past(0)
        assert own.get_recurrent_states_to_keep() == own.get_recurrent_states_to_keep(0) == 0


def test_attention_functions_take_what_they_precede():
    """The wrapped function hands on every argument, by position or by name."""

    def inner(module, query, key, value, attention_mask=None, *args, scaling=None, later=None):
        return args, scaling, later

    tensors = [None, *torch.zeros(3, 1)]
    assert integration._precede(inner)(*tensors, None, 1, 2, scaling=3, later=4) == ((1, 2), 3, 4)
