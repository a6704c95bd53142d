"""What a cache holds and what it occupies, counted from the tensors and files themselves."""

from collections import Counter
from dataclasses import dataclass, field

import torch
from torch.utils._pytree import tree_leaves

from .layer import PagedLayer


@dataclass(frozen=True)
class CacheStats:
    """The accounts of a cache. Prints as a small table.

    Attributes:
        tokens: tokens seen, summed over the sequences (padding and evicted ones included).
        pages: distinct pages that the block tables name, over all layers.
        shared_pages: those of them that more than one sequence names (forks of the cache included).
        bytes_allocated: bytes of every tensor and file that the cache holds.
        bytes_used: those of them that hold tokens: named pages, and the tails up to their length.
        bytes_by_tier: `bytes_allocated` by place: `"cuda:0"`, `"cpu"`, `"disk"`.
        compression: bytes of a contiguous cache in the model's dtype for all tokens seen, over `bytes_allocated`.
        dense_reads: how often the dense keys or values of a layer were built from its pages, which decoding avoids
            (`docs/contexts.md`).
    """

    tokens: int = 0
    pages: int = 0
    shared_pages: int = 0
    bytes_allocated: int = 0
    bytes_used: int = 0
    bytes_by_tier: dict[str, int] = field(default_factory=dict)
    compression: float = 1.0
    dense_reads: int = 0

    def __str__(self) -> str:
        lines = [
            ("tokens", f"{self.tokens:,}"),
            ("pages", f"{self.pages:,}, {self.shared_pages:,} of them shared"),
            ("allocated", f"{_readable(self.bytes_allocated)}, {_readable(self.bytes_used)} of it used"),
            *((f"  on {tier}", _readable(size)) for tier, size in self.bytes_by_tier.items()),
            ("compression", f"{self.compression:.2f}x"),
            ("dense reads", f"{self.dense_reads:,}"),
        ]
        return "\n".join(f"{name:<13}{value}" for name, value in lines)


def collect(layers) -> CacheStats:
    """The accounts of `layers`; those that are not ours count with the tensors they hold."""
    tiers: Counter[str] = Counter()
    tokens = pages = shared = used = contiguous = dense_reads = 0
    for layer in layers:
        paged = isinstance(layer, PagedLayer)
        for tensor in tree_leaves(layer.beside() if paged else vars(layer)):
            if isinstance(tensor, torch.Tensor):
                tiers[str(tensor.device)] += tensor.nbytes
                used, contiguous = used + tensor.nbytes, contiguous + tensor.nbytes
        if not paged:
            continue
        tiers.update(layer.bytes_by_tier())
        dense_reads += layer.own_dense_reads
        if not layer.is_initialized:
            continue
        if layer.reservation is not None:
            layer = layer.reservation.seen_by(layer)
        keys, values = layer.unsealed()
        used += keys.nbytes + values.nbytes
        with layer.sealed.lock:
            for segment in layer.sealed.segments:
                live = len(segment.table.named().unique())
                pages, shared = pages + live, shared + segment.pool.shared(segment.table)
                used += live * segment.bytes_per_page
        per_token = sum(x.shape[1] * x.shape[3] * x.dtype.itemsize for x in (keys, values))
        contiguous += layer.rows * layer.seen * per_token
        tokens = max(tokens, layer.rows * layer.seen)
    allocated = sum(tiers.values())
    compression = contiguous / allocated if allocated else 1.0
    return CacheStats(tokens, pages, shared, allocated, used, dict(tiers), compression, dense_reads)


def _readable(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError
