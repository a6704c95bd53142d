"""Attention of a tile of queries to the pages of one table row. Shapes as in `triton_kernels.py`."""

import triton
import triton.language as tl

from .._triton_codes import dot, numbers, place
from .triton_tiles import affine, joined, less, load_mask, shown, softmax_step
from .triton_visible import tokens_of


@triton.jit
def attend_pages(
    q, state, first, last, columns, TABLE, UNITS, KD, KS, KZ, VD, VS, VZ, mask, mask_rows, scale, softcap,
    KEY: tl.constexpr, KBITS: tl.constexpr, KSTEPS: tl.constexpr, KFACTOR: tl.constexpr,
    VALUE: tl.constexpr, VBITS: tl.constexpr, VSTEPS: tl.constexpr, VFACTOR: tl.constexpr,
    FOLD_V: tl.constexpr, V_SCALES: tl.constexpr,
    PAGE: tl.constexpr, WORDS: tl.constexpr, D_: tl.constexpr, DV_: tl.constexpr,
    SOFTCAP: tl.constexpr, MASK: tl.constexpr, MASK_ROWS: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Add tiles `first .. last - 1` of the pages to `state`: top, total, bias, sums.

    q: [M, D], rotated if the keys are. UNITS, if given, says which units (`visible_units`) the tiles are made of.
    """
    M: tl.constexpr = q.shape[0]
    PAGE_WORDS: tl.constexpr = PAGE * KBITS // 16
    T: tl.constexpr = WORDS * (16 // KBITS)
    ONE_PAGE: tl.constexpr = WORDS <= PAGE_WORDS
    UNITS_: tl.constexpr = WORDS // PAGE_WORDS  # pages of a tile

    top, total, bias, sums = state
    # Where a word holds many codes, these need the registers: addresses are worked out anew for each tile.
    for tile in tl.range(first, last, num_stages=STAGES, disable_licm=KBITS * VBITS < 64):
        word = tl.arange(0, WORDS)
        token_word, number = tokens_of(WORDS, KBITS)
        if ONE_PAGE:
            if UNITS is not None:
                unit, page = tl.load(UNITS + 2 * tile), tl.load(UNITS + 2 * tile + 1).to(tl.int64)
            else:
                unit, page = tile, tl.load(TABLE + tile // (PAGE_WORDS // WORDS)).to(tl.int64)
            start, column = unit % (PAGE_WORDS // WORDS) * WORDS, unit // (PAGE_WORDS // WORDS)
            word_page, token_page = page, page
        else:
            start = 0
            unit, token_unit = tile * UNITS_ + word // PAGE_WORDS, tile * UNITS_ + token_word // PAGE_WORDS
            if UNITS is not None:
                column = tl.load(UNITS + 2 * token_unit, mask=token_unit < columns, other=0)
                word_page = tl.load(UNITS + 2 * unit + 1, mask=unit < columns, other=-1).to(tl.int64)[None, :]
                token_page = tl.load(UNITS + 2 * token_unit + 1, mask=token_unit < columns, other=-1).to(tl.int64)
            else:
                column = token_unit
                word_page = tl.load(TABLE + unit, mask=unit < columns, other=-1).to(tl.int64)[None, :]
                token_page = tl.load(TABLE + token_unit, mask=token_unit < columns, other=-1).to(tl.int64)
        word, token_word = (start + word) % PAGE_WORDS, (start + token_word) % PAGE_WORDS
        token = place(token_word, number, PAGE, KBITS)
        valid = token < tl.where(token_page >= 0, PAGE, 0)
        slots = column * PAGE + token
        given, seen = load_mask(mask, mask_rows, slots, valid, MASK, MASK_ROWS)
        if MASK != "none" and UNITS is None and ONE_PAGE:
            token_page = tl.where(tl.max(seen.to(tl.int32), 0) > 0, page, -1)
            word_page, valid = token_page, seen

        scores = _scores(
            q, word_page, word, start, KD, KS, KZ,
            KEY, KBITS, KSTEPS, KFACTOR, PAGE, D_, ONE_PAGE, PRECISION, COMPILED,
        )  # fmt: skip
        scores = joined(scores, M, T)
        if KEY == "int8":  # one scale per token
            scores *= tl.load(KS + token_page * PAGE + token, mask=valid, other=0.0).to(tl.float32)[None, :]
        hidden = tl.where(token_page >= 0, 0.0, float("-inf"))
        if not ONE_PAGE:
            hidden = hidden[None, :]
        scores = shown(scores, hidden, given, scale, softcap, SOFTCAP, MASK)
        weights, keep, top, total = softmax_step(scores, top, total)
        bias, sums = _summed(
            weights, keep, bias, sums, token_page, token, valid, seen, VD, VS, VZ, q.dtype,
            VALUE, VBITS, VSTEPS, VFACTOR, FOLD_V, V_SCALES, PAGE, DV_, MASK != "none", PRECISION, COMPILED,
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
    at = d[:, None] * PAGE_WORDS + word[None, :]
    packed = tl.load(KD + page * (D_ * PAGE_WORDS) + at, mask=held, other=0)
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
                group, at = page * (D_ * PAGE // GROUP) + token // GROUP, d * (PAGE // GROUP)
                s = tl.load(KS + group + at, mask=d < tl.where(page >= 0, D_, 0), other=0.0).to(tl.float32)
                z = tl.load(KZ + group + at, mask=d < tl.where(page >= 0, D_, 0), other=0.0).to(tl.float32)
                scaled = q * s[None, :].to(q.dtype) if COMPILED else (q.to(tl.float32) * s[None, :]).to(q.dtype)
                middle = tl.full([D, word.shape[0]], -(2**KBITS) - MIDDLE, q.dtype)
                base = dot(scaled, middle, None, PRECISION, COMPILED)
                base += tl.sum(q.to(tl.float32) * (z + MIDDLE * s)[None, :], 1)[:, None]
            else:
                at = d[:, None] * (PAGE // GROUP) + (token + 2 * word[None, :]) // GROUP
                s = tl.load(KS + page * (D_ * PAGE // GROUP) + at, mask=held, other=0.0).to(tl.float32)
                z = tl.load(KZ + page * (D_ * PAGE // GROUP) + at, mask=held, other=0.0).to(tl.float32)
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
    weights, keep, bias, sums, page, token, valid, seen, VD, VS, VZ, dtype: tl.constexpr,
    VALUE: tl.constexpr, VBITS: tl.constexpr, VSTEPS: tl.constexpr, VFACTOR: tl.constexpr,
    FOLD_V: tl.constexpr, V_SCALES: tl.constexpr, PAGE: tl.constexpr, DV_: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Bias and sums after the values of tokens `[T]` of `page` (one, or `[T]`) were added with `weights [M, T]`.

    A value has V_SCALES scales: one, or one for each group of 32 channels. FOLD_V: groups are whole parts. Of tokens
    that are not `seen [T]`, what might be NaN is made zero: a weight of zero does not keep it out.
    """
    T: tl.constexpr = weights.shape[1]
    CODES: tl.constexpr = 16 // VBITS
    WORDS_: tl.constexpr = DV_ * VBITS // 16
    GROUPS: tl.constexpr = (DV_ + 31) // 32 if VALUE == "int2" else 1
    MIDDLE: tl.constexpr = (2**VBITS - 1) / 2
    word = tl.arange(0, triton.next_power_of_2(WORDS_))
    at = token[:, None] * WORDS_ + word[None, :]
    row = page
    if len(page.shape) == 1:
        row = page[:, None]
    held = valid[:, None] & (word[None, :] < WORDS_)
    packed = tl.load(VD + row * (PAGE * WORDS_) + at, mask=held, other=0)
    if MASKED and (VALUE == "float" or VALUE == "e4m3" or VALUE == "e5m2"):
        packed = tl.where(seen[:, None], packed, 0)
    added = ()
    for i in tl.static_range(V_SCALES):
        scaled = weights
        if FOLD_V:
            s = tl.load(VS + page * (PAGE * GROUPS) + token * GROUPS + i, mask=valid, other=0.0).to(tl.float32)
            scaled = weights * tl.where(seen, s * lift(VALUE, dtype), 0.0)[None, :]
        elif VALUE == "int2":
            s, z = tl.zeros([T, 1], tl.float32), tl.zeros([T, 1], tl.float32)
            for group in tl.static_range(i * (DV_ // 4) // 32, ((i + 1) * (DV_ // 4) - 1) // 32 + 1):
                inside = (place(word, 2 * i, DV_, VBITS) >= 32 * group)[None, :]
                at = token[:, None] * GROUPS + group
                s = tl.where(inside, _scales(VS, row * (PAGE * GROUPS), at, valid[:, None], seen[:, None]), s)
                z = tl.where(inside, _scales(VZ, row * (PAGE * GROUPS), at, valid[:, None], seen[:, None]), z)
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
        at = token[:, None] * GROUPS + tl.arange(0, GROUPS)[None, :]
        s = _scales(VS, row * (PAGE * GROUPS), at, valid[:, None], seen[:, None])
        z = _scales(VZ, row * (PAGE * GROUPS), at, valid[:, None], seen[:, None])
        middle = (z + MIDDLE * s).to(dtype)[:, :, None].broadcast_to(T, GROUPS, 32 // GROUPS).reshape(T, 32)
        bias = dot(weights.to(dtype), middle, bias * keep[:, None], PRECISION, COMPILED)
    return bias, added


@triton.jit
def _scales(SCALES, page, at, valid, seen):
    # Not loaded under `seen`, which is itself loaded: then these loads could not be issued ahead.
    return tl.where(seen, tl.load(SCALES + page + at, mask=valid, other=0.0).to(tl.float32), 0.0)


@triton.jit
def lift(VALUE: tl.constexpr, dtype: tl.constexpr):
    """Factor of float16 weights: times a small scale they would underflow, lifted they are near the values."""
    if dtype == tl.float16 and VALUE == "int8":
        return 64.0
    elif dtype == tl.float16 and VALUE == "int4":
        return 4.0
    else:
        return 1.0
