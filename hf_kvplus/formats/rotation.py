"""The Hadamard rotation, which spreads outlying channels over all channels before rounding.

Chee et al. 2023, "QuIP: 2-Bit Quantization of Large Language Models With Guarantees", section 4 (incoherence);
Ashkboos et al. 2024, "QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs", section 4 (keys and values in the cache).
"""

from functools import cache

import torch

from ..errors import invalid

SMALLEST_BLOCK = 16


def block_size(dim: int) -> int:
    """Channels that are rotated together: all where `dim` is a power of two, else the largest power of two that divides
    it; 0 (no rotation) where that is below 16."""
    block = dim & -dim
    return block if block == dim or block >= SMALLEST_BLOCK else 0


def rotation_block(dim: int, rotation: bool) -> int:
    """The block of a format's option `rotation`: `block_size(dim)` where it is on, else 0.

    Raises:
        CacheConfigError: neither `True` nor `False`.
    """
    if not isinstance(rotation, bool):
        raise invalid("rotation", rotation, "True or False")
    return block_size(dim) if rotation else 0


@cache
def hadamard(size: int, device: torch.device) -> torch.Tensor:
    """The orthonormal Hadamard matrix, float32 `[size, size]`, `size` a power of two. Symmetric, its own inverse."""
    with torch.inference_mode(False):
        matrix = torch.full((1, 1), size**-0.5, dtype=torch.float32, device=device)
        while matrix.shape[0] < size:
            matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
        return matrix


def rotate(x: torch.Tensor, block: int) -> torch.Tensor:
    """Rotate (or un-rotate: it is the same) float32 `x [..., dim]` in blocks of channels."""
    if not block:
        return x
    return (x.unflatten(-1, (-1, block)) @ hadamard(block, x.device)).flatten(-2)


def rotate_rows(x: torch.Tensor, block: int) -> torch.Tensor:
    """The same for channel-major `x [..., dim, n]`."""
    if not block:
        return x
    return (hadamard(block, x.device) @ x.unflatten(-2, (-1, block))).flatten(-3, -2)
