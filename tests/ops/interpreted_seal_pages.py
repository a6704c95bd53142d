"""The Triton kernel that seals pages against the formats' own `encode`, under the interpreter."""

import pytest
import torch
from numerics import poisoned

from hf_kvplus.formats import FORMATS
from hf_kvplus.ops.seal_pages import reference, seal_pages, triton

# format, page size, channels, dtype, channel-major
CASES = [
    ("native", 16, 80, torch.bfloat16, True),
    ("native", 64, 64, torch.float16, False),
    ("fp8", 16, 96, torch.bfloat16, True),
    ("fp8", 64, 64, torch.float32, False),
    ("int8", 64, 128, torch.bfloat16, True),
    ("int8", 16, 80, torch.float16, False),
    ("int8", 8, 256, torch.float32, True),
    ("int4", 64, 128, torch.bfloat16, True),
    ("int4", 8, 96, torch.float16, True),
    ("int4", 256, 64, torch.float32, True),
    ("int4", 64, 128, torch.bfloat16, False),
    ("int4", 16, 80, torch.float16, False),
    ("int4", 32, 256, torch.float32, False),
    ("int2", 64, 128, torch.bfloat16, True),
    ("int2", 8, 80, torch.float16, True),
    ("int2", 256, 64, torch.bfloat16, True),
    ("int2", 128, 64, torch.float32, True),
    ("int2", 64, 96, torch.bfloat16, False),
    ("int2", 16, 64, torch.float16, False),
    ("int2", 32, 256, torch.bfloat16, False),
]


def make(name, page, dim, dtype, channel_major, pages=3, **options):
    """A format, storage that nothing was written to, and tokens in a buffer with room behind them."""
    spec = FORMATS[name].with_options(**options)
    format = (spec.key if channel_major else spec.value)(page, dim, dtype, channel_major=channel_major)
    with poisoned():
        parts = {name: torch.empty((pages + 4, *shape), dtype=d) for name, (shape, d) in format.parts.items()}
    buffer = torch.randn(1, pages, page + 7, dim) * torch.rand(1, pages, page + 7, 1).mul(3).exp()
    buffer[:, :, page:] = float("nan")
    return format, parts, buffer.to(dtype)[:, :, :page].flatten(0, 1)


def sealed(module, format, parts, tokens, ids):
    parts = {name: part.clone() for name, part in parts.items()}
    module.seal_pages(format, parts, tokens, ids)
    return parts


def codes(format, data):
    """The numbers in `data`, one by one."""
    if format.layout not in ("int4", "int2"):
        return data.view(torch.int8).int() if data.dtype.itemsize == 1 else data
    return torch.stack([(data >> (format.bits * i)) & (2**format.bits - 1) for i in range(8 // format.bits)]).int()


def compare(format, parts, tokens, ids):
    actual, expected = (sealed(module, format, parts, tokens, ids) for module in (triton, reference))
    same = codes(format, actual["data"][ids]) == codes(format, expected["data"][ids])
    assert same.float().mean() >= (1 if format.layout in ("native", "fp8") else 0.999)
    shift = (format.decode(actual, torch.float32) - format.decode(expected, torch.float32))[ids].abs()
    step = expected["scale"][ids].float().amax() if "scale" in expected else 0.0
    assert shift.max() <= 0.5 * step if format.rotation == 0 else shift.max() <= step
    untouched = torch.ones(len(actual["data"]), dtype=torch.bool)
    untouched[ids] = False
    for name, part in parts.items():
        assert torch.equal(actual[name][untouched].view(torch.uint8), part[untouched].view(torch.uint8)), name


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_encode(case):
    format, parts, tokens = make(*case)
    assert triton.refuses(format, tokens) is None
    compare(format, parts, tokens, torch.tensor([5, 0, 2]))


@pytest.mark.parametrize(("name", "channel_major"), [("int8", True), ("int4", True), ("int2", False)])
def test_without_rotation(name, channel_major):
    format, parts, tokens = make(name, 32, 64, torch.bfloat16, channel_major, rotation=False)
    assert format.rotation == 0
    compare(format, parts, tokens, torch.tensor([1, 6, 3]))


@pytest.mark.parametrize("kind", ["e4m3", "e5m2"])
def test_every_number_of_16_bits_as_8(kind):
    """Subnormals, ties, what saturates, signed zeros."""
    spec = FORMATS["fp8"].with_options(fp8_type=kind)
    format = spec.value(256, 256, torch.float16, channel_major=False)
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16).nan_to_num(0.0)
    tokens, ids = every.view(1, 256, 256), torch.tensor([0])
    parts = {name: torch.empty((1, *shape), dtype=d) for name, (shape, d) in format.parts.items()}
    actual, expected = (sealed(module, format, parts, tokens, ids)["data"] for module in (triton, reference))
    assert torch.equal(actual.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("name", ["int8", "int4", "int2"])
def test_constant_tiny_and_huge_tokens(name):
    """Where channels are equal, codes stand for nothing but rounding errors: what they decode to counts."""
    for channel_major in (True, False):
        format, parts, tokens = make(name, 16, 64, torch.float32, channel_major)
        tokens, ids = tokens.clone(), torch.arange(3)
        tokens[0], tokens[1], tokens[2] = 0.0, 1e-9, 3e8
        actual, expected = (sealed(module, format, parts, tokens, ids) for module in (triton, reference))
        actual, expected = (format.decode(stored, torch.float32)[ids] for stored in (actual, expected))
        assert torch.equal(actual[0], expected[0])
        assert (actual - expected)[1:].abs().amax((1, 2)).le(1e-2 * expected[1:].abs().amax((1, 2))).all()


def test_no_pages():
    format, parts, tokens = make("int4", 16, 64, torch.float32, True, pages=0)
    triton.seal_pages(format, parts, tokens, torch.empty(0, dtype=torch.int64))


@pytest.mark.parametrize("name", ["native", "int2"])
def test_as_an_operator(name):
    format, parts, tokens = make(name, 16, 64, torch.float32, True)
    ids = torch.tensor([1, 0, 4])
    args = (tokens, ids, [part.zero_() for part in parts.values()], *triton.described(format))
    torch.library.opcheck(torch.ops.hf_kvplus.seal_pages_triton.default, args)
    expected = sealed(triton, format, parts, tokens, ids)

    def step(tokens, ids, *values):
        triton.seal_pages(format, dict(zip(parts, values)), tokens, ids)

    torch.compile(step, fullgraph=True, backend="eager")(tokens, ids, *parts.values())
    for part, value in expected.items():
        assert torch.equal(parts[part], value)


def test_shapes_that_do_not_belong_together():
    format, parts, tokens = make("int8", 16, 64, torch.float32, True)
    with pytest.raises(ValueError, match=r"`tokens` is \(3, 16, 64\), expected \(2, 16, 64\)"):
        seal_pages(format, parts, tokens, torch.tensor([0, 1]))
    with pytest.raises(ValueError, match=r"`backend`: got 'gpu', accepted: 'auto', 'torch', 'triton'"):
        seal_pages(format, parts, tokens, torch.tensor([0, 1, 2]), backend="gpu")
