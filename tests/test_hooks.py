"""Hooks into transformers: they harm nobody whose cache is not ours, whatever the version or another plugin does."""

import functools
import inspect

import pytest
import torch
from conftest import tiny_llama
from generating import assert_same_run, generate, prompts
from transformers import AttentionInterface, DynamicCache, GenerationConfig, LlamaForCausalLM, StaticCache
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.utils import GenerationMixin

import hf_kvplus
from hf_kvplus import hooks, integration
from hf_kvplus._compat import forward_cache_name
from hf_kvplus.generation import PREPARE


@pytest.fixture(scope="module")
def model():
    return tiny_llama(initializer_range=0.2)


@pytest.fixture(autouse=True)
def restored():
    """Every test may patch what it likes: afterwards transformers is as it was, and ours are in."""
    owners = {owner for owner, _, _ in integration._HOOKS}
    hf_kvplus.unregister()
    before = {
        (owner, name): vars(owner)[name] for owner in owners for name in vars(owner) if callable(vars(owner)[name])
    }
    hf_kvplus.register()
    yield
    hf_kvplus.unregister()
    for (owner, name), method in before.items():
        if vars(owner)[name] is not method:
            setattr(owner, name, method)
    hf_kvplus.register()


def replaced(method, name=PREPARE, owner=GenerationMixin) -> None:
    """Have ours come after `method`, as if it were transformers' own."""
    hf_kvplus.unregister()
    setattr(owner, name, method)
    hf_kvplus.register()


def original(name=PREPARE, owner=GenerationMixin):
    return next(hook.original for hook in hooks.serving() if (hook.owner, hook.name) == (owner, name))


@pytest.mark.parametrize(("owner", "name"), [hook[:2] for hook in integration._HOOKS])
def test_a_hook_takes_and_hands_on_whatever_is_given(owner, name):
    kinds = [each.kind for each in inspect.signature(vars(owner)[name], follow_wrapped=False).parameters.values()]
    assert kinds == [inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD]
    calls = []

    def later(self, *args, **kwargs):
        calls.append((self, args, kwargs))
        return "answer"

    replaced(later, name, owner)
    this = GenerationConfig() if owner is GenerationConfig else object()
    config, model_kwargs, both = GenerationConfig(), {"cache": DynamicCache()}, {"unheard_of": 1, "of": [2]}
    calls.clear()
    answer = getattr(owner, name)(this, config, model_kwargs, 3, None, "eager", **both)
    assert answer == "answer" or owner is AttentionInterface
    assert calls == [(this, (config, model_kwargs, 3, None, "eager"), both)]


def test_a_later_version_with_one_more_parameter(model):
    before, seen = original(), []

    def newer(self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length, extra=None):
        seen.append(extra)
        return before(self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length)

    plain, ours = generate(model, prompts(40, 7)), generate(model, prompts(40, 7), cache_implementation="paged_int8")
    replaced(newer)
    assert_same_run(generate(model, prompts(40, 7)), plain, 0.0)
    assert_same_run(generate(model, prompts(40, 7), cache_implementation="paged_int8"), ours, 0.0)
    arguments = (GenerationConfig(max_new_tokens=3, cache_implementation="paged_int8"), {}, GenerationMode.SAMPLE, 1, 9)
    model._prepare_cache_for_generation(*arguments, extra=7)
    assert seen == [None, None, 7]


@pytest.mark.parametrize("hides", [False, True], ids=["tells_its_arguments", "hides_its_arguments"])
def test_another_plugin_beneath_ours(model, hides):
    before = original()

    def theirs(*args, **kwargs):
        return before(*args, **kwargs)

    expected = generate(model, prompts(40, 7), cache_implementation="paged_int8")
    replaced(theirs if hides else functools.wraps(before)(theirs))
    out = generate(model, prompts(40, 7), cache_implementation="paged_int8")
    assert_same_run(out, expected, 0.0)
    assert type(out.past_key_values) is hf_kvplus.PagedCache


def renaming(before):
    def newer(self, generation_config, model_kwargs, *, kind, sizes):
        return before(self, generation_config, model_kwargs, kind, *sizes)

    def asking(self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length):
        sizes = batch_size, max_cache_length
        return over(self, generation_config, model_kwargs, kind=generation_mode, sizes=sizes)

    over = None

    def install():
        nonlocal over
        replaced(newer)
        over = vars(GenerationMixin)[PREPARE]
        setattr(GenerationMixin, PREPARE, asking)  # as a later `generate` would call it

    return install


def test_a_later_version_with_other_arguments_fails_for_our_strings_alone(model):
    plain = generate(model, prompts(40, 7))
    renaming(original())()
    assert_same_run(generate(model, prompts(40, 7)), plain, 0.0)
    cache = hf_kvplus.make_cache("paged_native", model)
    out = generate(model, prompts(40, 7), **{forward_cache_name(model): cache})
    assert_same_run(out, plain)
    assert cache.get_seq_length() > 40
    with pytest.raises(hf_kvplus.UnsupportedModelError, match=f"'paged_int8'.*changed `{PREPARE}`.*as tested"):
        generate(model, prompts(40, 7), cache_implementation="paged_int8")


