"""Models with linear layers, or a linear state beside each attention: drafts, copies and rows, as `DynamicCache`."""

import copy
import functools
import pickle

import pytest
import test_architectures as architectures
import tiny_models as tiny
import torch
from generating import ROUNDING, assert_same_run
from numerics import assert_close
from transformers import DynamicCache

import hf_kvplus
from hf_kvplus._compat import forward_cache_name
from hf_kvplus.hybrid import HybridPagedLayer

#: Linear layers and attention layers; then both in one layer.
APART = ("jamba", "qwen3_next", "lfm2", "bamba", "nemotron_h", "granitemoehybrid", "olmo_hybrid")
TOGETHER = ("falcon_h1", "zamba2", "zaya", "inkling_text")
#: Of zaya, transformers 5.25 cannot tell how many drafts were accepted in a prompt lookup, with its own cache either.
LOOKUP = tuple(name for name in (*APART, *TOGETHER) if name != "zaya")


@functools.cache
def assistant(name):
    """Another model, which agrees with that of `name` now and then."""
    other, generator = copy.deepcopy(architectures.build(name)), torch.Generator().manual_seed(1)
    for weight in other.parameters():
        weight.data += 0.01 * torch.randn(weight.shape, generator=generator)
    return other


MODES = {
    "assistant": lambda name: {"assistant_model": assistant(name)},
    "same_assistant": lambda name: {"assistant_model": architectures.build(name)},
    "prompt_lookup": lambda name: {"prompt_lookup_num_tokens": 4},
}


@pytest.mark.parametrize("string", ["paged_native", "offloaded_paged_native", "sliding_paged_native"])
@pytest.mark.parametrize(
    ("mode", "name"),
    [(mode, name) for mode in MODES for name in (LOOKUP if mode == "prompt_lookup" else (*APART, *TOGETHER))],
)
def test_drafts(mode, name, string):
    run = functools.partial(architectures.generate, name, architectures.attentions(name)[0], **MODES[mode](name))
    if getattr(architectures.build(name), "_is_stateful", False):
        pytest.skip("transformers 5.25 is the first that drafts for stateful models")
    options = {"window": 500} if "sliding" in string else {}
    assert_same_run(run(string=string, options=options), run(), 5 * ROUNDING)


@pytest.mark.parametrize("name", [*APART, *TOGETHER])
def test_layers(name):
    cache = hf_kvplus.make_cache("paged_int8", architectures.build(name))
    assert bool(cache.paged_layers)
    assert any(isinstance(layer, HybridPagedLayer) for layer in cache.layers) == (name in TOGETHER)
    assert not any(layer.is_compileable for layer in cache.layers if isinstance(layer, HybridPagedLayer))


def ask(name, cache, ids):
    model = architectures.build(name)
    return model(ids, use_cache=True, **{forward_cache_name(model): cache}).logits


def given(rows, count, seed):
    return torch.randint(3, tiny.VOCABULARY - 4, (rows, count), generator=torch.Generator().manual_seed(seed))


COPIERS = {
    "fork": lambda cache: cache.fork(),
    "deepcopy": copy.deepcopy,
    "pickle": lambda cache: pickle.loads(pickle.dumps(cache)),
}


@torch.no_grad()
@pytest.mark.parametrize("copier", COPIERS)
@pytest.mark.parametrize("name", [*APART, *TOGETHER])
def test_copies_go_their_own_ways(name, copier):
    """After a copy, neither cache sees what the other was given."""
    model = architectures.build(name)
    ours, theirs = hf_kvplus.PagedCache(model.config, page_size=8), DynamicCache(config=model.config)
    for cache in (ours, theirs):
        ask(name, cache, given(2, 21, 0))
    pairs = [(ours, theirs), (COPIERS[copier](ours), copy.deepcopy(theirs))]
    for step in range(12):
        for seed, (one, other) in enumerate(pairs):
            ids = given(2, 1, 100 * seed + step)
            assert_close(f"step {step}", ask(name, one, ids), ask(name, other, ids), 5 * ROUNDING)


@torch.no_grad()
@pytest.mark.parametrize("name", [*APART, *TOGETHER])
def test_rows(name):
    """`fork(2)`, and beams that change places."""
    model = architectures.build(name)
    ours, theirs = hf_kvplus.PagedCache(model.config, page_size=8), DynamicCache(config=model.config)
    for cache in (ours, theirs):
        ask(name, cache, given(2, 21, 0))
    ours = ours.fork(2)
    theirs.reorder_cache(torch.tensor([0, 0, 1, 1]))
    for step in range(12):
        ids, order = given(4, 1, step), torch.tensor([3, 1, 1, 0])
        assert_close(f"step {step}", ask(name, ours, ids), ask(name, theirs, ids), 5 * ROUNDING)
        for cache in (ours, theirs):
            cache.reorder_cache(order)


@torch.no_grad()
@pytest.mark.parametrize("name", TOGETHER)
def test_crop_without_recording_is_refused_and_changes_nothing(name):
    cache = hf_kvplus.PagedCache(architectures.build(name).config, page_size=8)
    ask(name, cache, given(1, 21, 0))
    twin = cache.fork()
    with pytest.raises(RuntimeError, match="activate_past_recording"):
        cache.layers[-1].crop(-3)
    ids = given(1, 1, 1)
    assert torch.equal(ask(name, cache, ids), ask(name, twin, ids))


@torch.no_grad()
@pytest.mark.parametrize("name", TOGETHER)
def test_reset(name):
    cache = hf_kvplus.PagedCache(architectures.build(name).config, page_size=8)
    expected = ask(name, cache, given(2, 21, 0))
    cache.reset()
    assert int(cache.get_seq_length()) == 0
    assert torch.equal(ask(name, cache, given(2, 21, 0)), expected)


@torch.no_grad()
@pytest.mark.parametrize("name", TOGETHER)
def test_stats_count_both_halves(name):
    model = architectures.build(name)
    ours, theirs = hf_kvplus.PagedCache(model.config, page_size=8), DynamicCache(config=model.config)
    for cache in (ours, theirs):
        ask(name, cache, given(2, 16, 0))
    held = [
        tensor
        for layer in theirs.layers
        for name, states in vars(layer).items()
        if name in ("conv_states", "recurrent_states", "cumulative_length_linear")
        for tensor in torch.utils._pytree.tree_leaves(states)
        if tensor is not None
    ]
    assert held
    pages = sum(sum(layer.bytes_by_tier().values()) for layer in ours.paged_layers)
    assert ours.stats().bytes_allocated == pages + sum(tensor.nbytes for tensor in held)
