"""Caches that evict: `generate()` does as full attention under an explicit mask over the tokens they keep."""

import copy

import pytest
import torch
from conftest import tiny_llama
from generating import (
    MODES,
    ROUNDING,
    Recorder,
    assert_same_run,
    conversation,
    drafting_model,
    generate,
    main_model,
    own_prompt,
    prompts,
    tokens,
)
from numerics import assert_close
from reference import Distinct, ReferenceCache, Window, reference_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

import hf_kvplus
from hf_kvplus._compat import forward_cache_name

PAGE = 8

#: name of the string's policy, its `cache_config`, and the reference of it
POLICIES = {
    "sliding": ("sliding", {"window": 13, "sink_tokens": 3}, Window(13, 3)),
    "keydiff": ("keydiff", {"budget": 21}, Distinct(21)),
    "keydiff_fraction": ("keydiff", {"budget": 0.4}, Distinct(0.4)),
}
MORE = {
    "sliding_without_sinks": ("sliding", {"window": 9, "sink_tokens": 0}, Window(9, 0)),
    "sliding_narrow": ("sliding", {"window": 1, "sink_tokens": 1}, Window(1, 1)),
    "keydiff_whole_pages": ("keydiff", {"budget": 24}, Distinct(24)),
    "keydiff_less_than_a_page": ("keydiff", {"budget": 3}, Distinct(3)),
}


@pytest.fixture(scope="module")
def model():
    return main_model()


@pytest.fixture(scope="module")
def assistant():
    return drafting_model()


@pytest.fixture(params=POLICIES)
def policy(request):
    return POLICIES[request.param]


def string(policy, format: str = "native", placement: str = "") -> dict:
    """`generate` arguments that ask for `policy`."""
    name, options, _ = policy
    return {"cache_implementation": f"{placement}{name}_paged_{format}", "cache_config": {"page_size": PAGE, **options}}


def empty_cache(model, policy, format: str = "native"):
    name, options = string(policy, format).values()
    return hf_kvplus.make_cache(name, model, **options)


def reference_run(model, policy, inputs, sharpness=1.0, **kwargs):
    """`generate` with the reference of `policy`."""
    with reference_attention(model, ReferenceCache(model.config, policy[2], PAGE), sharpness) as cache:
        return generate(model, inputs, **{forward_cache_name(model): cache}, **kwargs)


def held(cache) -> list:
    """The positions that every layer, row and head of ours keeps, as the next pass would find them."""
    layers = []
    for layer in cache.fork().layers:
        layer._settle()
        layers.append([[sorted(head[head >= 0].tolist()) for head in row] for row in layer.slot_positions()])
    return layers


def assert_same_tokens_held(policy, ours, theirs) -> None:
    """KeyDiff holds what the reference keeps; a window all that the next query sees, and less than two pages more."""
    for layer, expected in zip(held(ours), theirs.layers):
        if isinstance(policy[2], Distinct):
            assert layer == expected.held()
            continue
        real, window, sinks = expected.real, policy[2].window, policy[2].sinks
        for row, heads in enumerate(layer):
            own = real[row].nonzero().flatten().tolist()
            needed = own[:sinks] + own[max(sinks, len(own) - window + 1) :]
            for head in heads:
                assert set(needed) <= set(head) <= set(own)
                assert len(head) < len(needed) + 2 * PAGE + 16


def assert_same_as_reference(model, policy, inputs, **kwargs) -> None:
    ours, theirs = generate(model, inputs, **kwargs, **string(policy)), reference_run(model, policy, inputs, **kwargs)
    assert_same_run(ours, theirs)
    assert_same_tokens_held(policy, ours.past_key_values, theirs.past_key_values)


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "uncached"])
@pytest.mark.parametrize("lengths", [(47,), (47, 5, 31)], ids=["one", "padded"])
def test_modes(model, policy, mode, lengths):
    inputs = prompts(*lengths)
    ours, theirs = (
        generate(model, inputs, **MODES[mode], **string(policy)),
        reference_run(model, policy, inputs, **MODES[mode]),
    )
    assert_same_run(ours, theirs)
    assert_same_tokens_held(policy, ours.past_key_values, theirs.past_key_values)


