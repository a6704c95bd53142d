"""Attention of a tile of queries to the pages of one table row. Shapes as in `triton_kernels.py`."""

import triton
import triton.language as tl

from .._triton_codes import numbers, place
from .triton_tiles import affine, dot, joined, less, shown, softmax_step


@triton.jit
def attend_pages(
    q, state, first, last, columns, TABLE, KD, KS, KZ, VD, VS, VZ, mask, mask_rows, scale, softcap,
    KEY: tl.constexpr, KBITS: tl.constexpr, KSTEPS: tl.constexpr, KFACTOR: tl.constexpr,
    VALUE: tl.constexpr, VBITS: tl.constexpr, VSTEPS: tl.constexpr, VFACTOR: tl.constexpr,
    FOLD_V: tl.constexpr, V_SCALES: tl.constexpr,
    PAGE: tl.constexpr, WORDS: tl.constexpr, D_: tl.constexpr, DV_: tl.constexpr,
    SOFTCAP: tl.constexpr, MASK: tl.constexpr, MASK_ROWS: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Add tiles `first .. last - 1` of the pages to `state`: top, total, bias, sums.

    q: [M, D], rotated if the keys are.
    """
    M: tl.constexpr = q.shape[0]
    PAGE_WORDS: tl.constexpr = PAGE * KBITS // 16
    T: tl.constexpr = WORDS * (16 // KBITS)
    ONE_PAGE: tl.constexpr = WORDS <= PAGE_WORDS

    top, total, bias, sums = state
    for tile in tl.range(first, last, num_stages=STAGES):
        # The words of the tile; the word of each token and its number there, such that tokens come in their order.
        word, number, token_word = tl.arange(0, WORDS), tl.arange(0, T) * 0, tl.arange(0, T)
        if KBITS < 16:
            number = token_word // (2 * WORDS) * 2 + token_word % 2
            token_word = token_word % (2 * WORDS) // 2
        if ONE_PAGE:
            start = tile % (PAGE_WORDS // WORDS) * WORDS
            word, token_word = start + word, start + token_word
            column = tile // (PAGE_WORDS // WORDS)
            page = tl.load(TABLE + column).to(tl.int64)
            word_page, token_page, row_page = page, page, page
            hidden = tl.where(page >= 0, 0.0, float("-inf"))
        else:
            start = 0
            word, token_word = tile * WORDS + word, tile * WORDS + token_word
            column = word // PAGE_WORDS
            word_page = tl.load(TABLE + column, mask=column < columns, other=-1).to(tl.int64)[None, :]
            column = token_word // PAGE_WORDS
            token_page = tl.load(TABLE + column, mask=column < columns, other=-1).to(tl.int64)
            row_page = token_page[:, None]
            word, token_word = word % PAGE_WORDS, token_word % PAGE_WORDS
            hidden = tl.where(token_page >= 0, 0.0, float("-inf"))[None, :]
        token = place(token_word, number, PAGE, KBITS)
        valid = token < tl.where(token_page >= 0, PAGE, 0)

        scores = _scores(
            q, word_page, word, start, KD, KS, KZ,
            KEY, KBITS, KSTEPS, KFACTOR, PAGE, D_, ONE_PAGE, PRECISION, COMPILED,
        )  # fmt: skip
        scores = joined(scores, M, T)
        if KEY == "int8":  # one scale per token
            scores *= tl.load(KS + token_page * PAGE + token, mask=valid, other=0.0).to(tl.float32)[None, :]
        slots = column * PAGE + token
        scores = shown(scores, hidden, mask, mask_rows, slots, valid, scale, softcap, SOFTCAP, MASK, MASK_ROWS)
        weights, keep, top, total = softmax_step(scores, top, total)
        bias, sums = _summed(
            weights, keep, bias, sums, token_page, row_page, token, valid, VD, VS, VZ, q.dtype,
            VALUE, VBITS, VSTEPS, VFACTOR, FOLD_V, V_SCALES, PAGE, DV_, PRECISION, COMPILED,
        )  # fmt: skip
    return top, total, bias, sums


@triton.jit
def _scores(
    q, page, word, start, KD, KS, KZ,
    KEY: tl.constexpr, KBITS: tl.constexpr, KSTEPS: tl.constexpr, KFACTOR: tl.constexpr,
    PAGE: tl.constexpr, D_: tl.constexpr, ONE_PAGE: tl.constexpr, PRECISION: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """`q · k` of every code of the words `word [WORDS]` of `page` (one, or `[1, WORDS]`): tiles `[M, WORDS]`."""
    D: tl.constexpr = q.shape[1]
    CODES: tl.constexpr = 16 // KBITS
    PAGE_WORDS: tl.constexpr = PAGE * KBITS // 16
    d = tl.arange(0, D)
    held = d[:, None] < tl.where(page >= 0, D_, 0)
    at = page * (D_ * PAGE_WORDS) + d[:, None] * PAGE_WORDS + word[None, :]
    packed = tl.load(KD + at, mask=held, other=0)
    tiles = ()
    if KEY == "float":
        tiles += (dot(q, packed.to(q.dtype), None, PRECISION, COMPILED),)
    elif KEY == "int4" or KEY == "int2":
        # A scale per channel and group of tokens; in a tile of one page, SCALES groups, each of whole parts.
        PARTS: tl.constexpr = 8 // KBITS
        GROUP: tl.constexpr = 32 if KEY == "int2" and PAGE > 32 else PAGE
        SCALES: tl.constexpr = PARTS if PAGE // GROUP > PARTS else PAGE // GROUP
        MIDDLE: tl.constexpr = (2**KBITS - 1) / 2
        for i in tl.static_range(SCALES):
            token = i * (PARTS // SCALES) * (PAGE // PARTS) + 2 * start
            if ONE_PAGE:
                # Fold the scale into the query. What the middle code stands for goes into one number per query, less
                # what the same rounded queries make of it: then rounding costs what it costs for plain keys.
                at, seen = (page * D_ + d) * (PAGE // GROUP) + token // GROUP, d < tl.where(page >= 0, D_, 0)
                s = tl.load(KS + at, mask=seen, other=0.0).to(tl.float32)
                z = tl.load(KZ + at, mask=seen, other=0.0).to(tl.float32)
                scaled = q * s[None, :].to(q.dtype) if COMPILED else (q.to(tl.float32) * s[None, :]).to(q.dtype)
                middle = tl.full([D, word.shape[0]], -(2**KBITS) - MIDDLE, q.dtype)
                base = dot(scaled, middle, None, PRECISION, COMPILED)
                base += tl.sum(q.to(tl.float32) * (z + MIDDLE * s)[None, :], 1)[:, None]
            else:
                at = (page * D_ + d[:, None]) * (PAGE // GROUP) + (token + 2 * word[None, :]) // GROUP
                s = tl.load(KS + at, mask=held, other=0.0).to(tl.float32)
                z = tl.load(KZ + at, mask=held, other=0.0).to(tl.float32)
            for j in tl.static_range(CODES // SCALES):
                k = numbers(packed, KSTEPS, i * (CODES // SCALES) + j, KFACTOR, q.dtype, COMPILED)
                if ONE_PAGE:
                    tiles += (dot(scaled, k, base, PRECISION, COMPILED),)
                else:
                    tiles += (dot(q, affine(k, s, z, 2**KBITS, COMPILED), None, PRECISION, COMPILED),)
    else:
        for i in tl.static_range(CODES):
            k = numbers(packed, KSTEPS, i, KFACTOR, q.dtype, COMPILED)
            tiles += (dot(q, k, None, PRECISION, COMPILED),)
    return tiles


@triton.jit
def _summed(
    weights, keep, bias, sums, token_page, row_page, token, valid, VD, VS, VZ, dtype: tl.constexpr,
    VALUE: tl.constexpr, VBITS: tl.constexpr, VSTEPS: tl.constexpr, VFACTOR: tl.constexpr,
    FOLD_V: tl.constexpr, V_SCALES: tl.constexpr,
    PAGE: tl.constexpr, DV_: tl.constexpr, PRECISION: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Bias and sums after the values of tokens `[T]` were added with `weights [M, T]`.

    A value has V_SCALES scales: one, or one for each group of 32 channels. FOLD_V: groups are whole parts.
    """
    T: tl.constexpr = weights.shape[1]
    CODES: tl.constexpr = 16 // VBITS
    WORDS_: tl.constexpr = DV_ * VBITS // 16
    GROUPS: tl.constexpr = (DV_ + 31) // 32 if VALUE == "int2" else 1
    MIDDLE: tl.constexpr = (2**VBITS - 1) / 2
    word = tl.arange(0, triton.next_power_of_2(WORDS_))
    at = row_page * (PAGE * WORDS_) + token[:, None] * WORDS_ + word[None, :]
    packed = tl.load(VD + at, mask=valid[:, None] & (word[None, :] < WORDS_), other=0)
    added = ()
    for i in tl.static_range(V_SCALES):
        scaled = weights
        if FOLD_V:
            s = tl.load(VS + (token_page * PAGE + token) * GROUPS + i, mask=valid, other=0.0).to(tl.float32)
            scaled = weights * (s * lift(VALUE, dtype))[None, :]
        elif VALUE == "int2":
            s, z = tl.zeros([T, 1], tl.float32), tl.zeros([T, 1], tl.float32)
            for group in tl.static_range(i * (DV_ // 4) // 32, ((i + 1) * (DV_ // 4) - 1) // 32 + 1):
                inside = (place(word, 2 * i, DV_, VBITS) >= 32 * group)[None, :]
                at = (row_page * PAGE + token[:, None]) * GROUPS + group
                s = tl.where(inside, tl.load(VS + at, mask=valid[:, None], other=0.0).to(tl.float32), s)
                z = tl.where(inside, tl.load(VZ + at, mask=valid[:, None], other=0.0).to(tl.float32), z)
        scaled = scaled.to(dtype)
        for j in tl.static_range(CODES // V_SCALES):
            if VALUE == "float":
                v = packed.to(dtype)
            else:
                v = numbers(packed, VSTEPS, i * (CODES // V_SCALES) + j, VFACTOR, dtype, COMPILED)
            if VALUE == "int4" or VALUE == "int2":
                if FOLD_V:
                    v = less(v, 2**VBITS + MIDDLE, COMPILED)
                else:
                    v = affine(v, s, z, 2**VBITS, COMPILED)
            added += (dot(scaled, v, sums[i * (CODES // V_SCALES) + j] * keep[:, None], PRECISION, COMPILED),)
    if FOLD_V and VALUE != "int8":
        # What the middle code of each group stands for, in a product of its own: equal columns for each group.
        at = (row_page * PAGE + token[:, None]) * GROUPS + tl.arange(0, GROUPS)[None, :]
        s = tl.load(VS + at, mask=valid[:, None], other=0.0).to(tl.float32)
        z = tl.load(VZ + at, mask=valid[:, None], other=0.0).to(tl.float32)
        middle = (z + MIDDLE * s).to(dtype)[:, :, None].broadcast_to(T, GROUPS, 32 // GROUPS).reshape(T, 32)
        bias = dot(weights.to(dtype), middle, bias * keep[:, None], PRECISION, COMPILED)
    return bias, added


@triton.jit
def lift(VALUE: tl.constexpr, dtype: tl.constexpr):
    """Factor of float16 weights: times a small scale they would underflow, lifted they are near the values."""
    if dtype == tl.float16 and VALUE == "int8":
        return 64.0
    elif dtype == tl.float16 and VALUE == "int4":
        return 4.0
    else:
        return 1.0
