"""The CPU kernel of decode attention against the reference, how it is built, and what serves where it cannot be."""

import itertools
import os
import stat
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch
from numerics import TOLERANCE, assert_close

from hf_kvplus.formats import FORMATS
from hf_kvplus.ops import _build
from hf_kvplus.ops import decode_attention as package
from hf_kvplus.ops.decode_attention import PageView, cpu, decode_attention

OURS = ["native", "int8", "fp8", "int4", "k4v2", "int2"]

# heads, kv_heads, key width, value width, query tokens, page size
SHAPES = [
    (1, 1, 64, 64, 1, 8),
    (4, 1, 64, 64, 1, 64),
    (7, 1, 80, 80, 5, 32),
    (8, 2, 96, 96, 1, 16),
    (8, 1, 128, 128, 1, 128),
    (16, 1, 128, 64, 16, 64),
    (9, 3, 64, 128, 2, 256),
    (2, 2, 256, 256, 5, 32),
    (6, 3, 16, 112, 1, 16),
    (5, 1, 576, 512, 3, 64),
]


@pytest.fixture(autouse=True)
def _fill_unwritten_memory():
    """`at::empty` gives NaN, and the kernel is there."""
    if reason := cpu.missing():
        pytest.fail(f"The CPU kernel is missing: {reason}")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


#: Dtypes of query, keys and values.
MIXED = list(itertools.product((torch.float32, torch.bfloat16, torch.float16), repeat=3))


def make_view(
    name, rows, kv_heads, columns, page, dim, value_dim, dtype=torch.float32, null=(), value_dtype=None
) -> PageView:
    """Random pages in format `name`, some of them shared, `null` entries `(row, head, column)` missing.

    Pages that no entry names are poison: NaN, or the largest codes.
    """
    spec, capacity = FORMATS[name], rows * kv_heads * columns + 3
    formats = {
        "keys": spec.key(page, dim, dtype, channel_major=True),
        "values": spec.value(page, value_dim, value_dtype or dtype, channel_major=False),
    }
    table = torch.randperm(capacity)[: rows * kv_heads * columns].view(rows, kv_heads, columns).int()
    if columns:
        table[-1, :, 0] = table[0, 0, 0]
    for entry in null:
        table[entry] = -1
    unused = torch.ones(capacity, dtype=torch.bool)
    unused[table[table >= 0].long()] = False
    parts = {}
    for kind, format in formats.items():
        tokens = torch.randn(capacity, page, format.dim) * torch.rand(capacity, page, 1).mul(3).exp()
        parts[kind] = {part: x.clone().contiguous() for part, x in format.encode(tokens.to(format.dtype)).items()}
        for x in parts[kind].values():
            x.view(torch.uint8)[unused] = 0x7F if x.dtype.itemsize == 1 else 0xFF
    # As in a cache, the table in use is a part of a larger one.
    table = torch.cat([table, torch.full((rows, kv_heads, 2), 10**6, dtype=torch.int32)], -1)[..., :columns]
    return PageView(parts["keys"], parts["values"], *formats.values(), table, bool(null))


def make_tail(rows, kv_heads, tokens, dim, dtype=torch.float32) -> torch.Tensor:
    """The first tokens of a buffer whose rest is NaN."""
    buffer = torch.randn(rows, kv_heads, tokens + 5, dim).to(dtype)
    buffer[:, :, tokens:] = float("nan")
    return buffer[:, :, :tokens]


def check(query, views, keys, values, mask=None, **options):
    """The kernel's output, after comparing it with the reference's (each rounds its float32 sums in its own way)."""
    options = {"scale": query.shape[-1] ** -0.5, **options}
    given = (query, views, keys, values, mask)
    actual = decode_attention(*given, backend="cpu", **options)
    expected = decode_attention(*given, backend="torch", **options)
    assert actual.dtype == query.dtype
    assert actual.is_contiguous()
    assert_close("output", actual, expected, max(TOLERANCE[query.dtype], 1e-5))
    return actual


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", OURS)
def test_formats(name, shape):
    heads, kv_heads, dim, value_dim, q_len, page = shape
    view = make_view(name, 2, kv_heads, 3, page, dim, value_dim, null=[(1, 0, 2)])
    query = torch.randn(2, q_len, heads, dim).transpose(1, 2)
    tail = make_tail(2, kv_heads, 13, dim), make_tail(2, kv_heads, 13, value_dim)
    check(query, [view], *tail)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", OURS)
