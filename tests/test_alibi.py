"""ALiBi in the mask (Falcon since transformers 5.25): what evicting leaves keeps the distances of the full sequence.

The reference makes the bias anew, from the distances of a row's own tokens: Press et al. 2022, "Train Short, Test Long:
Attention with Linear Biases Enables Input Length Extrapolation", section 3. Falcon divides it by the root of the head
dimension.
"""

import pytest
import torch
from generating import MODES, ROUNDING, assert_same_run, conversation, prompts
from generating import generate as generate_any
from numerics import assert_close, relative_rms
from reference import Distinct, ReferenceCache, Window, reference_attention
from test_architectures import _asks_for_attention
from transformers import FalconConfig, FalconForCausalLM

import hf_kvplus
from hf_kvplus._compat import forward_cache_name

pytestmark = pytest.mark.skipif(not _asks_for_attention("falcon"), reason="Falcon's attention is inline before 5.25")

PAGE, HEADS, DIM, VOCABULARY = 8, 4, 16, 256
POLICIES = {
    "sliding": ({"window": 13, "sink_tokens": 3}, Window(13, 3)),
    "keydiff": ({"budget": 21}, Distinct(21)),
}


@pytest.fixture(scope="module", params=[False, True], ids=["mha", "mqa"])
def model(request):
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": HEADS * DIM, "num_hidden_layers": 2, "num_attention_heads": HEADS}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
    config = FalconConfig(**sizes, **tokens, alibi=True, multi_query=request.param, initializer_range=0.2)
    return FalconForCausalLM(config).eval()


@pytest.fixture(params=POLICIES)
def policy(request):
    return request.param


#: Keys of the first layer know no positions: of tokens that repeat, which one KeyDiff keeps would be left to rounding.
UPPER = range(VOCABULARY // 2, VOCABULARY)
DISTINCT = {"no_repeat_ngram_size": 1, "suppress_tokens": list(UPPER)}


def generate(model, inputs, **kwargs):
    return generate_any(model, inputs, **DISTINCT, **kwargs)


def questions(*turns: tuple[int, ...]) -> list[dict[str, torch.Tensor]]:
    """`prompts` of so many tokens in each turn, in which no row has a token twice."""
    given, unused = [prompts(*lengths) for lengths in turns], iter(torch.randperm(len(UPPER)) + UPPER.start)
    for turn in given:
        rows, width = turn["input_ids"].shape
        ids = torch.stack([next(unused) for _ in range(width)]).expand(rows, -1)
        turn["input_ids"] = ids * turn["attention_mask"]
    return given


def alibi(distances: torch.Tensor) -> torch.Tensor:
    slopes = 2.0 ** (-8 / HEADS * torch.arange(1, HEADS + 1))
    return -slopes[:, None, None] * distances / DIM**0.5


def reference(model, policy, bias=alibi):
    return reference_attention(model, ReferenceCache(model.config, POLICIES[policy][1], PAGE), bias=bias)


def string(policy) -> dict:
    options = {"page_size": PAGE, **POLICIES[policy][0]}
    return {"cache_implementation": f"{policy}_paged_native", "cache_config": options}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "uncached"])
@pytest.mark.parametrize("lengths", [(47,), (47, 5, 31)], ids=["one", "padded"])
def test_modes(model, policy, mode, lengths, attention):
    model.set_attn_implementation(attention)
    (inputs,) = questions(lengths)
    ours = generate(model, inputs, **MODES[mode], **string(policy))
    with reference(model, policy) as cache:
        theirs = generate(model, inputs, **{forward_cache_name(model): cache}, **MODES[mode])
    assert_same_run(ours, theirs)


def test_distances_matter_to_this_model(model, policy):
    runs = []
    for bias in (alibi, lambda distances: 0.5 * alibi(distances)):
        with reference(model, policy, bias) as cache:
            runs.append(generate(model, prompts(47, 31), **{forward_cache_name(model): cache}, max_new_tokens=1))
    assert relative_rms(*(run.logits[0] for run in runs)) > 100 * ROUNDING


@pytest.mark.parametrize("lengths", [[(41,), (3,), (25,)], [(41, 5, 24), (3, 14, 9), (9, 25, 2)]])
def test_turns(model, policy, lengths):
    """Padding between turns is no distance."""
    name, turns = forward_cache_name(model), questions(*lengths)

    def run(cache, inputs):
        return generate(model, inputs, max_new_tokens=11, **{name: cache})

    ours = conversation(
        run, hf_kvplus.make_cache(f"{policy}_paged_native", model, **string(policy)["cache_config"]), turns
    )
    with reference(model, policy) as cache:
        for found, expected in zip(ours, conversation(run, cache, turns)):
            assert_same_run(found, expected)


@pytest.mark.parametrize("lengths", [(40,), (40, 11)], ids=["one", "padded"])
def test_a_reservation_is_not_made(model, lengths):
    """This model's masks are as long as what was seen."""
    expected = generate(model, prompts(*lengths))
    out = generate(model, prompts(*lengths), cache_implementation="paged_native", cache_config={"reserve": 200})
    assert_same_run(out, expected)
    cache = hf_kvplus.PagedCache(model.config, reserve=200)
    assert_same_run(generate(model, prompts(*lengths), **{forward_cache_name(model): cache}), expected)


@torch.no_grad()
def test_a_reservation_by_hand(model):
    """The bias is as long as the mask that is given, and masks are asked for over all that is reserved."""
    cache, ids = hf_kvplus.PagedCache(model.config, page_size=PAGE, reserve=64), prompts(40, 40)["input_ids"]
    expected = model(ids, use_cache=False).logits
    model(ids[:, :30], cache=cache)
    for seen in range(30, 40):
        logits = model(ids[:, seen : seen + 1], cache=cache, attention_mask=torch.ones(2, 64, dtype=torch.long)).logits
        assert_close("logits", logits[:, 0], expected[:, seen], ROUNDING)
    assert all(layer.reservation is not None for layer in cache.layers)
    with pytest.raises(RuntimeError, match="64"):  # as with a StaticCache
        model(ids[:, :1], cache=cache)
