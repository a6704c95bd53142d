"""The Triton kernel that decodes pages against the formats' own `decode`, under the interpreter."""

import pytest
import torch
from numerics import assert_close, poisoned

from hf_kvplus.formats import FORMATS
from hf_kvplus.ops.gather_pages import gather_pages, reference, triton

# format, page size, channels, dtype of the model, channel-major, dtype of the result
CASES = [
    ("native", 16, 80, torch.bfloat16, True, None),
    ("native", 64, 64, torch.float16, False, torch.float32),
    ("fp8", 16, 96, torch.bfloat16, True, None),
    ("fp8", 64, 64, torch.float16, False, torch.float32),
    ("int8", 64, 128, torch.bfloat16, True, None),
    ("int8", 16, 80, torch.float16, False, torch.float32),
    ("int8", 8, 256, torch.float32, True, None),
    ("int4", 64, 128, torch.bfloat16, True, torch.float32),
    ("int4", 8, 96, torch.float16, True, None),
    ("int4", 128, 64, torch.float32, False, None),
    ("int4", 16, 80, torch.bfloat16, False, None),
    ("int2", 64, 128, torch.float16, True, torch.float32),
    ("int2", 8, 80, torch.bfloat16, True, None),
    ("int2", 256, 64, torch.float32, True, None),
    ("int2", 64, 96, torch.bfloat16, False, torch.float32),
    ("int2", 16, 256, torch.float16, False, None),
]


def make(name, page, dim, dtype, channel_major, null=True, **options):
    """A format, pages of which those in the table are written and the others are poison, and the table."""
    spec = FORMATS[name].with_options(**options)
    format = (spec.key if channel_major else spec.value)(page, dim, dtype, channel_major=channel_major)
    with poisoned():
        parts = {name: torch.empty((9, *shape), dtype=d) for name, (shape, d) in format.parts.items()}
    table = torch.tensor([[[7, 2, 5], [3, 3, 1]], [[2, 8, 6], [1, 5, 7]]], dtype=torch.int32)
    if null:
        table[0, 0, 1] = table[1, 1, 2] = table[1, 0, 0] = -1
    named = table[table >= 0].long().unique()
    tokens = torch.randn(len(named), page, dim) * torch.rand(len(named), page, 1).mul(3).exp()
    for part, codes in format.encode(tokens.to(dtype)).items():
        parts[part][named] = codes
    return format, parts, table


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_decode(case):
    *case, dtype = case
    format, parts, table = make(*case)
    assert triton.refuses(format, dtype) is None
    with poisoned():
        actual = triton.gather_pages(format, parts, table, dtype)
    expected = reference.gather_pages(format, parts, table, dtype)
    assert actual.dtype == expected.dtype
    assert_close("tokens", actual, expected)
    missing = (table < 0).repeat_interleave(format.page_size, dim=-1)
    assert not actual[missing].any()
    if not format.rotation and format.layout in ("native", "fp8"):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize(("name", "channel_major"), [("int8", False), ("int4", True), ("int2", False)])
def test_without_rotation(name, channel_major):
    format, parts, table = make(name, 32, 64, torch.float32, channel_major, rotation=False)
    assert_close(
        "tokens", triton.gather_pages(format, parts, table, None), reference.gather_pages(format, parts, table, None)
    )


def test_e5m2():
    format, parts, table = make("fp8", 16, 64, torch.float16, True, fp8_type="e5m2")
    assert torch.equal(
        triton.gather_pages(format, parts, table, None), reference.gather_pages(format, parts, table, None)
    )


def test_tables_that_name_nothing():
    format, parts, table = make("int4", 16, 64, torch.float32, True)
    assert triton.gather_pages(format, parts, table[:, :, :0], None).shape == (2, 2, 0, 64)
    none = {name: part[:0] for name, part in parts.items()}
    assert not triton.gather_pages(format, none, torch.full_like(table, -1), None).any()


@pytest.mark.parametrize("name", ["native", "int2"])
def test_as_an_operator(name):
    format, parts, table = make(name, 16, 64, torch.float32, True, null=False)
    expected = triton.gather_pages(format, parts, table, torch.float16)
    group = format.group if name == "int2" else 0
    given = (list(parts.values()), table, "float" if name == "native" else name, True, 16, 64, format.rotation, group)
    torch.library.opcheck(torch.ops.hf_kvplus.gather_pages_triton.default, (*given, torch.float16))

    def read(table, *values):
        return triton.gather_pages(format, dict(zip(parts, values)), table, torch.float16)

    assert torch.equal(torch.compile(read, fullgraph=True, backend="eager")(table, *parts.values()), expected)


def test_backends():
    format, parts, table = make("int8", 16, 64, torch.float32, True)
    with pytest.raises(ValueError, match=r"`backend`: got 'gpu', accepted: 'auto', 'torch', 'triton'"):
        gather_pages(format, parts, table, backend="gpu")
