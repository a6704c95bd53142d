"""Pages of integers: the bytes mean what docs/layouts.md says, and lose no more than they must."""

import pytest
import torch
from numerics import assert_close, poisoned, relative_rms

from hf_kvplus import CacheConfigError
from hf_kvplus.formats import FORMATS
from hf_kvplus.formats.integer import Int2Format, Int4Format, Int8Format
from hf_kvplus.formats.rotation import block_size, rotate, rotate_rows

CLASSES = {"int8": Int8Format, "int4": Int4Format, "int2": Int2Format}
BITS = {"int8": 8, "int4": 4, "int2": 2}
FLOATS = [torch.float32, torch.bfloat16, torch.float16]


def build(name, kind, page=64, dim=64, dtype=torch.float32, **options):
    return CLASSES[name](page, dim, dtype, channel_major=kind == "keys", **options)


@pytest.fixture(params=["keys", "values"])
def kind(request):
    return request.param


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("page", [8, 16, 64, 256])
@pytest.mark.parametrize("dim", [64, 80, 96, 112, 128, 192, 256, 512])
def test_parts_are_as_announced_and_any_number_of_pages_works(name, kind, page, dim):
    format = build(name, kind, page, dim)
    for count in (0, 1, 3):
        parts = format.encode(torch.randn(count, page, dim))
        assert {n: (tuple(part.shape[1:]), part.dtype) for n, part in parts.items()} == {
            n: (tuple(shape), dtype) for n, (shape, dtype) in format.parts.items()
        }
        assert sum(part.nbytes for part in parts.values()) == count * format.bytes_per_page()
        assert format.decode(parts).shape == (count, page, dim)
    assert parts["data"].nbytes == 3 * page * dim * BITS[name] // 8


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_encoding_leaves_its_input_alone_and_writes_all_of_its_output(name, kind, dtype):
    format = build(name, kind, dtype=dtype)
    for given in (dtype, torch.float32):
        pages = torch.randn(2, 64, 64).to(given)
        before = pages.clone()
        with poisoned():
            decoded = format.decode(format.encode(pages))
        assert torch.equal(pages, before)
        assert decoded.dtype == dtype
        assert decoded.isfinite().all()
        assert format.decode(format.encode(pages), torch.float64).dtype == torch.float64


# --- 8 bits ---------------------------------------------------------------------------------------------------------


def test_int8_codes_by_hand(kind):
    pages = torch.tensor([[[127.0, -64.0, 0.4, 0.6], [0.0, 0.0, 0.0, 0.0], [-0.5, 0.25, 0.125, 0.0]]])
    parts = build("int8", kind, 3, 4, rotation=False).encode(pages)
    codes = parts["data"].mT if kind == "keys" else parts["data"]
    assert codes[0].tolist() == [[127, -64, 0, 1], [0, 0, 0, 0], [-127, 64, 32, 0]]
    assert parts["scale"][0].tolist() == [1.0, 0.0, float(torch.tensor(0.5 / 127).half())]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e4])
@pytest.mark.parametrize("rotation", [True, False])
def test_int8_loses_at_most_half_a_step(kind, dtype, size, rotation):
    pages = (torch.randn(5, 16, 80).clamp(-5, 5) * size).to(dtype)
    format = build("int8", kind, 16, 80, dtype, rotation=rotation)
    decoded = format.decode(format.encode(pages), torch.float32)
    written = rotate(pages.float(), format.rotation)
    step = written.abs().amax(-1, keepdim=True) / 127
    assert ((rotate(decoded, format.rotation) - written).abs() <= 0.502 * step).all()


def test_int8_rotation_spreads_large_channels(kind):
    """Keys are large in a few channels; the scale of a token must not be theirs alone."""
    pages = torch.randn(8, 64, 64)
    pages[..., :2] *= 30
    error = {}
    for rotation in (True, False):
        format = build("int8", kind, rotation=rotation)
        error[rotation] = relative_rms(format.decode(format.encode(pages))[..., 2:], pages[..., 2:])
    assert error[True] < 0.6 * error[False]


