"""Pages of 8-bit floats: the nearest number of the type, saturated; every byte is read as PyTorch reads it."""

from contextlib import nullcontext

import pytest
import torch
from numerics import poisoned

from hf_kvplus import CacheConfigError
from hf_kvplus.formats import FORMATS
from hf_kvplus.formats.fp8 import Fp8Format

TYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@pytest.fixture(params=["keys", "values"])
def kind(request):
    return request.param


def build(kind, page=64, dim=64, dtype=torch.float32, fp8_type="e4m3"):
    return Fp8Format(page, dim, dtype, channel_major=kind == "keys", fp8_type=fp8_type)


@pytest.mark.parametrize("fp8_type", TYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("page", "dim"), [(8, 64), (64, 80), (256, 512)])
def test_numbers_are_the_nearest_of_the_type(kind, fp8_type, dtype, page, dim):
    format = build(kind, page, dim, dtype, fp8_type)
    pages = (torch.randn(2, page, dim) * 3).to(dtype)
    with poisoned():
        parts = format.encode(pages)
        decoded = format.decode(parts)
    data = parts["data"]
    assert {name: (tuple(p.shape[1:]), p.dtype) for name, p in parts.items()} == dict(format.parts)
    assert (tuple(data.shape[1:]), data.dtype) == ((dim, page) if kind == "keys" else (page, dim), TYPES[fp8_type])
    assert format.bytes_per_page() == data[0].nbytes == page * dim
    assert torch.equal(decoded, pages.to(TYPES[fp8_type]).to(dtype))
    assert format.decode(parts, torch.float64).dtype == torch.float64


@pytest.mark.parametrize("fp8_type", TYPES)
def test_every_byte_is_read_as_pytorch_reads_it(kind, fp8_type):
    data = torch.arange(256, dtype=torch.uint8).view(TYPES[fp8_type]).view(1, 16, 16)
    expected = data.float()
    decoded = build(kind, 16, 16, fp8_type=fp8_type).decode({"data": data})
    decoded = decoded.mT if kind == "keys" else decoded
    finite = expected.isfinite()  # what is not is never written
    assert finite.sum() >= 248
    assert torch.equal(decoded[finite], expected[finite])
    assert torch.equal(decoded[finite].signbit(), expected[finite].signbit())


@pytest.mark.parametrize(("fp8_type", "largest"), [("e4m3", 448.0), ("e5m2", 57344.0)])
def test_hard_numbers(kind, fp8_type, largest):
    format = build(kind, fp8_type=fp8_type)
    for value in (0.0, 1e4, -1e30, 1e-9, 2.0**-9):
        with (
            pytest.warns(UserWarning, match=rf"Some {kind} are beyond ±{largest:,.0f}.*'{kind[0]}_format': 'int8'")
            if (abs(value) > largest)
            else nullcontext()
        ):
            decoded = format.decode(format.encode(torch.full((1, 64, 64), value)))
        expected = torch.tensor(value).clamp(-largest, largest).to(TYPES[fp8_type]).float()
        assert torch.equal(decoded, expected.expand_as(decoded))
    for value in (float("nan"), float("inf"), float("-inf")):
        pages = torch.randn(2, 64, 64)
        pages[1, 5, 7] = value
        with pytest.raises(ValueError, match=rf"The {kind} to be cached hold infinities or NaN.*'fp8'"):
            format.encode(pages)


def test_the_type_is_an_option():
    spec = FORMATS["fp8"].with_options(fp8_type="e5m2")
    assert spec.key(64, 64, torch.float32, channel_major=True).parts["data"][1] == torch.float8_e5m2
    with pytest.raises(CacheConfigError, match=r"`fp8_type`: got 'e4m4', accepted: e4m3, e5m2. Did you mean 'e4m3'"):
        FORMATS["fp8"].with_options(fp8_type="e4m4")
