"""Formats in `generate()`: near native pages in every mode, and exact where the same tokens make the same pages."""

import functools

import pytest
import torch
from conftest import tiny_llama
from generating import Forced, generate, own_prompt, prompts, tokens
from numerics import assert_close, relative_rms
from tiny_models import build

import hf_kvplus
from hf_kvplus._compat import forward_cache_name

#: Relative RMS distance of the logits from those with native pages: what each format costs a model of random weights.
DISTANCE = {"int8": 0.025, "fp8": 0.12, "int4": 0.25, "k4v2": 0.6, "int2": 0.9}
ALL_ENCODED = {"page_size": 8, "native_pages": 0, "residual": 0}
POLICIES = {
    "": {"page_size": 8},
    "sliding_": {"page_size": 8, "window": 40},
    "keydiff_": {"page_size": 8, "budget": 40},
}


@pytest.fixture(scope="module")
def model():
    """Head dimension 32, weights large enough that attention matters."""
    return tiny_llama(hidden_size=128, initializer_range=0.12)


def forced(model, inputs, chosen, name, options, **kwargs):
    """`generate` that takes the tokens `chosen [rows, steps]`: the logits `[steps, rows, vocabulary]`."""
    out = generate(
        model,
        inputs,
        max_new_tokens=chosen.shape[1],
        logits_processor=[Forced(chosen)],
        cache_implementation=name,
        cache_config=options,
        **kwargs,
    )
    return torch.stack(out.logits)


@pytest.fixture(scope="module")
def native(model):
    """Returns a function: the logits with native pages, computed once for every policy."""
    return functools.cache(
        lambda policy: forced(model, prompts(70, 9, 33), tokens(3, 16), f"{policy}paged_native", POLICIES[policy])
    )


@pytest.mark.parametrize("format", DISTANCE)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("place", ["", "offloaded_"])
def test_logits_stay_near_those_of_native_pages(model, native, format, policy, place):
    """A padded batch's prompt, then tokens one by one, of which some are sealed."""
    options = {**ALL_ENCODED, **POLICIES[policy]}
    logits = forced(model, prompts(70, 9, 33), tokens(3, 16), f"{place}{policy}paged_{format}", options)
    assert logits.isfinite().all()
    # KeyDiff chooses by the keys that it reads, so from its second choice on, the tokens may be others.
    steps = slice(1, 8 if policy == "keydiff_" else None)
    for row in range(3):
        assert 0 < relative_rms(logits[steps, row], native(policy)[steps, row]) < DISTANCE[format]


@pytest.mark.parametrize("format", DISTANCE)
def test_kept_native_means_exact(model, format):
    """With enough native pages and a long enough residual nothing is encoded."""
    chosen, inputs = tokens(1, 24), prompts(70)
    exact = forced(model, inputs, chosen, "paged_native", {"page_size": 8})
    for options in ({"native_pages": 12}, {"residual": 100, "native_pages": 0}, {"native_pages": 6, "residual": 47}):
        ours = forced(model, inputs, chosen, f"paged_{format}", {"page_size": 8, **options})
        assert_close("logits", ours, exact, 2e-5)


@pytest.mark.parametrize("format", DISTANCE)
def test_padded_rows_are_their_own_runs_where_pages_fall_alike(model, format):
    """Padding of whole pages leaves a row's pages as they are in its own run."""
    inputs, chosen = prompts(72, 40, 64), tokens(3, 20)
    batch = forced(model, inputs, chosen, f"paged_{format}", ALL_ENCODED)
    for row in range(3):
        alone = forced(model, own_prompt(inputs, row), chosen[[row]], f"paged_{format}", ALL_ENCODED)
        # Not closer: what is rounded differently by a batch may fall to the next code.
        assert_close(f"row {row}", batch[:, row], alone[:, 0], 2e-3)


@pytest.mark.parametrize("format", DISTANCE)
def test_beams_score_what_their_tokens_score(model, format):
    """The score of a returned beam is that of its tokens, run by themselves through the same format."""
    inputs, config = prompts(45), {"page_size": 8, "residual": 3}
    out = generate(
        model,
        inputs,
        num_beams=4,
        num_return_sequences=3,
        output_scores=True,
        cache_implementation=f"paged_{format}",
        cache_config=config,
    )
    for sequence, score in zip(out.sequences, out.sequences_scores):
        chosen = sequence[None, 45:]
        logits = forced(model, inputs, chosen, f"paged_{format}", config)[:, 0]
        assert float(score) == pytest.approx(float(logits.log_softmax(-1).gather(-1, chosen.T).mean()), abs=2e-4)


@pytest.mark.parametrize("format", ["int4", "k4v2", "int2", "fp8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(format, dtype):
    model = tiny_llama(hidden_size=128, initializer_range=0.12).to(dtype)
    chosen, inputs = tokens(2, 12), prompts(70, 41)
    ours, native = (
        forced(model, inputs, chosen, f"paged_{name}", {**ALL_ENCODED, "page_size": 16}).float()
        for name in (format, "native")
    )
    assert 0 < relative_rms(ours[1:], native[1:]) < DISTANCE[format]


@pytest.mark.parametrize("format", DISTANCE)
@pytest.mark.parametrize(("head_dim", "attention"), [(16, "sdpa"), (80, "eager"), (96, "sdpa"), (112, "sdpa")])
def test_fused_and_dense_attention_agree(format, head_dim, attention):
    """Pages read one by one and the dense tensor hold the same numbers, whatever the head dimension."""
    model = tiny_llama(head_dim=head_dim, initializer_range=0.12, attn_implementation=attention)
    ids, name = tokens(1, 72), forward_cache_name(model)
    logits = []
    for step in (8, 32):  # up to 16 tokens are decoded in place
        cache = hf_kvplus.make_cache(f"paged_{format}", model, **ALL_ENCODED)
        with torch.inference_mode():
            model(ids[:, :40], **{name: cache})
            logits.append(torch.cat([model(part, **{name: cache}).logits for part in ids[:, 40:].split(step, 1)], 1))
    first = logits[0][:, :8], logits[1][:, :8]  # later steps see what was sealed in between
    assert_close("logits", *first, 1e-4)


@pytest.mark.parametrize("format", DISTANCE)
def test_latents_of_two_widths(format):
    """MLA (DeepSeek-V3) caches latents and rotary keys, of different widths."""
    model = build("deepseek_v3")
    ours, native = (
        generate(
            model, {"input_ids": tokens(2, 40) % 50}, cache_implementation=f"paged_{name}", cache_config=ALL_ENCODED
        )
        for name in (format, "native")
    )
    assert_close("logits of the prompt", ours.logits[0], native.logits[0], 2e-5)
    assert 0 < relative_rms(ours.logits[1], native.logits[1]) < 2 * DISTANCE[format]