def test_dtypes(name, dtype):
    view = make_view(name, 2, 2, 4, 32, 64, 64, dtype)
    tail = make_tail(2, 2, 70, 64, dtype), make_tail(2, 2, 70, 64, dtype)
    check(torch.randn(2, 6, 3, 64).to(dtype), [view], *tail)


@pytest.mark.parametrize("dtypes", MIXED, ids=str)
def test_query_keys_and_values_in_dtypes_of_their_own(dtypes):
    query, keys, values = dtypes
    view = make_view("native", 1, 2, 3, 16, 64, 80, keys, value_dtype=values)
    tail = make_tail(1, 2, 71, 64, keys), make_tail(1, 2, 71, 80, values)
    check(torch.randn(1, 4, 2, 64).to(query), [view], *tail)
    check(torch.randn(1, 4, 2, 64).to(query), [view], *(x[:, :, :0] for x in tail))


def test_extreme_numbers_of_8_bit_floats():
    view = make_view("fp8", 1, 1, 1, 256, 64, 64)
    every = torch.arange(256, dtype=torch.uint8)
    every[every & 0x7F == 0x7F] = 0  # NaN
    for parts in (view.keys, view.values):
        parts["data"].view(torch.uint8).copy_(every.repeat(64).view(parts["data"].shape[1:]))
    empty = torch.empty(1, 1, 0, 64)
    check(torch.randn(1, 1, 1, 64) * 1e-2, [view], empty, empty)
    view.values["data"].view(torch.uint8)[:, 3, 5] = 0x7F
    out = decode_attention(torch.zeros(1, 1, 1, 64), [view], empty, empty, scale=1.0, backend="cpu")
    assert out.isnan().flatten().nonzero().flatten().tolist() == [5]


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 111, 200])
def test_lengths_of_the_tail(length):
    view = make_view("int8", 2, 2, 2, 16, 64, 80)
    check(torch.randn(2, 6, 2, 64), [view], make_tail(2, 2, length, 64), make_tail(2, 2, length, 80))
    if length:
        check(torch.randn(2, 6, 2, 64), [], make_tail(2, 2, length, 64), make_tail(2, 2, length, 80))


def test_tails_in_other_strides():
    query = torch.randn(2, 6, 1, 64)
    check(query, [], make_tail(2, 20, 3, 64).transpose(1, 2), make_tail(2, 20, 3, 64).transpose(1, 2))
    check(query, [], make_tail(2, 3, 64, 20).transpose(2, 3), make_tail(2, 3, 64, 20).transpose(2, 3))
    check(query, [], make_tail(1, 3, 20, 64).expand(2, -1, -1, -1), make_tail(2, 1, 20, 64).expand(-1, 3, -1, -1))


MASKS = {
    "padding": lambda b, h, kv, q, n: torch.rand(b, 1, 1, n) > 0.4,
    "shared by rows": lambda b, h, kv, q, n: torch.rand(1, 1, q, n) > 0.4,
    "of kv heads": lambda b, h, kv, q, n: torch.rand(b, kv, q, n) > 0.4,
    "of heads": lambda b, h, kv, q, n: torch.rand(b, h, q, n) > 0.4,
    "additive": lambda b, h, kv, q, n: torch.randn(b, 1, q, n),
    "additive, of heads": lambda b, h, kv, q, n: torch.randn(b, h, q, n).masked_fill(
        torch.rand(b, h, q, n) > 0.5, -1e38
    ),
    "additive, float16": lambda b, h, kv, q, n: torch.randn(b, 1, q, n).half(),
    "additive, bfloat16": lambda b, h, kv, q, n: torch.randn(b, 1, q, n).bfloat16(),
    "expanded": lambda b, h, kv, q, n: (torch.rand(1, 1, 1, n) > 0.4).expand(b, h, q, n),
    "strided": lambda b, h, kv, q, n: (torch.rand(b, n, q, kv) > 0.4).permute(0, 3, 2, 1),
    "infinite": lambda b, h, kv, q, n: torch.zeros(b, 1, q, n).masked_fill(torch.rand(b, 1, q, n) > 0.5, -torch.inf),
    "hides pages": lambda b, h, kv, q, n: (torch.arange(n) > 40).expand(b, 1, q, n),
    "a part of a longer one": lambda b, h, kv, q, n: (torch.rand(b, 1, q, n + 9) > 0.4)[..., :n],
}