@pytest.mark.parametrize("dtype", FLOATS)
def test_int8_pages_that_are_sealed_again_and_again_do_not_drift(kind, dtype):
    """Policies move surviving tokens into new pages, many times over; between pages, tokens are float32."""
    format = build("int8", kind, dtype=dtype)
    first = format.decode(format.encode(torch.randn(4, 64, 64).to(dtype)), torch.float32)
    again = first
    for _ in range(50):
        again = format.decode(format.encode(again.flip(1)), torch.float32).flip(1)
    assert relative_rms(again, first) < 1e-6


# --- 4 and 2 bits -----------------------------------------------------------------------------------------------------


def by_hand(name, kind, parts, page, dim):
    """`[page, dim]` of the first page, code by code, as docs/layouts.md has it. Not rotated."""
    data, bits = parts["data"][0].tolist(), BITS[name]
    axis = page if kind == "keys" else dim
    share, group = axis * bits // 8, axis if name == "int4" else min(32, axis)
    out = torch.empty(page, dim)
    for t in range(page):
        for d in range(dim):
            row, place = (d, t) if kind == "keys" else (t, d)
            code = data[row][place % share] >> bits * (place // share) & 2**bits - 1
            scale, zero = (parts[n][0][row].reshape(-1)[place // group].float() for n in ("scale", "zero"))
            out[t, d] = code * scale + zero
    return out


@pytest.mark.parametrize("name", ["int4", "int2"])
@pytest.mark.parametrize(("page", "dim"), [(8, 16), (64, 8), (16, 80), (128, 4)])
def test_packed_bytes_mean_what_the_layout_says(name, kind, page, dim):
    format = build(name, kind, page, dim, rotation=False)
    parts = format.encode(torch.randn(2, page, dim))
    torch.testing.assert_close(format.decode(parts)[0], by_hand(name, kind, parts, page, dim))


@pytest.mark.parametrize(("dim", "block"), [(4, 4), (64, 64), (80, 16), (96, 32), (192, 64), (20, 0)])
def test_rotation_is_orthonormal_and_its_own_inverse(dim, block):
    x = torch.randn(3, 5, dim)
    assert block_size(dim) == block
    assert_close("twice rotated", rotate(rotate(x, block), block), x)
    assert_close("lengths", rotate(x, block).norm(dim=-1), x.norm(dim=-1))
    assert_close("rotated channel-major", rotate_rows(x.mT, block).mT, rotate(x, block))
    matrix = rotate(torch.eye(dim), block)
    for i, j in [(0, 0), (1, 3), (3, 3), (dim - 1, dim - 2)]:
        apart = block and i // block != j // block
        sign = (-1) ** bin(i % (block or 1) & j % (block or 1)).count("1")
        expected = float(i == j) if not block else 0.0 if apart else sign / block**0.5
        assert float(matrix[i, j]) == pytest.approx(expected)


# Not int2 with 80 channels: a group of 32 is two blocks of 16 there, of which only one would be spread.
@pytest.mark.parametrize(("name", "dim"), [("int4", 64), ("int4", 80), ("int4", 192), ("int2", 64), ("int2", 192)])
def test_rotation_spreads_an_outlying_channel_of_values(name, dim):
    pages = torch.randn(3, 64, dim)
    pages[:, :, 5] *= 40
    rotated, plain = (build(name, "values", 64, dim, rotation=rotation) for rotation in (True, False))
    others = torch.arange(dim) != 5
    losses = [relative_rms(f.decode(f.encode(pages))[..., others], pages[..., others]) for f in (rotated, plain)]
    assert losses[0] < losses[1]


@pytest.mark.parametrize("name", ["int4", "int2"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_packed_codes_are_the_nearest(name, kind, dtype):
    """No other code of a number's group, with the scale and zero that are stored, is nearer to it."""
    page = dim = 64
    format = build(name, kind, page, dim, dtype, rotation=False)
    pages = torch.randn(1, page, dim).to(dtype)
    parts = format.encode(pages)
    decoded = format.decode(parts, torch.float32)[0]
    per_number = parts["scale"][0].float().repeat_interleave(64 // (parts["scale"][0].numel() // 64), dim=-1)
    step = per_number.view(64, 64).mT if kind == "keys" else per_number.view(64, 64)
    zero = parts["zero"][0].float().repeat_interleave(64 // (parts["zero"][0].numel() // 64), dim=-1)
    zero = zero.view(64, 64).mT if kind == "keys" else zero.view(64, 64)
    place = (pages[0].float() - zero) / step  # steps lead down where the top of a group is nearer to 0
    inside = (place >= 0) & (place <= 2 ** BITS[name] - 1)
    assert (step < 0).float().mean() == pytest.approx(0.5, abs=0.2)
    assert inside.float().mean() > 0.8
    assert ((decoded - pages[0].float()).abs() <= 0.501 * step.abs())[inside].all()


# --- what is hard to encode ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("value", [0.0, 1.0, -3.5, 1e4, -1e4, 1e-6, 3e-8])
def test_constant_pages(name, kind, dtype, value):
    pages = torch.full((1, 64, 64), value).to(dtype)
    rotated = build(name, kind, dtype=dtype)
    assert rotated.decode(rotated.encode(pages)).isfinite().all()
    plain = build(name, kind, dtype=dtype, **({} if name == "int8" else {"rotation": False}))
    decoded = plain.decode(plain.encode(pages), torch.float32)
    # float16 scales resolve no less than 6e-8; int8 multiplies that by up to 127
    assert (decoded - pages.float()).abs().max() <= max(6e-3 * abs(value), 127 * 2**-24)


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("value", [1.0, -3.5, 1e4, -1e4])
def test_constants_survive_the_rotation(name, kind, dim, value):
    """All of a token lands in the first channel of a block, √block times as large: beyond float16 for 1e4."""
    format = build(name, kind, dim=dim)
    decoded = format.decode(format.encode(torch.full((2, 64, dim), value)))
    assert (decoded - value).abs().max() <= 0.01 * abs(value)


@pytest.mark.parametrize("name", ["int4", "int2"])
@pytest.mark.parametrize("offset", [1e5, -1e5, 1.6e5, -1.6e5])
def test_groups_beyond_float16_are_counted_from_its_end(name, kind, offset):
    """Zeros of ±65,504, and steps that lead on from there: down, where the group is below."""
    format = build(name, kind, rotation=False)
    pages = offset + torch.randn(2, 64, 64) * 100
    parts = format.encode(pages)
    assert (parts["zero"].float() == 65504 * (1 if offset > 0 else -1)).all()
    assert (parts["scale"].sign() == (1 if offset > 0 else -1)).all()
    assert relative_rms(format.decode(parts), pages) < 0.005


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("size", [1e-6, 1e4, 1e7, 1e30, 3e37])
def test_sizes_out_of_reach_are_clipped_not_lost(name, kind, size):
    format = build(name, kind)
    pages = torch.randn(1, 64, 64) * size
    decoded = format.decode(format.encode(pages))
    assert decoded.isfinite().all()
    plain = build(name, kind, rotation=False)
    assert plain.decode(plain.encode(pages)).isfinite().all()
    if size in (1e4, 1e7) and name == "int8":
        assert relative_rms(decoded, pages) < (0.01 if size == 1e4 else 0.8)


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_are_not_finite_are_told(name, kind, value):
    pages = torch.randn(2, 64, 64)
    pages[1, 5, 7] = value
    with pytest.raises(ValueError, match=rf"The {kind} to be cached hold infinities or NaN.*'{name}'.*'native'"):
        build(name, kind).encode(pages)


@pytest.mark.parametrize("name", ["int4", "int2"])
def test_channels_that_do_not_fill_bytes_are_refused(name):
    with pytest.raises(CacheConfigError, match=rf"`format`: got '{name}' for values of 67 channels"):
        build(name, "values", dim=67)
    with pytest.raises(CacheConfigError, match="`rotation`: got 1, accepted: True or False"):
        FORMATS[name].with_options(rotation=1)
