"""The kernels: attention of one split of the tokens, and the sum over the splits. `triton_launch.py` starts them.

Shapes: M query rows of one KV head (its query heads times the query tokens), T tokens of a tile, D and DV channels,
padded to powers of two (`D_`, `DV_`: the real ones). A tile spans WORDS 16-bit words of the packed axis of the keys
(`_triton_codes.py`). Values are summed apart for each code of a word. A state is the running maximum `top [M]` (in
base 2), the total of the weights `[M]`, a bias `[M, 32]` and the sums `[M, words]`.
"""

import triton
import triton.language as tl

from .._triton_codes import dot, hadamard, place, rotate
from .triton_pages import attend_pages, lift
from .triton_tiles import LOG2E, load_mask, shown, softmax_step


@triton.jit
def _start(M: tl.constexpr, WORDS: tl.constexpr, CODES: tl.constexpr):
    """The state before the first token."""
    sums = ()
    for _ in tl.static_range(CODES):
        sums += (tl.zeros([M, WORDS], tl.float32),)
    return tl.full([M], float("-inf"), tl.float32), tl.zeros([M], tl.float32), tl.zeros([M, 32], tl.float32), sums


@triton.jit
def _rotated(Q, held, D_: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr, COMPILED: tl.constexpr):
    """The queries at `Q [M, 1]` where they are `held [M, 1]`, `[M, D]`, times the Hadamard matrix in blocks."""
    STEP: tl.constexpr = 16
    d = tl.arange(0, triton.next_power_of_2(D_))
    rotated = tl.zeros([Q.shape[0], d.shape[0]], tl.float32)
    for start in range(0, D_, STEP):
        i = start + tl.arange(0, STEP)
        q = tl.load(Q + i[None, :], mask=held & (i[None, :] < D_), other=0.0)
        rotated = dot(q, hadamard(i, d, BLOCK, q.dtype), rotated, PRECISION, COMPILED)
    return (rotated * BLOCK**-0.5).to(Q.dtype.element_ty)


