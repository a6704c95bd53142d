"""A layer with a reservation does what it would do without, in any order of its methods."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layers import layer_of
from numerics import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hf_kvplus import make_cache, step
from hf_kvplus.attention import attend
from hf_kvplus.errors import CacheConfigError
from hf_kvplus.ops import decode_attention
from hf_kvplus.retention.sliding import Sliding
from hf_kvplus.stats import collect

HEADS, DIM, CAPACITY = 2, 16, 512
MODULE = SimpleNamespace(is_causal=True, num_key_value_groups=2)
COMPOSITIONS = {
    "native": {},
    "int8": {"format": "int8"},
    "int4": {"format": "int4"},
    "k4v2, two native pages": {"format": "k4v2", "native_pages": 2},
    "int2": {"format": "int2", "residual": 20},
    "int8, 5 recent, pages of 8": {"format": "int8", "residual": 5, "page_size": 8},
    "sliding native": {"retention": Sliding(window=40, sink_tokens=3)},
    "sliding int4": {"format": "int4", "retention": Sliding(window=40, sink_tokens=3)},
    "window alone, int8": {"format": "int8", "retention": Sliding(window=24, sink_tokens=0)},
}


def host_looks(looks: bool):
    """The operators run as on the CPU, or as on a device, which nobody waits for."""
    return mock.patch.object(step, "on_host", new=mock.Mock(return_value=looks))


def build(name, reserve):
    layer = layer_of(**{"page_size": 16, **COMPOSITIONS[name]})
    layer.reserve(reserve)
    return layer


def ask(layer, keys, values, query, shown):
    """One forward pass: give tokens, attend. `shown`, bool `[rows, positions]`, is false for padding."""
    new, seen = keys.shape[2], int(layer.get_seq_length())
    stand_ins = layer.update(keys, values)
    width, _ = layer.get_mask_sizes(0)
    order = torch.arange(width) <= torch.arange(seen, seen + new)[:, None]
    shown = torch.nn.functional.pad(shown[:, :width], (0, width - min(width, shown.shape[1])), value=True)
    mask = order[None, None] & shown[:, None, None]
    return attend(sdpa_attention_forward, MODULE, query, *stand_ins, mask)[0]


class Twins:
    """A layer with a reservation and one without, to which the same things happen."""

    def __init__(self, name, rows, seed, value_dtype=torch.float32):
        self.layers = build(name, CAPACITY), build(name, None)
        self.random = torch.Generator().manual_seed(seed)
        self.shown = torch.ones(rows, 0, dtype=torch.bool)
        self.rows, self.value_dtype = rows, value_dtype

    def give(self, new, padding=None):
        keys, values, extra, more = torch.randn(4, self.rows, HEADS, new, DIM, generator=self.random)
        shown = torch.ones(self.rows, new, dtype=torch.bool)
        if padding is not None:
            shown = torch.arange(new) >= torch.tensor(padding)[:, None]
        self.shown = torch.cat([self.shown, shown], dim=1)
        query = torch.cat([extra, more], dim=1)
        found, expected = (ask(layer, keys, values.to(self.value_dtype), query, self.shown) for layer in self.layers)
        assert_close("attention", found.flatten(2)[shown], expected.flatten(2)[shown], 1e-5)

    def do(self, method, *arguments):
        for layer in self.layers:
            getattr(layer, method)(*arguments)
        self.rows = self.layers[1].rows

    def compare(self):
        reserved, plain = self.layers
        assert int(reserved.get_seq_length()) == plain.get_seq_length()
        if plain.retention is None:
            for name in ("keys", "values"):
                assert torch.equal(getattr(reserved, name), getattr(plain, name))


LENGTHS = st.one_of(st.integers(1, 16), st.integers(17, 70))
ACTIONS = st.one_of(
    st.tuples(st.just("give"), st.integers(1, 16)),
    st.tuples(st.just("give"), st.integers(17, 50)),
    st.tuples(st.just("many"), st.integers(1, 60)),
    st.tuples(st.just("crop"), st.integers(1, 30)),
    st.tuples(st.just("reorder"), st.integers(0, 3)),
    st.tuples(st.just("fork"), st.integers(1, 2)),
    st.tuples(st.just("stats"), st.just(0)),
)


@pytest.mark.parametrize("name", COMPOSITIONS)
@settings(max_examples=16, deadline=None, derandomize=True)
@given(st.booleans(), st.integers(1, 3), LENGTHS, st.lists(ACTIONS, max_size=7), st.integers(0, 99))
def test_same_as_without_a_reservation(name, looks, rows, prompt, actions, seed):
    with host_looks(looks):
        drive(Twins(name, rows, seed), rows, prompt, actions)


@pytest.mark.parametrize("name", COMPOSITIONS)
@settings(max_examples=6, deadline=None, derandomize=True)
@given(st.booleans(), st.integers(1, 3), LENGTHS, st.lists(ACTIONS, max_size=7), st.integers(0, 99))
def test_the_same_under_autocast(name, looks, rows, prompt, actions, seed):
    with host_looks(looks), torch.autocast("cpu", dtype=torch.bfloat16):
        twins = Twins(name, rows, seed, torch.bfloat16)
        drive(twins, rows, prompt, actions)
    for layer in twins.layers:
        assert [layer.keys.dtype, layer.values.dtype] == [torch.float32, torch.bfloat16]


def drive(twins, rows, prompt, actions):
    twins.give(prompt, [row * prompt // 4 for row in range(rows)])
    for action, number in actions:
        if int(twins.layers[1].seen) > CAPACITY - 60:
            break
        if action == "give":
            twins.give(number)
        elif action == "many":
            for _ in range(number):
                twins.give(1)
        elif action == "crop" and twins.layers[1].retention is None and number < twins.layers[1].seen - prompt:
            twins.do("crop", -number)
            twins.shown = twins.shown[:, :-number]
        elif action == "reorder":
            index = torch.arange(twins.rows).roll(number).repeat(2)[: twins.rows + number % 2]
            twins.do("reorder_cache", index)
            twins.shown = twins.shown[index]
        elif action == "fork":
            before = twins.layers
            twins.layers = tuple(layer.fork(number) for layer in before)
            twins.rows, twins.shown = twins.rows * number, twins.shown.repeat_interleave(number, 0)
            for _ in range(20):
                twins.give(1)  # the originals must not see this
            twins.layers = before
            twins.rows, twins.shown = twins.rows // number, twins.shown[::number, :-20]
        elif action == "stats":
            reserved, plain = (collect([layer]) for layer in twins.layers)
            assert reserved.tokens == plain.tokens
            assert reserved.bytes_allocated >= reserved.bytes_used
        twins.compare()
    assert twins.layers[0].reservation is not None


class Forbid(TorchDispatchMode):
    """No operation that makes the host wait for a device, or whose result has a size that depends on values."""

    WAITING = ("_local_scalar_dense", "item", "nonzero", "is_nonzero", "masked_select", "unique", "equal")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.__name__.split(".")[0] not in self.WAITING, func
        masked = func.__name__.startswith("index.") and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        assert not masked, func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_a_step_on_a_device_never_waits(monkeypatch, name):
    monkeypatch.setattr(step, "on_host", lambda device: False)
    monkeypatch.setattr(decode_attention, "KERNELS", {})  # what serves where there is no kernel must not wait either
    layer = build(name, CAPACITY)
    shown = torch.ones(2, 0, dtype=torch.bool)
    prompt = torch.randn(3, 2, HEADS, 50, DIM)
    ask(layer, prompt[0], prompt[1], prompt[2].repeat(1, 2, 1, 1), shown)
    keys, values, query = torch.randn(3, 2, HEADS, 1, DIM)
    addresses = [tensor.data_ptr() for tensor in layer.reservation.tensors()]
    for _ in range(40):
        with Forbid():
            stand_ins = layer.reservation.update(keys, values, layer)  # as in a graph, which does not ask what fits
            attend(sdpa_attention_forward, MODULE, query.repeat(1, 2, 1, 1), *stand_ins, None)
    assert addresses == [tensor.data_ptr() for tensor in layer.reservation.tensors()]
    assert int(layer.get_seq_length()) == 90


def test_rows_write_over_no_page_of_each_other():
    """Rows that share their prompt's pages slide on alone."""
    layers = [layer_of("native", Sliding(window=30, sink_tokens=2), page_size=8) for _ in range(2)]
    layers[0].reserve(CAPACITY)
    prompt = torch.randn(3, 1, HEADS, 60, DIM)
    for layer in layers:
        ask(layer, prompt[0], prompt[1], prompt[2].repeat(1, 2, 1, 1), torch.ones(1, 0, dtype=torch.bool))
        layer.batch_repeat_interleave(3)
    for _ in range(70):
        keys, values, query = torch.randn(3, 3, HEADS, 1, DIM)
        found, expected = (
            ask(layer, keys, values, query.repeat(1, 2, 1, 1), torch.ones(3, 0, dtype=torch.bool)) for layer in layers
        )
        assert_close("attention", found, expected, 1e-5)


