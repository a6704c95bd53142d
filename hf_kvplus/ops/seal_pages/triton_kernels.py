"""The kernel that rotates, encodes and packs pages of tokens, and how it is launched."""

import torch
import triton
import triton.language as tl

from .._triton_codes import BITS, INTERPRETED, Launch, dot, hadamard

_LARGEST = tl.constexpr(65504.0)  # of float16
_HALF_STEP = tl.constexpr(2.0**-11)  # float16 rounds to within this, relatively
_TINY = tl.constexpr(torch.finfo(torch.float32).tiny)
_ROUND = tl.constexpr(12582912.0)  # 1.5 * 2**23: added and taken away again, it rounds to whole numbers


def plan(tokens, ids, parts, kind, channel_major, rotation, group, inset, compiled=not INTERPRETED) -> list[Launch]:
    """The launch that writes `parts`."""
    pages, page, dim = tokens.shape
    if not pages:
        return []
    tokens = tokens if tokens.stride(-1) == 1 else tokens.contiguous()
    data, *rest = (part.view(torch.uint8) if part.dtype.itemsize == 1 else part for part in parts)
    # Packed keys are grouped along tokens; all else along channels. The other axis is cut among programs.
    along_tokens = channel_major and group > 0
    axis, rows = (page, dim) if along_tokens else (dim, page)
    per_byte = 8 // BITS[kind] if group else 1
    step, tile = 16 if along_tokens else 32, max(16, triton.next_power_of_2(axis // per_byte))
    args = {
        **{"X": tokens, "IDS": ids, "DATA": data, **dict(zip(("SCALE", "ZERO"), [*rest, None, None]))},
        **{"x_page": tokens.stride(0), "x_token": tokens.stride(1), "INSET": inset, "KIND": kind},
        **{"BITS": BITS[kind], "PAGE": page, "D_": dim, "BLOCK": rotation, "GROUP": group, "PER_BYTE": per_byte},
        **{"ALONG_TOKENS": along_tokens, "CHANNEL_MAJOR": channel_major, "ROWS": step},
        **{"A": tile, "K": (128 if tile == 16 else 64) // tokens.dtype.itemsize, "COMPILED": compiled},
    }
    return [Launch(seal, (pages, triton.cdiv(rows, step)), args, {"num_warps": 4})]


@triton.jit
def _numbers(
    X, x_token, axis, row, PART: tl.constexpr, RS: tl.constexpr, D_: tl.constexpr, BLOCK: tl.constexpr,
    ALONG_TOKENS: tl.constexpr, FIRST: tl.constexpr, K: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """The rotated numbers of a page, float32 `[A, ROWS]`, from the part that begins at FIRST on."""
    held, row_held, axis = (axis < PART)[:, None], (row < RS)[None, :], axis + FIRST
    if BLOCK > 1:
        out = tl.zeros([axis.shape[0], row.shape[0]], tl.float32)
        for start in range(0, D_, K):
            k = start + tl.arange(0, K)
            if ALONG_TOKENS:
                x = tl.load(X + axis[:, None] * x_token + k[None, :], mask=held & (k[None, :] < D_), other=0.0)
                out = dot(x, hadamard(k, row, BLOCK, x.dtype), out, "tf32x3", COMPILED)
            else:
                x = tl.load(X + row[None, :] * x_token + k[:, None], mask=row_held & (k[:, None] < D_), other=0.0)
                out = dot(hadamard(axis, k, BLOCK, x.dtype), x, out, "tf32x3", COMPILED)
        return out * BLOCK**-0.5
    else:
        token, channel = (axis[:, None], row[None, :]) if ALONG_TOKENS else (row[None, :], axis[:, None])
        return tl.load(X + token * x_token + channel, mask=held & row_held, other=0.0).to(tl.float32)


@triton.jit
def _float8(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr, LARGEST: tl.constexpr):
    """The bits of float32 `x` as an 8-bit float, rounded to the nearest, even if between two; saturated."""
    STEP: tl.constexpr = 23 - MANTISSA
    size = tl.minimum(tl.abs(x), LARGEST)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + (1 << (STEP - 1)) - 1 + ((bits >> STEP) & 1)) >> STEP) - ((127 - BIAS) << MANTISSA)
    # Added to a power of two whose last place is the step of the smallest numbers, these are rounded to it.
    SMALL: tl.constexpr = 2.0 ** (24 - BIAS - MANTISSA)
    small = (size + SMALL).to(tl.int32, bitcast=True) - ((127 + 24 - BIAS - MANTISSA) << 23)
    code = tl.where(size < 2.0 ** (1 - BIAS), small, normal) | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)
    return tl.where(x == x, code, 0x7F).to(tl.uint8)


@triton.jit
def _fit(low, high, BITS: tl.constexpr):
    """Scale and zero, float16, of groups whose outermost codes stand for `low` and `high`; see `formats.integer`."""
    TOP: tl.constexpr = 2**BITS - 1
    low = tl.minimum(tl.maximum(low, -_LARGEST * (TOP + 1)), _LARGEST * (TOP + 1))
    high = tl.minimum(tl.maximum(high, -_LARGEST * (TOP + 1)), _LARGEST * (TOP + 1))
    down = tl.abs(low) > tl.abs(high)
    zero, far = tl.where(down, high, low), tl.where(down, low, high)
    zero += tl.abs(zero) * tl.where(down, _HALF_STEP, -_HALF_STEP)
    zero = tl.minimum(tl.maximum(zero, -_LARGEST), _LARGEST).to(tl.float16)
    scale = (far - zero.to(tl.float32)) * ((1 + _HALF_STEP) / TOP)
    return tl.minimum(tl.maximum(scale, -_LARGEST), _LARGEST).to(tl.float16), zero


@triton.jit
def _between(x, low, width):
    """How far numbers are from both ends of their groups: 0 at the ends, a quarter in the middle."""
    place = (x - low) / width
    return place * (1 - place)


@triton.jit
def seal(
    X, IDS, DATA, SCALE, ZERO, x_page, x_token, INSET: tl.constexpr, KIND: tl.constexpr, BITS: tl.constexpr,
    PAGE: tl.constexpr, D_: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, PER_BYTE: tl.constexpr,
    ALONG_TOKENS: tl.constexpr, CHANNEL_MAJOR: tl.constexpr, ROWS: tl.constexpr, A: tl.constexpr, K: tl.constexpr,
    COMPILED: tl.constexpr,
):  # fmt: skip
    """One program: ROWS rows of a page, each of which is whole along the axis that is packed and has one scale or more.

    X: [n, PAGE, D_]. Tiles are [A, ROWS], one for each part of the axis that shares a byte with the others.
    """
    AXIS: tl.constexpr = PAGE if ALONG_TOKENS else D_
    RS: tl.constexpr = D_ if ALONG_TOKENS else PAGE
    PART: tl.constexpr = AXIS // PER_BYTE
    page = tl.load(IDS + tl.program_id(0))
    X += tl.program_id(0).to(tl.int64) * x_page
    axis, row = tl.arange(0, A), tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    held = (axis < PART)[:, None] & (row < RS)[None, :]
    tiles = ()
    for i in tl.static_range(PER_BYTE):
        tiles += (_numbers(X, x_token, axis, row, PART, RS, D_, BLOCK, ALONG_TOKENS, i * PART, K, COMPILED),)
    # Where CHANNEL_MAJOR, rows of `data` are channels; else tokens.
    across: tl.constexpr = ALONG_TOKENS == CHANNEL_MAJOR
    at = row[None, :] * PART + axis[:, None] if across else axis[:, None] * RS + row[None, :]
    DATA += page * (RS * PART) + at

    if KIND == "float":
        tl.store(DATA, tiles[0].to(DATA.dtype.element_ty), mask=held)
    elif KIND == "e4m3":
        tl.store(DATA, _float8(tiles[0], 3, 7, 448.0), mask=held)
    elif KIND == "e5m2":
        tl.store(DATA, _float8(tiles[0], 2, 15, 57344.0), mask=held)
    elif KIND == "int8":
        largest = tl.max(tl.where(held, tl.abs(tiles[0]), 0.0), 0)
        scale = tl.minimum(largest / 127, _LARGEST).to(tl.float16)
        inverse = tl.where(scale > 0, 1 / scale.to(tl.float32), 0.0)
        codes = tl.minimum(tl.maximum(tiles[0] * inverse[None, :], -127.0), 127.0)
        tl.store(DATA, ((codes + _ROUND) - _ROUND).to(tl.int32).to(tl.uint8), mask=held)
        tl.store(SCALE + page * RS + row, scale, mask=row < RS)
    else:
        GROUPS: tl.constexpr = (AXIS + GROUP - 1) // GROUP
        data = tl.zeros([A, ROWS], tl.int32)
        for group in tl.static_range(GROUPS):
            low, high = tl.full([ROWS], float("inf"), tl.float32), tl.full([ROWS], float("-inf"), tl.float32)
            for i in tl.static_range(PER_BYTE):
                if i * PART < (group + 1) * GROUP and group * GROUP < (i + 1) * PART:
                    own = ((axis < PART) & ((axis + i * PART) // GROUP == group))[:, None]
                    low = tl.minimum(low, tl.min(tl.where(own, tiles[i], float("inf")), 0))
                    high = tl.maximum(high, tl.max(tl.where(own, tiles[i], float("-inf")), 0))
            if INSET > 0:
                width, sum = tl.maximum(high - low, _TINY), tl.zeros([ROWS], tl.float32)
                for i in tl.static_range(PER_BYTE):
                    if i * PART < (group + 1) * GROUP and group * GROUP < (i + 1) * PART:
                        own = ((axis < PART) & ((axis + i * PART) // GROUP == group))[:, None]
                        sum += tl.sum(tl.where(own, _between(tiles[i], low[None, :], width[None, :]), 0.0), 0)
                if (group + 1) * GROUP > AXIS:  # a short group counts its last number as often as numbers are missing
                    last = tl.sum(tl.where((axis == PART - 1)[:, None], tiles[PER_BYTE - 1], 0.0), 0)
                    sum += _between(last, low, width) * ((group + 1) * GROUP - AXIS)
                inset = tl.minimum(sum * (8 / GROUP), 1.0) * INSET * (high - low)
                low, high = low + inset, high - inset
            scale, zero = _fit(low, high, BITS)
            at = (page * RS + row) * GROUPS + group
            tl.store(SCALE + at, scale, mask=row < RS)
            tl.store(ZERO + at, zero, mask=row < RS)
            inverse = tl.where(scale != 0, 1 / scale.to(tl.float32), 0.0)
            offset = 0.5 - zero.to(tl.float32) * inverse
            for i in tl.static_range(PER_BYTE):
                if i * PART < (group + 1) * GROUP and group * GROUP < (i + 1) * PART:
                    code = tiles[i] * inverse[None, :] + offset[None, :]
                    code = tl.minimum(tl.maximum(code, 0.0), 2.0**BITS - 0.5).to(tl.int32) << (BITS * i)
                    data |= tl.where(((axis + i * PART) // GROUP == group)[:, None], code, 0)
        tl.store(DATA, data.to(tl.uint8), mask=held)
