"""Pages of optimum-quanto's integers."""

import pytest
import torch
from libraries import SHAPES, built, check_generate, check_half_precision, check_hard_pages, check_missing, check_pages
from numerics import assert_close

from hf_kvplus import CacheConfigError

NAMES = {"quanto_int8": 0.012, "quanto_int4": 0.13, "quanto_int2": 0.6}


@pytest.fixture(scope="module")
def library():
    quanto = pytest.importorskip("optimum.quanto", reason="the extra `quanto` is not installed")
    try:
        torch.ops.quanto.unpack(torch.zeros(2, dtype=torch.uint8), 4)
    except Exception as error:
        pytest.skip(f"optimum-quanto cannot build its unpacking routine here: {str(error).splitlines()[0]}")
    return quanto


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["keys", "values"])
@pytest.mark.parametrize(("page", "dim", "dtype"), SHAPES)
@pytest.mark.usefixtures("library")
def test_pages(name, kind, page, dim, dtype):
    check_pages(name, kind, page, dim, dtype, NAMES[name])


@pytest.mark.parametrize("name", ["quanto_int4", "quanto_int2"])
@pytest.mark.parametrize("kind", ["keys", "values"])
def test_pages_are_those_of_the_library(library, name, kind):
    qtype = getattr(library, name.replace("quanto_", "q"))
    pages = torch.randn(2, 64, 128)
    rows = (pages.mT if kind == "keys" else pages).reshape(-1, 64)
    scale, shift = library.MaxOptimizer()(rows, qtype, 0)
    expected = library.quantize_weight(rows, qtype, 0, scale, shift, optimized=False).dequantize()
    format = built(name, kind, 64, 128)
    decoded = format.decode(format.encode(pages))
    decoded = (decoded.mT if kind == "keys" else decoded).reshape(-1, 64)
    # Scales are rounded to float16 here, which may move a number by a step where it lay between two codes.
    assert_close("pages", decoded, expected, 0.03)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["keys", "values"])
@pytest.mark.usefixtures("library")
def test_hard_pages(name, kind):
    check_hard_pages(name, kind)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("library")
def test_generate(name):
    check_generate(name)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.usefixtures("library")
def test_half_precision(name, dtype):
    check_half_precision(name, dtype)


@pytest.mark.usefixtures("library")
def test_channels_that_do_not_fill_bytes_are_refused():
    with pytest.raises(CacheConfigError, match="got 'quanto_int2' for values of 66 channels"):
        built("quanto_int2", "values", dim=66)


@pytest.mark.parametrize("name", NAMES)
def test_without_the_library(name, monkeypatch):
    check_missing(name, "optimum", "quanto", monkeypatch)
