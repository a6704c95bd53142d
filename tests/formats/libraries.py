"""What the tests of the library formats share: the demands that a page format has to meet, whoever wrote its codes."""

import sys

import pytest
import torch
from conftest import tiny_llama
from numerics import relative_rms

import hf_kvplus
from hf_kvplus.formats import FORMATS

#: Page sizes, head dimensions and dtypes.
SHAPES = [
    (8, 64, torch.float32),
    (16, 80, torch.bfloat16),
    (64, 96, torch.float16),
    (64, 128, torch.float32),
    (128, 112, torch.bfloat16),
    (256, 192, torch.float16),
    (64, 512, torch.bfloat16),
]


def built(name, kind, page=64, dim=64, dtype=torch.float32):
    build = FORMATS[name].key if kind == "keys" else FORMATS[name].value
    return build(page, dim, dtype, channel_major=kind == "keys")


def check_pages(name, kind, page, dim, dtype, tolerance):
    """Parts as announced, every page readable by itself, numbers near what was written."""
    format = built(name, kind, page, dim, dtype)
    pages = torch.randn(3, page, dim).to(dtype)
    pages[1] *= 30  # a page's scales are its own
    for given in (pages, pages[:1], pages[:0]):
        parts = format.encode(given)
        assert {n: (tuple(part.shape), part.dtype) for n, part in parts.items()} == {
            n: ((len(given), *shape), dtype) for n, (shape, dtype) in format.parts.items()
        }
        assert sum(part.nbytes for part in parts.values()) == len(given) * format.bytes_per_page()
        assert format.decode(parts).dtype == dtype
        assert format.decode(parts).shape == given.shape
    parts = format.encode(pages)
    decoded = format.decode(parts, torch.float32)
    for i, page in enumerate(pages):
        assert relative_rms(decoded[i], page) < tolerance
        alone = format.decode({n: part[[i]] for n, part in parts.items()}, torch.float32)
        assert torch.equal(alone[0], decoded[i])


def check_hard_pages(name, kind):
    """Constant, tiny and huge numbers come back finite and near; those that are not finite are told."""
    format = built(name, kind)
    for value in (0.0, 1.0, -3.5, 1e4, -1e4, 1e-6, 3e-8):
        decoded = format.decode(format.encode(torch.full((1, 64, 64), value)))
        assert (decoded - value).abs().max() <= max(1e-3 * abs(value), 2.0**-24)
    assert format.decode(format.encode(torch.randn(1, 64, 64) * 1e30)).isfinite().all()
    for value in (float("nan"), float("inf")):
        pages = torch.randn(2, 64, 64)
        pages[1, 5, 7] = value
        with pytest.raises(ValueError, match=f"The {kind} to be cached hold infinities or NaN"):
            format.encode(pages)


def check_generate(name):
    """generate() runs on such pages, in beams too, and the logits stay near those of native pages."""
    model = tiny_llama()
    ids = torch.randint(3, 128, (2, 100))
    call = {"max_new_tokens": 24, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    native = model.generate(ids, cache_implementation="paged_native", **call)
    ours = model.generate(
        ids, cache_implementation=f"paged_{name}", cache_config={"page_size": 16, "residual": 0}, **call
    )
    assert relative_rms(ours.logits[0], native.logits[0]) < 1e-5  # a prompt's own attention is exact
    assert 0 < relative_rms(ours.logits[1], native.logits[1]) < 0.35
    beams = model.generate(ids, cache_implementation=f"paged_{name}", max_new_tokens=8, num_beams=3, do_sample=False)
    assert beams.shape == (2, 108)


def check_half_precision(name, dtype):
    """A model in half precision reads such pages, as near to native pages as a float32 one."""
    model = tiny_llama().to(dtype)
    ids = torch.randint(3, 128, (2, 100))
    call = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    native, ours = (
        model.generate(ids, cache_implementation=f"paged_{format}", cache_config={"page_size": 16}, **call).logits
        for format in ("native", name)
    )
    assert ours[1].isfinite().all()
    assert 0 < relative_rms(ours[1], native[1]) < 0.35


def check_missing(name, package, extra, monkeypatch):
    """Without the library: told when the cache is built, with what to install. Other formats are unaffected."""
    monkeypatch.setitem(sys.modules, package, None)
    message = rf"{name}.*pip install hf-kvplus\[{extra}\]"
    with pytest.raises(ImportError, match=message):
        hf_kvplus.make_cache(f"paged_{name}", tiny_llama())
    with pytest.raises(ImportError, match=message):
        hf_kvplus.PagedCache(tiny_llama().config, format="int8", v_format=name)
    with pytest.raises(ImportError, match=message):
        tiny_llama().generate(torch.ones(1, 4).long(), cache_implementation=f"paged_{name}", max_new_tokens=2)
    assert f"paged_{name}" in hf_kvplus.available()
    hf_kvplus.make_cache("paged_int8", tiny_llama())
