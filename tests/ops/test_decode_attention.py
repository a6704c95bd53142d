"""Decode attention by its definition: softmax over all tokens at once, in double precision, written here anew."""

import itertools
import time

import pytest
import torch
from numerics import assert_close, poisoned

from hf_kvplus.formats import FORMATS
from hf_kvplus.ops.decode_attention import PageView, decode_attention

BACKENDS = ["torch"]
LENGTHS = [0, 1, 63, 64, 65, 111, 1000]


@pytest.fixture(autouse=True)
def _poison():
    with poisoned():
        yield


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


class Case:
    """Tokens in pages and tail, and what attention to them must be.

    Args:
        formats: of the views, oldest first.
        columns: of each view.
        null: entries `(view, row, head, column)` that hold no page; `"ragged"`: row `r` lacks its first `r` pages.
        shared: rows name the pages of row 0.
    """

    def __init__(self, formats=("native",), columns=(2,), tail=5, q=1, rows=2, heads=4, kv_heads=2, dim=64,
                 value_dim=None, page=16, dtype=torch.float32, null=(), shared=False):  # fmt: skip
        self.rows, self.heads, self.kv_heads, self.q = rows, heads, kv_heads, q
        self.scale = dim**-0.5
        value_dim = value_dim or dim
        self.query = torch.randn(rows, heads, q, dim).to(dtype)
        self.pages, keys, values, held = [], [], [], []
        for index, (name, number) in enumerate(zip(formats, columns)):
            missing = torch.zeros(rows, kv_heads, number, dtype=torch.bool)
            if null == "ragged":
                missing |= torch.arange(number) < torch.arange(rows)[:, None, None]
            for view, *entry in () if null == "ragged" else null:
                missing[tuple(entry)] |= view == index
            view, k, v = _pages(FORMATS[name], missing, page, dim, value_dim, dtype, shared)
            self.pages.append(view)
            keys.append(k), values.append(v), held.append(~missing.repeat_interleave(page, dim=-1))
        self.tail = [torch.randn(rows, kv_heads, tail, width).to(dtype) for width in (dim, value_dim)]
        held.append(torch.ones(rows, kv_heads, tail, dtype=torch.bool))
        keys, values = (torch.cat([*t, own.double()], dim=2) for t, own in zip((keys, values), self.tail))
        group = heads // kv_heads
        self.keys, self.values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
        self.held = torch.cat(held, dim=-1).repeat_interleave(group, dim=1)[:, :, None]

    @property
    def slots(self):
        return self.keys.shape[2]

    def expected(self, mask=None, softcap=None, sinks=None):
        scores = self.query.double() @ self.keys.mT * self.scale
        scores = softcap * torch.tanh(scores / softcap) if softcap else scores
        if mask is not None:
            mask = mask.repeat_interleave(self.heads // mask.shape[1], dim=1) if mask.shape[1] > 1 else mask
            bias = torch.zeros(mask.shape).masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else mask
            scores = scores + bias.double()
        weights = scores.masked_fill(~self.held, float("-inf")).exp()
        total = weights.sum(-1, keepdim=True)
        if sinks is not None:
            total = total + sinks.double().exp().view(1, -1, 1, 1)
        return ((weights / total).nan_to_num(0) @ self.values).transpose(1, 2)

    def check(self, backend, mask=None, **options):
        out = decode_attention(self.query, self.pages, *self.tail, mask, scale=self.scale, backend=backend, **options)
        assert out.dtype == self.query.dtype
        expected = self.expected(mask, **options)
        assert_close("output", out, expected)
        return out


def _pages(spec, missing, page, dim, value_dim, dtype, shared):
    """A view with those entries missing, and the keys and values of its slots (zeros where there is no page)."""
    rows, heads, columns = missing.shape
    formats = [
        spec.key(page, dim, dtype, channel_major=True),
        spec.value(page, value_dim, dtype, channel_major=False),
    ]
    capacity = rows * heads * columns + 2
    table = torch.randperm(capacity)[: rows * heads * columns].view(rows, heads, columns).int()
    if shared:
        table = table[:1].expand(rows, -1, -1).clone()
    table[missing] = -1
    named, where = table[table >= 0].long(), table.clamp(min=0).long()
    parts, slots = [], []
    for format in formats:
        encoded = format.encode(torch.randn(capacity, page, format.dim).to(dtype))
        tokens = format.decode(encoded, torch.float32).double()[where].masked_fill(missing[..., None, None], 0)
        stored = {name: torch.empty(part.shape, dtype=part.dtype) for name, part in encoded.items()}  # poison
        for name, part in encoded.items():
            stored[name][named] = part[named]
        parts.append(stored)
        slots.append(tokens.flatten(2, 3))
    return PageView(*parts, *formats, table, bool(missing.any())), *slots


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("format", ["native", "int8", "int4", "int2", "fp8"])
@pytest.mark.parametrize("page", [16, 64])
def test_lengths(backend, format, length, page):
    Case((format,), (length // page,), length % page, page=page).check(backend)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (8, 2), (7, 1), (16, 2)])
@pytest.mark.parametrize(("dim", "value_dim"), [(64, 64), (80, 80), (96, 128), (128, 96), (256, 256), (576, 512)])
def test_heads_and_widths(backend, heads, kv_heads, dim, value_dim, dtype):
    Case(("int8",), (4,), 7, 2, heads=heads, kv_heads=kv_heads, dim=dim, value_dim=value_dim, dtype=dtype).check(
        backend
    )


@pytest.mark.parametrize("q", [1, 5, 16])
@pytest.mark.parametrize("format", ["native", "int8"])
@pytest.mark.parametrize("columns", [3, 70])  # more than one block of pages
def test_several_queries_causal_among_themselves(backend, format, q, columns):
    case = Case((format,), (columns,), 20, q)
    last = torch.arange(case.slots - q, case.slots)
    case.check(backend, torch.arange(case.slots) <= last[:, None].view(1, 1, q, 1))


@pytest.mark.parametrize(
    "null", ["ragged", [(0, 0, 0, 0)], [(0, 1, 1, 2)], [(0, 0, 0, c) for c in range(3)], list(itertools.product(
        [0], range(3), range(2), range(3)))], ids=["ragged", "first", "last", "a whole head", "all"],
)  # fmt: skip
@pytest.mark.parametrize("format", ["native", "int8", "int4"])
@pytest.mark.parametrize("tail", [0, 5])
def test_missing_pages_are_never_attended_to(backend, format, null, tail):
    case = Case((format,), (3,), tail, 2, rows=3, null=null)
    out = case.check(backend)
    if null != "ragged" and len(null) >= 3 and not tail:
        assert not out[0, :, :2].any()  # nothing to attend to


def test_a_table_of_missing_pages_needs_no_storage(backend):
    case = Case(columns=(2,), null=list(itertools.product([0], range(2), range(2), range(2))))
    (view,) = case.pages
    view.keys, view.values = ({name: part[:0] for name, part in parts.items()} for parts in (view.keys, view.values))
    case.check(backend)


@pytest.mark.parametrize("formats", [("native", "int8"), ("native", "int4"), ("int8", "native", "int2")])
@pytest.mark.parametrize("columns", [(1, 3, 2), (2, 0, 1), (0, 2, 0)])
@pytest.mark.parametrize("null", [(), "ragged"], ids=["full", "ragged"])
def test_several_views(backend, formats, columns, null):
    Case(formats, columns, 6, 2, null=null, page=32).check(backend)


@pytest.mark.parametrize("rows", [2, 5])
def test_shared_pages(backend, rows):
    Case(("int8",), (4,), 3, rows=rows, shared=True).check(backend)


@pytest.mark.parametrize("kind", ["bool", "additive", "-inf", "finfo.min"])
@pytest.mark.parametrize("mask_rows", [1, 2])
@pytest.mark.parametrize("mask_heads", [1, 2, 6])
@pytest.mark.parametrize("mask_q", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masks(backend, kind, mask_rows, mask_heads, mask_q, dtype):
    case = Case(("native",), (3,), 9, 3, heads=6, kv_heads=2, dtype=dtype)
    shown = torch.rand(mask_rows, mask_heads, mask_q, case.slots) < 0.6
    low = float("-inf") if kind == "-inf" else torch.finfo(dtype).min
    masks = {
        "bool": shown,
        "additive": torch.randn(shown.shape).to(dtype),
        "-inf": torch.zeros(shown.shape, dtype=dtype).masked_fill(~shown, low),
        "finfo.min": torch.zeros(shown.shape, dtype=dtype).masked_fill(~shown, low),
    }
    case.check(backend, masks[kind])


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("kind", ["bool", "-inf"])
def test_queries_that_see_nothing_yield_zeros(backend, kind, sinks):
    case = Case(("int8",), (3,), 9, 4)
    mask = torch.ones(2, 1, 4, case.slots, dtype=torch.bool)
    mask[0, :, 1] = mask[1, :, 3] = False
    if kind == "-inf":
        mask = torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))
    out = case.check(backend, mask, sinks=torch.randn(4) if sinks else None)
    assert not out[0, 1].any()
    assert not out[1, 3].any()
    assert out[0, 0].any()


@pytest.mark.parametrize("softcap", [None, 0.5, 30.0])
@pytest.mark.parametrize("sinks", [None, -20.0, 0.0, 8.0])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_softcap_and_sinks(backend, softcap, sinks, masked, dtype):
    case = Case(("int8",), (3,), 9, 2, dtype=dtype)
    mask = torch.rand(1, 1, 2, case.slots) < 0.7 if masked else None
    sinks = None if sinks is None else (torch.randn(4) + sinks).to(dtype)
    case.check(backend, mask, softcap=softcap, sinks=sinks)


def test_large_scores_neither_overflow_nor_vanish(backend):
    case = Case(("native",), (3,), 9, dtype=torch.float16)
    case.query = case.query * 400
    out = decode_attention(case.query, case.pages, *case.tail, scale=case.scale, backend=backend)
    scores = (case.query.double() @ case.keys.mT * case.scale).softmax(-1)
    assert_close("output", out, (scores @ case.values).transpose(1, 2))


def test_nothing_at_all_to_attend_to(backend):
    out = Case(columns=(0,), tail=0, q=3).check(backend)
    assert out.shape == (2, 3, 4, 64)
    assert not out.any()
    assert not Case((), (), tail=0).check(backend, sinks=torch.zeros(4)).any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: setattr(c, "query", c.query[:, :3]), r"`query` has 3 heads, which is no multiple of the 2"),
        (lambda c: setattr(c, "query", c.query[:1]), r"`pages`: got a block table for \(2, 2\).*expected \(1, 2\)"),
    ],
)
def test_shapes_that_do_not_belong_together(backend, change, message):
    case = Case()
    change(case)
    with pytest.raises(ValueError, match=message):
        case.check(backend)


