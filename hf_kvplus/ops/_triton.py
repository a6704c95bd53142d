"""Whether the Triton kernels can run, and whether they run without being asked for. Does not import triton."""

import os
from functools import cache
from importlib.util import find_spec

import torch

DEVICE = "cuda"
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
