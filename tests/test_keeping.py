"""The cache of a string holds all tokens after any pass of a generation, or the model is refused."""

import copy

import pytest
import torch
from conftest import tiny_llama
from generating import MODES, NEW, assert_same_run, generate, prompts
from numerics import assert_close
from torch.nn.functional import pad
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    LlamaForCausalLM,
    Phi3Config,
    PhimoeConfig,
    StaticCache,
    WhisperConfig,
)
from transformers.models.phi3.modeling_phi3 import Phi3ForCausalLM
from transformers.models.phimoe.modeling_phimoe import PhimoeForCausalLM
from transformers.models.whisper.modeling_whisper import WhisperForCausalLM

import hf_kvplus
from hf_kvplus import hooks
from hf_kvplus._compat import forward_cache_name
from hf_kvplus.keeping import PREPARE_INPUTS

NAME = forward_cache_name(tiny_llama())
SWITCH = 48  # tokens at which the models below take other rotary frequencies, and drop their cache
SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "original_max_position_embeddings": SWITCH,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "sliding_window": None,
}


def longrope(kind: str):
    """A model that drops its cache when it has seen `SWITCH` tokens."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "original_max_position_embeddings": SWITCH}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 1.0, **factors}
    torch.manual_seed(0)
    if kind == "phi3":
        return Phi3ForCausalLM(Phi3Config(**SIZES, rope_parameters=rope)).eval()
    rope |= {"short_mscale": 1.0, "long_mscale": 1.0}
    return PhimoeForCausalLM(PhimoeConfig(**SIZES, rope_parameters=rope, num_local_experts=2)).eval()


def own(model, string="paged_native", **options):
    return {"cache_implementation": string, "cache_config": {"page_size": 8, **options}}


@pytest.mark.parametrize("kind", ["phi3", "phimoe"])
@pytest.mark.parametrize("lengths", [(30,), (40, 29), (48,), (49,), (90, 60)], ids=str)
def test_a_model_that_drops_its_cache(kind, lengths):
    """Before the prompt, at it, or between two of the tokens that it generates: as without a cache (5.17 itself, with
    one, goes on with the last token alone)."""
    model, inputs = longrope(kind), prompts(*lengths)
    ours = generate(model, inputs, **own(model))
    assert_same_run(ours, generate(model, inputs, use_cache=False))
    cache, expected = ours.past_key_values, DynamicCache(config=model.config)
    assert type(cache) is hf_kvplus.PagedCache
    assert cache.get_seq_length() == lengths[0] + NEW - 1
    mask = pad(inputs["attention_mask"], (0, NEW - 1), value=1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        model(ours.sequences[:, :-1], attention_mask=mask, position_ids=positions, **{NAME: expected})
    for layer, right in zip(cache.layers, expected.layers):
        for name in ("keys", "values"):
            found, stored = (getattr(each, name).transpose(1, 2)[mask.bool()] for each in (layer, right))
            assert_close(name, found, stored, 2e-5)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("lengths", [(40, 29), (90, 60)], ids=str)
def test_a_model_that_drops_its_cache_in_every_mode(mode, lengths):
    model, chunks = longrope("phi3"), "prefill_chunk_size" in MODES[mode]
    if chunks and lengths[0] < SWITCH:
        pytest.skip("with chunks, too, the cache is dropped at a step: as in greedy decoding")
    # Keys of the first chunks have the frequencies of short texts, in any cache.
    theirs = generate(model, prompts(*lengths), **{**MODES[mode], **({} if chunks else {"use_cache": False})})
    assert_same_run(generate(model, prompts(*lengths), **MODES[mode], **own(model)), theirs)


@pytest.mark.parametrize("drafts", [{"prompt_lookup_num_tokens": 3}, {"assistant_model": longrope("phi3")}])
@pytest.mark.parametrize("length", [40, 90])
def test_a_model_that_drops_its_cache_and_drafts(drafts, length):
    model = longrope("phi3")
    plain = generate(model, prompts(length))
    if (
        length < SWITCH
        and plain.sequences.tolist() != generate(model, prompts(length), use_cache=False).sequences.tolist()
    ):
        pytest.skip("this version of transformers itself loses all tokens at the switch")
    found = generate(model, prompts(length), **own(model), **drafts)
    assert_same_run(found, generate(model, prompts(length), **drafts))
    assert isinstance(found.past_key_values, hf_kvplus.PagedCache)


@pytest.mark.parametrize("length", [40, 90])
def test_what_a_string_asks_for_holds_behind_the_switch(length):
    model = longrope("phi3")
    seen = length + 25
    for string, options in {"sliding": {"window": 20, "sink_tokens": 2}, "keydiff": {"budget": 24}}.items():
        cache = generate(model, prompts(length), **own(model, f"{string}_paged_native", **options)).past_key_values
        assert {layer.get_seq_length() for layer in cache.layers} == {seen}
        assert max(layer.slots for layer in cache.layers) <= 24 + 2 * 8
    dense = generate(model, prompts(length)).sequences
    windowed = generate(
        model, prompts(length), **own(model, "sliding_paged_native", window=20, sink_tokens=2)
    ).sequences
    assert dense.tolist() != windowed.tolist()
    steps = generate(model, prompts(length), **own(model, reserve=length + 26))
    assert_same_run(steps, generate(model, prompts(length), use_cache=False))
    assert steps.past_key_values.layers[0].reservation is not None
    stats = generate(model, prompts(length), **own(model, "offloaded_paged_native", offload_to="disk")).past_key_values
    assert stats.stats().bytes_by_tier["disk"] > 0


def test_a_cache_of_the_users_goes_on_behind_the_switch():
    """The object that was given is the one that is filled, turn after turn."""
    model = longrope("phi3")
    cache = hf_kvplus.make_cache("paged_native", model, page_size=8)
    ids = prompts(30)["input_ids"]
    for turn in range(3):
        ours = generate(model, {"input_ids": ids}, **{NAME: cache}, max_new_tokens=12)
        assert_same_run(ours, generate(model, {"input_ids": ids}, use_cache=False, max_new_tokens=12))
        assert ours.past_key_values is cache
        assert cache.get_seq_length() == ids.shape[1] + 11
        ids = torch.cat([ours.sequences, prompts(5 + turn)["input_ids"]], dim=1)


def test_unregister_leaves_a_models_own_methods():
    model = longrope("phi3")
    hf_kvplus.unregister()
    before = vars(Phi3ForCausalLM)[PREPARE_INPUTS]
    hf_kvplus.register()
    generate(model, prompts(20), **own(model))
    assert (Phi3ForCausalLM, PREPARE_INPUTS) in {(hook.owner, hook.name) for hook in hooks.serving()}
    hf_kvplus.unregister()
    assert vars(Phi3ForCausalLM)[PREPARE_INPUTS] is before
    hf_kvplus.register()


# --- models that go on with a cache of their own ----------------------------------------------------------------------


def whisper_decoder():
    sizes = {"vocab_size": 128, "d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48}
    sizes |= {"encoder_layers": 3, "encoder_attention_heads": 4, "encoder_ffn_dim": 48, "max_target_positions": 128}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "decoder_start_token_id": 1}
    torch.manual_seed(0)
    return WhisperForCausalLM(WhisperConfig(**sizes, **tokens, init_std=0.3, is_encoder_decoder=False)).eval()


@pytest.mark.parametrize("mode", ["greedy", "sampling", "beams", "returned", "chunks_of_7", "chunks_of_1"])
@pytest.mark.parametrize("lengths", [(30,), (40, 29)], ids=str)
def test_a_model_that_puts_another_cache_in_the_place(mode, lengths):
    """Whisper's decoder alone makes a pair of caches where it finds an empty one."""
    model = whisper_decoder()
    rows = len(lengths)
    encoded = torch.randn(rows, 12, 32, generator=torch.Generator().manual_seed(1))
    inputs = {**prompts(*lengths), "encoder_outputs": (encoded,)}
    theirs = generate(model, inputs, **MODES[mode])
    ours = generate(model, inputs, **MODES[mode], **own(model))
    assert_same_run(ours, theirs)
    assert type(ours.past_key_values) is type(theirs.past_key_values) is EncoderDecoderCache
    kept, expected = ours.past_key_values.self_attention_cache, theirs.past_key_values.self_attention_cache
    assert type(kept) is hf_kvplus.PagedCache
    assert kept.is_initialized
    assert kept.get_seq_length() == expected.get_seq_length()
    assert len(kept.layers) == len(expected.layers)


