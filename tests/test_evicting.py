"""Caches that evict: `generate()` does as full attention under an explicit mask over the tokens they keep."""

import pytest
import torch
from conftest import tiny_llama
from generating import MODES, ROUNDING, assert_same_run, generate, own_prompt, prompts
from numerics import assert_close
from reference import Distinct, ReferenceCache, Window, reference_attention
from torch.nn.functional import pad

import hf_kvplus
from hf_kvplus._compat import forward_cache_name

PAGE = 8

#: name of the string's policy, its `cache_config`, and the reference of it
POLICIES = {
    "sliding": ("sliding", {"window": 13, "sink_tokens": 3}, Window(13, 3)),
    "sliding_without_sinks": ("sliding", {"window": 9, "sink_tokens": 0}, Window(9, 0)),
    "keydiff": ("keydiff", {"budget": 24}, Distinct(24)),
    "keydiff_odd": ("keydiff", {"budget": 21}, Distinct(21)),
    "keydiff_fraction": ("keydiff", {"budget": 0.4}, Distinct(0.4)),
}


@pytest.fixture(scope="module")
def model():
    model = tiny_llama(initializer_range=0.2)
    model.generation_config.num_assistant_tokens_schedule = "constant"
    return model


@pytest.fixture(scope="module")
def assistant():
    other = tiny_llama(initializer_range=0.2)
    generator = torch.Generator().manual_seed(1)
    for weight in other.parameters():
        weight.data += 0.02 * torch.randn(weight.shape, generator=generator)
    other.generation_config.num_assistant_tokens_schedule = "constant"
    return other


@pytest.fixture(params=POLICIES)
def policy(request):
    return POLICIES[request.param]


def string(policy, format: str = "native", placement: str = "") -> dict:
    """`generate` arguments that ask for `policy`."""
    name, options, _ = policy
    return {"cache_implementation": f"{placement}{name}_paged_{format}", "cache_config": {"page_size": PAGE, **options}}


def empty_cache(model, policy):
    name, options = string(policy).values()
    return hf_kvplus.make_cache(name, model, **options)


def reference_run(model, policy, inputs, cache=None, **kwargs):
    """`generate` with the reference of `policy`."""
    with reference_attention(model, cache or ReferenceCache(model.config, policy[2], PAGE)) as cache:
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


@pytest.mark.parametrize("lengths", [(4,), (20,), (70,)])
def test_long_generations(model, policy, lengths):
    ours = generate(model, prompts(*lengths), max_new_tokens=60, **string(policy))
    theirs = reference_run(model, policy, prompts(*lengths), max_new_tokens=60)
    assert_same_run(ours, theirs)
    assert_same_tokens_held(policy, ours.past_key_values, theirs.past_key_values)


@pytest.mark.parametrize("placement", ["offloaded_"])
@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_offloaded(model, policy, placement, where):
    kwargs = string(policy, placement=placement)
    kwargs["cache_config"]["offload_to"] = where
    assert_same_run(generate(model, prompts(47, 5), **kwargs), reference_run(model, policy, prompts(47, 5)))


def test_eager(policy):
    eager = tiny_llama(initializer_range=0.2, attn_implementation="eager")
    for mode in ("greedy", "chunks_of_19"):
        ours, theirs = (
            generate(eager, prompts(47, 5), **MODES[mode], **string(policy)),
            reference_run(eager, policy, prompts(47, 5), **MODES[mode]),
        )
        assert_same_run(ours, theirs)


@pytest.mark.parametrize("drafts", [3, 11, 21])
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampling"])
def test_assistant(model, assistant, policy, drafts, sampled):
    assistant.generation_config.num_assistant_tokens = drafts
    mode = {"do_sample": sampled, "assistant_model": assistant, "max_new_tokens": 40}
    ours, theirs = (
        generate(model, prompts(41), **mode, **string(policy)),
        reference_run(model, policy, prompts(41), **mode),
    )
    assert_same_run(ours, theirs)
    assert_same_tokens_held(policy, ours.past_key_values, theirs.past_key_values)


@pytest.mark.parametrize("drafts", [2, 10, 24])
def test_prompt_lookup(model, policy, drafts):
    mode = {"prompt_lookup_num_tokens": drafts, "max_matching_ngram_size": 2}
    ours, theirs = (
        generate(model, prompts(41), **mode, **string(policy)),
        reference_run(model, policy, prompts(41), **mode),
    )
    assert_same_run(ours, theirs)
    assert_same_tokens_held(policy, ours.past_key_values, theirs.past_key_values)


@pytest.mark.parametrize("mode", ["chunks_of_7", "chunks_of_19", "chunks_of_37"])
@pytest.mark.parametrize("lengths", [(60, 20, 12), (75, 71, 59)])
def test_rows_that_begin_within_a_chunk(model, policy, mode, lengths):
    inputs, kwargs = prompts(*lengths), {"prefill_chunk_size": int(mode.split("_")[-1])}
    ours, theirs = generate(model, inputs, **kwargs, **string(policy)), reference_run(model, policy, inputs, **kwargs)
    assert_same_run(ours, theirs)
    assert_same_tokens_held(policy, ours.past_key_values, theirs.past_key_values)


@pytest.mark.parametrize("lengths", [(3, 70, 17, 40), (23, 24, 26, 31), (60, 61)])
def test_each_row_equals_its_own_unpadded_run(model, policy, lengths):
    together = generate(model, prompts(*lengths), max_new_tokens=40, **string(policy))
    for row in range(len(lengths)):
        alone = generate(model, own_prompt(prompts(*lengths), row), max_new_tokens=40, **string(policy))
        assert together.sequences[row, -40:].tolist() == alone.sequences[0, -40:].tolist()
        for step, (logits, expected) in enumerate(zip(together.logits, alone.logits)):
            assert_close(f"row {row}, step {step}", logits[row], expected[0], ROUNDING)


def conversation(model, run, cache, turns, whole=True, answer=11):
    """What `run(cache, inputs)` generates in turns; each adds a message, left-padded as a batch of its own.

    Args:
        turns: for every turn, `input_ids` and `attention_mask` of the messages.
        whole: whether every turn is given all tokens again, or only those that the cache has not seen.
    """
    outs = []
    ids = mask = torch.zeros(len(turns[0]["input_ids"]), 0, dtype=torch.long)
    for turn in turns:
        ids, mask = torch.cat([ids, turn["input_ids"]], 1), torch.cat([mask, turn["attention_mask"]], 1)
        unseen = ids if whole else ids[:, cache.get_seq_length() :]
        outs.append(run(cache, {"input_ids": unseen, "attention_mask": mask}))
        ids, mask = torch.cat([ids, outs[-1].sequences[:, -answer:]], 1), pad(mask, (0, answer), value=1)
    return outs


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

    ours = conversation(model, run, empty_cache(model, policy), turns, whole)
    with reference_attention(model, ReferenceCache(model.config, policy[2], PAGE)) as cache:
        theirs = conversation(model, run, cache, turns, whole)
    for one, other in zip(ours, theirs):
        assert_same_run(one, other)
    assert_same_tokens_held(policy, ours[-1].past_key_values, cache)
    for row in range(len(lengths[0])):
        own = [
            {name: tensor[row : row + 1, -turn[row] :] for name, tensor in prompts(*turn).items()} for turn in lengths
        ]
        alone = conversation(model, run, empty_cache(model, policy), own, whole)
        for together, single in zip(ours, alone):
            assert together.sequences[row, -11:].tolist() == single.sequences[0, -11:].tolist()