@triton.jit
def _attend_tail(
    q, state, length, K, V, k_stride, v_stride, mask, mask_rows, scale, softcap,
    T: tl.constexpr, D_: tl.constexpr, DV_: tl.constexpr, SOFTCAP: tl.constexpr, MASK: tl.constexpr,
    MASK_ROWS: tl.constexpr, PRECISION: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Add the `length` tokens at `K [t, D_]` and `V [t, DV_]` to `state`."""
    d, dv = tl.arange(0, q.shape[1]), tl.arange(0, triton.next_power_of_2(DV_))
    top, total, bias, sums = state
    for start in tl.range(0, length, T, num_stages=1):
        slots = start + tl.arange(0, T)
        valid, at = slots < length, slots.to(tl.int64)
        given, seen = load_mask(mask, mask_rows, slots, valid, MASK, MASK_ROWS)
        k = tl.load(K + at[None, :] * k_stride + d[:, None], mask=seen[None, :] & (d[:, None] < D_), other=0.0)
        scores = dot(q, k.to(q.dtype), None, PRECISION, COMPILED)
        hidden = tl.where(valid, 0.0, float("-inf"))[None, :]
        scores = shown(scores, hidden, given, scale, softcap, SOFTCAP, MASK)
        weights, keep, top, total = softmax_step(scores, top, total)
        v = tl.load(V + at[:, None] * v_stride + dv[None, :], mask=seen[:, None] & (dv[None, :] < DV_), other=0.0)
        sums = (dot(weights.to(q.dtype), v.to(q.dtype), sums[0] * keep[:, None], PRECISION, COMPILED),)
    return top, total, bias, sums


@triton.jit
def _store(
    state, OUT, TOTALS, at, m, rows: tl.constexpr, VALUE: tl.constexpr, VBITS: tl.constexpr, FOLD_V: tl.constexpr,
    V_SCALES: tl.constexpr, DV_: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Write the split's mean `[M, DV_]`, running maximum and total `[M]`, rows `m < rows`, from row `at` on."""
    top, total, bias, sums = state
    word = tl.arange(0, sums[0].shape[1])[None, :]
    held = (m < rows)[:, None] & (word < DV_ * VBITS // 16)
    divisor = tl.where(total == 0.0, 1.0, total)[:, None]
    for i in tl.static_range(len(sums)):
        mean = sums[i] / lift(VALUE, dtype)
        if FOLD_V and VALUE != "int8":
            column = i * V_SCALES // len(sums) * (32 // V_SCALES)
            mean += tl.sum(tl.where(tl.arange(0, 32)[None, :] == column, bias, 0.0), 1)[:, None]
        tl.store(OUT + (at + m)[:, None] * DV_ + place(word, i, DV_, VBITS), mean / divisor, mask=held)
    tl.store(TOTALS + 2 * (at + m), top, mask=m < rows)
    tl.store(TOTALS + 2 * (at + m) + 1, total, mask=m < rows)


@triton.jit(do_not_specialize=[
    "columns", "rider_columns", "length", "splits", "all_splits", "first_split", "room", "table_row", "table_head",
    "r_row", "r_head", "mask_row", "mask_head", "mask_group", "mask_token", "mask_pages", "mask_tail",
])  # fmt: skip
def decode_splits(
    Q, OUT, TOTALS, TABLE, UNITS, COUNTS, BITS, KD, KS, KZ, VD, VS, VZ, RIDER, RK, RV, TK, TV, MASKED,
    scale, softcap, columns, rider_columns, length, splits, all_splits, first_split, room,
    q_row, q_head, q_token, table_row, table_head, r_row, r_head, tk_row, tk_head, tk_token, tv_row, tv_head, tv_token,
    mask_row, mask_head, mask_group, mask_token, mask_pages, mask_tail,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, TOKENS: tl.constexpr, M: tl.constexpr,
    KEY: tl.constexpr, KBITS: tl.constexpr, KSTEPS: tl.constexpr, KFACTOR: tl.constexpr, KROTATION: tl.constexpr,
    VALUE: tl.constexpr, VBITS: tl.constexpr, VSTEPS: tl.constexpr, VFACTOR: tl.constexpr,
    FOLD_V: tl.constexpr, V_SCALES: tl.constexpr,
    PAGE: tl.constexpr, WORDS: tl.constexpr, TAIL: tl.constexpr, D_: tl.constexpr, DV_: tl.constexpr,
    EXTRA: tl.constexpr, SOFTCAP: tl.constexpr, MASK: tl.constexpr, MASK_ROWS: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """One program: M queries of a sequence's KV head and one split of its pages, or (the last) all that is not packed.

    Q: [rows, heads, TOKENS, D_]. OUT: [rows, kv_heads, all_splits, GROUP * TOKENS, DV_], TOTALS: [..., 2]. The rider
    is a short native view that comes before the pages; the tail comes after them. UNITS, COUNTS and
    BITS, where there is a mask: what `visible_units` found.
    """
    BLOCKS: tl.constexpr = (GROUP * TOKENS + M - 1) // M
    ROWS: tl.constexpr = GROUP * TOKENS
    pair = (tl.program_id(0) // BLOCKS).to(tl.int64)
    row, head = pair // KV_HEADS, pair % KV_HEADS
    split = tl.program_id(1)

    m = tl.program_id(0) % BLOCKS * M + tl.arange(0, M)
    member, query = m // TOKENS, m % TOKENS
    d = tl.arange(0, triton.next_power_of_2(D_))
    Q += row * q_row + (head * GROUP + member)[:, None] * q_head + query[:, None] * q_token
    if MASK != "none":
        MASKED += row * mask_row + head * mask_head
    mask_rows = tl.where(m < ROWS, member * mask_group + query * mask_token, 0)

    out = (pair * all_splits + first_split + split) * ROWS
    if split < splits:
        if KROTATION > 1:
            q = _rotated(Q, (m < ROWS)[:, None], D_, KROTATION, "tf32x3", COMPILED)
        else:
            q = tl.load(Q + d[None, :], mask=(m < ROWS)[:, None] & (d[None, :] < D_), other=0.0)
        PAGE_WORDS: tl.constexpr = PAGE * KBITS // 16
        if BITS is not None:
            mask = BITS + tl.program_id(0).to(tl.int64) * columns * PAGE
        else:
            mask = MASKED + mask_pages if MASK != "none" else None
        if UNITS is None:
            tiles = (columns * PAGE_WORDS + WORDS - 1) // WORDS
            first, last = tiles * split // splits, tiles * (split + 1) // splits
        else:
            own = tl.program_id(0).to(tl.int64) * splits + split
            UNITS += own * room * 2
            columns = tl.load(COUNTS + own)
            first = 0
            last = columns if WORDS <= PAGE_WORDS else (columns * PAGE_WORDS + WORDS - 1) // WORDS
        paged = attend_pages(
            q, _start(M, triton.next_power_of_2(DV_ * VBITS // 16), 16 // VBITS), first, last, columns,
            TABLE + row * table_row + head * table_head, UNITS, KD, KS, KZ, VD, VS, VZ,
            mask, mask_rows, scale, softcap,
            KEY, KBITS, KSTEPS, KFACTOR, VALUE, VBITS, VSTEPS, VFACTOR, FOLD_V, V_SCALES, PAGE, WORDS, D_, DV_,
            SOFTCAP, MASK if BITS is None else "bits", MASK_ROWS, STAGES, PRECISION, COMPILED,
        )  # fmt: skip
        _store(paged, OUT, TOTALS, out, m, ROWS, VALUE, VBITS, FOLD_V, V_SCALES, DV_, q.dtype)
    elif EXTRA:
        q = tl.load(Q + d[None, :], mask=(m < ROWS)[:, None] & (d[None, :] < D_), other=0.0)
        state = _start(M, triton.next_power_of_2(DV_), 1)
        if RIDER is not None:
            RIDE: tl.constexpr = PAGE if PAGE >= 16 and PAGE < TAIL else TAIL  # pages that the mask hides stay apart
            state = attend_pages(
                q, state, 0, (rider_columns * PAGE + RIDE - 1) // RIDE, rider_columns,
                RIDER + row * r_row + head * r_head, None, RK, None, None, RV, None, None,
                MASKED if MASK != "none" else None, mask_rows, scale, softcap,
                "float", 16, None, 1.0, "float", 16, None, 1.0, False, 1, PAGE, RIDE, D_, DV_,
                SOFTCAP, MASK, MASK_ROWS, 1, PRECISION, COMPILED,
            )  # fmt: skip
        state = _attend_tail(
            q, state, length, TK + row * tk_row + head * tk_head, TV + row * tv_row + head * tv_head,
            tk_token, tv_token, MASKED + mask_tail if MASK != "none" else None, mask_rows, scale, softcap,
            TAIL, D_, DV_, SOFTCAP, MASK, MASK_ROWS, PRECISION, COMPILED,
        )  # fmt: skip
        _store(state, OUT, TOTALS, out, m, ROWS, "float", 16, False, 1, DV_, q.dtype)


@triton.jit(do_not_specialize=["splits", "rotated"])
def sum_splits(
    PART, TOTALS, SINKS, OUT, splits, rotated, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, TOKENS: tl.constexpr,
    DV_: tl.constexpr, STEP: tl.constexpr, ROTATION: tl.constexpr,
):  # fmt: skip
    """One program: the output of one query, from its splits; the first `rotated` of them are un-rotated on the way.

    PART: [rows, kv_heads, splits, GROUP * TOKENS, DV_], TOTALS: [..., 2]. OUT: [rows, TOKENS, heads, DV_].
    """
    ROWS: tl.constexpr = GROUP * TOKENS
    DV: tl.constexpr = triton.next_power_of_2(DV_)
    pair, m = (tl.program_id(0) // ROWS).to(tl.int64), tl.program_id(0) % ROWS
    row, head = pair // KV_HEADS, pair % KV_HEADS * GROUP + m // TOKENS
    dv = tl.arange(0, DV)

    top, total = float("-inf"), 0.0
    if SINKS is not None:
        top, total = tl.load(SINKS + head).to(tl.float32) * LOG2E, 1.0
    plain, turned = tl.zeros([DV], tl.float32), tl.zeros([DV], tl.float32)
    for start in range(0, splits, STEP):
        split = start + tl.arange(0, STEP)
        at = (pair * splits + split) * ROWS + m
        its_top = tl.load(TOTALS + 2 * at, mask=split < splits, other=float("-inf"))
        its_total = tl.load(TOTALS + 2 * at + 1, mask=split < splits, other=0.0)
        held = (split < splits)[:, None] & (dv[None, :] < DV_)
        part = tl.load(PART + at[:, None] * DV_ + dv[None, :], mask=held, other=0.0)
        raised = tl.maximum(top, tl.max(its_top, 0))
        base = tl.where(raised == float("-inf"), 0.0, raised)
        keep, weights = tl.exp2(top - base), tl.exp2(its_top - base) * its_total
        total = total * keep + tl.sum(weights, 0)
        plain = plain * keep + tl.sum(part * tl.where(split < rotated, 0.0, weights)[:, None], 0)
        if ROTATION > 1:
            turned = turned * keep + tl.sum(part * tl.where(split < rotated, weights, 0.0)[:, None], 0)
        top = raised
    if ROTATION > 1:
        plain += rotate(turned[None, :], ROTATION).reshape(DV)
    out = plain / tl.where(total == 0.0, 1.0, total)
    at = ((row * TOKENS + m % TOKENS) * (KV_HEADS * GROUP) + head) * DV_
    tl.store(OUT + at + dv, out.to(OUT.dtype.element_ty), mask=dv < DV_)
