"""What `update` returns: recognised by our attention, an ordinary tensor to everything else."""

import operator

import einops
import numpy
import pytest
import torch
from conftest import tiny_llama
from generating import generate, prompts
from layers import layer_of
from numerics import assert_close

import hf_kvplus
from hf_kvplus import UnsupportedModelError
from hf_kvplus.layer import PagedLayer
from hf_kvplus.retention.keydiff import KeyDiff
from hf_kvplus.retention.sliding import Sliding
from hf_kvplus.standin import StandIn


class Filled:
    """A layer with 40 tokens in pages and tail, the stand-ins of the last update, and what they stand for."""

    def __init__(self, new=3, **options):
        self.layer = layer_of(page_size=8, **options)
        self.keys, self.values = torch.randn(2, 2, 40, 6), torch.randn(2, 2, 40, 10)
        for part in (slice(0, 40 - new), slice(40 - new, 40)):
            if self.keys[:, :, part].shape[2]:
                k, v = self.layer.update(self.keys[:, :, part], self.values[:, :, part])
        self.k, self.v = k, v


@pytest.fixture(params=[3, 20, 40], ids=["decoded", "a chunk", "fresh"])
def filled(request):
    return Filled(new=request.param)


BINARY = "add sub mul truediv pow lt le gt ge eq ne".split()


@pytest.mark.parametrize("name", BINARY)
def test_binary_operators_on_either_side(filled, name):
    function, other = getattr(operator, name), torch.rand(2, 2, 40, 6) + 1
    torch.testing.assert_close(function(filled.k, other), function(filled.keys, other), equal_nan=True)
    torch.testing.assert_close(function(other, filled.k), function(other, filled.keys), equal_nan=True)
    torch.testing.assert_close(function(filled.k, 2), function(filled.keys, 2), equal_nan=True)
    torch.testing.assert_close(function(2, filled.k), function(2, filled.keys), equal_nan=True)
    torch.testing.assert_close(function(filled.k, filled.k), function(filled.keys, filled.keys), equal_nan=True)


@pytest.mark.parametrize(
    "use",
    [
        lambda k: -k,
        lambda k: abs(k),
        lambda k: k // 2,
        lambda k: k % 2,
        lambda k: k @ torch.ones(6, 3),
        lambda k: torch.ones(7, 40) @ k,
        lambda k: k[:, :, -3:],
        lambda k: k[:, :, None].expand(-1, -1, 4, -1, -1),
        lambda k: torch.stack(list(k)),
        lambda k: (k > 0) & (k < 1),
        lambda k: k.transpose(2, 3),
        lambda k: k.mT,
        lambda k: k.repeat_interleave(2, dim=1),
        lambda k: k.reshape(2, 2, -1),
        lambda k: k.float().sum(dim=-1),
        lambda k: k.contiguous().view(-1),
        lambda k: torch.cat([k, k], dim=2),
        lambda k: torch.cat((k[:, :1], k), dim=1),
        lambda k: torch.matmul(torch.ones(7, 40), k),
        lambda k: torch.einsum("bhtd,bhsd->bhts", k, k),
        lambda k: torch.nn.functional.pad(k, (0, 2)),
        lambda k: torch.nn.functional.scaled_dot_product_attention(torch.ones(2, 2, 1, 6), k, k),
        lambda k: torch.nn.functional.scaled_dot_product_attention(torch.ones(2, 2, 1, 6), key=k, value=k),
        lambda k: torch.chunk(k, 2, dim=-1)[1],
        lambda k: torch.broadcast_tensors(k, torch.ones(1))[0],
    ],
)
def test_operators_and_torch_functions(filled, use):
    torch.testing.assert_close(use(filled.k), use(filled.keys), rtol=1e-5, atol=1e-6)


def test_what_is_known_without_the_dense_tensor(filled):
    before = PagedLayer.dense_reads
    for standin, tensor in ((filled.k, filled.keys), (filled.v, filled.values)):
        assert standin.shape == standin.size() == tensor.shape
        assert [standin.size(dim) for dim in (0, 1, -2, -1)] == [2, 2, 40, tensor.shape[-1]]
        assert (standin.dtype, standin.device) == (tensor.dtype, tensor.device)
        assert standin.ndim == standin.dim() == 4
        assert len(standin) == 2
        assert hash(standin) != hash(filled.layer)
    assert PagedLayer.dense_reads == before


def test_to_is_itself_where_nothing_changes(filled):
    before = PagedLayer.dense_reads
    for target in ("cpu", torch.device("cpu"), torch.float32, filled.keys):
        assert filled.k.to(target) is filled.k
    assert filled.k.to(device="cpu", dtype=torch.float32, non_blocking=True) is filled.k
    assert PagedLayer.dense_reads == before
    assert torch.equal(filled.v.to(torch.bfloat16), filled.values.bfloat16())
    assert filled.v.to("meta").device.type == "meta"


def test_an_attribute_that_tensors_lack_is_an_error(filled):
    with pytest.raises(AttributeError, match="no_such"):
        _ = filled.k.no_such
    assert not hasattr(filled.k, "__array_ufunc__")


def test_a_touched_fresh_stand_in_commits():
    filled = Filled(new=40)
    assert filled.layer.sealed.slots == 0
    assert torch.equal(filled.k.dense(), filled.keys)
    assert filled.layer.sealed.slots == 40
    assert torch.equal(filled.v.dense(), filled.values)
    assert torch.equal(filled.layer.dense("values"), filled.values)


