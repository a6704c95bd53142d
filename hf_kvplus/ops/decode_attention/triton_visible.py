"""Which pages of a split the mask shows at all: only these are read. Shapes as in `triton_kernels.py`."""

import triton
import triton.language as tl

from .._triton_codes import place
from .triton_tiles import shows


@triton.jit
def tokens_of(WORDS: tl.constexpr, BITS: tl.constexpr):
    """Of a run of WORDS words: the word of each token and its number there, such that tokens come in their order."""
    T: tl.constexpr = WORDS * (16 // BITS)
    token = tl.arange(0, T)
    if BITS == 16:
        return token, token * 0
    else:
        return token % (2 * WORDS) // 2, token // (2 * WORDS) * 2 + token % 2


@triton.jit(do_not_specialize=[
    "columns", "splits", "room", "table_row", "table_head", "mask_row", "mask_head", "mask_group", "mask_token",
    "mask_pages",
])  # fmt: skip
def visible_units(
    TABLE, MASKED, UNITS, COUNTS, BITS, columns, splits, room, table_row, table_head,
    mask_row, mask_head, mask_group, mask_token, mask_pages,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, TOKENS: tl.constexpr, M: tl.constexpr, MASK: tl.constexpr,
    MASK_ROWS: tl.constexpr, KBITS: tl.constexpr, PAGE: tl.constexpr, WORDS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """One program: the units of a split that hold a token which any of M queries sees, their numbers and pages.

    A unit is a page, or a tile where a page is several. Splits take turns, so that each has its share of what is seen.
    UNITS: [programs, splits, room, 2], COUNTS: [programs, splits]. BITS: [programs, slots], if given: bit `m` of a slot
    says whether query `m` sees it; written for the units found.
    """
    BLOCKS: tl.constexpr = (GROUP * TOKENS + M - 1) // M
    PAGE_WORDS: tl.constexpr = PAGE * KBITS // 16
    UNIT: tl.constexpr = WORDS if WORDS < PAGE_WORDS else PAGE_WORDS
    IN_PAGE: tl.constexpr = PAGE_WORDS // UNIT
    program, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, head = program // BLOCKS // KV_HEADS, program // BLOCKS % KV_HEADS
    TABLE += row * table_row + head * table_head
    MASKED += row * mask_row + head * mask_head + mask_pages
    word, number = tokens_of(UNIT, KBITS)

    count = 0
    for start in range(split, columns * IN_PAGE, splits * AT_ONCE):
        unit = start + tl.arange(0, AT_ONCE) * splits
        column = unit // IN_PAGE
        page = tl.load(TABLE + column, mask=column < columns, other=-1)
        token = place((unit % IN_PAGE * UNIT)[:, None] + word[None, :], number[None, :], PAGE, KBITS)
        slots = column[:, None] * PAGE + token
        seen = tl.zeros(slots.shape, tl.int32)
        if MASK_ROWS:
            first = tl.program_id(0) % BLOCKS * M
            for m in range(first, tl.minimum(first + M, GROUP * TOKENS)):
                at = m // TOKENS * mask_group + m % TOKENS * mask_token + slots
                seen |= shows(tl.load(MASKED + at, mask=page[:, None] >= 0, other=0), MASK).to(tl.int32) << (m - first)
        else:
            seen = shows(tl.load(MASKED + slots, mask=page[:, None] >= 0, other=0), MASK).to(tl.int32)
        found = ((tl.max(seen, 1) > 0) & (page >= 0)).to(tl.int32)
        at = (program * splits + split) * room + count + tl.cumsum(found, 0) - found
        tl.store(UNITS + 2 * at, unit, mask=found > 0)
        tl.store(UNITS + 2 * at + 1, page, mask=found > 0)
        if BITS is not None:
            tl.store(BITS + program * columns * PAGE + slots, seen.to(tl.int16), mask=(found > 0)[:, None])
        count += tl.sum(found, 0)
    tl.store(COUNTS + program * splits + split, count)
