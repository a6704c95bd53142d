"""Attention functions of others: read in place where that is sure to be right, else from dense tensors, and told."""

import contextlib
import functools
import warnings

import pytest
import tiny_models
import torch
from conftest import tiny_llama
from generating import assert_same_run, generate, prompts
from numerics import assert_close
from transformers import AttentionInterface, DynamicCache
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as with_sinks
from transformers.models.llama.modeling_llama import eager_attention_forward

import hf_kvplus
from hf_kvplus import functions
from hf_kvplus._compat import forward_cache_name
from hf_kvplus.layer import PagedLayer

OF = {"sdpa": sdpa_attention_forward, "eager": eager_attention_forward}
NAME = forward_cache_name(tiny_llama())
STRINGS = ["paged_native", "sliding_paged_native", "keydiff_paged_native"]
OPTIONS = {"sliding": {"window": 16, "sink_tokens": 2}, "keydiff": {"budget": 24}}


def own(string="paged_native", **options):
    options = {"page_size": 8, **OPTIONS.get(string.partition("_")[0], {}), **options}
    return {"cache_implementation": string, "cache_config": options}


@pytest.fixture(autouse=True)
def untold():
    """Every test may declare what it likes, and is told what the ones before it were told."""
    declared, told = list(functions._declared), set(functions._told)
    functions._declared.clear()
    functions._told.clear()
    yield
    functions._declared[:], functions._told = declared, told


@contextlib.contextmanager
def registered(function, name="sdpa"):
    ALL_ATTENTION_FUNCTIONS[name] = function
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS[name]


@contextlib.contextmanager
def said():
    """What hf_kvplus warns of."""
    told: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield told
    told += [str(each.message) for each in caught if "hf_kvplus" in str(each.message)]


# --- wrappers ---------------------------------------------------------------------------------------------------------


def harmless(function):
    def wrapper(module, query, key, value, attention_mask, **kwargs):
        return function(module, query, key, value, attention_mask, **kwargs)

    return wrapper


def by_position(function):
    def wrapper(module, query, key, value, attention_mask, dropout, **kwargs):
        if query.shape[2] == key.shape[2] and not key.dtype.is_complex:
            module.prompts = getattr(module, "prompts", 0) + 1
        return function(module, query, key, value, attention_mask, dropout, **kwargs)

    return wrapper