@pytest.mark.parametrize("policy", [*POLICIES.values(), *MORE.values()], ids=[*POLICIES, *MORE])
@pytest.mark.parametrize("lengths", [(4,), (20, 14), (70, 30)])
def test_long_generations(model, policy, lengths):
    assert_same_as_reference(model, policy, prompts(*lengths), max_new_tokens=60)


@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_offloaded(model, policy, where):
    kwargs = string(policy, placement="offloaded_")
    kwargs["cache_config"]["offload_to"] = where
    assert_same_run(generate(model, prompts(47, 5), **kwargs), reference_run(model, policy, prompts(47, 5)))


@pytest.mark.parametrize("mode", ["greedy", "chunks_of_19"])
def test_eager(policy, mode):
    eager = tiny_llama(initializer_range=0.2, attn_implementation="eager")
    assert_same_as_reference(eager, policy, prompts(47, 5), **MODES[mode])


@pytest.mark.parametrize("mode", ["greedy", "beams", "chunks_of_19"])
def test_attentions(policy, mode):
    """A column for every token, zero where it was evicted."""
    eager = tiny_llama(initializer_range=0.2, attn_implementation="eager")
    wanted = {"output_attentions": True, **MODES[mode]}
    ours = generate(eager, prompts(47), **wanted, **string(policy))
    theirs = reference_run(eager, policy, prompts(47), **wanted)
    for step, (layers, expected) in enumerate(zip(ours.attentions, theirs.attentions, strict=True)):
        for index, (got, want) in enumerate(zip(layers, expected, strict=True)):
            assert_close(f"attentions of step {step}, layer {index}", got, want, ROUNDING)


@pytest.mark.parametrize("drafts", [3, 11, 21])
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampling"])
def test_assistant(model, assistant, policy, drafts, sampled):
    assistant.generation_config.num_assistant_tokens = drafts
    mode = {"do_sample": sampled, "assistant_model": assistant, "max_new_tokens": 40}
    assert_same_as_reference(model, policy, prompts(41), **mode)


@pytest.mark.parametrize("drafts", [2, 10, 24])
def test_prompt_lookup(model, policy, drafts):
    mode = {"prompt_lookup_num_tokens": drafts, "max_matching_ngram_size": 2}
    assert_same_as_reference(model, policy, prompts(41), **mode)


@pytest.mark.parametrize("chunk", [7, 19, 37])
@pytest.mark.parametrize("lengths", [(60, 20, 12), (75, 71, 59)])
def test_rows_that_begin_within_a_chunk(model, policy, chunk, lengths):
    assert_same_as_reference(model, policy, prompts(*lengths), prefill_chunk_size=chunk)


@pytest.mark.parametrize("lengths", [(3, 70, 17, 40), (23, 24, 26, 31), (60, 61)])
def test_each_row_equals_its_own_unpadded_run(model, policy, lengths):
    together = generate(model, prompts(*lengths), max_new_tokens=40, **string(policy))
    for row in range(len(lengths)):
        alone = generate(model, own_prompt(prompts(*lengths), row), max_new_tokens=40, **string(policy))
        assert together.sequences[row, -40:].tolist() == alone.sequences[0, -40:].tolist()
        for step, (logits, expected) in enumerate(zip(together.logits, alone.logits)):
            assert_close(f"row {row}, step {step}", logits[row], expected[0], ROUNDING)


