"""Rollback, chunks of a prompt, and what a layer refuses."""

import pytest
import torch
from layers import give, layer_of
from numerics import assert_close

from hf_kvplus import PagedCache
from hf_kvplus._compat import forward_cache_name
from hf_kvplus.retention.keydiff import KeyDiff
from hf_kvplus.retention.sliding import Sliding


@pytest.mark.parametrize("format", ["native", "int8", "int4"])
@pytest.mark.parametrize("kept", [0, 1, 15, 16, 17, 48, 150, 159])
def test_crop_goes_back_into_sealed_pages(format, kept):
    layer, straight = (layer_of(format, page_size=16, residual=0) for _ in range(2))
    keys = torch.randn(1, 2, 160, 8)
    layer.update(keys, keys)
    layer.crop(kept - 160)
    after = torch.randn(1, 2, 40, 8)
    for one in (layer, straight):
        if one is straight and kept:
            one.update(keys[:, :, :kept], keys[:, :, :kept])
        one.update(after, after)
        one.commit()
    assert layer.get_seq_length() == kept + 40
    if format == "int4":  # pages that are encoded twice lose twice
        assert (layer.dense("keys") - straight.dense("keys")).abs().max() <= 2 * (straight.dense("keys") - torch.cat(
            [keys[:, :, :kept], after], dim=2)).abs().max()  # fmt: skip
    else:
        torch.testing.assert_close(layer.dense("keys"), straight.dense("keys"), rtol=0, atol=1e-6)


@pytest.mark.parametrize("policy", [Sliding(window=20), KeyDiff(budget=20)], ids=["sliding", "keydiff"])
def test_crop_behind_an_eviction_is_refused_and_changes_nothing(policy):
    layer = layer_of(retention=policy, page_size=8)
    give(layer, 100)
    give(layer, 5)
    before = layer.contiguous("keys")
    with pytest.raises(ValueError, match=r"`tokens_to_remove`: got -6, which goes back to 99 tokens.*`fork` the cache"):
        layer.crop(-6)
    assert torch.equal(layer.contiguous("keys"), before)
    layer.crop(-5)
    assert layer.get_seq_length() == 100


def test_crop_refuses_a_target_length():
    layer = layer_of()
    give(layer, 10)
    with pytest.raises(ValueError, match=r"`tokens_to_remove`: got 4, accepted: 0 or a negative.*pass -6"):
        layer.crop(4)


@pytest.mark.parametrize("rows", [1, 3])
def test_another_number_of_rows_is_refused(rows):
    layer = layer_of()
    give(layer, 10, rows=2)
    with pytest.raises(ValueError, match=rf"`key_states` has {rows} rows, but this cache holds 2 sequences"):
        give(layer, 1, rows=rows)
    assert layer.get_seq_length() == 10


@pytest.mark.parametrize("chunk", [1, 7, 16, 17, 33])
@pytest.mark.parametrize("policy", [None, Sliding(window=24, sink_tokens=4)], ids=["all", "sliding"])
def test_padding_is_known_however_short_the_chunks_of_a_prompt(llama, chunk, policy):
    lengths = (60, 21, 9)
    prompts = [torch.randint(3, 128, (1, length)) for length in lengths]
    name = forward_cache_name(llama)

    @torch.no_grad()
    def logits(ids, mask):
        cache = PagedCache(llama.config, retention=policy, page_size=8)
        for start in range(0, 60, chunk):
            stop = min(start + chunk, ids.shape[1])
            if start < stop:
                out = llama(ids[:, start:stop], attention_mask=mask[:, :stop], **{name: cache})
        return out.logits[:, -1], cache

    ids = torch.cat([torch.nn.functional.pad(prompt, (60 - prompt.shape[1], 0)) for prompt in prompts])
    mask = torch.arange(60) >= 60 - torch.tensor(lengths)[:, None]
    together, cache = logits(ids, mask.long())
    assert cache.layers[0].padding.first.tolist() == [0, 39, 51]
    for row, prompt in enumerate(prompts):
        alone, _ = logits(prompt, torch.ones_like(prompt))
        assert_close(f"logits of row {row}", together[row], alone[0])
    if policy is None:
        (pages,) = cache.layers[0].sealed.segments
        assert len(pages.pool.live()) == 2 * sum(max(0, pages.table.columns - pad // 8) for pad in (0, 39, 51))


@pytest.mark.parametrize("format", ["int8", "int4", "k4v2"])
def test_tokens_that_cannot_be_encoded_are_taken_back_by_crop(format):
    """An overflow in mid-turn costs the turn, not the conversation."""
    layer = layer_of(format, page_size=16)
    give(layer, 25)
    before = layer.keys.clone()
    layer.update(*torch.full((2, 1, 2, 30, 8), float("nan")))
    with pytest.raises(ValueError, match="hold infinities or NaN"):
        layer.commit()
    with pytest.raises(ValueError, match="hold infinities or NaN"):
        layer.update(*torch.randn(2, 1, 2, 1, 8))
    layer.crop(-30)
    assert torch.equal(layer.keys, before)
    more = give(layer, 30)
    assert layer.seen == 55
    assert_close("keys", layer.keys[:, :, 48:], more[:, :, 23:], 1e-6)
