"""The kernel that decodes the pages of a block table, and how it is launched."""

import torch
import triton
import triton.language as tl

from .._triton_codes import BITS, INTERPRETED, Launch, dot, hadamard


def plan(
    parts, block_table, kind, channel_major, page, dim, rotation, group, dtype, compiled=not INTERPRETED
) -> tuple[torch.Tensor, list[Launch]]:
    """The tensor for the result, and the launch that fills it."""
    rows, heads, columns = block_table.shape
    block_table = block_table.contiguous()
    out = block_table.new_empty((rows, heads, columns * page, dim), dtype=dtype)
    if not out.numel():
        return out, []
    data, *rest = (part.view(torch.uint8) if part.dtype.itemsize == 1 else part for part in parts)
    step = min(64, max(16, page))
    args = {
        **{"TABLE": block_table, "OUT": out, "DATA": data, **dict(zip(("SCALE", "ZERO"), [*rest, None, None]))},
        **{"KIND": kind, "BITS": BITS[kind], "PAGE": page, "D_": dim, "BLOCK": rotation, "GROUP": group},
        **{"CHANNEL_MAJOR": channel_major, "T": step, "K": 32, "COMPILED": compiled},
    }
    return out, [
        Launch(gather, (rows * heads * columns, triton.cdiv(page, step)), args, {"num_warps": 4 if dim <= 128 else 8})
    ]


@triton.jit
def _decoded(
    DATA, SCALE, ZERO, token, channel, held, KIND: tl.constexpr, BITS: tl.constexpr, PAGE: tl.constexpr,
    D_: tl.constexpr, GROUP: tl.constexpr, CHANNEL_MAJOR: tl.constexpr,
):  # fmt: skip
    """Numbers `[T, K]` of a page as they are written, not un-rotated: native ones as such, others float32."""
    axis, row = (token, channel) if CHANNEL_MAJOR else (channel, token)
    AXIS: tl.constexpr = PAGE if CHANNEL_MAJOR else D_
    PART: tl.constexpr = AXIS * BITS // 8 if BITS < 8 else AXIS
    at = row * PART + axis % PART
    codes = tl.load(DATA + at, mask=held, other=0)
    if KIND == "float":
        return codes
    elif KIND == "int8":
        scale = tl.load(SCALE + token, mask=held, other=0.0).to(tl.float32)
        return codes.to(tl.int8, bitcast=True).to(tl.float32) * scale
    elif KIND == "e4m3":  # moved by seven places, the bits of a float16 that is 2^8 times too small
        codes = codes.to(tl.int16)
        half = (((codes & 0x7F) << 7) | ((codes & 0x80) << 8)).to(tl.float16, bitcast=True)
        return half.to(tl.float32) * 256
    elif KIND == "e5m2":
        return (codes.to(tl.int16) << 8).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        code = (codes.to(tl.int32) >> (axis // PART * BITS)) & (2**BITS - 1)
        at = row * ((AXIS + GROUP - 1) // GROUP) + axis // GROUP
        scale = tl.load(SCALE + at, mask=held, other=0.0).to(tl.float32)
        return code * scale + tl.load(ZERO + at, mask=held, other=0.0).to(tl.float32)


@triton.jit
def gather(
    TABLE, OUT, DATA, SCALE, ZERO, KIND: tl.constexpr, BITS: tl.constexpr, PAGE: tl.constexpr, D_: tl.constexpr,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, CHANNEL_MAJOR: tl.constexpr, T: tl.constexpr, K: tl.constexpr,
    COMPILED: tl.constexpr,
):  # fmt: skip
    """One program: T tokens of the page that an entry of the table names; zeros if it names none.

    OUT: [entries, PAGE, D_].
    """
    TERMS: tl.constexpr = 3 if OUT.dtype.element_ty == tl.float32 else 2
    GROUPS: tl.constexpr = (((PAGE if CHANNEL_MAJOR else D_) + GROUP - 1) // GROUP) if GROUP > 0 else 0
    entry = tl.program_id(0).to(tl.int64)
    page = tl.load(TABLE + entry).to(tl.int64)
    token = (tl.program_id(1) * T + tl.arange(0, T))[:, None]
    OUT += entry * (PAGE * D_) + token * D_
    DATA += page * (PAGE * D_ * BITS // 8 if BITS < 8 else PAGE * D_)
    if SCALE is not None:
        SCALE += page * (PAGE if GROUP == 0 else (D_ if CHANNEL_MAJOR else PAGE) * GROUPS)
    if ZERO is not None:
        ZERO += page * (D_ if CHANNEL_MAJOR else PAGE) * GROUPS
    held = token < tl.where(page >= 0, PAGE, 0)

    if BLOCK > 1:
        d = tl.arange(0, triton.next_power_of_2(D_))
        out = tl.zeros([T, d.shape[0]], tl.float32)
        for start in tl.range(0, D_, K, num_stages=2, disable_licm=True):
            k = start + tl.arange(0, K)
            x = _decoded(
                DATA, SCALE, ZERO, token, k[None, :], held & (k[None, :] < D_),
                KIND, BITS, PAGE, D_, GROUP, CHANNEL_MAJOR,
            )  # fmt: skip
            # As a sum of bfloat16 numbers, of 8 bits each: times 1 or -1, their products are exact.
            h = hadamard(k, d, BLOCK, tl.bfloat16)
            for _ in tl.static_range(TERMS):
                term = x.to(tl.bfloat16)
                out = dot(term, h, out, None, COMPILED)
                x -= term.to(tl.float32)
        out = out * BLOCK**-0.5
        tl.store(OUT + d[None, :], out.to(OUT.dtype.element_ty), mask=(token < PAGE) & (d[None, :] < D_))
    else:
        d = tl.arange(0, triton.next_power_of_2(D_))[None, :]
        x = _decoded(
            DATA, SCALE, ZERO, token, d, held & (d < D_), KIND, BITS, PAGE, D_, GROUP, CHANNEL_MAJOR
        )  # fmt: skip
        tl.store(OUT + d, x.to(OUT.dtype.element_ty), mask=(token < PAGE) & (d < D_))
