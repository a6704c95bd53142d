"""The Triton kernels on a GPU against the references, and a captured decode step."""

import pytest
import torch
from conftest import tiny_llama
from numerics import assert_close

from hf_kvplus.formats import FORMATS
from hf_kvplus.ops import _triton
from hf_kvplus.ops.decode_attention import PageView, decode_attention
from hf_kvplus.ops.gather_pages import gather_pages
from hf_kvplus.ops.seal_pages import seal_pages

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

OURS = ["native", "int8", "fp8", "int4", "k4v2", "int2"]
#: Half precision rounds rotated queries, and the weights; codes and sums are exact.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 4e-3, torch.bfloat16: 3e-2}

# heads, kv_heads, channels, query tokens, page size, columns, tail
SHAPES = [
    (32, 8, 128, 1, 64, 33, 13),
    (8, 8, 64, 1, 16, 9, 0),
    (14, 2, 80, 5, 32, 12, 70),
    (16, 2, 96, 1, 64, 7, 3),
    (8, 2, 128, 16, 128, 5, 20),
    (4, 1, 256, 2, 256, 3, 40),
]


def pages_of(name, rows, kv_heads, columns, page, dim, dtype):
    """Random pages on the device, named in random order; those that no entry names hold NaN or the largest codes."""
    spec, capacity = FORMATS[name], rows * kv_heads * columns + 3
    formats = [maker(page, dim, dtype, channel_major=keys) for maker, keys in ((spec.key, True), (spec.value, False))]
    table = torch.randperm(capacity)[:-3].view(rows, kv_heads, columns).int()
    table[-1, :, 0] = table[0, 0, 0]
    table[-1, 0, -1] = -1
    stored = []
    for format in formats:
        tokens = torch.randn(capacity, page, dim) * torch.rand(capacity, page, 1).mul(3).exp()
        parts = {part: x.clone().contiguous() for part, x in format.encode(tokens.to(dtype)).items()}
        unused = torch.ones(capacity, dtype=torch.bool)
        unused[table[table >= 0].long()] = False
        for x in parts.values():
            x.view(torch.uint8)[unused] = 0x7F if x.dtype.itemsize == 1 else 0xFF
        stored.append({part: x.cuda() for part, x in parts.items()})
    return PageView(*stored, *formats, table.cuda(), has_null=True)


#: Every kernel is compiled here, which takes seconds: each format meets half of the shapes, each dtype, masks and none.
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
CASES = [
    (name, SHAPES[(i + 2 * j) % len(SHAPES)], dtype, (i + j) % 2 == 0)
    for i, name in enumerate(OURS)
    for j, dtype in enumerate(DTYPES)
]
CASES += [(name, SHAPES[0], torch.bfloat16, masked) for name in OURS for masked in (False, True)]


@pytest.mark.parametrize(("name", "shape", "dtype", "masked"), CASES, ids=str)
def test_decode_attention(name, shape, dtype, masked):
    heads, kv_heads, dim, tokens, page, columns, tail = shape
    views = [pages_of(name, 2, kv_heads, columns, page, dim, dtype)]
    if name in ("int4", "int2"):
        views.insert(0, pages_of("native", 2, kv_heads, 1, page, dim, dtype))
    query = torch.randn(2, heads, tokens, dim, device="cuda").to(dtype)
    keys, values = (torch.randn(2, kv_heads, tail, dim, device="cuda").to(dtype) for _ in range(2))
    slots = sum(view.tokens for view in views) + tail
    mask = None
    if masked:  # the last tokens hide from the first queries, and a row has padding in front and room behind
        mask = torch.ones(2, 1, tokens, slots, dtype=torch.bool, device="cuda").tril(slots - tokens)
        mask[1, :, :, : page + 5] = mask[1, :, :, -tail - 2 * page :] = False
    given = {"scale": dim**-0.5}
    actual = decode_attention(query, views, keys, values, mask, backend="triton", **given)
    exact = decode_attention(query.float(), views, keys.float(), values.float(), mask, backend="torch", **given)
    assert_close("output", actual, exact, TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("page", "dim", "dtype"),
    [(64, 128, torch.bfloat16), (16, 80, torch.float16), (256, 64, torch.float32)],
    ids=str,
)
@pytest.mark.parametrize("keys", [True, False], ids=["keys", "values"])
@pytest.mark.parametrize("name", ["native", "int8", "fp8", "int4", "int2"])
def test_seal_and_gather(name, keys, page, dim, dtype):
    format = (FORMATS[name].key if keys else FORMATS[name].value)(page, dim, dtype, channel_major=keys)
    ids = torch.randperm(40, device="cuda")[:24]
    tokens = torch.randn(2, 12, page + 15, dim, device="cuda").to(dtype)[:, :, :page].flatten(0, 1)
    stored = []
    for backend in ("triton", "torch"):
        parts = {n: torch.zeros((40, *shape), dtype=d, device="cuda") for n, (shape, d) in format.parts.items()}
        seal_pages(format, parts, tokens, ids, backend=backend)
        stored.append(parts)
    same = stored[0]["data"][ids].view(torch.uint8) == stored[1]["data"][ids].view(torch.uint8)
    assert same.float().mean() >= (1 if format.layout in ("native", "fp8") else 0.995)
    table = ids.int().view(2, 3, 4).clone()
    table[1, 1, 2] = -1
    read = [gather_pages(format, parts, table, torch.float32, backend="torch") for parts in stored]
    assert_close("sealed", *read, tolerance=1e-2)  # where a number lies between two codes
    assert_close("gathered", gather_pages(format, stored[0], table, torch.float32, backend="triton"), read[0], 1e-5)
    assert_close("in the model's dtype", gather_pages(format, stored[0], table, backend="triton"), read[0])


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_a_captured_step(name, monkeypatch):
    """`generate` with its decode steps compiled, CUDA graphs and all, gives what the references give without."""
    model = tiny_llama(hidden_size=256, num_attention_heads=4, num_key_value_heads=2).cuda()
    prompt = torch.randint(2, 128, (2, 70), device="cuda")
    given = {"max_new_tokens": 150, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    given |= {"cache_implementation": f"paged_{name}"}
    monkeypatch.setenv(_triton.SWITCH, "0")
    expected = model.generate(prompt, **given, disable_compile=True)
    monkeypatch.setenv(_triton.SWITCH, "1")
    torch._dynamo.reset()
    found = model.generate(prompt, **given)
    # A token that is chosen otherwise, because two were as good, makes the rest another text.
    same = int((expected.sequences == found.sequences).all(0).long().cumprod(0).sum()) - 70
    assert same > 20
    for step in range(same):
        assert_close(f"logits of step {step}", found.logits[step], expected.logits[step], 2e-2)
