"""The Triton kernel (`triton_kernels.py`) as `torch.ops.hf_kvplus.seal_pages_triton`."""

import torch

from .._triton import DTYPES, KINDS, kind

_WIDEST = 256

_library = torch.library.Library("hf_kvplus", "FRAGMENT")
_library.define(
    "seal_pages_triton(Tensor tokens, Tensor ids, Tensor(a!)[] parts, str kind, bool channel_major, int rotation,"
    " int group, float inset) -> ()"
)


@torch.library.register_fake("hf_kvplus::seal_pages_triton", lib=_library)
def _(*_):
    return None


@torch.library.impl("hf_kvplus::seal_pages_triton", "CompositeExplicitAutograd", lib=_library)
def _(*args):
    from . import triton_kernels

    for launch in triton_kernels.plan(*args):
        launch.run()


def refuses(format, tokens) -> str | None:
    """`None` if the kernel writes this format, else why not."""
    if format.layout not in KINDS:
        return f"`format` has the layout {format.layout!r}, written are {sorted(KINDS)}"
    if tokens.dtype not in DTYPES:
        return f"`tokens` is {tokens.dtype}, read are float32, bfloat16, float16"
    return f"`format` has {format.dim} channels, written are up to {_WIDEST}" if format.dim > _WIDEST else None


def seal_pages(format, parts, tokens, ids):
    torch.ops.hf_kvplus.seal_pages_triton(tokens, ids, list(parts.values()), *described(format))


def described(format) -> tuple[str, bool, int, int, float]:
    """A format as the operator takes it: kind, channel-major, rotation, size of groups (0: none), inset.

    The inset is how far inside of a group's extremes the outermost codes lie (`formats.integer`).
    """
    group = format.group if format.layout in ("int4", "int2") else 0
    inset = 0.075 * group / 32 if format.layout == "int2" else 0.0
    return kind(format), format.channel_major, format.rotation, group, inset