@pytest.mark.parametrize("whole", [True, False], ids=["all_tokens_again", "new_tokens_only"])
@pytest.mark.parametrize(
    "lengths",
    [[(41,), (3,), (25,)], [(41,), (15,), (15,)], [(41, 5, 24), (9, 9, 9), (20, 20, 20)],
     [(41, 5, 24), (3, 14, 9), (9, 25, 2)], [(10, 12), (40, 3), (2, 16)]],
    ids=["short_long", "middle", "padded", "padded_within", "padded_within_long"],
)  # fmt: skip
def test_three_turns(model, policy, lengths, whole):
    name = forward_cache_name(model)
    turns = [prompts(*turn) for turn in lengths]

    def run(cache, inputs):
        return generate(model, inputs, max_new_tokens=11, **{name: cache})

    ours = conversation(run, empty_cache(model, policy), turns, whole)
    with reference_attention(model, ReferenceCache(model.config, policy[2], PAGE)) as cache:
        theirs = conversation(run, cache, turns, whole)
    for one, other in zip(ours, theirs):
        assert_same_run(one, other)
    assert_same_tokens_held(policy, ours[-1].past_key_values, cache)
    for row in range(len(lengths[0])):
        own = [
            {name: tensor[row : row + 1, -turn[row] :] for name, tensor in prompts(*turn).items()} for turn in lengths
        ]
        alone = conversation(run, empty_cache(model, policy), own, whole)
        for together, single in zip(ours, alone):
            assert together.sequences[row, -11:].tolist() == single.sequences[0, -11:].tolist()


# --- by hand ----------------------------------------------------------------------------------------------------------


def feed(model, cache, ids):
    with torch.no_grad():
        return model(ids, use_cache=True, **{forward_cache_name(model): cache}).logits


class Pair:
    """A cache of ours and the reference of it, given the same tokens and the same calls."""

    def __init__(self, model, policy) -> None:
        self.model, self.policy = model, policy
        self.ours, self.theirs = empty_cache(model, policy), ReferenceCache(model.config, policy[2], PAGE)

    def feed(self, ids) -> None:
        ours = feed(self.model, self.ours, ids)
        with reference_attention(self.model, self.theirs):
            assert_close("logits", ours, feed(self.model, self.theirs, ids), ROUNDING)

    def call(self, method: str, *args) -> None:
        for cache in (self.ours, self.theirs):
            getattr(cache, method)(*args)

    def copied(self, copier) -> "Pair":
        twin = copy.copy(self)
        twin.ours, twin.theirs = copier(self.ours), copy.deepcopy(self.theirs)
        return twin


@pytest.mark.parametrize("count", [1, 6, 20])
def test_rows_chosen_and_repeated(model, policy, count):
    pair, rows = Pair(model, policy), 4
    operations = [
        None,
        ("reorder_cache", torch.tensor([2, 0, 0, 1])),
        ("batch_repeat_interleave", 2),
        ("batch_select_indices", torch.tensor([7, 2, 3])),
        ("reorder_cache", torch.tensor([1, 1, 1])),
    ]
    for seed, operation in enumerate(operations):
        if operation:
            pair.call(*operation)
        rows = {2: 8, 3: 3}.get(seed, rows)
        for length in (count, 11, 1):
            pair.feed(tokens(rows, length, seed))
        assert_same_tokens_held(policy, pair.ours, pair.theirs)
    pair.ours.reset()
    pair.theirs = ReferenceCache(model.config, policy[2], PAGE)
    pair.feed(tokens(2, 40))
    pair.feed(tokens(2, 1))
    assert_same_tokens_held(policy, pair.ours, pair.theirs)


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda cache: cache.fork()], ids=["deepcopy", "fork"])
@pytest.mark.parametrize("length", [6, 21, 50])
def test_copies_go_their_own_ways(model, policy, copier, length):
    pair = Pair(model, policy)
    pair.feed(tokens(2, length))
    pairs = [pair, pair.copied(copier), pair.copied(copier)]
    for turn in range(2):
        for seed, one in enumerate(pairs):
            for count in (1, 9, 20, 1):
                one.feed(tokens(2, count, seed=10 * turn + seed))
    for one in pairs:
        assert_same_tokens_held(policy, one.ours, one.theirs)


@pytest.mark.parametrize("drafts", [2, 7, 15, 30])
def test_drafts_taken_back(model, policy, drafts):
    """Tokens that no later pass has seen can be cropped, whatever was evicted before them."""
    pair = Pair(model, policy)
    pair.feed(tokens(2, 50))
    for step in range(8):
        pair.feed(tokens(2, drafts, step))
        pair.call("crop", -(drafts - step % drafts))
        pair.feed(tokens(2, 1, step))
    assert_same_tokens_held(policy, pair.ours, pair.theirs)