@pytest.mark.parametrize("q_len", [1, 5])
@pytest.mark.parametrize("kind", MASKS)
def test_masks(kind, q_len):
    rows, heads, kv_heads = 3, 6, 2
    views = [make_view("native", rows, kv_heads, 1, 16, 64, 64), make_view("int8", rows, kv_heads, 5, 16, 64, 64)]
    tail = make_tail(rows, kv_heads, 11, 64)
    mask = MASKS[kind](rows, heads, kv_heads, q_len, 6 * 16 + 11)
    check(torch.randn(rows, heads, q_len, 64), views, tail, tail, mask)


def test_a_query_that_sees_nothing_yields_zeros():
    view, tail = make_view("int8", 2, 1, 2, 16, 64, 64), make_tail(2, 1, 5, 64)
    mask = torch.ones(2, 1, 1, 37, dtype=torch.bool)
    mask[0] = False
    out = check(torch.randn(2, 4, 1, 64), [view], tail, tail, mask)
    assert not out[0].any()
    assert out[1].all()
    nothing = torch.empty(2, 1, 0, 64)
    assert not decode_attention(torch.randn(2, 4, 1, 64), [], nothing, nothing, scale=1.0, backend="cpu").any()


def test_a_mask_of_the_lowest_number_hides_nothing_where_it_is_everywhere():
    view, tail = make_view("native", 1, 1, 2, 16, 64, 64), make_tail(1, 1, 5, 64)
    check(torch.randn(1, 4, 1, 64), [view], tail, tail, torch.full((1, 1, 1, 37), torch.finfo(torch.float32).min))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("sinks", [None, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("softcap", [None, 0.7, 50.0])
def test_softcap_and_sinks(softcap, sinks, masked):
    views = [make_view("int4", 2, 2, 3, 32, 64, 64), make_view("native", 2, 2, 1, 16, 64, 64)]
    tail = make_tail(2, 2, 9, 64)
    mask = torch.rand(2, 1, 3, 3 * 32 + 16 + 9) > 0.5 if masked else None
    sinks = None if sinks is None else torch.randn(8).to(sinks)
    check(torch.randn(2, 8, 3, 64), views, tail, tail, mask, softcap=softcap, sinks=sinks, scale=0.3)


def test_sinks_alone_yield_zeros():
    view, tail = make_view("int8", 1, 1, 1, 16, 64, 64), make_tail(1, 1, 3, 64)
    mask = torch.zeros(1, 1, 1, 19, dtype=torch.bool)
    assert not check(torch.randn(1, 2, 1, 64), [view], tail, tail, mask, sinks=torch.randn(2)).any()


def test_large_scores():
    view, tail = make_view("native", 1, 1, 8, 16, 64, 64), make_tail(1, 1, 3, 64)
    check(torch.randn(1, 2, 4, 64) * 1e3, [view], tail, tail, scale=10.0)


@pytest.mark.parametrize("name", ["int8", "k4v2"])
def test_null_pages(name):
    missing = [(0, 0, 0), (0, 1, 3), (1, 0, slice(1, None)), (2,)]
    views = [make_view("native", 3, 2, 1, 32, 64, 64), make_view(name, 3, 2, 4, 32, 64, 64, null=missing)]
    empty = torch.empty(3, 2, 0, 64)
    check(torch.randn(3, 4, 1, 64), views, empty, empty)
    out = check(torch.randn(3, 4, 1, 64), views[1:], empty, empty)
    assert not out[2].any()
    check(torch.randn(3, 4, 2, 64), views, empty, empty, torch.rand(3, 2, 2, 160) > 0.5)


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize(("rows", "kv_heads"), [(1, 1), (1, 3), (3, 2)])
def test_threads_and_splits(rows, kv_heads, threads):
    views = [make_view("native", rows, kv_heads, 1, 64, 128, 128)]
    views.append(make_view("int8", rows, kv_heads, 33, 64, 128, 128, null=[(0, 0, 7), (rows - 1, 0, slice(20, None))]))
    query, tail = torch.randn(rows, kv_heads * 4, 1, 128), make_tail(rows, kv_heads, 100, 128)
    mask = torch.rand(rows, 1, 1, 34 * 64 + 100) > 0.2
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        check(query, views, tail, tail)
        check(query, views, tail, tail, mask, sinks=torch.randn(kv_heads * 4))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("dim", "value_dim", "tail_rows", "sinks", "message"),
    [
        (80, 64, 1, 4, "`query` .* 64 and 64 channels, the pages 80"),
        (64, 80, 1, 4, "the pages 64 and 80"),
        (64, 64, 2, 4, "`tail_keys`"),
        (64, 64, 1, 3, "`sinks` is 3 numbers"),
    ],
)
def test_shapes_that_do_not_belong_together(dim, value_dim, tail_rows, sinks, message):
    view, tail = make_view("int8", 1, 2, 1, 16, dim, value_dim), make_tail(tail_rows, 2, 5, 64)
    with pytest.raises(ValueError, match=message):
        decode_attention(
            torch.randn(1, 4, 1, 64), [view], tail, tail, scale=0.1, sinks=torch.randn(sinks), backend="cpu"
        )


def test_fullgraph():
    view, tail = make_view("int8", 2, 2, 3, 16, 64, 80), make_tail(2, 2, 9, 64)
    values = make_tail(2, 2, 9, 80)

    def step(query, table, keys):
        pages = PageView(view.keys, view.values, view.key_format, view.value_format, table)
        return decode_attention(query, [pages], keys, values, scale=0.1) * 2

    torch.use_deterministic_algorithms(False)
    query = torch.randn(2, 4, 1, 64)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert_close("compiled", compiled(query, view.block_table, tail), step(query, view.block_table, tail))


def test_the_operator_passes_the_checks_of_torch():
    view, tail = make_view("int8", 2, 2, 3, 16, 64, 64), make_tail(2, 2, 9, 64)
    parts = [*view.keys.values(), *view.values.values()]
    pages = [view.block_table], parts, ["int8"] * 2, [0, 0]
    torch.use_deterministic_algorithms(False)
    torch.library.opcheck(
        torch.ops.hf_kvplus.decode_attention.default,
        (torch.randn(2, 4, 1, 64), *pages, tail, tail, None, 0.1, None, None),
        test_utils=["test_schema", "test_faketensor"],
    )


def test_gradients_come_from_the_reference():
    view, tail = make_view("native", 1, 1, 1, 16, 64, 64), make_tail(1, 1, 9, 64)
    query = torch.randn(1, 2, 1, 64, requires_grad=True)
    decode_attention(query, [view], tail, tail, scale=0.1).sum().backward()
    assert query.grad.isfinite().all()
    assert query.grad.any()


# --- where the kernel is not ------------------------------------------------------------------------------------------


@pytest.fixture
def fresh_build(monkeypatch, tmp_path):
    """Nothing is built yet, builds go to a folder of their own, and warnings were not given yet."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    monkeypatch.setattr(package, "_warned", set())
    _build.load.cache_clear()
    yield tmp_path
    _build.load.cache_clear()


def compiler(folder: Path, script: str) -> str:
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (None, "no C\\+\\+ compiler .* install"),
        ("echo 'cpu.cpp:1: error: too old' >&2; exit 1", "too old"),
        ("exit 1", "failed .* newer"),
        ("sleep 30", "did not finish within 0.2 seconds"),
        ("exit 0", "OSError"),  # writes an empty library
    ],
)
def test_without_the_kernel_the_reference_serves_with_one_warning(fresh_build, monkeypatch, script, message):
    monkeypatch.setenv("CXX", compiler(fresh_build, script) if script else "a-compiler-that-is-not-there")
    monkeypatch.setattr(_build, "TIME_LIMIT", 0.2 if "sleep" in str(script) else 60)
    view, tail = make_view("int8", 1, 1, 2, 16, 64, 64), make_tail(1, 1, 5, 64)
    given = (torch.randn(1, 2, 1, 64), [view], tail, tail)
    with pytest.warns(UserWarning, match=message) as caught:
        outputs = [decode_attention(*given, scale=0.1) for _ in range(3)]
    assert len(caught) == 1
    expected = decode_attention(*given, scale=0.1, backend="torch")
    assert all(torch.equal(out, expected) for out in outputs)
    with pytest.raises(ValueError, match=f"`backend`.*'cpu'.*{message}"):
        decode_attention(*given, scale=0.1, backend="cpu")
    assert not [file for file in (fresh_build / "extensions").rglob("*") if file.is_file()]


def test_a_folder_that_cannot_be_written_to(fresh_build, monkeypatch):
    (fresh_build / "file").touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(fresh_build / "file"))
    tail = make_tail(1, 1, 5, 64)
    with pytest.warns(UserWarning, match="NotADirectoryError.*TORCH_EXTENSIONS_DIR"):
        decode_attention(torch.randn(1, 2, 1, 64), [], tail, tail, scale=0.1)


def test_another_platform_is_served_by_the_reference(fresh_build, monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    tail = make_tail(1, 1, 5, 64)
    with pytest.warns(UserWarning, match="arm64"):
        decode_attention(torch.randn(1, 2, 1, 64), [], tail, tail, scale=0.1)


def test_builds_at_the_same_time_do_not_disturb_each_other(fresh_build, monkeypatch):
    # Writes its output in two steps, so that a reader of a half-written library would notice.
    script = 'while [ "$1" != -o ]; do shift; done; printf one > "$2"; sleep 0.3; printf two >> "$2"'
    monkeypatch.setenv("CXX", compiler(fresh_build, script))
    library, results = fresh_build / "extensions" / "lib.so", []

    def build():
        results.append((_build._compile(Path("cpu.cpp"), library), library.read_text()))

    builds = [threading.Thread(target=build) for _ in range(3)]
    for thread in builds:
        thread.start()
    for thread in builds:
        thread.join()
    assert results == [(None, "onetwo")] * 3
    assert list(library.parent.iterdir()) == [library]


def test_the_name_of_a_build_tells_what_it_depends_on(monkeypatch):
    source = Path(cpu.__file__).with_name("cpu.cpp")
    names = {_build._fingerprint(source)}
    monkeypatch.setenv("CXXFLAGS", "-O1")
    names.add(_build._fingerprint(source))
    monkeypatch.setattr(torch, "__version__", "9.9")
    names.add(_build._fingerprint(source))
    monkeypatch.setattr(_build, "_processor", lambda: b"another one")
    names.add(_build._fingerprint(source))
    assert len(names) == 4


def test_forcing_what_is_not_there():
    tail = make_tail(1, 1, 5, 64)
    query = torch.randn(1, 2, 1, 64)
    with pytest.raises(ValueError, match=r"`backend`: got 'gpu', accepted: 'auto', 'torch', 'cpu'"):
        decode_attention(query, [], tail, tail, scale=0.1, backend="gpu")
    with pytest.raises(ValueError, match=r"`backend`: got 'cpu'.*float64"):
        decode_attention(query.double(), [], tail.double(), tail.double(), scale=0.1, backend="cpu")
    view = make_view("native", 1, 1, 1, 16, 64, 64)
    view.key_format.layout = ""
    with pytest.raises(ValueError, match=r"`backend`: got 'cpu'.*layout ''"):
        decode_attention(query, [view], tail, tail, scale=0.1, backend="cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decode_attention(query, [view], tail, tail, scale=0.1)  # the reference, without a word


@pytest.mark.parametrize("flags", ["-march=x86-64-v3", "-march=x86-64"], ids=["AVX2", "plain"])
def test_processors_without_avx512(flags):
    """The same file once more, compiled for an older processor. The build is kept, as any other is."""
    if "CXXFLAGS" in os.environ:
        pytest.skip("this is the inner run")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    command += ["-k", "formats or dtypes or masks or softcap or tail or extreme"]
    environment = {**os.environ, "CXXFLAGS": f"{flags} -O1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:]
