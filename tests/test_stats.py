"""The accounts of a cache against counts made by walking it, and what sharing saves."""

import pytest
import torch
from accounting import held_bytes
from conftest import tiny_llama

from hf_kvplus import CacheStats, available, make_cache
from hf_kvplus._compat import forward_cache_name


@pytest.fixture(scope="module")
def wide():
    """Heads as wide as those of real models, so that pages outweigh tables as they do there."""
    return tiny_llama(num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=4096)


def generate(model, cache, prompt=100, rows=1, new=8, **kwargs):
    ids = torch.randint(3, 128, (rows, prompt), generator=torch.Generator().manual_seed(0))
    options = {forward_cache_name(model): cache, "attention_mask": torch.ones_like(ids), "max_new_tokens": new}
    return model.generate(ids, **options, **{"do_sample": False, **kwargs})


@pytest.mark.parametrize("mode", [{}, {"num_beams": 3}, {"num_return_sequences": 3, "do_sample": True}], ids=str)
@pytest.mark.parametrize("name", [name for name in available() if name.endswith(("d_native", "d_int8", "d_int4"))])
def test_every_field_equals_an_independent_count(llama, name, mode):
    options = {"budget": 40} if "keydiff" in name else {"window": 40} if "sliding" in name else {}
    cache = make_cache(name, llama, page_size=16, **options)
    generate(llama, cache, new=30, **mode)
    stats, rows = cache.stats(), 3 if mode else 1

    held = held_bytes(cache)
    assert {tier: size for tier, size in stats.bytes_by_tier.items() if size} == held
    assert stats.bytes_allocated == sum(held.values())
    assert stats.tokens == rows * 129
    assert stats.compression == pytest.approx(rows * 129 * 2 * 2 * 2 * 16 * 4 / stats.bytes_allocated)

    pages = shared = used = 0
    for layer in cache.layers:
        for segment in layer.sealed.segments:
            entries = [page for page in segment.table.ids.flatten().tolist() if page >= 0]
            pages += len(set(entries))
            shared += sum(entries.count(page) > 1 for page in set(entries))
            for part in segment.storage._parts.values():
                used += len(set(entries)) * part.nbytes // segment.pool.capacity
        used += sum(tokens.nbytes for tokens in layer.unsealed())
    assert (stats.pages, stats.shared_pages, stats.bytes_used) == (pages, shared, used)
    assert stats.bytes_used <= stats.bytes_allocated
    if mode and "keydiff" not in name and "sliding" not in name:
        assert shared >= 2 * 2 * 6  # the prompt's pages, of both layers and heads


def test_an_empty_cache_holds_nothing(llama):
    cache = make_cache("offloaded_keydiff_paged_int8", llama, offload_to="disk")
    assert cache.stats() == CacheStats()
    generate(llama, cache)
    cache.reset()
    assert cache.stats().bytes_allocated == cache.stats().tokens == 0


def test_pages_shared_between_forks_count_for_both_and_others_for_neither(llama):
    cache = make_cache("paged_native", llama, page_size=8)
    generate(llama, cache, prompt=63, new=2)  # 64 tokens seen, 56 of them in pages
    assert (cache.stats().pages, cache.stats().shared_pages) == (2 * 2 * 7, 0)
    fork = cache.fork(3)
    assert (fork.stats().pages, fork.stats().shared_pages) == (2 * 2 * 7, 2 * 2 * 7)
    assert cache.stats().shared_pages == 2 * 2 * 7
    with torch.no_grad():
        for _ in range(40):
            llama(torch.randint(3, 128, (3, 1)), **{forward_cache_name(llama): fork})
    fork.reorder_cache(torch.tensor([0, 0, 0]))
    assert fork.stats().shared_pages == fork.stats().pages > 2 * 2 * 7
    assert cache.stats().shared_pages == cache.stats().pages == 2 * 2 * 7
    del fork
    assert cache.stats().shared_pages == 0


def test_layers_that_are_not_ours_count_with_their_tensors(llama):
    cache = make_cache("paged_int8", llama)
    cache.layers[1] = type("Other", (), {"keys": torch.zeros(2, 5), "state": {"a": [torch.zeros(3)]}})()
    vars(cache.layers[1]).update(keys=torch.zeros(2, 5), state={"a": [torch.zeros(3)]})
    assert cache.stats().bytes_by_tier == {"cpu": 4 * 13}


def test_it_prints_as_a_table():
    stats = CacheStats(12_345, 60, 7, 5 << 20, 3 << 19, {"cpu": 1 << 20, "disk": 4 << 20}, 3.456, 1_212)
    assert str(stats).splitlines() == [
        "tokens       12,345",
        "pages        60, 7 of them shared",
        "allocated    5.0 MiB, 1.5 MiB of it used",
        "  on cpu     1.0 MiB",
        "  on disk    4.0 MiB",
        "compression  3.46x",
        "dense reads  1,212",
    ]


# --- sharing ------------------------------------------------------------------------------------------------------

EIGHT = {
    "returned sequences": {"num_return_sequences": 8, "do_sample": True},
    "beams": {"num_beams": 8},
    "beams, the prompt in chunks": {"num_beams": 8, "prefill_chunk_size": 1000},
}


@pytest.mark.parametrize("mode", EIGHT)
@pytest.mark.parametrize("format", ["native", "int8"])
def test_eight_sequences_of_one_prompt_take_at_most_a_quarter_more_than_one(wide, format, mode):
    one, eight = make_cache(f"paged_{format}", wide), make_cache(f"paged_{format}", wide)
    generate(wide, one, prompt=2048, new=12)
    generate(wide, eight, prompt=2048, new=12, **EIGHT[mode])
    assert eight.stats().tokens == 8 * one.stats().tokens
    assert eight.stats().bytes_allocated <= 1.25 * one.stats().bytes_allocated


@pytest.mark.parametrize("format", ["native", "int8"])
def test_eight_forks_take_at_most_a_quarter_more_than_one(wide, format):
    cache = make_cache(f"paged_{format}", wide)
    generate(wide, cache, prompt=2048, new=12)
    alone, fork = cache.stats().bytes_allocated, cache.fork(8)
    assert fork.stats().bytes_allocated <= 1.25 * alone
    assert sum(held_bytes([cache, fork]).values()) <= 1.5 * alone
