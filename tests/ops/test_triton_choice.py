"""When the Triton kernels run: where they are asked for, and what is said where they cannot."""

import pytest
import torch
from test_cpu_kernel import make_tail, make_view

from hf_kvplus.ops import _triton
from hf_kvplus.ops import decode_attention as package
from hf_kvplus.ops.decode_attention import decode_attention


def given(device="cpu"):
    tail = make_tail(1, 1, 5, 64).to(device)
    return torch.randn(1, 4, 1, 64, device=device), [], tail, tail


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_forced_without_a_device():
    with pytest.raises(ValueError, match=r"`backend`: got 'triton'.*there is no CUDA device\. 'torch' serves always"):
        decode_attention(*given(), scale=0.1, backend="triton")


def test_forced_without_triton(monkeypatch):
    monkeypatch.setattr(_triton, "find_spec", lambda name: None)
    monkeypatch.setattr(_triton, "_missing", _triton._missing.__wrapped__)  # not what was found out before
    with pytest.raises(ValueError, match=r"`backend`: got 'triton'.*pip install hf-kvplus\[triton\]"):
        decode_attention(*given(), scale=0.1, backend="triton")


def test_forced_on_tensors_of_another_device(monkeypatch):
    monkeypatch.setattr(_triton, "_missing", lambda: None)
    with pytest.raises(ValueError, match=r"`query` is on cpu, and this kernel runs on cuda"):
        decode_attention(*given(), scale=0.1, backend="triton")


@pytest.mark.parametrize(("value", "chosen"), [(None, "torch"), ("0", "torch"), ("1", "triton")])
def test_auto_takes_them_where_the_environment_says_so(monkeypatch, value, chosen):
    if value is None:
        monkeypatch.delenv(_triton.SWITCH, raising=False)
    else:
        monkeypatch.setenv(_triton.SWITCH, value)
    monkeypatch.setattr(_triton, "_missing", lambda: None)
    modules = {"torch": package.reference, "triton": package.triton}
    query = torch.empty(1, 4, 1, 64, device="meta")
    monkeypatch.setattr(package.triton, "DEVICE", "meta")
    assert package._backend("auto", query, [], query, query, None) is modules[chosen]


def test_the_reference_is_plain_torch_throughout(monkeypatch):
    """Even where its own reading of pages would be left to a kernel."""
    monkeypatch.setattr(_triton, "serves", lambda *_: pytest.fail("the reference asked for a kernel"))
    view = make_view("int8", 1, 1, 2, 16, 64, 64)
    query, _, *tail = given()
    assert decode_attention(query, [view], *tail, scale=0.1, backend="torch").isfinite().all()
