"""Pages of bitsandbytes' 4-bit floats."""

import pytest
import torch
from libraries import SHAPES, built, check_generate, check_half_precision, check_hard_pages, check_missing, check_pages

from hf_kvplus import CacheConfigError

NAMES = {"nf4": 0.13, "fp4": 0.17}


def library():
    return pytest.importorskip("bitsandbytes.functional", reason="the extra `bitsandbytes` is not installed")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["keys", "values"])
@pytest.mark.parametrize(("page", "dim", "dtype"), SHAPES)
def test_pages(name, kind, page, dim, dtype):
    library()
    check_pages(name, kind, page, dim, dtype, NAMES[name])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["keys", "values"])
def test_pages_are_those_of_the_library(name, kind):
    functional = library()
    pages = torch.randn(2, 64, 128)
    format = built(name, kind, 64, 128)
    stored = pages.mT.contiguous() if kind == "keys" else pages
    codes, state = functional.quantize_4bit(stored, blocksize=64, quant_type=name)
    parts = format.encode(pages)
    assert torch.equal(parts["data"].flatten(), codes.flatten())
    expected = functional.dequantize_4bit(codes, state)
    torch.testing.assert_close(format.decode(parts), expected.mT if kind == "keys" else expected, rtol=1e-3, atol=0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["keys", "values"])
def test_hard_pages(name, kind):
    library()
    check_hard_pages(name, kind)


@pytest.mark.parametrize("name", NAMES)
def test_generate(name):
    library()
    check_generate(name)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(name, dtype):
    library()
    check_half_precision(name, dtype)


def test_pages_of_part_blocks_are_refused():
    library()
    with pytest.raises(CacheConfigError, match=r"got 'nf4' for pages of 8 tokens and 4 channels.*larger `page_size`"):
        built("nf4", "keys", 8, 4)


@pytest.mark.parametrize("name", NAMES)
def test_without_the_library(name, monkeypatch):
    check_missing(name, "bitsandbytes.functional", "bitsandbytes", monkeypatch)
