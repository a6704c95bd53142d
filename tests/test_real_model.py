"""What only a trained model can show: exactness, closeness in int8, memory, and the strings in a pipeline."""

from pathlib import Path

import pytest
import torch
from transformers import DynamicCache, pipeline

import hf_kvplus
from hf_kvplus import _compat
from hf_kvplus.layer import PagedLayer

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def prompt(smollm):
    """1,000 tokens of licence prose."""
    text = (Path(__file__).parent.parent / "LICENSE").read_text()
    return smollm[1](text, return_tensors="pt").input_ids[:, :1000]


@pytest.fixture(scope="module")
def generated(smollm, prompt):
    """Returns a function that generates 96 tokens (more than a page) greedily: the output, logits `[96, vocab]`."""

    def generate(**kwargs):
        out = smollm[0].generate(
            prompt,
            max_new_tokens=96,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
            **kwargs,
        )
        return out, torch.cat(out.logits)

    return generate


@pytest.fixture(scope="module")
def expected(generated):
    return generated()


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("paged_native", {}),
        ("offloaded_paged_native", {"offload_to": "cpu"}),
        ("offloaded_paged_native", {"offload_to": "disk", "page_size": 128}),
        ("sliding_paged_native", {"window": 2000}),
        ("keydiff_paged_native", {"budget": 2000}),
    ],
)
def test_nothing_lost_means_the_same_tokens_and_logits(generated, expected, name, config):
    PagedLayer.dense_reads = 0
    out, logits = generated(cache_implementation=name, cache_config=config)
    assert torch.equal(out.sequences, expected[0].sequences)
    torch.testing.assert_close(logits, expected[1], rtol=0, atol=5e-4)
    assert PagedLayer.dense_reads == 0


def test_int8_next_token_distributions_stay_close(smollm, prompt):
    """Teacher-forced, so that every position is compared on the same past."""
    model, ids = smollm[0], prompt
    name = _compat.forward_cache_name(model)

    def log_probs(cache):
        with torch.inference_mode():
            model(ids[:, :800], **{name: cache})
            steps = [model(part, **{name: cache}).logits for part in ids[:, 800:].split(8, dim=1)]
        return torch.cat(steps, dim=1)[0].log_softmax(-1)

    reference = log_probs(DynamicCache(config=model.config))
    int8 = log_probs(hf_kvplus.make_cache("paged_int8", model))
    kl = (reference.exp() * (reference - int8)).sum(-1)
    assert kl.mean() < 1e-4, f"mean {kl.mean():.2e}, largest {kl.max():.2e}"
    assert kl.min() > -1e-6


def test_int8_takes_a_third_of_the_memory(generated, expected):
    cache = _cache_of(generated(cache_implementation="paged_int8")[0])
    stats = cache.stats()
    assert stats.tokens == 1095
    assert stats.compression > 3
    dense = sum(layer.keys.nbytes + layer.values.nbytes for layer in _cache_of(expected[0]).layers)
    assert stats.bytes_allocated < dense / 3


def test_pipeline_takes_the_strings(smollm):
    model, tokenizer = smollm
    generate = pipeline("text-generation", model=model, tokenizer=tokenizer)
    chat = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
    options = {"max_new_tokens": 12, "do_sample": False}
    plain = generate(chat, **options)[0]["generated_text"][-1]["content"]
    paged = generate(chat, cache_implementation="paged_int8", **options)[0]["generated_text"][-1]["content"]
    assert "Paris" in plain
    assert paged == plain


def _cache_of(output):
    return getattr(output, "cache", None) or output.past_key_values