def test_a_stand_in_keeps_meaning_the_tokens_of_its_time(filled):
    filled.layer.update(*(torch.randn(2, 2, 30, width) for width in (6, 10)))
    filled.layer.update(*(torch.randn(2, 2, 1, width) for width in (6, 10)))
    assert torch.equal(filled.k.dense(), filled.keys)
    assert torch.equal(filled.v.dense(), filled.values)


@pytest.mark.parametrize("retention", [Sliding(window=20), KeyDiff(budget=20)], ids=["sliding", "keydiff"])
@pytest.mark.parametrize("new", [1, 20, 40])
@pytest.mark.parametrize("touch", [lambda k: k + 1, lambda k: torch.cat([k]), lambda k: k.mT, lambda k: k.dense()])
def test_touching_an_evicting_layer_is_refused(retention, new, touch):
    filled = Filled(new=new, retention=retention)
    with pytest.raises(UnsupportedModelError, match=r"reads the cached keys outside of its attention.*'paged_int8'"):
        touch(filled.k)


# --- code that takes tensors alone ------------------------------------------------------------------------------------


@torch.jit.script
def scripted(keys: torch.Tensor):
    return keys + 1


REJECTING = {
    "einops": lambda k: einops.rearrange(k, "b h t d -> b t (h d)"),
    "script": scripted,
    "vmap": lambda k: torch.vmap(lambda row: row + 1)(k),
    "grad": lambda k: torch.func.grad(lambda each: each.square().sum())(k),
}


@pytest.mark.parametrize("name", REJECTING)
def test_code_that_rejects_a_stand_in_says_what_to_do(filled, name):
    REJECTING[name](filled.keys)
    with pytest.raises((TypeError, ValueError, RuntimeError), match=r"in pages, which code .*leave the cache out for"):
        REJECTING[name](filled.k)


@pytest.mark.parametrize("name", REJECTING)
@pytest.mark.parametrize("string", ["paged_int8", "keydiff_paged_int8"])
@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_model_with_such_code_is_refused(monkeypatch, name, string):
    update = hf_kvplus.PagedCache.update

    def used(*args, **kwargs):
        keys, values = update(*args, **kwargs)
        REJECTING[name](keys)
        return keys, values

    monkeypatch.setattr(hf_kvplus.PagedCache, "update", used)
    with pytest.raises(UnsupportedModelError, match=r"PagedCache\(.* cannot serve Llama.*, which reads .*Leave"):
        generate(tiny_llama(), prompts(20), cache_implementation=string)


@pytest.mark.parametrize("make", [torch.as_tensor, torch.tensor, torch.asarray, torch.from_dlpack, numpy.asarray])
def test_what_makes_a_tensor_of_anything_takes_a_stand_in(filled, make):
    for standin, tensor in ((filled.k, filled.keys), (filled.v, filled.values)):
        assert torch.equal(torch.as_tensor(make(standin)), tensor)


EDITS = {
    "item": lambda k: operator.setitem(k, (slice(None), slice(None), 3), 0.0),
    "method": lambda k: k.mul_(2),
    "masked": lambda k: k.masked_fill_(torch.ones(1, dtype=torch.bool), 0.0),
    "function of torch": lambda k: torch.relu_(k),
    "out": lambda k: torch.add(torch.zeros(1), 1, out=k),
}


@pytest.mark.parametrize("name", EDITS)
def test_edits_in_place_are_refused(filled, name):
    """What is edited would be a copy: attention would go on with the keys as they were."""
    with pytest.raises(UnsupportedModelError, match=r"edits the cached keys in place.*Leave `cache_impl"):
        EDITS[name](filled.k)
    assert torch.equal(filled.k.dense(), filled.keys)
    torch.zeros(2, 2, 40, 6).copy_(filled.k)  # to read it is fine


# --- layers that share keys and values ----------------------------------------------------------------------------


@pytest.mark.parametrize("first", [0, 5, 37, 64])
@pytest.mark.parametrize("new", [1, 16, 17, 60])
@pytest.mark.parametrize("format", ["native", "int8"])
@pytest.mark.parametrize("retention", [None, Sliding(window=24, sink_tokens=0)], ids=["all", "the model's window"])
def test_layers_that_share_read_the_same_all_through_a_pass(first, new, format, retention):
    """A later layer is handed the stand-ins of an earlier one, which has committed, and sees what that one saw."""
    layer = layer_of(format, page_size=8, retention=retention)
    layer.masked_by_model = retention is not None
    keys, values = torch.randn(2, 1, 2, first + new, 8)
    if first:
        layer.update(keys[:, :, :first], values[:, :, :first])
        layer.commit()
    standins = layer.update(keys[:, :, first:], values[:, :, first:])
    layer.commit()
    oldest = max(0, first + 1 - 24) if retention else 0  # what the first of the new queries sees
    for name, standin, whole in (("keys", standins[0], keys), ("values", standins[1], values)):
        assert type(standin) is StandIn
        for _ in range(2):
            seen = standin.dense()[:, :, oldest:]
            assert_close(name, seen, whole[:, :, oldest:], 0 if format == "native" else 1e-2)