def test_more_tokens_than_reserved():
    """A graph cannot make room; without one, the layer grows as it would have."""
    twins = Twins("int8", 1, 0)
    twins.layers[0].reserve(40)
    twins.give(30)
    keys = torch.randn(1, HEADS, 11, DIM)
    with pytest.raises(ValueError, match="`reserve`: this cache has room for 40 tokens, 30 are stored and 11 more"):
        twins.layers[0].reservation.update(keys, keys, twins.layers[0])
    assert int(twins.layers[0].get_seq_length()) == 30
    assert twins.layers[0].is_compileable
    for _ in range(30):
        twins.give(1)
        twins.compare()
    assert not twins.layers[0].is_compileable


def test_a_prompt_longer_than_the_reservation():
    twins = Twins("int4", 1, 0)
    twins.layers[0].reserve(40)
    twins.give(60)
    assert not twins.layers[0].is_compileable
    twins.give(3)
    twins.compare()


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_forks_go_on_side_by_side(name):
    """A fork that grows the storage they share leaves the other's pages as they are."""
    twins = Twins(name, 2, 0)
    twins.give(30)
    branches = [tuple(layer.fork(1) for layer in twins.layers) for _ in range(2)]
    for _ in range(70):
        for branch in (twins.layers, *branches):
            twins.layers, shown = branch, twins.shown
            twins.give(1)
            twins.shown, longer = shown, twins.shown
        twins.shown = longer
    for branch in branches:
        twins.layers = branch
        branch[0].take_back()
        twins.compare()
        twins.give(1)
        twins.shown = twins.shown[:, :-1]
    reserved, plain = twins.layers
    if plain.retention is None:  # pages that leave a window are dropped at other times
        assert collect([reserved]).bytes_used == collect([plain]).bytes_used


