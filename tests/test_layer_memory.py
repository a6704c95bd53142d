"""What a layer's memory does: it grows in step with the tokens, is given back, shared, and never held twice."""

import weakref

import pytest
import torch
from layers import give, layer_of

from hf_kvplus.placement import Offloaded, Resident
from hf_kvplus.placement.resident import TensorStorage
from hf_kvplus.retention.keydiff import KeyDiff
from hf_kvplus.retention.sliding import Sliding
from hf_kvplus.stats import collect


def live_pages(layer) -> int:
    return sum(len(segment.pool.live()) for segment in layer.sealed.segments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("format", ["native", "int8", "int4"])
@pytest.mark.parametrize(
    ("policy", "rows"),
    [(None, 1), (None, 8), (Sliding(window=1024, sink_tokens=4), 2), (KeyDiff(budget=1024), 2)],
    ids=["1 row", "8 rows", "sliding", "keydiff"],
)
def test_a_long_generation_takes_little_more_than_its_tokens(format, dtype, policy, rows):
    """Needed are the pages that hold tokens, as long as they are, and the tail, in the model's dtype."""
    layer = layer_of(format, policy)
    give(layer, 3000, rows, 4, 64, dtype)
    worst = 0
    for step in range(700):
        layer.update(*torch.randn(2, rows, 4, 1, 64, dtype=dtype))
        if step % (1 if policy is None else 9) == 0:
            sealed = sum(len(segment.pool.live()) * segment.bytes_per_page for segment in layer.sealed.segments)
            needed = sealed + rows * 4 * layer.tail.length * 2 * 64 * dtype.itemsize
            worst = max(worst, collect([layer]).bytes_allocated / needed)
    assert worst <= 1.15


def test_growing_never_holds_more_than_one_layer_twice(monkeypatch):
    layers = [layer_of("int8", page_size=16) for _ in range(4)]
    original, allocated, surplus = TensorStorage._empty, [], []

    def in_use():
        storages = [layer.sealed.segments[0].storage for layer in layers if layer.sealed]
        return sum(part.nbytes for storage in storages for part in storage._parts.values())

    def watched(storage, *args):
        tensor = original(storage, *args)
        allocated.append(weakref.ref(tensor))
        surplus.append(sum(ref().nbytes for ref in allocated if ref() is not None) - in_use())
        return tensor

    monkeypatch.setattr(TensorStorage, "_empty", watched)
    for tokens in [500] + [1] * 300:
        for layer in layers:
            give(layer, tokens)
    assert sum(size > 0 for size in surplus) > 4 * 4 * 8  # four parts of four layers, grown again and again
    assert max(surplus) <= in_use() / len(layers)


@pytest.mark.parametrize(
    "policy", [Sliding(window=100, sink_tokens=4), KeyDiff(budget=100)], ids=["sliding", "keydiff"]
)
@pytest.mark.parametrize("placement", [Resident(), Offloaded("disk")], ids=["resident", "disk"])
def test_evicted_pages_are_written_over(policy, placement):
    layer = layer_of("int8", policy, page_size=16, placement=placement)
    give(layer, 300)
    most = 0
    for step in range(1000):
        give(layer, 1)
        if step == 100:
            settled = collect([layer]).bytes_allocated
        most = max(most, layer.sealed.segments[0].pool.capacity)
    # 104 tokens of 2 heads, in pages of 16 that fill up and empty one by one
    assert most <= 1.1 * 2 * (104 / 16 + 3)
    assert collect([layer]).bytes_allocated <= 1.1 * settled


@pytest.mark.parametrize("retention", [None, Sliding(window=500)], ids=["all", "sliding"])
def test_pages_of_padding_alone_are_not_allocated(retention):
    lengths = torch.tensor([200, 70, 5])
    layer = layer_of(retention=retention, page_size=16)
    give(layer, 200, rows=3, padding=torch.arange(200) < (200 - lengths)[:, None])
    # 12 pages are sealed; the rows' first tokens are at 0, 130 and 195, the last of them in the tail
    assert live_pages(layer) == 2 * (12 + 4 + 0)
    assert layer.sealed.segments[0].pool.capacity == 2 * (12 + 4 + 0)


def test_a_prompt_of_padding_alone_in_its_whole_pages():
    layer = layer_of("int8", page_size=16)
    give(layer, 20, rows=2, padding=torch.arange(20).expand(2, -1) < 18)
    assert live_pages(layer) == 0
    assert layer.sealed.segments[0].pool.capacity == 0
    assert not layer.dense("keys")[:, :, :16].any()


def test_pages_of_dead_beams_are_written_over():
    layer = layer_of(page_size=8)
    layer.expansion = 4
    keys = torch.randn(1, 2, 160, 8).expand(4, -1, -1, -1)
    layer.update(keys, keys)
    layer.commit()
    assert live_pages(layer) == 2 * 20
    for step in range(400):
        give(layer, 1, rows=4)
        # every few steps one beam wins: what the others wrote since is lost
        layer.reorder_cache(torch.tensor([step % 4] * 4) if step % 5 == 4 else torch.arange(4))
    lived = 2 * (20 + 400 // 8)
    assert live_pages(layer) <= lived
    assert layer.sealed.segments[0].pool.capacity <= 17 / 16 * (lived + 2 * 4)


def test_rows_that_only_look_like_one_prompt_share_nothing():
    layer = layer_of(page_size=8)
    layer.expansion = 2
    keys = torch.randn(2, 2, 64, 8)
    layer.update(keys, keys)
    layer.commit()
    assert live_pages(layer) == 2 * 2 * 8
    assert torch.equal(layer.dense("keys"), keys)


def test_reset_and_the_end_of_a_fork_give_everything_back():
    layer = layer_of(page_size=8)
    give(layer, 160)
    pool = layer.sealed.segments[0].pool
    fork = layer.fork(3)
    for _ in range(80):
        give(fork, 1, rows=3)
    assert len(pool.live()) == 2 * (20 + 3 * 9)
    del fork
    assert len(pool.live()) == 2 * 20
    layer.reset()
    assert len(pool.live()) == 0
    assert collect([layer]).bytes_allocated == 0