def test_crop_behind_an_eviction(model, policy):
    pair = Pair(model, policy)
    pair.feed(tokens(1, 70))
    pair.feed(tokens(1, 1))
    before = held(pair.ours)
    with pytest.raises(ValueError, match=r"`tokens_to_remove`: got -30, which goes back to 41 tokens, .*fork"):
        pair.ours.crop(-30)
    assert held(pair.ours) == before
    pair.feed(tokens(1, 5))


@pytest.mark.parametrize("name", ["sliding", "keydiff"])
def test_crop_to_before_anything_was_evicted(model, name):
    policy = POLICIES[name]
    pair = Pair(model, policy)
    pair.feed(tokens(1, 7))
    pair.feed(tokens(1, 1))
    pair.call("crop", -4)
    pair.feed(tokens(1, 40))
    pair.feed(tokens(1, 1))
    assert_same_tokens_held(policy, pair.ours, pair.theirs)


# --- int8 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [(47, *[1] * 30), (19, 19, 9, *[1] * 12), (30, 7, 7, 7, 16, 5)])
def test_int8_is_close_to_native(model, policy, steps):
    """Rows agree until two keys are so nearly as distinctive that rounding decides which is kept; that is rare."""
    native, int8 = empty_cache(model, policy), empty_cache(model, policy, "int8")
    agree, compared = torch.ones(4, dtype=torch.bool), 0
    for seed, count in enumerate(steps):
        ids = tokens(4, count, seed)
        logits, expected = feed(model, int8, ids), feed(model, native, ids)
        assert_close("logits", logits[agree], expected[agree], 0.1)
        compared += int(agree.sum())
        kept, wanted = held(int8), held(native)
        for row in range(4):
            pairs = [
                (set(one[row][head]), set(other[row][head])) for one, other in zip(kept, wanted) for head in (0, 1)
            ]
            agree[row] &= all(one == other for one, other in pairs)
            assert all(len(one) == len(other) and len(one & other) > 0.75 * len(other) for one, other in pairs)
    assert compared >= 2 * len(steps)


# --- what cannot be served --------------------------------------------------------------------------------------------


def halved(module, query, key, value, mask, scaling=None, **kwargs):
    """An attention function of a user's own: not what any of ours computes."""
    return sdpa_attention_forward(module, query, key, value, mask, scaling=scaling / 2, **kwargs)


@pytest.fixture
def own_attention():
    AttentionInterface.register("own", halved)
    yield "own"
    del AttentionInterface._global_mapping["own"]
    AttentionMaskInterface._global_mapping.pop("own", None)


@pytest.mark.parametrize("lengths", [(47,), (47, 5)], ids=["one", "padded"])
@pytest.mark.parametrize("mode", ["greedy", "beams", "chunks_of_19"])
def test_attention_function_of_ones_own(policy, own_attention, mode, lengths):
    AttentionMaskInterface.register("own", sdpa_mask)
    model = tiny_llama(initializer_range=0.2, attn_implementation="own")
    ours = generate(model, prompts(*lengths), **MODES[mode], **string(policy))
    theirs = reference_run(model, policy, prompts(*lengths), sharpness=0.5, **MODES[mode])
    assert_same_run(ours, theirs)


@pytest.mark.parametrize("implementation", ["own", "flex_attention"])
def test_attention_that_takes_no_mask_of_ours(policy, own_attention, implementation):
    """Refused before the first token."""
    model = tiny_llama(initializer_range=0.2, attn_implementation=implementation, head_dim=16)
    streamer = Recorder()
    refused = pytest.raises(hf_kvplus.UnsupportedModelError, match=r"evicts tokens cannot .*sdpa")
    with torch.compiler.set_stance("force_eager"), refused:
        generate(model, prompts(47), streamer=streamer, **string(policy))
    assert len(streamer.given) == 1  # the prompt