def named_as_the_wrapped(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


def sharper(function):
    def wrapper(module, query, key, value, attention_mask, scaling=None, **kwargs):
        return function(module, query * 1.5, key, value, attention_mask, scaling=scaling / 2, **kwargs)

    return wrapper


def later(function):
    def wrapper(module, query, key, value, attention_mask, **kwargs):
        out, weights = function(module, query, key, value, attention_mask, **kwargs)
        return out * 0.9, weights

    return wrapper


def either(function):
    other = sharper(function)

    def wrapper(module, *args, **kwargs):
        return (other if module.layer_idx else function)(module, *args, **kwargs)

    return wrapper


HARMLESS = {
    "closure": harmless,
    "by_position": by_position,
    "wraps": named_as_the_wrapped,
    "partial": functools.partial,
    "partial_of_closure": lambda function: functools.partial(harmless(function)),
    "twice": lambda function: harmless(by_position(function)),
    "changes_the_query": sharper,
    "changes_the_output": later,
    "one_of_two": either,
}


@pytest.mark.parametrize(
    ("wrap", "implementation"),
    [(wrap, "sdpa") for wrap in HARMLESS]
    + [(wrap, "eager") for wrap in HARMLESS if wrap not in ("by_position", "twice")],
)
def test_wrappers_that_hand_on_what_they_get_are_read_in_place(wrap, implementation):
    """And what else they do is done."""
    model, inner = tiny_llama(initializer_range=0.2, attn_implementation=implementation), OF[implementation]
    with registered(HARMLESS[wrap](inner), implementation), said() as told:
        theirs = generate(model, prompts(40, 29))
        before = PagedLayer.dense_reads
        ours = generate(model, prompts(40, 29), **own())
        assert PagedLayer.dense_reads - before == ours.past_key_values.stats().dense_reads == 0
        assert_same_run(ours, theirs)
        for string in STRINGS[1:]:
            before = PagedLayer.dense_reads
            generate(model, prompts(40, 29), **own(string))
            assert PagedLayer.dense_reads == before
        reserved = generate(model, prompts(40, 29), **own(reserve=100))
        assert_same_run(reserved, theirs)
        assert reserved.past_key_values.stats().dense_reads == 0
        assert reserved.past_key_values.layers[0].reservation is not None
    assert told == []
    if "changes" in wrap or wrap == "one_of_two":
        assert theirs.sequences.tolist() != generate(model, prompts(40, 29)).sequences.tolist()


def pressing(function):
    """As kvpress wraps every function: keys of some positions are overwritten once a press has named them."""

    def wrapper(module, query, key, value, attention_mask, dropout, **kwargs):
        if query.shape[2] == key.shape[2]:
            module.masked_key_indices = None
        elif module.masked_key_indices is not None:
            key[:, :, module.masked_key_indices] = 0.0
        return function(module, query, key, value, attention_mask, dropout, **kwargs)

    return wrapper


def peeking(function):
    def wrapper(module, query, key, value, attention_mask, **kwargs):
        return function(module, query + key.mean(), key, value, attention_mask, **kwargs)

    return wrapper


def listing(function):
    def wrapper(module, query, key, value, attention_mask, **kwargs):
        return function(module, query, torch.cat([key, key], 2)[:, :, : key.shape[2]], value, attention_mask, **kwargs)

    return wrapper


def weighing(function):
    def wrapper(module, query, key, value, attention_mask, **kwargs):
        out, weights = function(module, query, key, value, attention_mask, **kwargs)
        return (out if weights is None else out * weights.amax()), weights

    return wrapper


@pytest.mark.parametrize(("wrap", "implementation"), [(peeking, "sdpa"), (listing, "sdpa"), (weighing, "eager")])
@pytest.mark.parametrize("reserve", [None, 100])
def test_wrappers_that_look_inside_get_tensors_and_one_warning(wrap, implementation, reserve):
    model, inner = tiny_llama(initializer_range=0.2, attn_implementation=implementation), OF[implementation]
    with registered(wrap(inner), implementation):
        theirs = generate(model, prompts(40, 29))
        with said() as told:
            ours = generate(model, prompts(40, 29), **own(reserve=reserve))
            again = generate(model, prompts(40, 29), **own(reserve=reserve))
        assert_same_run(ours, theirs)
        assert_same_run(again, theirs)
    assert len(told) == 1
    assert f"{wrap.__name__}.<locals>.wrapper builds the dense keys" in told[0]
    assert "treat_as_standard" in told[0]
    assert ours.past_key_values.stats().dense_reads >= 2 * 25 * len(ours.past_key_values.layers)


def test_a_wrapper_that_begins_to_look_inside():
    """With kvpress imported nothing is lost until a press is in use; then its tokens are those it gives elsewhere."""
    model, runs = tiny_llama(initializer_range=0.2), []
    with registered(pressing(sdpa_attention_forward)), torch.no_grad():
        for cache in (DynamicCache(config=model.config), hf_kvplus.make_cache("paged_native", model, page_size=8)):
            logits = [model(prompts(40)["input_ids"], **{NAME: cache}).logits[:, -1]]
            for step in range(8):
                if step == 4:
                    before = PagedLayer.dense_reads
                    for layer in model.model.layers:
                        layer.self_attn.masked_key_indices = torch.tensor([3, 9, 20])
                logits.append(model(logits[-1].argmax(-1)[:, None], **{NAME: cache}).logits[:, -1])
            runs.append(torch.stack(logits))
            if step == 7 and len(runs) == 2:
                assert before == PagedLayer.dense_reads - cache.stats().dense_reads
                assert cache.stats().dense_reads == 2 * 4 * len(cache.layers)
    assert_close("logits", *runs[::-1], 2e-5)


def test_an_error_of_the_wrappers_own_stays_its_own():
    def broken(module, query, key, value, attention_mask, **kwargs):
        if key.shape[2] > 45:
            raise RuntimeError("of my own")
        return inner(module, query, key, value, attention_mask, **kwargs)

    inner, model = sdpa_attention_forward, tiny_llama()
    with registered(broken), pytest.raises(RuntimeError, match="of my own"):
        generate(model, prompts(40), **own())


# --- functions of one's own -------------------------------------------------------------------------------------------


def through_a_global(*args, **kwargs):
    return sdpa_attention_forward(*args, **kwargs)


class Callable:
    """Neither a function nor hashable."""

    __hash__ = None

    def __call__(self, module, query, key, value, attention_mask, **kwargs):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


@pytest.mark.parametrize("function", [through_a_global, Callable()], ids=["function", "object"])
@pytest.mark.parametrize("string", STRINGS)
def test_a_function_of_ones_own_is_called_and_told_of_once(function, string):
    model = tiny_llama(initializer_range=0.2)
    expected = generate(model, prompts(40, 29), **own(string))
    with registered(function), said() as told:
        ours = generate(model, prompts(40, 29), **own(string))
        generate(model, prompts(40), **own(string))
    assert_same_run(ours, expected)
    assert ours.past_key_values.stats().dense_reads == 2 * 25 * len(ours.past_key_values.layers)
    assert "dense reads  " in str(ours.past_key_values.stats())
    assert len(told) == 1
    assert "hf_kvplus.treat_as_standard(function)" in told[0]


@pytest.mark.parametrize("string", STRINGS)
def test_a_function_that_is_declared_standard(string):
    model, calls = tiny_llama(initializer_range=0.2), []
    expected = generate(model, prompts(40, 29), **own(string))

    @hf_kvplus.treat_as_standard
    def counting(*args, **kwargs):
        calls.append(args[1].shape[2])
        return sdpa_attention_forward(*args, **kwargs)

    with registered(counting), said() as told:
        ours = generate(model, prompts(40, 29), **own(string))
    assert_same_run(ours, expected)
    assert ours.past_key_values.stats().dense_reads == 0
    assert set(calls) == {40}  # the prompt
    assert told == []


def test_a_function_is_declared_as_transformers_hands_it_out():
    with registered(through_a_global):
        function = ALL_ATTENTION_FUNCTIONS.get_interface("sdpa", eager_attention_forward)
        assert function is not through_a_global
        assert hf_kvplus.treat_as_standard(function) is function
        assert functions.is_standard(through_a_global)
    with pytest.raises(hf_kvplus.CacheConfigError, match=r"`function`: got 'sdpa', accepted: an attention function"):
        hf_kvplus.treat_as_standard("sdpa")


# --- arguments --------------------------------------------------------------------------------------------------------


def steps(model, cache, **kwargs):
    """Logits of ten tokens after a prompt, with `kwargs` to every call."""
    with torch.no_grad():
        logits = [model(prompts(40)["input_ids"], **{NAME: cache}, **kwargs).logits[:, -1]]
        for step in range(10):
            logits.append(model(torch.tensor([[step + 3]]), **{NAME: cache}, **kwargs).logits[:, -1])
    return torch.stack(logits)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("string", STRINGS)
@pytest.mark.parametrize("given", [{"my_flag": 1}, {"return_shared_kv_states": True}, {"sliding_window": 5}], ids=str)
def test_an_argument_that_the_function_does_not_read_changes_nothing(implementation, string, given):
    model = tiny_llama(initializer_range=0.2, attn_implementation=implementation)
    found = {}
    for kwargs in ({}, given):
        cache = hf_kvplus.make_cache(string, model, **own(string)["cache_config"])
        found[len(kwargs)] = steps(model, cache, **kwargs)
        assert cache.stats().dense_reads == 0
    assert torch.equal(found[0], found[1])
    if string == "paged_native":
        assert_close("logits", found[1], steps(model, DynamicCache(config=model.config), **given), 2e-5)


def flagged(module, query, key, value, attention_mask, my_flag=None, **kwargs):
    out, weights = eager_attention_forward(module, query, key, value, attention_mask, **kwargs)
    return out * (my_flag or 1), weights


@pytest.mark.parametrize("reserve", [None, 100])
def test_an_argument_that_the_function_reads_reaches_it(monkeypatch, reserve):
    """Here one of transformers' own, as it were."""
    monkeypatch.setattr(flagged, "__module__", "transformers.models.flagged")
    model = tiny_llama(initializer_range=0.2, attn_implementation="eager")
    with registered(flagged, "eager"), said() as told:
        expected = steps(model, DynamicCache(config=model.config), my_flag=2)
        cache = hf_kvplus.make_cache("paged_native", model, page_size=8, reserve=reserve)
        assert_close("logits", steps(model, cache, my_flag=2), expected, 2e-5)
        assert cache.stats().dense_reads == 20 * len(cache.layers)
        assert len(told) == 0
        plain = hf_kvplus.make_cache("paged_native", model, page_size=8, reserve=reserve)
        assert_close("logits", steps(model, plain), steps(model, DynamicCache(config=model.config)), 2e-5)
        assert plain.stats().dense_reads == 0
        evicting = hf_kvplus.make_cache("keydiff_paged_native", model, budget=24)
        with pytest.raises(hf_kvplus.UnsupportedModelError, match="takes my_flag, which a cache that evicts"):
            steps(model, evicting, my_flag=2)
    assert len(told) == 1
    assert "it reads my_flag, which" in told[0]


def test_asking_for_attention_weights_is_told():
    model = tiny_llama(initializer_range=0.2, attn_implementation="eager")
    with said() as told:
        generate(model, prompts(40), output_attentions=True, **own())
    assert len(told) == 1
    assert "attention weights are asked for" in told[0]


def looking_up(module, query, key, value, attention_mask, **kwargs):
    if "one" in kwargs and kwargs.get("two", 0) and kwargs["three"]:
        return module.sinks
    return eager_attention_forward(module, query, key, value, attention_mask, **kwargs)


def by_variable(module, query, key, value, attention_mask, **kwargs):
    return [kwargs.get(name) for name in module.names]


def elsewhere(module, query, key, value, attention_mask, **kwargs):
    return module.attend(query, **kwargs)


def test_what_functions_read():
    words = functions.mentions(looking_up)
    assert words >= {"one", "two", "three", "s_aux", "scaling", "dropout"}
    assert not words & {"my_flag", "softcap", "sliding_window", "position_ids"}
    assert functions.mentions(functools.partial(looking_up)) == words
    assert "s_aux" in functions.mentions(with_sinks)
    assert functions.mentions(flash_attention_forward) >= {"sliding_window", "softcap", "s_aux", "position_ids"}
    assert not functions.mentions(flash_attention_forward) & {"my_flag", "return_shared_kv_states"}
    for unclear in (by_variable, elsewhere, torch.softmax, Callable(), eval("lambda *args, **kwargs: 0")):
        assert functions.mentions(unclear) is None
        assert functions.reads(unclear, "my_flag")
        assert not functions.reads(unclear, "use_cache")


def test_all_functions_that_transformers_registers_are_understood():
    for name, function in AttentionInterface().items():
        assert functions.mentions(function) is not None, name


def test_a_model_that_shares_its_keys_with_an_assistant():
    """Gemma 4's assistant takes the keys of two layers as tensors once a draft; the model itself reads its pages."""
    gemma = pytest.importorskip("transformers.models.gemma4_assistant.modeling_gemma4_assistant")
    model = tiny_models.build("gemma4_text")
    text = model.config.to_dict() | {"num_kv_shared_layers": model.config.num_hidden_layers}
    text |= {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    sizes = {"backbone_hidden_size": model.config.hidden_size, "use_ordered_embeddings": False}
    torch.manual_seed(0)
    assistant = gemma.Gemma4AssistantForCausalLM(gemma.Gemma4AssistantConfig(text_config=text, **sizes)).eval()
    assistant.generation_config.update(pad_token_id=0, bos_token_id=1, eos_token_id=None, num_assistant_tokens=3)
    inputs, drafts = tiny_models.inputs("gemma4_text", model), []
    theirs = generate(model, inputs, assistant_model=assistant)
    assistant.register_forward_hook(lambda *_: drafts.append(1))
    ours = generate(model, inputs, assistant_model=assistant, **own())
    assert_same_run(ours, theirs)
    assert 0 < ours.past_key_values.stats().dense_reads <= 4 * -(-len(drafts) // 3) + 4
