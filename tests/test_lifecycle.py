"""What happens to a cache between two turns: it is pickled, copied, meets another inference mode, is interrupted."""

import copy
import itertools
import pickle

import pytest
import torch
from conftest import tiny_llama
from generating import ROUNDING, Recorder, assert_same_run, conversation, generate, prompts
from transformers import DynamicCache

import hf_kvplus
from hf_kvplus._compat import forward_cache_name

CACHES = {
    "native": ("paged_native", {}),
    "int4": ("paged_int4", {}),
    "sliding": ("sliding_paged_native", {"window": 20, "sink_tokens": 2}),
    "keydiff": ("keydiff_paged_int8", {"budget": 20}),
    "disk": ("offloaded_paged_int8", {"offload_to": "disk"}),
    "reserved": ("paged_native", {"reserve": 300}),
    "reserved window": ("sliding_paged_native", {"window": 20, "sink_tokens": 2, "reserve": 300}),
    "reserved window int8": ("sliding_paged_int8", {"window": 20, "sink_tokens": 2, "reserve": 300}),
}
#: A copy reserves pages in another order, and so sums in another order: a code of int8 may come out one higher.
COPIED = {"reserved window int8": 2e-3}
TURNS = [prompts(30, 17), prompts(5, 9), prompts(20, 3)]


@pytest.fixture(scope="module")
def model():
    return tiny_llama(initializer_range=0.2)


def cache_of(model, kind):
    name, options = CACHES[kind]
    return hf_kvplus.make_cache(name, model, page_size=8, **options)


def answers(model, cache, between=lambda cache: cache, contexts=(torch.no_grad,)):
    """A conversation whose cache goes through `between` before every turn, each in the next of `contexts`."""
    held, contexts = [cache], iter(contexts * len(TURNS))

    def run(_, inputs):
        held[0] = between(held[0])
        with next(contexts)():
            return generate(model, inputs, max_new_tokens=11, **{forward_cache_name(model): held[0]})

    return conversation(run, cache, TURNS)


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize(
    "contexts",
    [(torch.inference_mode, torch.no_grad), (torch.no_grad, torch.inference_mode), (torch.inference_mode,)],
    ids=["inference mode first", "no_grad first", "inference mode alone"],
)
def test_turns_in_and_out_of_inference_mode(model, kind, contexts):
    expected = answers(model, cache_of(model, kind))
    for found, one in zip(answers(model, cache_of(model, kind), contexts=contexts), expected):
        assert_same_run(found, one)


@pytest.mark.parametrize("kind", CACHES)
def test_methods_outside_of_inference_mode(model, kind):
    runs = []
    for context in (torch.inference_mode, torch.no_grad):
        cache = cache_of(model, kind)
        with context():
            out = generate(model, prompts(30, 17), **{forward_cache_name(model): cache})
        cache.reorder_cache(torch.tensor([1, 0]))
        twin = cache.fork(2)
        twin.batch_select_indices(torch.tensor([1, 2]))
        ids = torch.cat([out.sequences[[1, 0]], prompts(9, 9)["input_ids"]], dim=1)
        inputs = {"input_ids": ids, "attention_mask": (ids > 0).long()}
        runs.append([generate(model, inputs, **{forward_cache_name(model): held}) for held in (cache, twin)])
    for one, other in zip(*runs):
        assert_same_run(one, other)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
@pytest.mark.parametrize("kind", [kind for kind in CACHES if kind != "disk"])
def test_copies_between_turns(model, kind, copied):
    expected = answers(model, cache_of(model, kind))
    for found, one in zip(answers(model, cache_of(model, kind), copied), expected):
        assert_same_run(found, one, COPIED.get(kind, ROUNDING))


@pytest.mark.parametrize("kind", ["native", "reserved", "sliding", "keydiff"])
def test_pickling_leaves_the_cache_and_its_forks_as_they_were(model, kind):
    def pickled(cache):
        keep.append((cache.fork(), pickle.dumps(cache)))
        return cache

    keep = []
    expected = answers(model, cache_of(model, kind))
    for found, one in zip(answers(model, cache_of(model, kind), pickled), expected):
        assert_same_run(found, one)


class Interrupting(Recorder):
    def put(self, value):
        super().put(value)
        if len(self.given) == 15:
            raise KeyboardInterrupt


@pytest.mark.parametrize("kind", ["native", "reserved"])
def test_go_on_after_an_interruption(model, kind):
    runs, name = [], forward_cache_name(model)
    for cache in (DynamicCache(config=model.config), cache_of(model, kind)):
        streamer = Interrupting()
        with pytest.raises(KeyboardInterrupt):
            generate(model, prompts(20), streamer=streamer, **{name: cache})
        ids = torch.tensor([[*itertools.chain(*streamer.given)]])
        assert int(cache.get_seq_length()) == ids.shape[1] - 1
        runs.append(generate(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, **{name: cache}))
    assert_same_run(*runs, ROUNDING)
