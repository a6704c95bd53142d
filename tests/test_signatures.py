"""What stands in for a class of transformers takes all that the installed version's takes, and answers as it would."""

import copy
import inspect

import pytest
import torch
from conftest import tiny_llama
from numerics import assert_close
from transformers import PaliGemmaConfig, PaliGemmaForConditionalGeneration, Qwen2Config
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
)

import hf_kvplus
from hf_kvplus._compat import forward_cache_name
from hf_kvplus.attention import precede
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


def swap(cache, rows=(1, 0)):
    cache.reorder_cache(torch.tensor(rows))
    return cache


#: What is done to a cache that holds two rows of 30 tokens, and gives the cache to ask.
LIVES = {
    "empty": lambda cache: cache.reset() or cache,
    "filled": lambda cache: cache,
    "forked": lambda cache: copy.deepcopy(cache),
    "cropped": lambda cache: cache.crop(-7) or cache,
    "cropped_to_nothing": lambda cache: cache.crop(-30) or cache,
    "reordered": swap,
    "repeated": lambda cache: cache.batch_repeat_interleave(3) or cache,
    "selected": lambda cache: cache.batch_select_indices(torch.tensor([1])) or cache,
}
#: What only answers about capacity: these differ where a cache has one.
OF_CAPACITY = {"is_compileable", "get_mask_sizes"}


def answers_of(cache) -> dict:
    """Whatever a cache and its layers answer to questions without side effects."""
    found = {}

    def ask(name, question):
        try:
            found[name] = question()
        except (AttributeError, ValueError) as error:
            found[name] = type(error)

    for name in (
        "batch_size",
        "is_compileable",
        "is_initialized",
        "is_croppable",
        "is_sliding",
        "is_linear",
        "is_dummy",
    ):
        ask(name, lambda name=name: getattr(cache, name))
    for name in ("get_seq_length", "get_max_length", "get_query_offset", "has_previous_state", "__len__"):
        if hasattr(DynamicCache, name):  # `get_query_offset` came later
            ask(name, getattr(cache, name))
    ask("get_mask_sizes", lambda: cache.get_mask_sizes(3, 0))
    for index, layer in enumerate([*cache.layers, None]):
        for name in ("get_seq_length", "get_max_length"):
            ask(f"{name}({index})", lambda name=name, index=index: getattr(cache, name)(index))
        if layer is not None:
            for name in ("is_initialized", "is_sliding", "is_croppable", "is_compileable", "device"):
                ask(f"layers[{index}].{name}", lambda name=name, layer=layer: getattr(layer, name))
            for name in ("get_seq_length", "get_max_length"):
                ask(f"layers[{index}].{name}", getattr(layer, name))
    return found


@pytest.mark.parametrize("life", LIVES)
@pytest.mark.parametrize("string", ["paged_native", "paged_int8", "offloaded_paged_int8", "keydiff_paged_native"])
@pytest.mark.parametrize("windowed", [False, True])
def test_values_that_a_cache_answers(string, life, windowed):
    if string.startswith("keydiff") and life.startswith("cropped"):
        pytest.skip("what was evicted cannot be taken back: an error of ours says so")
    options = {"budget": 16} if "keydiff" in string else {}
    kinds = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 40} if windowed else {}
    config = Qwen2Config(num_hidden_layers=2, use_sliding_window=windowed, **kinds)
    caches = [DynamicCache(config=config), hf_kvplus.make_cache(string, config, page_size=8, **options)]
    tokens = torch.randn(2, 2, 2, 30, 8)
    answers = []
    for cache in caches:
        for index in range(2):
            cache.update(*tokens, index)
        cache = LIVES[life](cache)
        if life == "empty" and not answers and cache.get_seq_length():
            pytest.skip("in 5.17 a dynamic cache that is reset keeps its length")
        answers.append(answers_of(cache))
        if life != "empty" and not options:
            found = [(layer[0].shape, layer[1].dtype) for layer in cache]
            assert found == [(torch.Size((*layer.keys.shape,)), torch.float32) for layer in cache.layers]
    assert answers[1] == answers[0]


def test_values_that_a_reserved_cache_answers():
    """As the dynamic cache, but for what tells its capacity; a length is a value of its moment."""
    config = tiny_llama().config
    theirs, ours = DynamicCache(config=config), hf_kvplus.make_cache("paged_int8", config, page_size=8, reserve=64)
    lengths = []
    for new in (30, 1, 1):
        for index in range(len(theirs.layers)):
            tokens = torch.randn(2, 2, 2, new, 8)
            theirs.update(*tokens, index)
            ours.update(*tokens, index)
            ours.layers[index].commit()
            ours.layers[index].resume()
        lengths.append(ours.get_seq_length())
        expected, found = answers_of(theirs), answers_of(ours)
        assert {name for name in expected if found[name] != expected[name]} <= {
            each for each in expected if each.rpartition(".")[2] in OF_CAPACITY
        }
        assert found["get_mask_sizes"] == (64, 0)
    assert ours.layers[0].reservation is not None
    assert lengths == [30, 31, 32]  # what was asked before later tokens came still says what was then


@pytest.mark.parametrize("name", ["keys", "values"])
@pytest.mark.parametrize("string", ["paged_native", "keydiff_paged_int8", "offloaded_paged_int8"])
def test_keys_that_are_assigned_are_refused_and_nothing_is_lost(string, name):
    cache = hf_kvplus.make_cache(string, tiny_llama().config)
    cache.update(*torch.randn(2, 1, 2, 20, 8), 0)
    before = getattr(cache.layers[0], name).clone()
    with pytest.raises(hf_kvplus.UnsupportedModelError, match=r"hf_kvplus: `keys` and `values`.*cannot be assigned"):
        setattr(cache.layers[0], name, torch.zeros_like(before))
    assert torch.equal(getattr(cache.layers[0], name), before)


@torch.no_grad()
@pytest.mark.parametrize("string", ["paged_native", "paged_int8"])
def test_a_model_that_asks_whether_its_cache_is_filled(string):
    """PaliGemma lets the tokens of a first call see each other, and those of later calls only what came before."""
    model, tokens = prefix_lm(), torch.randint(3, 90, (1, 24), generator=torch.Generator().manual_seed(0))
    logits = []
    for cache in (DynamicCache(config=model.config), hf_kvplus.make_cache(string, model, page_size=8)):
        for part in tokens.split([9, 15], dim=1):
            out = model(input_ids=part, token_type_ids=torch.zeros_like(part), **{forward_cache_name(model): cache})
        logits.append(out.logits)
    assert_close("logits", logits[1], logits[0], 1e-5 if string == "paged_native" else 0.02)


def prefix_lm():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = {**sizes, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 100, "model_type": "gemma"}
    vision = {**sizes, "image_size": 8, "patch_size": 4, "model_type": "siglip_vision_model", "projection_dim": 32}
    config = PaliGemmaConfig(text_config=text, vision_config=vision, image_token_index=99, projection_dim=32)
    return PaliGemmaForConditionalGeneration(config).eval()


def test_attention_functions_take_what_they_precede():
    """The wrapped function hands on every argument, by position or by name."""

    def inner(module, query, key, value, attention_mask=None, *args, scaling=None, later=None):
        return args, scaling, later

    tensors = [None, *torch.zeros(3, 1)]
    assert precede(inner)(*tensors, None, 1, 2, scaling=3, later=4) == ((1, 2), 3, 4)
