"""Gradients stop at the cache: they are those of the tokens of each call, and no graph outlives its call."""

import contextlib
import copy
import functools
import gc
import re
import warnings
import weakref
from pathlib import Path

import pytest
import test_architectures as architectures
import torch
from generating import generate, main_model, prompts
from numerics import assert_close
from test_dtypes import STRINGS, make
from transformers import DynamicCache

import hf_kvplus
from hf_kvplus._compat import forward_cache_name
from hf_kvplus.guards import tell_of_gradients
from hf_kvplus.layer import PagedLayer

pytestmark = [
    pytest.mark.filterwarnings("ignore:hf_kvplus. gradients stop"),
    pytest.mark.filterwarnings("error:.*an autograd kernel was not registered"),  # an operator that has no backward
]
ROOT = Path(__file__).parents[1]
IDS, STEPS = prompts(60, 60)["input_ids"] % 95, (20, 21, 30, *range(31, 60))


def trained(name="llama", only=""):
    """A model whose parameters with `only` in their names are trained, and its twin."""
    model = main_model() if name == "llama" else copy.deepcopy(architectures.build(name)).eval()
    for parameter, weight in model.named_parameters():
        weight.requires_grad_(only in parameter)
    return model, copy.deepcopy(model)


def call(model, ids, cache, **given):
    return model(ids, **{forward_cache_name(model): cache}, **given)


def losses(model, cache, mask):
    """What would be trained on, of the calls after the first one: a chunk, and single tokens."""
    start = 0
    for stop in STEPS:
        given = {} if mask is None else {"attention_mask": mask[:, :stop]}
        yield call(model, IDS[:, start:stop], cache, **given).logits.float().square().mean()
        start = stop


def gradients(model) -> dict:
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def both_gradients(models, cache, context=contextlib.nullcontext, mask=None):
    """The gradients through `cache` and through a DynamicCache that is told, between calls, what `cache` stores."""
    stored, sums = DynamicCache(config=models[1].config), [0, 0]
    with context():
        both = zip(losses(models[0], cache, mask), losses(models[1], stored, mask))
        with torch.no_grad():
            next(both)
        while True:
            with torch.no_grad():
                for mine, layer in zip(cache.layers, stored.layers):
                    if isinstance(mine, PagedLayer):
                        mine.take_back()
                        mine._settle()  # as at the next call
                        mine.resume()
                        held = slice(-layer.keys.shape[2], None)
                        layer.keys = mine.keys[:, :, held].to(layer.keys.dtype)
                        layer.values = mine.values[:, :, held].to(layer.values.dtype)
            pair = next(both, None)
            if pair is None:
                break
            sums = [total + loss for total, loss in zip(sums, pair)]
    for total in sums:
        total.backward()
    return gradients(models[0]), gradients(models[1])


def assert_same_gradients(found, expected, bound=1e-4):
    assert found.keys() == expected.keys()
    assert expected
    for name, gradient in expected.items():
        assert_close(name, found[name], gradient, bound)


@pytest.mark.parametrize("only", ["", "q_proj", "v_proj", "layers.1", "lm_head"])
@pytest.mark.parametrize(
    ("name", "reserve"),
    [
        ("paged_native", None),
        ("paged_native", 64),
        ("paged_int8", None),
        ("paged_int8", 64),
        ("paged_int4", None),
        ("offloaded_paged_int8", None),
    ],
)
def test_gradients_are_those_of_the_tokens_of_each_call(name, reserve, only):
    models = trained(only=only)
    cache = hf_kvplus.make_cache(name, models[0], page_size=8, reserve=reserve)
    assert_same_gradients(*both_gradients(models, cache))


