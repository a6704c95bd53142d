"""What the Triton kernels share: launching, turning packed codes into numbers, and the Hadamard rotation.

A kernel reads the packed axis of a page in words of 16 bits, each of which holds `16 / bits` codes. The matrix units
take pairs of 16-bit numbers, so a word and its neighbour across the packed axis share a register, and an instruction of
32 bits turns one code of each into a number. `Packing` says which bits; `numbers` does it.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

#: Set when triton was imported with TRITON_INTERPRET=1: kernels run as numpy code on the CPU, which knows no assembly
#: and does not compute in bfloat16.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

#: Bits of a code, by the kind of a page ("float" pages hold the model's dtype, and count as 16).
BITS = {"float": 16, "int8": 8, "e4m3": 8, "e5m2": 8, "int4": 4, "int2": 2}


@dataclass(frozen=True)
class Packing:
    """How the codes in a word become numbers, each `((word >> shift) & mask) | magic` seen as a float.

    `magic` is the bits of a power of two whose last mantissa bits the code replaces: a code `c` of `b` bits comes out
    as `2**b + c`, exactly. int8 adds a second such number, for its sign bit. 8-bit floats move sign and exponent into
    place and are multiplied by the quotient of the two exponents' biases.

    Attributes:
        steps: for each code of the word, in the order of `place`: shift, mask, magic, the same three for the sign, PTX.
        factor: what 8-bit floats are multiplied by.
    """

    steps: tuple[int | str, ...]  # flat: not all versions of triton index tuples of tuples
    factor: float = 1.0


@dataclass
class Launch:
    """One kernel launch: `kernel[grid](**args, **options)`."""

    kernel: Callable
    grid: tuple[int, ...]
    args: dict[str, Any]
    options: dict[str, int]

    def run(self) -> None:
        # Multiply and add in one step: said aloud, because the default is about to change between versions of triton.
        self.kernel[self.grid](**self.args, **self.options, enable_fp_fusion=True)


@cache
def packing(kind: str, dtype: torch.dtype) -> Packing:
    """The packing of pages of `kind` for kernels that compute in `dtype`; no steps where numbers are stored as such."""
    if kind == "float":
        return Packing(())
    # Kernels in float32 unpack to float16, in which all codes are exact.
    mantissa, bias = (7, 127) if dtype == torch.bfloat16 else (10, 15)
    bits, factor, steps = BITS[kind], 1.0, []

    def power(exponent: int) -> int:
        """The bits of `2**exponent`."""
        return (bias + exponent) << mantissa

    for number in range(16 // bits):
        start = number % 2 * 8 + number // 2 * bits
        if kind in ("int4", "int2"):
            step = (start - (mantissa - bits), (2**bits - 1) << (mantissa - bits), power(bits), 0, 0, 0)
        elif kind == "int8":  # 2**m plus the low seven bits, and minus that for a code that is not negative
            step = (start, 0x7F, power(mantissa), start, 0x80, power(mantissa) | 0x8000)
        else:
            exponent, fraction = (4, 3) if kind == "e4m3" else (5, 2)
            factor = 2.0 ** (bias - (2 ** (exponent - 1) - 1))
            step = (start - (mantissa - fraction), 0x7F << (mantissa - fraction), 0, start - 8, 0x8000, 0)
        multiplier = power(0) if kind == "int8" else power(int(factor).bit_length() - 1)
        steps += (*step, _assembly(step, multiplier, "bf16x2" if dtype == torch.bfloat16 else "f16x2"))
    return Packing(tuple(steps), factor)


def _assembly(step: tuple[int, ...], multiplier: int, suffix: str) -> str:
    """The same on the two words in register `$1`, as PTX that leaves the two numbers in `$0`."""
    shift, mask, magic, sign_shift, sign_mask, sign_magic = step
    pair = "0x{0:04x}{0:04x}".format

    def masked(name: str, by: int, keep: int, add: int) -> str:
        move = "shr.u32" if by > 0 else "shl.b32"
        return f"{move} {name}, $1, {abs(by)}; lop3.b32 {name}, {name}, {pair(keep)}, {pair(add)}, 0xea;"

    code = masked("a", shift, mask, magic)
    if not sign_mask:
        return f"{{.reg .b32 a; {code} mov.b32 $0, a;}}"
    code += masked("b", sign_shift, sign_mask, sign_magic) + f" mov.b32 c, {pair(multiplier)};"
    if not sign_magic:  # `b` is a sign bit: with the code it is a float, to which the smallest zero is added
        code += " or.b32 a, a, b; mov.b32 b, 0x80008000;"
    return f"{{.reg .b32 a, b, c; {code} fma.rn.{suffix} $0, a, c, b;}}"


def words(kind: str, part: torch.Tensor) -> torch.Tensor:
    """A part of pages as a kernel reads it: packed codes in words of 16 bits."""
    part = part.contiguous()
    return part.view(torch.int16) if part.dtype.itemsize == 1 else part


@triton.jit
def numbers(
    words, STEPS: tl.constexpr, NUMBER: tl.constexpr, FACTOR: tl.constexpr, dtype: tl.constexpr, COMPILED: tl.constexpr
):  # fmt: skip
    """Code NUMBER of each of the 16-bit `words`, as `dtype`. STEPS and FACTOR are those of a `Packing`."""
    half: tl.constexpr = tl.float16 if dtype == tl.float32 else dtype
    if COMPILED:
        bits = tl.inline_asm_elementwise(
            STEPS[7 * NUMBER + 6], "=r,r", [words], dtype=words.dtype, is_pure=True, pack=2
        )
        return bits.to(half, bitcast=True).to(dtype)
    else:
        code = _taken(words, STEPS[7 * NUMBER], STEPS[7 * NUMBER + 1]) | STEPS[7 * NUMBER + 2]
        sign = _taken(words, STEPS[7 * NUMBER + 3], STEPS[7 * NUMBER + 4]) | STEPS[7 * NUMBER + 5]
        if STEPS[7 * NUMBER + 5] != 0:
            return (_float(code, half) + _float(sign, half)).to(dtype)
        else:
            return (_float(code | sign, half) * FACTOR).to(dtype)


@triton.jit
def _taken(words, shift: tl.constexpr, mask: tl.constexpr):
    words = words.to(tl.int32)
    return ((words >> shift) if shift > 0 else (words << -shift)) & mask


@triton.jit
def _float(bits, half: tl.constexpr):
    return bits.to(tl.int16).to(half, bitcast=True).to(tl.float32)


@triton.jit
def place(word, number, LENGTH: tl.constexpr, BITS: tl.constexpr):
    """Where code `number` of `word` stands on a packed axis of `LENGTH`, whose parts share a byte (docs/layouts.md).

    Codes 0 and 1 of a word are neighbours (of its low and its high byte), 2 and 3 are neighbours in the next part.
    """
    if BITS == 16:
        return word
    else:
        return number // 2 * (LENGTH * BITS // 8) + 2 * word + number % 2


@triton.jit
def rotate(x, BLOCK: tl.constexpr):
    """`x [M, N]` (float32) times the orthonormal Hadamard matrix in blocks of `BLOCK` channels; 0 changes nothing."""
    M: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    if BLOCK > 1:
        second = tl.arange(0, 2)[None, None, :, None] == 1
        for k in tl.static_range(BLOCK.bit_length() - 1):
            pairs = x.reshape(M, N >> (k + 1), 2, 1 << k)
            total = tl.sum(pairs, 2, keep_dims=True)
            x = tl.where(second, total - 2 * pairs, total).reshape(M, N)
        x = x * (BLOCK**-0.5)
    return x


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr, COMPILED: tl.constexpr):
    if not COMPILED:  # the interpreter multiplies bfloat16 as integers
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def hadamard(rows, columns, BLOCK: tl.constexpr, dtype: tl.constexpr):
    """Entries of the Hadamard matrix in blocks of `BLOCK` channels, times `BLOCK ** 0.5`: 1, -1, 0 between blocks."""
    i, j = rows[:, None], columns[None, :]
    odd = i & j & (BLOCK - 1)
    if BLOCK > 16:
        odd = odd ^ (odd >> 4)
    odd = odd ^ (odd >> 2)
    odd = odd ^ (odd >> 1)
    return tl.where(i // BLOCK == j // BLOCK, 1.0 - 2.0 * (odd & 1), 0.0).to(dtype)
