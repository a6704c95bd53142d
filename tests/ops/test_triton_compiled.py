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

#: Bytes that the compiler keeps in memory where registers run out, by format, capability, channels and whether each
#: query has a mask row of its own. Nothing else spills.
SPILLS = {("k4v2", 100, 128, False): 16, ("int2", 90, 96, False): 48, ("int2", 90, 128, True): 16}


def check(name, capability, **shape):
    figures = kernels.report(name, capability, **shape)
    allowed = SPILLS.get((name, capability, figures["dim"], shape.get("masked", False)), 0)
    assert figures["spilled_bytes"] <= allowed, figures
    assert figures["local_accesses"] <= allowed, figures
    assert figures["loads_128"] > 0, figures
    assert figures["matrix_instructions"] > 0, figures
    assert figures["shared_bytes"] <= kernels.DEVICES[capability]["shared_program"], figures
    assert figures["programs_per_multiprocessor"] >= 1, figures


@pytest.mark.parametrize("capability", kernels.DEVICES)
@pytest.mark.parametrize("name", kernels.FORMAT_NAMES)
def test_every_format_and_architecture(name, capability):
    check(name, capability)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("int8", {"dtype": torch.float16}),
        ("int4", {"dtype": torch.float16}),
        ("native", {"dtype": torch.float32}),
        ("int8", {"dtype": torch.float32}),
        ("int4", {"dim": 64}),
        ("int4", {"dim": 80}),
        ("k4v2", {"dim": 96}),
        ("int2", {"dim": 96}),
        ("int8", {"dim": 256}),
        ("int2", {"dim": 256}),
        ("native", {"tokens": 16, "masked": True}),
        ("int8", {"tokens": 16, "masked": True, "group": 7}),
        ("int4", {"tokens": 5, "masked": True, "softcap": 30.0}),
        ("int2", {"tokens": 5, "masked": True}),
    ],
    ids=str,
)
def test_other_shapes(name, shape):
    check(name, 90, **shape)


def test_the_sum_over_splits():
    for name in ("native", "int4"):
        figures = kernels.inspect(kernels.compile_for(kernels.launches(name)[-1], 90), 90)
        assert figures["spilled_bytes"] == 0
