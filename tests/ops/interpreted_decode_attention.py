"""The Triton kernels of decode attention against the reference, run by triton's interpreter (see `test_triton.py`)."""

import itertools

import pytest
import torch
from numerics import assert_close, poisoned
from test_cpu_kernel import MASKS, OURS, make_tail, make_view

from hf_kvplus.ops.decode_attention import reference, triton

#: Half precision rounds rotated queries, and the weights; codes and sums are exact. Scores reach 40 in these tests,
#: and what rounding moves them by is proportional to them.
LOOSER = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2.5e-2}
DTYPES = [torch.bfloat16, torch.float16]


def compared(query, views, keys, values, mask, scale, softcap=None, sinks=None):
    """The reference on float32 queries and tail."""
    return reference.decode_attention(query.float(), views, keys.float(), values.float(), mask, scale, softcap, sinks)


def check(query, views, keys, values, mask=None, scale=None, softcap=None, sinks=None, **lengths):
    """The kernels' output, after comparing it with the reference on float32 queries and tail."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    assert triton.refuses(query, views, keys, mask) is None
    with poisoned():
        actual = triton.decode_attention(query, views, keys, values, mask, scale, softcap, sinks, **lengths)
    assert actual.dtype == query.dtype
    expected = compared(query, views, keys, values, mask, scale, softcap, sinks)
    assert_close("output", actual, expected, LOOSER[query.dtype])
    return actual


@pytest.mark.parametrize("dtype", [torch.float32, *DTYPES], ids=str)
@pytest.mark.parametrize("name", OURS)
def test_formats(name, dtype):
    view = make_view(name, 2, 1, 4, 64, 64, 64, dtype, null=[(1, 0, 2)])
    check(torch.randn(2, 4, 1, 64).to(dtype), [view], make_tail(2, 1, 13, 64, dtype), make_tail(2, 1, 13, 64, dtype))


@pytest.mark.parametrize(("dim", "value_dim"), [(80, 80), (96, 96), (128, 128), (256, 256), (64, 128), (192, 112)])
@pytest.mark.parametrize("name", OURS)
def test_head_dimensions(name, dim, value_dim):
    view = make_view(name, 1, 1, 2, 64, dim, value_dim)
    check(torch.randn(1, 3, 1, dim), [view], make_tail(1, 1, 5, dim), make_tail(1, 1, 5, value_dim))


@pytest.mark.parametrize("page", [8, 16, 32, 128, 256])
@pytest.mark.parametrize("name", OURS)
def test_page_sizes(name, page):
    columns = max(1, 144 // page)
    view = make_view(name, 1, 2, columns, page, 64, 64, null=[(0, 1, columns - 1)])
    check(torch.randn(1, 4, 1, 64), [view], make_tail(1, 2, 5, 64), make_tail(1, 2, 5, 64))


@pytest.mark.parametrize("group", [1, 4, 7, 8])
@pytest.mark.parametrize(("name", "tokens"), [("int8", 1), ("int4", 5), ("int2", 16), ("native", 16)])
def test_groups_of_queries(name, tokens, group):
    view = make_view(name, 1, 1, 2, 32, 64, 64)
    mask = torch.ones(tokens, 64 + tokens, dtype=torch.bool).tril(diagonal=64)[None, None]
    query = torch.randn(1, tokens, group, 64).transpose(1, 2)
    check(query, [view], make_tail(1, 1, tokens, 64), make_tail(1, 1, tokens, 64), mask)


@pytest.mark.parametrize("q_len", [1, 5])
@pytest.mark.parametrize("kind", MASKS)
def test_masks(kind, q_len):
    rows, heads, kv_heads = 2, 4, 2
    views = [make_view("native", rows, kv_heads, 1, 16, 64, 64), make_view("int4", rows, kv_heads, 5, 16, 64, 64)]
    tail = make_tail(rows, kv_heads, 11, 64)
    mask = MASKS[kind](rows, heads, kv_heads, q_len, 6 * 16 + 11)
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
@pytest.mark.parametrize("softcap", [None, 0.7, 50.0])
def test_softcap_and_sinks(softcap, sinks):
    views, tail = [make_view("int4", 1, 2, 3, 32, 64, 64)], make_tail(1, 2, 9, 64)
    sinks = None if sinks is None else torch.randn(8).to(sinks)
    check(torch.randn(1, 8, 3, 64), views, tail, tail, softcap=softcap, sinks=sinks, scale=0.3)


@pytest.mark.parametrize(
    "names", [("native", "k4v2"), ("int4", "native"), ("int2", "int8", "fp8"), ("native", "native")]
)
def test_several_views(names):
    """Rotated and plain ones, before and after each other, in pages of different sizes."""
    views = [make_view(name, 2, 1, 2 + i, 16 << i, 64, 64) for i, name in enumerate(names)]
    check(torch.randn(2, 3, 2, 64), views, make_tail(2, 1, 7, 64), make_tail(2, 1, 7, 64))


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 200])
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
    view, tail = make_view("int4", 1, 1, 60, 8, 256, 256), make_tail(1, 1, 3, 256)
    check(torch.randn(1, 2, 1, 256), [view], tail, tail, (torch.arange(483) > 200)[None, None, None])


@pytest.mark.parametrize("name", ["native", "int8", "int4"])
def test_lengths_read_from_tensors(name):
    """Tables and tails larger than what is in use, by row: as if they were cut."""
    view, rider = make_view(name, 2, 2, 6, 16, 64, 64), make_view("native", 2, 2, 2, 16, 64, 64)
    keys, values, query = make_tail(2, 2, 20, 64), make_tail(2, 2, 20, 64), torch.randn(2, 4, 2, 64)
    columns = torch.tensor([[2, 1], [4, 6]], dtype=torch.int32)
    length = torch.tensor([20, 3], dtype=torch.int32)
    slots = torch.arange(32 + 96 + 20)
    mask = torch.stack(
        [
            torch.where(slots < 32, slots < 16 * r, torch.where(slots < 128, slots < 32 + 16 * c, slots < 128 + t))
            for r, c, t in zip(*columns.tolist(), length.tolist())
        ]
    )[:, None, None]
    given = (query, [rider, view], keys, values)
    expected = reference.decode_attention(*given, mask, 0.1, None, None)
    unused = {r: slice(t, None) for r, t in enumerate(length.tolist())}
    for row, rest in unused.items():
        keys[row, :, rest] = values[row, :, rest] = torch.nan
    for read, used in ((rider, columns[0]), (view, columns[1])):
        for row, count in enumerate(used.tolist()):
            read.block_table[row, :, count:] = 10**6  # beyond what is in use, anything
    actual = triton.decode_attention(*given, None, 0.1, None, None, columns=columns, length=length)
    assert_close("output", actual, expected, 1e-5)


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


def test_as_an_operator():
    """Schema, fake implementation and tracing."""
    views, tail = [make_view("int8", 1, 1, 2, 16, 64, 80)], (make_tail(1, 1, 5, 64), make_tail(1, 1, 5, 80))
    args = (torch.randn(1, 2, 1, 64), *triton.flattened(views), *tail, None, 0.1, None, None, None, None)
    torch.library.opcheck(torch.ops.hf_kvplus.decode_attention_triton.default, args)
