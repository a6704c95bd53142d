"""The Triton kernels compiled for GPUs that are not there: what the machine code must and must not have in it."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

if sys.platform != "linux":
    pytest.skip("triton is for Linux", allow_module_level=True)  # there, the `test` extra installs it: no skipping

_file = Path(__file__).parents[2] / "benchmarks" / "compiled_kernels.py"
_spec = importlib.util.spec_from_file_location("compiled_kernels", _file)
kernels = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(kernels)


def check(name, capability, **shape):
    figures = kernels.report(name, capability, **shape)
    assert figures["matrix_instructions"] > 0, figures
    check_memory(figures, capability)


def check_memory(figures, capability):
    assert figures["spilled_bytes"] == 0, figures
    assert figures["local_accesses"] == 0, figures
    assert figures["loads_128"] > 0, figures
    assert figures["shared_bytes"] <= kernels.DEVICES[capability]["shared_program"], figures
    assert figures["programs_per_multiprocessor"] >= 1, figures


@pytest.mark.parametrize("capability", kernels.DEVICES)
@pytest.mark.parametrize("name", kernels.FORMAT_NAMES)
def test_every_format_and_architecture(name, capability):
    check(name, capability)


@pytest.mark.parametrize(
    ("name", "capability", "shape"),
    [
        ("int8", 80, {"dtype": torch.float16}),
        ("int4", 90, {"dtype": torch.float16}),
        ("native", 90, {"dtype": torch.float32}),
        ("int8", 90, {"dtype": torch.float32}),
        ("int4", 90, {"dim": 64}),
        ("int2", 100, {"dim": 64}),
        ("int4", 90, {"dim": 80}),
        ("k4v2", 80, {"dim": 80}),
        ("k4v2", 100, {"dim": 96}),
        ("int2", 80, {"dim": 96}),
        ("int2", 90, {"dim": 96}),
        ("int8", 90, {"dim": 256}),
        ("int8", 90, {"dim": 256, "group": 4}),
        ("native", 90, {"dim": 256}),
        ("k4v2", 90, {"dim": 256}),
        ("int2", 90, {"dim": 256}),
        ("int2", 100, {"dim": 96, "masked": True}),
        ("native", 80, {"tokens": 16, "masked": True}),
        ("int8", 90, {"tokens": 16, "masked": True, "group": 7}),
        ("fp8", 100, {"tokens": 5, "masked": True}),
        ("int4", 90, {"tokens": 5, "masked": True, "softcap": 30.0}),
        ("k4v2", 100, {"tokens": 5, "masked": True}),
        ("int2", 80, {"tokens": 5, "masked": True}),
        ("int2", 90, {"tokens": 5, "masked": True}),
    ],
    ids=str,
)
def test_other_shapes(name, capability, shape):
    """In `shape`, a group of 16 by default: with fewer, the compiler leaves out what it knows to be zero."""
    check(name, capability, **{"group": 16, **shape})


@pytest.mark.parametrize("name", kernels.FORMAT_NAMES)
def test_a_captured_step(name):
    """One query token, and a mask over reserved pages."""
    check(name, 90, masked=True)


@pytest.mark.parametrize("name", ["native", "int4"])
def test_the_kernels_around_it(name):
    """What finds the visible pages, and the sum over the splits."""
    first, *_, last = kernels.launches(name, tokens=5, masked=True)
    for launch in (first, last):
        figures = kernels.inspect(kernels.compile_for(launch, 90), 90)
        assert figures["spilled_bytes"] == figures["local_accesses"] == 0


@pytest.mark.parametrize("capability", kernels.DEVICES)
@pytest.mark.parametrize("name", ["native", "int8", "fp8", "int4", "int2"])
@pytest.mark.parametrize("keys", [True, False], ids=["keys", "values"])
@pytest.mark.parametrize("op", ["seal", "gather"])
def test_sealing_and_reading_pages(op, keys, name, capability):
    check_memory(kernels.page_report(op, name, keys, capability), capability)


@pytest.mark.parametrize(
    ("op", "name", "shape"),
    [
        ("seal", "int8", {"dim": 256, "dtype": torch.float32}),
        ("seal", "int2", {"dim": 256, "page": 256}),
        ("seal", "int4", {"dim": 64, "dtype": torch.float16}),
        ("seal", "int2", {"dim": 96}),
        ("gather", "int8", {"dim": 256, "dtype": torch.float32}),
        ("gather", "int2", {"dim": 128, "page": 256}),
        ("gather", "int4", {"dim": 80, "dtype": torch.float16}),
    ],
    ids=str,
)
@pytest.mark.parametrize("keys", [True, False], ids=["keys", "values"])
def test_pages_of_other_shapes(op, keys, name, shape):
    figures = kernels.page_report(op, name, keys, 90, **shape)
    assert figures["spilled_bytes"] == figures["local_accesses"] == 0, figures
