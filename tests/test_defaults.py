"""Nothing depends on the defaults of the process: its dtype, device, gradient mode or choice of algorithms."""

import ast
import contextlib
import importlib.util
from pathlib import Path

import pytest
import torch
from conftest import tiny_llama
from generating import assert_same_run, generate, prompts
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import hf_kvplus
from hf_kvplus import registry
from hf_kvplus.attention import attend
from hf_kvplus.formats import FORMATS
from hf_kvplus.formats.rotation import hadamard

OPTIONS = {"sliding": {"window": 20, "sink_tokens": 2}, "keydiff": {"budget": 24}}
LIBRARIES = {"nf4": "bitsandbytes", "fp4": "bitsandbytes", "quanto": "optimum.quanto"}


def installed(name: str) -> bool:
    """Whether the library that a string or a format needs is there."""
    library = next((library for part, library in LIBRARIES.items() if part in name), "torch")
    return importlib.util.find_spec(library.split(".")[0]) is not None


STRINGS = [name for name in registry.names() if name not in registry.FACTORIES and installed(name)]


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


CONTEXTS = {
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "float64": lambda: default_dtype(torch.float64),
    "meta": lambda: torch.device("meta"),
    "deterministic": deterministic,
    "gradients": torch.enable_grad,
    "inference": torch.inference_mode,
}


class Attention(torch.nn.Module):
    num_key_value_groups, is_causal = 2, True


def life_of(name: str, context, reserve=None) -> list[torch.Tensor]:
    """What attention gives, and what is stored, in a life with padding, decoding, beams, forks and a crop."""
    options = {"page_size": 16} | ({"reserve": reserve} if reserve else {})
    options |= next((given for part, given in OPTIONS.items() if part in name), {})
    generator, module, outs = torch.Generator().manual_seed(0), Attention(), []
    plan = [torch.randn(3, 2, 4, new, 64, generator=generator) for new in (70, *[1] * 40)]
    mask = torch.ones(110, 128, dtype=torch.bool).tril()[None, None].repeat(2, 1, 1, 1)
    mask[1, :, :, :40] = False
    beams, config = torch.tensor([1, 0]), tiny_llama(num_hidden_layers=1, head_dim=64).config
    hadamard.cache_clear()  # what is built once must not be built from the defaults of that moment
    with torch.no_grad(), context():
        cache = hf_kvplus.make_cache(name, config, **options)
        for index, (query, keys, values) in enumerate(plan):
            keys, values = cache.update(keys[:, :2], values[:, :2], 0)
            seen, new = 70 + index, query.shape[2]
            columns = 128 if cache.layers[0].reservation is not None else seen  # as `get_mask_sizes` has them
            shown = mask[:, :, seen - new : seen, :columns]
            outs.append(attend(sdpa_attention_forward, module, query, keys, values, shown, scaling=0.125)[0])
            if index == 20:
                cache.reorder_cache(beams)
                mask = mask[beams]
        other = cache.fork()
        if cache.spec.retention is None:
            other.crop(-3)
        other.batch_repeat_interleave(2)
        other.batch_select_indices([0, 3])
        outs += [cache.layers[0].keys, cache.layers[0].values, other.layers[0].keys]
        assert "tokens" in str(cache.stats())
    hadamard.cache_clear()
    return outs


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("name", STRINGS)
def test_the_life_of_a_cache(name, context):
    expected, found = life_of(name, contextlib.nullcontext), life_of(name, CONTEXTS[context])
    assert [(out.dtype, out.device) for out in found] == [(out.dtype, out.device) for out in expected]
    for step, (out, right) in enumerate(zip(found, expected)):
        assert torch.equal(out, right), f"{context} changes output {step}"


@pytest.mark.parametrize("context", [name for name in CONTEXTS if name != "gradients"])
@pytest.mark.parametrize("name", ["paged_native", "paged_int8", "paged_int4", "sliding_paged_int8"])
def test_the_life_of_a_reserved_cache(name, context):
    expected, found = life_of(name, contextlib.nullcontext, 128), life_of(name, CONTEXTS[context], 128)
    for step, (out, right) in enumerate(zip(found, expected)):
        assert torch.equal(out, right), f"{context} changes output {step}"


@pytest.mark.parametrize("name", ["paged_int8", "paged_int4", "paged_k4v2", "paged_int2", "keydiff_paged_int8"])
def test_generate_under_another_default_dtype_and_after_it(name):
    model = tiny_llama(initializer_range=0.2)
    hadamard.cache_clear()
    with default_dtype(torch.bfloat16):
        inside = generate(model, prompts(140, 90), cache_implementation=name)
    after = generate(model, prompts(140, 90), cache_implementation=name)
    hadamard.cache_clear()
    assert_same_run(after, generate(model, prompts(140, 90), cache_implementation=name), 0.0)
    assert inside.sequences.shape == after.sequences.shape


# --- tensors name their device ----------------------------------------------------------------------------------------

FACTORIES = "empty zeros ones full arange tensor as_tensor eye rand randn randint linspace empty_strided".split()


def nameless(source: str) -> list[int]:
    """The lines of calls that build a tensor on whatever device is the default."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        of_torch = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
        named = any(keyword.arg in ("device", None) for keyword in node.keywords)  # `**like` may name it
        if of_torch and node.func.attr in FACTORIES and not named:
            found.append(node.lineno)
    return found


def test_every_tensor_that_is_built_names_its_device():
    assert nameless("torch.zeros(3)\ntorch.zeros(\n  3, dtype=x)\ntorch.ones(3, device=d)\nx.zeros(3)") == [1, 2]
    files = Path(hf_kvplus.__file__).parent.rglob("*.py")
    found = [f"{file.name}:{line}" for file in files for line in nameless(file.read_text())]
    assert not found


# --- nothing to store -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in FORMATS if installed(f"paged_{name}")])
@pytest.mark.parametrize("channel_major", [False, True])
def test_formats_encode_nothing(name, channel_major):
    for build in (FORMATS[name].key, FORMATS[name].value):
        format = build(16, 64, torch.float32, channel_major=channel_major)
        parts = format.encode(torch.zeros(0, 16, 64))
        assert {part: (tuple(each.shape), each.dtype) for part, each in parts.items()} == {
            part: ((0, *shape), dtype) for part, (shape, dtype) in format.parts.items()
        }
        assert format.decode(parts).shape == (0, 16, 64)


@pytest.mark.parametrize("name", [name for name in STRINGS if name.startswith("keydiff")])
def test_a_short_row_beside_a_long_one(name):
    """The short row keeps all: none of its pages is due when the long one's are."""
    model = tiny_llama(initializer_range=0.2)
    out = generate(model, prompts(200, 30), cache_implementation=name, cache_config={"budget": 64})
    alone = generate(model, prompts(30), cache_implementation=name, cache_config={"budget": 64})
    assert out.sequences.shape == (2, 226)
    assert alone.sequences.shape == (1, 56)
