"""Whether the Triton kernels can run, and whether they run without being asked for. Does not import triton."""

import os
from functools import cache
from importlib.util import find_spec

import torch

DEVICE = "cuda"
DTYPES = {torch.float32, torch.bfloat16, torch.float16}
#: Names of the kinds of pages by layout; 8-bit floats are told apart by their dtype.
KINDS = {"native": "float", "int8": "int8", "int4": "int4", "int2": "int2", "fp8": "e4m3 or e5m2"}
#: The environment variable that, set to 1, lets `backend="auto"` choose the Triton kernels on a GPU. Until the
#: `gpu`-marked tests have passed on one, they run only where they are asked for: by it or by `backend="triton"`.
SWITCH = "HF_KVPLUS_TRITON"


@torch.compiler.assume_constant_result
def missing() -> str | None:
    """`None` if the kernels can run here, else why not and what to install."""
    return _missing()


@cache
def _missing() -> str | None:
    if find_spec("triton") is None:
        return "triton is not installed: pip install hf-kvplus[triton]"
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    if torch.cuda.get_device_capability() < (8, 0):
        return "the GPU is older than compute capability 8.0"
    return None


@torch.compiler.assume_constant_result
def by_default() -> bool:
    """Whether `backend="auto"` may choose the kernels; see `SWITCH`."""
    return os.environ.get(SWITCH) == "1"


def serves(backend: str, device: torch.device, refused: str | None) -> bool:
    """Whether a Triton kernel, rather than the reference, serves a call on `device` (see `decode_attention`).

    Args:
        refused: why the kernel does not take the arguments, if so.

    Raises:
        ValueError: a backend that is not known, or that is asked for and cannot serve.
    """
    if backend == "torch":
        return False
    if backend == "auto":
        return device.type == DEVICE and by_default() and not (refused or missing())
    if backend != "triton":
        raise ValueError(f"`backend`: got {backend!r}, accepted: 'auto', 'torch', 'triton'.")
    reason = missing() or refused
    if not reason and device.type != DEVICE:
        reason = f"the tensors are on {device}, and this kernel runs on {DEVICE}"
    if reason:
        raise ValueError(f"`backend`: got 'triton', which cannot serve here, because {reason}. 'torch' serves always.")
    return True


def kind(format) -> str:
    """The name that the kernels give to the pages of a format."""
    if format.layout == "fp8":
        return {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}[format.parts["data"][1]]
    return KINDS[format.layout]