class Own(LlamaForCausalLM):
    """Goes on with `kind` from its `calls`-th pass on."""

    kind, calls = None, 0

    def forward(self, *args, **kwargs):
        name = NAME
        given, type(self).calls = kwargs.get(name), type(self).calls - 1
        if self.calls < 0 and given is not None:
            kwargs[name] = type(self).kind(self, given)
        return super().forward(*args, **kwargs)


def moved(model, given):
    """A DynamicCache with what is stored."""
    if isinstance(given, DynamicCache) and not isinstance(given, hf_kvplus.PagedCache):
        return given
    cache = DynamicCache(config=model.config)
    for index, layer in enumerate(given.layers):
        if layer.is_initialized:
            cache.update(layer.keys, layer.values, index)
    return cache


def static(model, given):
    return StaticCache(config=model.config, max_cache_len=100)


def owning(kind, calls=0):
    torch.manual_seed(0)
    kinds = type("Owning", (Own,), {"kind": staticmethod(kind), "calls": calls})
    return kinds(tiny_llama(initializer_range=0.2).config).eval()


@pytest.mark.parametrize("calls", [0, 1, 4])
@pytest.mark.parametrize("mode", ["greedy", "beams", "chunks_of_7"])
def test_a_dynamic_cache_in_the_place_of_ours_is_moved_into_it(calls, mode):
    plain = owning(lambda model, given: given)
    theirs = generate(plain, prompts(40, 23), **MODES[mode])
    ours = generate(owning(moved, calls), prompts(40, 23), **MODES[mode], **own(plain))
    assert_same_run(ours, theirs)
    assert type(ours.past_key_values) is hf_kvplus.PagedCache
    assert ours.past_key_values.get_seq_length() == theirs.past_key_values.get_seq_length()