@pytest.mark.parametrize("prefix", [torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("name", ["paged_native", "paged_int8"])
def test_however_the_first_tokens_came(name, prefix):
    models = trained()
    caches = [hf_kvplus.make_cache(name, model, page_size=8) for model in models]
    for model, cache, context in zip(models, caches, (prefix, torch.no_grad)):
        with context():
            call(model, IDS[:, :20], cache)
        call(model, IDS[:, 20:30], cache).logits.square().mean().backward()
    assert_same_gradients(gradients(models[0]), gradients(models[1]), 0.0)


@pytest.mark.parametrize("name", ["paged_native", "paged_int8", "sliding_paged_native"])
def test_of_a_padded_batch(name):
    mask = torch.ones(2, 60, dtype=torch.long)
    mask[1, :12] = 0
    models = trained()
    options = {"window": 500} if "sliding" in name else {}
    cache = hf_kvplus.make_cache(name, models[0], page_size=8, **options)
    assert_same_gradients(*both_gradients(models, cache, mask=mask))


@pytest.mark.parametrize("only", ["", "q_proj"])
@pytest.mark.parametrize("name", ["paged_native", "paged_int8"])
def test_under_autocast(name, only):
    models = trained(only=only)
    context = functools.partial(torch.autocast, "cpu", torch.bfloat16)
    cache = hf_kvplus.make_cache(name, models[0], page_size=8)
    assert_same_gradients(*both_gradients(models, cache, context=context), 0.05)


@pytest.mark.parametrize("options", [{}, {"reserve": 64}], ids=["grows", "reserved"])
@pytest.mark.parametrize("only", ["", "sinks"])
def test_of_attention_sinks(only, options):
    models = trained("gpt_oss", only)
    for model in models:
        model.set_attn_implementation("eager")
    cache = hf_kvplus.make_cache("paged_native", models[0], page_size=8, **options)
    assert_same_gradients(*both_gradients(models, cache))


def evicting(name, model):
    """The cache of a string, which evicts within these tests if its policy ever does."""
    kept = {"budget": 24} if "keydiff" in name else {"window": 16} if "sliding" in name else {}
    return hf_kvplus.make_cache(name, model, page_size=8, **kept)


@pytest.mark.parametrize("only", ["", "q_proj"])
@pytest.mark.parametrize("name", STRINGS)
def test_one_backward_for_all_calls_is_one_for_each(name, only):
    """What backward reads of a call is not what later calls write over, or free."""
    models = trained(only=only)
    both = zip(*(losses(model, evicting(name, model), None) for model in models))
    with torch.no_grad():
        next(both)
    total = 0
    for loss, alone in both:
        total = total + loss
        alone.backward()
    total.backward()
    assert_same_gradients(gradients(models[0]), gradients(models[1]), 1e-5)


@pytest.mark.parametrize("name", STRINGS)
def test_what_changes_with_a_weight_is_what_the_gradient_says(name):
    """Also where tokens were evicted: a step along the gradient changes the output by as much as the gradient says."""
    model, _ = trained()
    cache = evicting(name, model)
    with torch.no_grad():
        call(model, IDS[:, :48], cache)
    weights = list(model.parameters())
    random = torch.Generator().manual_seed(0)
    chosen = torch.randn(2, 4, model.config.vocab_size, generator=random)

    def loss():
        return (call(model, IDS[:, 48:52], cache.fork()).logits.log_softmax(-1) * chosen).mean()

    slopes = torch.autograd.grad(loss(), weights)
    size = 2e-3 / sum(slope.square().sum() for slope in slopes).sqrt()
    moved = []
    with torch.no_grad():
        for sign in (1, -2):
            for weight, slope in zip(weights, slopes):
                weight += sign * size * slope
            moved.append(float(loss()))
    expected = 2 * size * sum(slope.square().sum() for slope in slopes)
    assert moved[0] - moved[1] == pytest.approx(float(expected), rel=0.02)


# --- what is said -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def told():
    """The warnings of a block about gradients, in a process that has given none."""
    tell_of_gradients.cache_clear()
    found = []
    with warnings.catch_warnings(record=True) as all_told:
        warnings.simplefilter("always")
        yield found
    found += [str(warning.message) for warning in all_told if "gradients stop" in str(warning.message)]


def test_one_warning_in_a_process():
    model, _ = trained()
    with told() as found:
        for name in (*STRINGS, *STRINGS):
            cache = make(name, model)
            for start in (0, 20, 21):
                call(model, IDS[:, start : start + 20], cache)
    (warning,) = found
    for part in ("hf_kvplus: gradients stop at the cache", "torch.inference_mode()", "to train", "DynamicCache"):
        assert part in warning


def test_nobody_else_is_warned():
    model, frozen = trained()
    frozen.requires_grad_(False)
    with told() as found:
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                call(model, IDS, make("paged_int8", model))
        generate(model, prompts(20), cache_implementation="paged_int8")
        call(frozen, IDS, make("paged_int8", frozen))
        call(model, IDS, DynamicCache(config=model.config))
    assert found == []


def test_the_example_of_the_readme():
    model, _ = trained()
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (example,) = (block for block in blocks if ".fork(" in block)
    example = example.replace("cache=", f"{forward_cache_name(model)}=")
    names = {"hf_kvplus": hf_kvplus, "torch": torch, "model": model, "inputs": prompts(100)}
    with told() as found:
        exec(example, names)
    assert found == []
    assert names["branch"].layers[0].keys.shape[:3] == (8, 2, 100)
    assert names["branch"].stats().shared_pages > 0


# --- what is kept -----------------------------------------------------------------------------------------------------


class Mark:
    """Alive as long as the graph that it was made in."""


class Marked(torch.autograd.Function):
    @staticmethod
    def forward(context, states, marks):
        context.mark = Mark()
        marks.append(weakref.ref(context.mark))
        return states.clone()

    @staticmethod
    def backward(context, gradient):
        return gradient, None


def graphs_kept(model, cache, calls=((0, 30), (30, 31), (31, 32), (32, 50))) -> int:
    """How many graphs are alive after calls whose outputs are dropped: all that is left of them is `cache`."""
    marks: list[weakref.ref] = []
    hook = model.get_input_embeddings().register_forward_hook(lambda module, args, out: Marked.apply(out, marks))
    try:
        for start, stop in calls:
            call(model, IDS[:, start:stop], cache)
    finally:
        hook.remove()
    gc.collect()
    assert len(marks) == len(calls)
    return sum(mark() is not None for mark in marks)


@pytest.mark.parametrize(
    ("name", "reserve"), [*((name, None) for name in STRINGS), ("paged_native", 64), ("sliding_paged_int8", 64)]
)
def test_no_graph_is_kept(name, reserve):
    model, _ = trained()
    cache = hf_kvplus.make_cache(name, model, page_size=8, reserve=reserve)
    assert graphs_kept(model, cache) == 0
    branch = cache.fork(2)
    assert branch.layers[0].keys.shape[0] == 4
    assert graphs_kept(model, DynamicCache(config=model.config)) > 0  # or this test sees nothing


@pytest.mark.parametrize("duplicate", [hf_kvplus.PagedCache.fork, copy.deepcopy], ids=["fork", "deepcopy"])
@pytest.mark.parametrize("name", ["lfm2", "qwen3_next", "jamba", "falcon_h1"])
def test_copies_beside_linear_states_that_carry_a_graph(name, duplicate):
    """Those are transformers' own, and keep their graph as in its cache; torch refuses to copy such tensors."""
    model, _ = trained(name)
    cache = hf_kvplus.make_cache("paged_native", model, page_size=8)
    call(model, IDS[:, :30], cache)
    twin = duplicate(cache)
    with torch.no_grad():
        expected = call(model, IDS[:, 30:31], cache).logits
        assert torch.equal(call(model, IDS[:, 30:31], twin).logits, expected)
