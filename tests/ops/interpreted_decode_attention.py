"""The Triton kernels of decode attention against the reference, under the interpreter."""

import itertools

import pytest
import torch
from numerics import assert_close, poisoned
from test_cpu_kernel import MASKS, MIXED, OURS, make_tail, make_view

from hf_kvplus.ops.decode_attention import reference, triton

#: Half precision rounds rotated queries, and the weights; codes and sums are exact. Scores reach 40 in these tests,
#: and what rounding moves them by is proportional to them.
LOOSER = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
DTYPES = [torch.bfloat16, torch.float16]


def compared(query, views, keys, values, mask, scale, softcap=None, sinks=None):
    """The reference on float32 queries and tail."""
    return reference.decode_attention(query.float(), views, keys.float(), values.float(), mask, scale, softcap, sinks)


def check(query, views, keys, values, mask=None, scale=None, softcap=None, sinks=None):
    """The kernels' output, after comparing it with the reference on float32 queries and tail."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    assert triton.refuses(query, views, keys, values, mask) is None
    with poisoned():
        actual = triton.decode_attention(query, views, keys, values, mask, scale, softcap, sinks)
    assert actual.dtype == query.dtype
    expected = compared(query, views, keys, values, mask, scale, softcap, sinks)
    assert_close("output", actual, expected, LOOSER[query.dtype])
    return actual


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OURS)
def test_formats(name, dtype):
    view = make_view(name, 2, 1, 3, 64, 64, 64, dtype, null=[(1, 0, 2)])
    check(torch.randn(2, 4, 1, 64).to(dtype), [view], make_tail(2, 1, 13, 64, dtype), make_tail(2, 1, 13, 64, dtype))


@pytest.mark.parametrize("dtypes", [each for each in MIXED if len(set(each)) > 1], ids=str)
def test_query_keys_and_values_in_dtypes_of_their_own(dtypes):
    query, keys, values = dtypes
    rider = make_view("native", 1, 1, 1, 16, 64, 64, keys, value_dtype=values)
    tail = make_tail(1, 1, 9, 64, keys), make_tail(1, 1, 9, 64, values)
    for name in ("native", "int8"):
        view = make_view(name, 1, 1, 2, 16, 64, 64, keys, value_dtype=values)
        check(torch.randn(1, 2, 1, 64).to(query), [rider, view], *tail)


@pytest.mark.parametrize(
    ("name", "dim", "value_dim"),
    [
        ("native", 80, 80),
        ("native", 64, 128),
        ("int8", 192, 112),
        ("int8", 96, 96),
        ("fp8", 256, 256),
        ("int4", 80, 80),
        ("int4", 256, 256),
        ("k4v2", 96, 96),
        ("k4v2", 192, 112),
        ("int2", 80, 80),
        ("int2", 128, 128),
        ("int2", 256, 256),
    ],
)
def test_head_dimensions(name, dim, value_dim):
    view = make_view(name, 1, 1, 1, 64, dim, value_dim)
    check(torch.randn(1, 3, 1, dim), [view], make_tail(1, 1, 5, dim), make_tail(1, 1, 5, value_dim))


@pytest.mark.parametrize(
    ("name", "page"),
    [
        *itertools.product(("int4", "int2"), (8, 16, 32, 128, 256)),
        ("native", 8),
        ("int8", 16),
        ("k4v2", 32),
        ("fp8", 256),
    ],
)
def test_page_sizes(name, page):
    columns = max(1, 96 // page)
    view = make_view(name, 1, 2, columns, page, 64, 64, null=[(0, 1, columns - 1)])
    check(torch.randn(1, 4, 1, 64), [view], make_tail(1, 2, 5, 64), make_tail(1, 2, 5, 64))


@pytest.mark.parametrize(
    ("name", "tokens", "group"),
    [("int8", 1, 8), ("fp8", 1, 7), ("int4", 5, 4), ("k4v2", 5, 1), ("int2", 16, 1), ("native", 3, 7), ("int8", 5, 8)],
)
def test_groups_of_queries(name, tokens, group):
    view = make_view(name, 1, 1, 2, 32, 64, 64)
    mask = torch.ones(tokens, 64 + tokens, dtype=torch.bool).tril(diagonal=64)[None, None]
    query = torch.randn(1, tokens, group, 64).transpose(1, 2)
    check(query, [view], make_tail(1, 1, tokens, 64), make_tail(1, 1, tokens, 64), mask)


@pytest.mark.parametrize(("kind", "q_len"), zip(MASKS, itertools.cycle((1, 3))))
def test_masks(kind, q_len):
    rows, heads, kv_heads = 2, 4, 2
    views = [make_view("native", rows, kv_heads, 1, 16, 64, 64), make_view("int4", rows, kv_heads, 4, 16, 64, 64)]
    tail = make_tail(rows, kv_heads, 11, 64)
    mask = MASKS[kind](rows, heads, kv_heads, q_len, 5 * 16 + 11)
    check(torch.randn(rows, heads, q_len, 64), views, tail, tail, mask)


def test_a_query_that_sees_nothing_yields_zeros():
    view, tail = make_view("int8", 2, 1, 2, 16, 64, 64), make_tail(2, 1, 5, 64)
    mask = torch.ones(2, 1, 1, 37, dtype=torch.bool)
    mask[0] = False
    out = check(torch.randn(2, 4, 1, 64), [view], tail, tail, mask)
    assert not out[0].any()
    nothing = torch.empty(2, 1, 0, 64)
    assert not check(torch.randn(2, 4, 1, 64), [], nothing, nothing).any()
    assert not check(torch.randn(2, 4, 1, 64), [make_view("int4", 2, 1, 0, 16, 64, 64)], nothing, nothing).any()


def test_a_mask_of_the_lowest_number_hides_nothing_where_it_is_everywhere():
    view, tail = make_view("native", 1, 1, 2, 16, 64, 64), make_tail(1, 1, 5, 64)
    check(torch.randn(1, 4, 1, 64), [view], tail, tail, torch.full((1, 1, 1, 37), torch.finfo(torch.float32).min))


@pytest.mark.parametrize("sinks", [None, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("softcap", [None, 0.7])
def test_softcap_and_sinks(softcap, sinks):
    views, tail = [make_view("int4", 1, 2, 3, 32, 64, 64)], make_tail(1, 2, 9, 64)
    sinks = None if sinks is None else torch.randn(8).to(sinks)
    check(torch.randn(1, 8, 3, 64), views, tail, tail, softcap=softcap, sinks=sinks, scale=0.3)


@pytest.mark.parametrize("names", [("native", "k4v2"), ("int4", "native"), ("int2", "int8", "fp8")])
def test_several_views(names):
    """Rotated and plain ones, before and after each other, in pages of different sizes."""
    views = [make_view(name, 2, 1, 2 + i, 16 << i, 64, 64) for i, name in enumerate(names)]
    check(torch.randn(2, 3, 2, 64), views, make_tail(2, 1, 7, 64), make_tail(2, 1, 7, 64))


@pytest.mark.parametrize("length", [0, 1, 63, 65])
def test_lengths_and_strides_of_the_tail(length):
    view = make_view("int8", 2, 2, 2, 16, 64, 80)
    keys, values = make_tail(2, 2, length, 64), make_tail(2, 2, length, 80)
    check(torch.randn(2, 6, 2, 64), [view], keys, values)
    transposed = make_tail(2, length, 2, 80)[:, :length].transpose(1, 2) if length > 1 else values
    check(torch.randn(2, 6, 2, 64), [], keys, transposed[:, :, :length])


def test_many_splits(monkeypatch):
    """A long sequence in more parts than are summed at a time, some of them hidden altogether."""
    from hf_kvplus.ops.decode_attention import triton_launch

    monkeypatch.setattr(triton_launch, "_multiprocessors", lambda device: 10**6)
    monkeypatch.setattr(triton_launch, "_FEWEST", 8)
    view, tail = make_view("int4", 1, 1, 40, 8, 256, 256), make_tail(1, 1, 3, 256)
    check(torch.randn(1, 2, 1, 256), [view], tail, tail, (torch.arange(323) > 150)[None, None, None])


def spoil(view, shown):
    """Fill what `shown [rows, slots]` hides with NaN: whole pages, and slots of pages where they can hold one."""
    page = view.key_format.page_size
    shown = shown.unflatten(-1, (-1, page))[:, None].expand(*view.block_table.shape, page)
    hidden = torch.ones(view.keys["data"].shape[0], page, dtype=torch.bool)
    for ids, slots in zip(view.block_table.flatten().tolist(), shown.flatten(0, 2)):
        hidden[ids] &= ~slots
    for format, parts in ((view.key_format, view.keys), (view.value_format, view.values)):
        for name, part in parts.items():
            apart = part.is_floating_point() and not (format.mixes_tokens and format.channel_major)
            doomed = hidden if apart else hidden.all(-1, keepdim=True)
            shape = [len(part)] + [1] * (part.ndim - 1)
            shape[2 if format.channel_major and name == "data" else 1] = doomed.shape[1]
            bits = part.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[part.dtype.itemsize])
            bits.masked_fill_(doomed.view(shape), 0x7F if part.dtype.itemsize == 1 else -1)


@pytest.mark.parametrize(("name", "page"), [*((name, 64) for name in OURS), ("int2", 8), ("native", 16), ("int4", 128)])
def test_what_a_mask_hides_may_be_anything(name, page):
    """As in a captured step: tables and tails with room for tokens to come, what is not there yet uninitialised."""
    rider, view = make_view("native", 2, 1, 2, page, 64, 64), make_view(name, 2, 1, 256 // page, page, 64, 64)
    for each in (rider, view):
        each.block_table[-1] = each.block_table[-1].flip(-1)  # rows of other lengths share no page
    tail = [make_tail(2, 1, 40, 64) for _ in range(2)]
    starts = torch.tensor([0, rider.tokens, rider.tokens + view.tokens, rider.tokens + view.tokens + 40])
    used = torch.tensor([[page, 3 * page // 2, 40], [2 * page, 0, 7]])  # tokens of each view and the tail, by row
    used[1, 1] = 2 * page
    slots = torch.arange(int(starts[-1]))
    shown = torch.stack([sum((slots >= s) & (slots < s + n) for s, n in zip(starts, row)) > 0 for row in used])
    query, mask = torch.randn(2, 4, 1, 64), shown[:, None, None]
    expected = compared(query, [rider, view], *tail, mask, 0.1)
    for each, start in ((rider, 0), (view, rider.tokens)):
        seen = shown[:, start : start + each.tokens]
        spoil(each, seen)
        if page >= 16 or each is view:  # not even the table's entries are followed
            each.block_table[~seen.unflatten(-1, (-1, page)).any(-1)[:, None]] = 10**6
    for x in tail:
        x[~shown[:, None, starts[2] :]] = float("nan")
    for given in (mask, torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))):
        with poisoned():
            out = triton.decode_attention(query, [rider, view], *tail, given, 0.1, None, None)
        assert_close("output", out, expected, 2e-5)


def test_channels_of_large_bias():
    """Keys and values far from zero in some channels: no less precise than the same tokens in bfloat16 would be."""
    torch.manual_seed(0)
    for name, rotation in itertools.product(("int4", "int2"), (True, False)):
        view = biased_view(name, rotation)
        empty = torch.empty(1, 1, 0, 64, dtype=torch.bfloat16)
        query = torch.randn(1, 4, 1, 64).bfloat16()
        out = triton.decode_attention(query, [view], empty, empty, None, 0.125, None, None)
        expected = reference.decode_attention(
            query.float(), [view], empty.float(), empty.float(), None, 0.125, None, None
        )
        assert_close(f"{name}, rotation {rotation}", out, expected, 3e-2)


def biased_view(name, rotation):
    from hf_kvplus.formats import FORMATS

    view = make_view(name, 1, 1, 4, 64, 64, 64, torch.bfloat16)
    spec = FORMATS[name].with_options(rotation=rotation)
    bias = torch.zeros(64).index_fill(0, torch.tensor([3, 17, 40]), 100.0)
    view.key_format = spec.key(64, 64, torch.bfloat16, channel_major=True)
    view.value_format = spec.value(64, 64, torch.bfloat16, channel_major=False)
    capacity = view.keys["data"].shape[0]
    for parts, format in ((view.keys, view.key_format), (view.values, view.value_format)):
        tokens = (torch.randn(capacity, 64, 64) + bias).bfloat16()
        parts.update({part: x.clone().contiguous() for part, x in format.encode(tokens).items()})
    return view


def test_tokens_of_extreme_size_in_float16():
    """Scales so small and so large that their products with weights or queries leave float16's range."""
    for name, size in itertools.product(("int8", "int4", "int2"), (1e-5, 3e3)):
        view = make_view(name, 1, 1, 2, 64, 64, 64, torch.float16)
        tokens = torch.randn(view.values["data"].shape[0], 64, 64) * size
        view.values.update({p: x.clone().contiguous() for p, x in view.value_format.encode(tokens.half()).items()})
        empty = torch.empty(1, 1, 0, 64, dtype=torch.float16)
        query = torch.randn(1, 4, 1, 64).half()
        out = triton.decode_attention(query, [view], empty, empty, None, 0.125, None, None)
        expected = reference.decode_attention(
            query.float(), [view], empty.float(), empty.float(), None, 0.125, None, None
        )
        assert_close(f"{name} at {size}", out / size, expected / size, 1e-2 if size < 1 else 3e-3)


@pytest.mark.parametrize("masked", [False, True])
def test_as_an_operator(masked):
    """Schema, fake implementation and tracing."""
    (view,) = views = [make_view("int8", 1, 1, 2, 16, 64, 80)]
    query, tail = torch.randn(1, 2, 1, 64), (make_tail(1, 1, 5, 64), make_tail(1, 1, 5, 80))
    mask = torch.ones(1, 1, 1, 37, dtype=torch.bool).tril(30) if masked else None
    args = (query, *triton.flattened(views), *tail, mask, 0.1, None, None)
    torch.library.opcheck(torch.ops.hf_kvplus.decode_attention_triton.default, args)

    def step(query, keys, values):
        return triton.decode_attention(query, [view], keys, values, mask, 0.1, None, None)

    assert torch.equal(torch.compile(step, fullgraph=True, backend="eager")(query, *tail), step(query, *tail))