@pytest.mark.parametrize("shape", [(2, 1, 1, 36), (3, 1, 1, 37), (1, 3, 1, 37), (1, 1, 2, 37), (1, 1, 37)])
def test_masks_that_do_not_fit(backend, shape):
    with pytest.raises(ValueError, match=r"`mask` is \(.*expected \[1 or 2, 1, 2 or 4, 1, 37\]"):
        Case().check(backend, torch.ones(shape, dtype=torch.bool))


def test_time_against_decoding_everything():
    """Prints; asserts nothing about time."""
    with poisoned():
        case = Case(("int8",), (128,), 20, rows=1, heads=16, kv_heads=4, dim=128, page=64)
    (view,) = case.pages

    def paged():
        return decode_attention(case.query, case.pages, *case.tail, scale=case.scale, backend="torch")

    def dense():
        flat = view.block_table.flatten().long()
        tokens = [
            torch.cat(
                [format.decode({n: p[flat] for n, p in parts.items()}).reshape(1, 4, -1, format.dim), tail], dim=2
            )
            for format, parts, tail in zip(
                (view.key_format, view.value_format), (view.keys, view.values), case.tail, strict=True
            )
        ]
        return torch.nn.functional.scaled_dot_product_attention(
            case.query, *tokens, scale=case.scale, enable_gqa=True
        ).transpose(1, 2)

    assert_close("output", paged(), dense(), 1e-5)
    times = {paged: [], dense: []}
    for _, function in itertools.product(range(7), times):
        start = time.perf_counter()
        function()
        times[function].append(time.perf_counter() - start)
    ratio = sorted(a / b for a, b in zip(times[paged], times[dense]))[3]
    print(f"\n8,192 tokens in int8: the reference takes {ratio:.2f} times as long as decoding everything and SDPA")
