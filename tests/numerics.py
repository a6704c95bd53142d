"""How tests compare numbers, and how they make unwritten memory show."""

import torch
from torch.overrides import TorchFunctionMode

#: Relative RMS error allowed between a result in this dtype and the same thing computed in float32 or better.
#: int8 stands for tokens that went through int8 pages.
TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 2e-6,
    torch.float16: 1e-3,
    torch.bfloat16: 8e-3,
    torch.int8: 1e-2,
}


def relative_rms(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """RMS of the difference over the RMS of `expected` (of the difference alone where that is zero)."""
    actual, expected = actual.double(), expected.double()
    error, scale = (actual - expected).square().mean().sqrt(), expected.square().mean().sqrt()
    return float(error / scale) if scale > 0 else float(error)


def assert_close(name: str, actual: torch.Tensor, expected: torch.Tensor, tolerance: float | None = None) -> None:
    """Fail, naming the tensor, unless shapes agree, nothing is NaN or infinite, and the relative RMS error is small.

    Args:
        name: what the tensor is, for the message.
        tolerance: by default that of `actual`'s dtype in `TOLERANCE`.
    """
    assert actual.shape == expected.shape, f"{name}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    if not actual.numel():
        return
    bad = int((~actual.isfinite()).sum())
    assert not bad, f"{name}: {bad} of {actual.numel()} values are NaN or infinite"
    tolerance = TOLERANCE[actual.dtype] if tolerance is None else tolerance
    error = relative_rms(actual, expected)
    assert error <= tolerance, f"{name}: relative RMS error {error:.3g}, allowed {tolerance:.3g}"


_UNWRITTEN = {
    torch.empty,
    torch.empty_like,
    torch.empty_strided,
    torch.empty_permuted,
    torch.Tensor.new_empty,
    torch.Tensor.new_empty_strided,
}


class poisoned(TorchFunctionMode):
    """Within this context, memory that comes unwritten holds NaN (floats), a large number (ints) or true."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return _poison(out) if func in _UNWRITTEN else out


def _poison(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_floating_point() and tensor.dtype.itemsize == 1:
        tensor.view(torch.uint8).fill_(0x7F)  # NaN in every 8-bit float
    elif tensor.is_floating_point():
        tensor.fill_(float("nan"))
    elif tensor.dtype == torch.bool:
        tensor.fill_(True)
    else:
        tensor.fill_(torch.iinfo(tensor.dtype).max - 85)
    return tensor
