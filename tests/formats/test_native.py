"""Native pages give back what was written, bit by bit."""

import pytest
import torch

from hf_kvplus.formats import FORMATS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("kind", ["keys", "values"])
def test_every_number_as_it_came(dtype, kind):
    spec = FORMATS["native"]
    pages = torch.randn(3, 8, 6).to(dtype)
    pages[0, 0, :4] = torch.tensor([float("inf"), float("-inf"), float("nan"), -0.0])
    format = (spec.key if kind == "keys" else spec.value)(8, 6, dtype, channel_major=kind == "keys")
    parts = format.encode(pages)
    (data,) = parts.values()
    assert {name: (tuple(part.shape[1:]), part.dtype) for name, part in parts.items()} == dict(format.parts)
    assert data[1, 2, 5] == (pages[1, 5, 2] if kind == "keys" else pages[1, 2, 5])  # channel-major, token-major
    assert format.bytes_per_page() == data[0].nbytes == 8 * 6 * dtype.itemsize
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    assert torch.equal(format.decode(parts).contiguous().view(bits), pages.view(bits))
    assert torch.equal(format.decode(parts, torch.float32).isnan(), pages.float().isnan())
    assert format.decode(parts, torch.float32).dtype == torch.float32