def test_policies_hold_in_what_is_moved():
    model = owning(lambda model, given: given if given.is_initialized else moved(model, given))
    string = own(model, "sliding_paged_native", window=16, sink_tokens=2)
    ours = generate(model, prompts(40, 23), **string)
    assert max(layer.slots for layer in ours.past_key_values.layers) <= 18 + 16
    expected = generate(owning(lambda model, given: given), prompts(40, 23), **string)
    assert_same_run(ours, expected)


@pytest.mark.parametrize("mode", ["greedy", "beams", "chunks_of_7"])
def test_any_other_cache_is_refused(mode):
    model = owning(static)
    match = r"PagedCache\(format=.*cannot serve Owning, which goes on with a StaticCache of its own. Leave"
    with pytest.raises(hf_kvplus.UnsupportedModelError, match=match):
        generate(model, prompts(40), **MODES[mode], **own(model))
    generate(owning(lambda model, given: given), prompts(40))


def test_a_window_that_dropped_tokens_cannot_be_moved():
    from transformers import MistralConfig, MistralForCausalLM

    class Windowed(MistralForCausalLM):
        def forward(self, *args, **kwargs):
            name = NAME
            if isinstance(kwargs.get(name), hf_kvplus.PagedCache):
                kwargs[name] = DynamicCache(config=self.config)
            return super().forward(*args, **kwargs)

    sizes = {key: value for key, value in SIZES.items() if not key.startswith("original")} | {"sliding_window": 20}
    model = Windowed(MistralConfig(**sizes)).eval()
    out = generate(model, prompts(15), **own(model))
    assert type(out.past_key_values) is hf_kvplus.PagedCache
    with pytest.raises(hf_kvplus.UnsupportedModelError, match="goes on with a DynamicCache of its own"):
        generate(model, prompts(40), **own(model))


class Forgetful(LlamaForCausalLM):
    """Stores what it is given in a copy of its cache, and gives the cache itself back."""

    def forward(self, *args, **kwargs):
        name = NAME
        given = kwargs[name]
        out = super().forward(*args, **{**kwargs, name: copy.deepcopy(given)})
        out[name] = given
        return out


@pytest.mark.parametrize("mode", ["greedy", "beams", "chunks_of_7"])
def test_a_cache_that_is_left_empty_is_noticed(mode):
    model = Forgetful(tiny_llama().config).eval()
    filled, drafts = hf_kvplus.make_cache("paged_int8", model), {"prompt_lookup_num_tokens": 3}
    generate(LlamaForCausalLM(model.config).eval(), prompts(20), **{NAME: filled})
    later = [{NAME: filled}] if mode != "beams" else []
    for again in (own(model), {**own(model), **drafts}, *later):
        with pytest.raises(hf_kvplus.UnsupportedModelError, match="Forgetful, which stores no keys in the cache"):
            generate(model, prompts(60), **MODES[mode] if drafts.keys() - again.keys() else {}, **again)