@pytest.mark.parametrize("looks", [True, False])
@pytest.mark.parametrize("window", [24, 40, 100])
def test_padding_between_turns(looks, window):
    """The window counts a row's own tokens, so it spans more pages than their number needs."""
    with host_looks(looks):
        layers = [layer_of("native", Sliding(window=window, sink_tokens=2), page_size=8) for _ in range(2)]
        layers[0].reserve(CAPACITY)
        shown = torch.ones(2, 0, dtype=torch.bool)
        for turn in (60, 50, 13, 30, 9):
            for new in (turn, *[1] * 25):
                keys, values, query = torch.randn(3, 2, HEADS, new, DIM)
                real = torch.arange(new) >= torch.tensor([[0], [new * 2 // 3]])
                shown = torch.cat([shown, real], dim=1)
                found, expected = (ask(layer, keys, values, query.repeat(1, 2, 1, 1), shown) for layer in layers)
                assert_close("attention", found.flatten(2)[real], expected.flatten(2)[real], 1e-5)
        assert layers[0].reservation is not None


def test_rows_and_gradients_are_looked_at():
    layer = build("int8", CAPACITY)
    keys = torch.randn(3, HEADS, 30, DIM)
    ask(layer, keys, keys, keys.repeat(1, 2, 1, 1), torch.ones(3, 0, dtype=torch.bool))
    with pytest.raises(ValueError, match="`key_states` has 1 rows, but this cache holds 3"):
        layer.update(keys[:1, :, :1], keys[:1, :, :1])
    new = torch.randn(3, HEADS, 1, DIM, requires_grad=True)
    out = ask(layer, new, new, keys[:, :, :1].repeat(1, 2, 1, 1), torch.ones(3, 0, dtype=torch.bool))
    out.sum().backward()
    assert new.grad.abs().sum() > 0


def test_a_mask_that_shows_dropped_padding_is_refused_in_a_step():
    layer = build("int8", CAPACITY)
    keys, shown = torch.randn(2, HEADS, 50, DIM), torch.arange(50) >= torch.tensor([[0], [40]])
    ask(layer, keys, keys, keys.repeat(1, 2, 1, 1), shown)
    with pytest.raises(ValueError, match="shows tokens that were padding"):
        ask(layer, keys[:, :, :1], keys[:, :, :1], keys[:, :, :1].repeat(1, 2, 1, 1), torch.ones_like(shown))


def test_branches_in_threads():
    """Forks share pages; what one does must not be seen by another, whenever it happens."""
    prompt = torch.randn(2, 1, HEADS, 40, DIM)
    root = layer_of("int8", page_size=8)
    root.update(*prompt)
    root.commit()
    branches = [root.fork(1) for _ in range(4)]
    told = [torch.randn(2, 1, HEADS, 300, DIM, generator=torch.Generator().manual_seed(i)) for i in range(4)]

    def talk(number):
        for token in range(300):
            branches[number].update(*told[number][:, :, :, token : token + 1])
            branches[number].commit()
            if token % 50 == 0:
                branches[number].reorder_cache(torch.tensor([0]))

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(talk, range(4)))
    for branch, (keys, values) in zip(branches, told):
        alone = layer_of("int8", page_size=8)
        alone.update(torch.cat([prompt[0], keys], 2), torch.cat([prompt[1], values], 2))
        alone.commit()
        assert torch.equal(branch.keys, alone.keys)
        assert torch.equal(branch.values, alone.values)


@pytest.mark.parametrize(
    ("string", "options"),
    [
        ("keydiff_paged_int8", {"reserve": 100}),
        ("offloaded_paged_int8", {"reserve": 100}),
        ("paged_int8", {"reserve": 0}),
        ("paged_int8", {"reserve": 1.5}),
        ("paged_int8", {"reserve": True}),
    ],
)
def test_what_cannot_be_reserved(llama, string, options):
    with pytest.raises(CacheConfigError, match="`reserve`: got"):
        make_cache(string, llama, **options)


def test_is_compileable_answers_truthfully(llama):
    for string in ("paged_native", "paged_int4", "sliding_paged_int8"):
        assert not make_cache(string, llama).is_compileable
        cache = make_cache(string, llama, reserve=100)
        assert cache.is_compileable
        cache.activate_past_recording()
        assert not cache.is_compileable
    assert not make_cache("keydiff_paged_int8", llama).is_compileable
