"""Reservations in `generate`: asked for, made for a compiler, left by another mode; the same tokens in any case."""

import pytest
import tiny_models as tiny
import torch
from conftest import tiny_llama
from generating import ROUNDING, assert_same_run, drafting_model, generate, main_model, prompts
from numerics import assert_close
from test_architectures import assert_same, build, dynamic
from test_architectures import generate as generate_with
from transformers import CompileConfig, DynamicCache

import hf_kvplus
from hf_kvplus import _compat, step

#: Models that take reservations; then those that would misread keys longer than what was seen, or have no paged layer.
FIXED = ("llama", "gemma3_text", "gpt_oss", "falcon", "deepseek_v3", "qwen3_next", "mixtral")
FIXED += ("llama4_text",) if _compat.makes_masks_of_steps(build("llama4_text").config) else ()
LOOSE = ("t5", "mt5", "bart", "t5gemma2", "prophetnet", "led", "switch_transformers", "longt5", "moshi", "gpt_neo")
LOOSE += ("mpt", "bloom", "falcon:alibi", "mamba2", "jetmoe", "recurrent_gemma")


@pytest.fixture(scope="module")
def model():
    return main_model()


@pytest.fixture
def compiling():
    """A `compile_config` that `generate` follows; nothing is compiled."""
    config = CompileConfig()
    config._compile_all_devices = True
    with torch.compiler.set_stance("force_eager"):
        yield config


def is_reserved(cache) -> bool:
    return any(layer.reservation is not None for layer in cache.paged_layers)


@pytest.mark.parametrize("name", dict.fromkeys([*FIXED, "llama4_text", *LOOSE]))
def test_models(name, compiling):
    attention = "sdpa" if build(name)._supports_sdpa else "eager"
    for lengths in [(tiny.PROMPT,), (tiny.PROMPT, 12)][: 1 + (name in tiny.TEXT)]:
        expected = dynamic(name, attention, lengths)
        for asked in ({"options": {"reserve": 200}}, {"compile_config": compiling}):
            out = generate_with(name, attention, lengths, "paged_native", **asked)
            assert_same(name, out, expected)
            cache = getattr(out.past_key_values, "self_attention_cache", out.past_key_values)
            assert is_reserved(cache) == (name in FIXED)


@pytest.mark.parametrize("name", FIXED)
def test_models_as_on_a_device(name, compiling, monkeypatch):
    monkeypatch.setattr(step, "on_host", lambda device: False)
    lengths, attention = (tiny.PROMPT, 12), "sdpa" if build(name)._supports_sdpa else "eager"
    out = generate_with(name, attention, lengths, "paged_native", compile_config=compiling)
    assert_same(name, out, dynamic(name, attention, lengths))


@pytest.mark.parametrize("reserve", [1, 20, 45, 60])
@pytest.mark.parametrize("lengths", [(40,), (40, 11)])
def test_a_reservation_that_is_too_small_is_enlarged(model, reserve, lengths):
    inputs = prompts(*lengths)
    options = {"page_size": 8, "reserve": reserve}
    out = generate(model, inputs, cache_implementation="paged_native", cache_config=options)
    assert_same_run(out, generate(model, inputs))
    assert is_reserved(out.past_key_values)


def test_attention_weights_have_a_column_per_token(compiling):
    model = tiny_llama(initializer_range=0.2)
    model.set_attn_implementation("eager")
    expected = generate(model, prompts(40, 11), output_attentions=True)
    for asked in ({"cache_config": {"reserve": 200}}, {"compile_config": compiling}):
        out = generate(model, prompts(40, 11), output_attentions=True, cache_implementation="paged_native", **asked)
        assert_same_run(out, expected)
        for found, weights in zip(out.attentions, expected.attentions):
            for one, other in zip(found, weights):
                assert_close("attention weights", one, other, ROUNDING)


def test_flex_attention_is_not_reserved_for(compiling):
    model = tiny_llama(initializer_range=0.2, hidden_size=128)  # heads of at least 16, which a query of one token needs
    model.set_attn_implementation("flex_attention")
    expected = generate(model, prompts(40, 11), max_new_tokens=4)
    for asked in ({"cache_config": {"reserve": 200}}, {"compile_config": compiling}):
        out = generate(model, prompts(40, 11), max_new_tokens=4, cache_implementation="paged_native", **asked)
        assert_same_run(out, expected)


LATER = {
    "greedy": {},
    "beams": {"num_beams": 2},
    "assistant": {"assistant_model": drafting_model()},
    "prompt_lookup": {"prompt_lookup_num_tokens": 4},
}


@pytest.mark.parametrize("mode", LATER)
def test_another_mode_outgrows_what_was_reserved_for_a_compiler(mode, compiling):
    model = tiny_llama(initializer_range=0.2)
    model.generation_config.num_assistant_tokens_schedule = "constant"
    caches = DynamicCache(config=model.config), hf_kvplus.PagedCache(model.config)
    runs, (name, follow_up) = [], (_compat.forward_cache_name(model), prompts(500))
    for cache in caches:
        options = {"compile_config": compiling} if cache is caches[1] else {}
        ids = generate(model, prompts(30), **{name: cache}, **options).sequences
        if cache is caches[1]:
            assert is_reserved(cache)
        ids = torch.cat([ids, follow_up["input_ids"]], dim=1)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if mode == "beams":
            cache.batch_repeat_interleave(2)
        runs.append(generate(model, inputs, **{name: cache}, **LATER[mode]))
    assert runs[0].sequences.tolist() == runs[1].sequences.tolist()


@torch.no_grad()
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("steps", [(30, 1, 1, 1), (30, 5, 1, 9)])
def test_a_mask_per_head_over_a_reservation(llama, rows, steps):
    """Longer than what was seen, with a bias of its own for every query head."""
    name, logits = _compat.forward_cache_name(llama), []
    for reserve in (None, 64):
        generator, cache, outs = torch.Generator().manual_seed(0), hf_kvplus.PagedCache(llama.config, page_size=8), []
        cache.reserve(reserve)
        for new in steps:
            seen = int(cache.get_seq_length())
            ids = torch.randint(3, 128, (rows, new), generator=generator)
            hidden = torch.arange(64) > torch.arange(seen, seen + new)[:, None]
            mask = torch.randn(rows, 4, new, 64, generator=generator).masked_fill(
                hidden, torch.finfo(torch.float32).min
            )
            width = cache.layers[0].get_mask_sizes(new)[0]
            outs.append(llama(ids, attention_mask=mask[..., :width], **{name: cache}).logits)
        logits.append(outs)
    assert any(layer.reservation is not None for layer in cache.layers)
    for found, expected in zip(*logits):
        assert_close("logits", found, expected, ROUNDING)