def test_a_later_version_without_a_method(model, monkeypatch):
    plain = generate(model, prompts(40, 7))
    hf_kvplus.unregister()
    monkeypatch.setattr(integration, "_HOOKS", (*integration._HOOKS, (GenerationMixin, "_of_old", None)))
    with pytest.warns(UserWarning, match=r"hf_kvplus: .*changed `GenerationMixin._of_old`"):
        hf_kvplus.register()
    assert_same_run(generate(model, prompts(40, 7)), plain, 0.0)
    with pytest.raises(hf_kvplus.UnsupportedModelError, match=r"'paged_int8'.*changed `GenerationMixin\._of_old`"):
        generate(model, prompts(40, 7), cache_implementation="paged_int8")


def test_unregister_keeps_what_was_put_over_ours(model):
    own, ours, calls = original(), vars(GenerationMixin)[PREPARE], []

    def theirs(self, *args, **kwargs):
        calls.append(args)
        return ours(self, *args, **kwargs)

    plain = generate(model, prompts(40, 7))
    setattr(GenerationMixin, PREPARE, theirs)
    for _ in range(2):
        hf_kvplus.unregister()
        assert vars(GenerationMixin)[PREPARE] is theirs
    assert_same_run(generate(model, prompts(40, 7)), plain, 0.0)
    assert len(calls) == 1
    with pytest.raises(ValueError, match="cache_implementation"):
        generate(model, prompts(40, 7), cache_implementation="paged_int8")
    hf_kvplus.register()  # over theirs: the string is served, through both
    out = generate(model, prompts(40, 7), cache_implementation="paged_int8")
    assert type(out.past_key_values) is hf_kvplus.PagedCache
    assert len(calls) == 2
    hf_kvplus.unregister()
    assert vars(GenerationMixin)[PREPARE] is theirs
    setattr(GenerationMixin, PREPARE, ours)  # they leave
    hf_kvplus.unregister()
    assert vars(GenerationMixin)[PREPARE] is own


# --- a model's own way to its cache: judged by what it does -----------------------------------------------------------


def extending(call):
    """A Llama whose own method of preparing the cache does `call(super(), *its arguments)`."""

    class Extended(LlamaForCausalLM):
        def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs):
            return call(super(), generation_config, model_kwargs, *args, **kwargs)

    return Extended(tiny_llama().config).eval()


def extends(parent, *arguments, **kwargs):
    return getattr(parent, "_prepare_cache" + "_for_generation")(*arguments, **kwargs)


def mentions(parent, generation_config, model_kwargs, *args, **kwargs):
    if generation_config.num_beams == 77:
        parent._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
    model_kwargs[forward_cache_name(parent)] = DynamicCache()


def insists(parent, generation_config, model_kwargs, *args, **kwargs):
    model_kwargs[forward_cache_name(parent)] = StaticCache(tiny_llama().config, max_cache_len=80)


def test_an_override_that_comes_to_ours_is_served():
    out = generate(extending(extends), prompts(10), cache_implementation="paged_int8")
    assert isinstance(out.past_key_values, hf_kvplus.PagedCache)


@pytest.mark.parametrize("call", [mentions, insists])
def test_an_override_that_does_not_is_refused(call):
    model = extending(call)
    own = vars(type(model))[PREPARE]
    for _ in range(2):
        with pytest.raises(hf_kvplus.UnsupportedModelError, match="Extended, which builds a cache of its own"):
            generate(model, prompts(10), cache_implementation="paged_int8")
        generate(model, prompts(10), disable_compile=True)
    assert vars(type(model))[PREPARE] is not own
    hf_kvplus.unregister()
    assert vars(type(model))[PREPARE] is own


def test_only_a_model_that_looks_into_strings_gets_one_that_hides_its_words(model):
    seen = {}
    for model_type in ("llama", "t5gemma"):
        config = GenerationConfig(cache_implementation="offloaded_paged_int8")
        stands_for = extending(extends)
        stands_for.config.model_type = model_type
        stands_for._prepare_cache_for_generation(config, {}, GenerationMode.SAMPLE, 1, 9)
        seen[model_type] = config.cache_implementation
    assert set(seen.values()) == {"offloaded_paged_int8"}
    assert type(seen["llama"]) is str
    assert "offloaded" in seen["llama"]
    assert "offloaded" not in seen["t5gemma"]


def test_hooks_survive_threads_that_meet_a_new_model_at_once():
    from concurrent.futures import ThreadPoolExecutor

    model, before = extending(extends), len(hooks.serving())
    with ThreadPoolExecutor(4) as pool:
        runs = [pool.submit(generate, model, prompts(10), cache_implementation="paged_int8") for _ in range(8)]
        kinds = {type(run.result().past_key_values) for run in runs}
    assert kinds == {hf_kvplus.PagedCache}
    assert len(hooks.serving()) == before + 1
    assert torch.equal(runs[0].result().sequences, runs[7].result().sequences)
