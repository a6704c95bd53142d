"""`generate` compiles the decode step of a paged cache: one graph, the same tokens."""

from unittest import mock

import pytest
import torch
from generating import prompts
from transformers import (
    CompileConfig,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import hf_kvplus
from hf_kvplus._compat import forward_cache_name
from hf_kvplus.reservation import Reservation

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
ALTERNATING = {"head_dim": 16, "sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=24)),
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, **ALTERNATING)),
    "gpt_oss": lambda: GptOssForCausalLM(GptOssConfig(**SIZES, **ALTERNATING, **EXPERTS)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=128, n_positions=1024, n_embd=64, n_layer=2, n_head=4)),
}
NEW = {"max_new_tokens": 101, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}  # a prompt, and 100 steps
PAGES = {"page_size": 16}  # several seals, of the prompt's end and of new tokens alone
WINDOW = {**PAGES, "window": 40, "sink_tokens": 3}


class Graphs:
    """A backend of torch.compile that counts what it is given, and runs it as it is."""

    def __init__(self):
        torch._dynamo.reset()
        self.count = 0

    @property
    def config(self):
        def backend(graph, example_inputs):  # a function, of which `generate` makes no copy
            self.count += 1
            return graph.forward

        self.backend = getattr(self, "backend", backend)
        config = CompileConfig(fullgraph=True, backend=self.backend, mode=None)
        config._compile_all_devices = True
        return config


def model_of(name):
    torch.manual_seed(0)
    return MODELS[name]().eval()


def compare(model, inputs, graphs, string, options=PAGES, **kwargs):
    """Compiled and eager runs of `generate` give the same tokens."""
    given = {"cache_implementation": string, "cache_config": options, **NEW, **kwargs}
    torch.manual_seed(1)
    expected = model.generate(**inputs, **given)
    torch.manual_seed(1)
    found = model.generate(**inputs, **given, compile_config=graphs.config)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("string", ["paged_native", "paged_int8", "paged_int4"])
@pytest.mark.parametrize("name", MODELS)
def test_one_graph_for_all_steps_and_caches(name, string):
    model, graphs = model_of(name), Graphs()
    compare(model, prompts(9, 9), graphs, string)
    assert graphs.count == 1
    compare(model, prompts(70, 70), graphs, string)
    compare(model, prompts(20, 33), graphs, string)  # left-padded, by less and by more than a page
    assert graphs.count == 1


@pytest.mark.parametrize(
    "string", ["sliding_paged_native", "sliding_paged_int4", "paged_k4v2", "paged_int2", "paged_fp8"]
)
def test_windows_and_other_formats(string):
    model, graphs, options = model_of("llama"), Graphs(), WINDOW if "sliding" in string else PAGES
    compare(model, prompts(9, 30), graphs, string, options)
    compare(model, prompts(70, 33), graphs, string, options)
    assert graphs.count == 1


@pytest.mark.parametrize("string", ["paged_quanto_int4", "paged_nf4"])
def test_library_formats(string):
    pytest.importorskip({"paged_quanto_int4": "optimum.quanto", "paged_nf4": "bitsandbytes"}[string])
    graphs = Graphs()
    compare(model_of("llama"), prompts(20, 33), graphs, string)
    assert graphs.count == 1


def test_eager_attention():
    model, graphs = model_of("llama"), Graphs()
    model.set_attn_implementation("eager")
    compare(model, prompts(20, 33), graphs, "paged_int8")
    assert graphs.count == 1


def test_sampling_and_returned_sequences():
    graphs = Graphs()
    compare(model_of("llama"), prompts(40), graphs, "paged_int8", do_sample=True, num_return_sequences=3)
    assert graphs.count == 1


def test_modes_that_are_not_compiled_stay_as_they_are():
    model, graphs = model_of("llama"), Graphs()
    compare(model, prompts(20, 33), graphs, "paged_int8", num_beams=3)
    compare(model, prompts(33), graphs, "paged_int8", prompt_lookup_num_tokens=4)
    compare(model, prompts(33), graphs, "keydiff_paged_int8", {**PAGES, "budget": 24})
    assert graphs.count == 0


def test_chunks_of_a_prompt_break_the_graph_and_no_more():
    """transformers compiles them too; they are stored by the host."""
    model, graphs = model_of("llama"), Graphs()
    config = graphs.config
    config.fullgraph = False
    given = {"cache_implementation": "paged_int8", "cache_config": PAGES, "prefill_chunk_size": 24, **NEW}
    expected = model.generate(**prompts(70), **given)
    assert torch.equal(model.generate(**prompts(70), **given, compile_config=config), expected)


def test_turns_on_one_cache():
    """What was generated is the next prompt's past, for a cache that the caller holds."""
    model, graphs, caches = model_of("llama"), Graphs(), []
    ids = []
    for options in ({}, {"compile_config": graphs.config}):
        cache = hf_kvplus.PagedCache(model.config, format="int8", **PAGES)
        turn = prompts(33)["input_ids"]
        for follow_up in (prompts(5), prompts(40), prompts(3)):
            name = forward_cache_name(model)
            turn = model.generate(turn, attention_mask=torch.ones_like(turn), **{name: cache}, **NEW, **options)
            turn = torch.cat([turn, follow_up["input_ids"]], dim=1)
        ids.append(turn)
        caches.append(cache)
    assert torch.equal(*ids)
    assert graphs.count == 1
    plain, compiled = (cache.stats() for cache in caches)
    assert compiled.tokens == plain.tokens
    assert compiled.bytes_allocated > plain.bytes_allocated  # what is reserved is allocated, and told


def test_no_dense_cache_in_a_compiled_step():
    with mock.patch.object(Reservation, "dense", side_effect=AssertionError):
        compare(model_of("llama"), prompts(33), Graphs(), "paged_int8")


def test_inductor():
    """The real compiler, on what it is given when `generate` compiles by itself."""
    torch._dynamo.reset()
    model = model_of("llama")
    config = CompileConfig(fullgraph=True, backend="inductor", mode="default")
    config._compile_all_devices = True
    given = {"cache_implementation": "paged_int8", "cache_config": PAGES, **NEW}
    expected = model.generate(**prompts(20, 33), **given)
    assert torch.equal(model.generate(**prompts(20, 33), **given, compile_config=config), expected)
