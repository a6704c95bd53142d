"""Small steps of the decode kernels, on one tile of tokens. Shapes as in `triton_kernels.py`."""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def affine(x, scale, zero, OFFSET: tl.constexpr, COMPILED: tl.constexpr):
    """`(x - OFFSET) * scale + zero` in the dtype of `x`."""
    if not COMPILED:
        return ((x.to(tl.float32) - OFFSET) * scale + zero).to(x.dtype)
    elif x.dtype == tl.float16:  # whose range the product of offset and scale may exceed
        return (x - OFFSET) * scale.to(x.dtype) + zero.to(x.dtype)
    else:
        return x * scale.to(x.dtype) + (zero - OFFSET * scale).to(x.dtype)


@triton.jit
def less(x, BY: tl.constexpr, COMPILED: tl.constexpr):
    """`x - BY`, which is exact for codes."""
    if COMPILED:
        return x - tl.full([], BY, x.dtype)
    else:
        return (x.to(tl.float32) - BY).to(x.dtype)


@triton.jit
def joined(tiles, M: tl.constexpr, T: tl.constexpr):
    """Tiles `[M, WORDS]`, one per code of a word, as `[M, T]` with the tokens in their order."""
    if len(tiles) == 1:
        return tiles[0]
    elif len(tiles) == 2:  # neighbours
        return tl.join(tiles[0], tiles[1]).reshape(M, T)
    elif len(tiles) == 4:  # two parts of neighbours
        return _behind(_beside(tiles[0], tiles[1]), _beside(tiles[2], tiles[3]))
    else:
        first = _behind(_beside(tiles[0], tiles[1]), _beside(tiles[2], tiles[3]))
        return _behind(first, _behind(_beside(tiles[4], tiles[5]), _beside(tiles[6], tiles[7])))


@triton.jit
def _beside(a, b):
    """Columns of `a` and `b` in turn."""
    return tl.join(a, b).reshape(a.shape[0], 2 * a.shape[1])


@triton.jit
def _behind(a, b):
    """The columns of `a`, then those of `b`."""
    return tl.join(a, b).permute(0, 2, 1).reshape(a.shape[0], 2 * a.shape[1])


@triton.jit
def shows(given, MASK: tl.constexpr):
    """Whether the mask's numbers let anything be seen at all. The lowest finite one does, where there is no higher."""
    if MASK == "bool" or MASK == "bits":
        return given != 0
    else:
        return given.to(tl.float32) != float("-inf")


@triton.jit
def load_mask(mask, mask_rows, slots, valid, MASK: tl.constexpr, MASK_ROWS: tl.constexpr):
    """The mask's numbers for `slots [T]`, `[M or 1, T]`, and which slots are valid and seen by any query, `[T]`.

    `mask` points to slot 0 of the first query row; where MASK_ROWS, the others are at `mask_rows [M]` from there. Where
    MASK is "bits", it points to slot 0 of numbers whose bits are the queries'.
    """
    if MASK == "none":
        return slots[None, :], valid
    elif MASK == "bits":
        bits = tl.load(mask + slots, mask=valid, other=0)
        return (bits.to(tl.int32)[None, :] >> tl.arange(0, mask_rows.shape[0])[:, None]) & 1, valid & (bits != 0)
    elif MASK_ROWS:
        given = tl.load(mask + (mask_rows[:, None] + slots[None, :]), mask=valid[None, :], other=0)
        return given, valid & (tl.max(shows(given, MASK).to(tl.int32), 0) > 0)
    else:
        given = tl.load(mask + slots, mask=valid, other=0)
        return given[None, :], valid & shows(given, MASK)


@triton.jit
def shown(scores, hidden, given, scale, softcap, SOFTCAP: tl.constexpr, MASK: tl.constexpr):
    """Scores `[M, T]` times `scale`, after softcap and mask, plus `hidden` (0 or -inf), in base 2.

    What a hidden score was makes no difference, even if it was NaN.
    """
    if SOFTCAP:  # tanh written out: the interpreter has no libdevice
        scores = 1 - 2 / (tl.exp2(scores * (scale * (2 * LOG2E) / softcap)) + 1)
        scale = softcap
    scores = scores * (scale * LOG2E) + hidden
    if (
        MASK == "added"
    ):  # the smallest float stays finite, so that rows of nothing else are averaged as the reference does
        added = given.to(tl.float32)
        scores += tl.where(added < -2e38, -3e38, added * LOG2E)
    if MASK != "none":
        scores = tl.where(shows(given, MASK), scores, float("-inf"))
    return scores


@triton.jit
def softmax_step(scores, top, total):
    """Weights `[M, T]` of one more tile, the factor for all sums so far, and the new running maximum and total."""
    raised = tl.maximum(top, tl.max(scores, 1))
    base = tl.where(raised == float("-inf"), 0.0, raised)
    keep = tl.exp2(top - base)
    weights = tl.exp2(scores - base[:, None])
    return weights, keep, raised, total * keep + tl.sum(weights, 1)
