"""Tokens taken back out of the pages of a reservation, where rows have different numbers of pages."""

import pytest
import torch
from layers import layer_of

from hf_kvplus.retention.sliding import Sliding


@pytest.mark.parametrize("format", ["native", "int4"])
@pytest.mark.parametrize("removed", [3, 16, 27, 40])
@pytest.mark.parametrize("padding", [(0, 0), (17, 0), (17, 9), (25, 18)])
def test_crop_into_the_pages_of_padded_rows(format, removed, padding):
    kept, found = [], []
    for reserve in (None, 200):
        generator = torch.Generator().manual_seed(0)
        layer = layer_of(format, Sliding(window=150, sink_tokens=2), page_size=8)
        layer.reserve(reserve)
        layer.update(*torch.randn(2, 2, 2, 60, 8, generator=generator))
        layer.commit(torch.arange(60) < torch.tensor(padding)[:, None])
        layer.resume()
        assert (layer.reservation is None) == (reserve is None)
        for _ in range(10):
            layer.update(*torch.randn(2, 2, 2, 1, 8, generator=generator))
            layer.commit()
            layer.resume()
        layer.crop(-removed)
        layer.take_back()
        found.append((layer.seen, layer.keys, layer.values))
        kept.append([sorted(row.tolist()) for row in layer.slot_positions().flatten(0, 1)])
    assert found[0][0] == found[1][0] == 70 - removed
    for plain, reserved in zip(*kept):
        assert [p for p in plain if p >= 0] == [p for p in reserved if p >= 0]
    for plain, reserved in zip(found[0][1:], found[1][1:]):
        assert torch.equal(plain, reserved)


@pytest.mark.parametrize("removed", [5, 9, 20])
@pytest.mark.parametrize("rows", [1, 2])
def test_crop_into_padding_between_turns(rows, removed):
    found = []
    for reserve in (None, 200):
        generator = torch.Generator().manual_seed(0)
        layer = layer_of("native", Sliding(window=150, sink_tokens=2), page_size=8)
        layer.reserve(reserve)
        for new, padding in ((13, 0), (27, 22)):
            layer.update(*torch.randn(2, rows, 2, new, 8, generator=generator))
            layer.commit(torch.arange(new) < torch.tensor([padding, 0][:rows])[:, None])
            layer.resume()
        layer.crop(-removed)
        layer.take_back()
        found.append((layer.keys, layer.values))
    for plain, reserved in zip(*found):
        assert torch.equal(plain, reserved)
