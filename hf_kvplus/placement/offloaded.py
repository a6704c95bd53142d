"""Pages live in CPU memory or in files, and visit the layer's device while it computes.

Pages move as they are written (encoded), a whole layer at a time: while one layer computes, the next one's pages are
copied on a side stream (from CPU memory) or by a thread (from files).
"""

import mmap
import os
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache

import torch

from ..errors import CacheConfigError, invalid
from .base import Layout, Placement, Storage, register_placement
from .resident import TensorStorage

_ALIGNMENT = 16  # of the parts of a page in a file, in bytes: enough for every dtype


class HostStorage(TensorStorage):
    """Pages in CPU memory, pinned when the layer runs on a CUDA device."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self._visiting: tuple[dict[str, torch.Tensor], torch.Event] | None = None
        super().__init__(layout, device, home=torch.device("cpu"))

    def _empty(self, capacity, shape, dtype):
        pinned = self.device.type == "cuda" and capacity > 0
        return torch.empty((capacity, *shape), dtype=dtype, device="cpu", pin_memory=pinned)

    def resize(self, capacity):
        self._visiting = None
        super().resize(capacity)

    def write(self, ids, parts):
        self._visiting = None
        super().write(ids, parts)

    def prefetch(self):
        if self.device.type != "cuda" or self._visiting is not None:
            return
        current = torch.cuda.current_stream(self.device)
        stream = _side_stream(self.device, current.cuda_stream)
        # The copies belong to the side stream, so their memory is taken again for later ones as soon as nothing refers
        # to it. Waiting for all that is queued makes that safe, and keeps the copies of a host that runs ahead to two
        # layers: `record_stream` would keep those of every layer of the pass.
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            copies = {name: part.to(self.device, non_blocking=True) for name, part in self._parts.items()}
            arrived = torch.cuda.Event()
            arrived.record(stream)
        self._visiting = (copies, arrived)

    def view(self):
        if self.device.type != "cuda":
            return {name: part.to(self.device) for name, part in self._parts.items()}
        self.prefetch()
        copies, arrived = self._visiting
        self._visiting = None
        torch.cuda.current_stream(self.device).wait_event(arrived)
        return copies

    def bytes_by_tier(self):
        tiers = super().bytes_by_tier()
        if self._visiting is not None:
            tiers[str(self.device)] = sum(copy.nbytes for copy in self._visiting[0].values())
        return tiers


class DiskStorage(Storage):
    """Pages in an unnamed file, the parts of each side by side. It is gone when the process is, however that ends.

    Raises:
        OSError: the folder has no room for the pages.
    """

    def __init__(self, layout: Layout, device: torch.device, folder: str | None) -> None:
        super().__init__(layout, device)
        self._folder = folder or tempfile.gettempdir()
        self._file = tempfile.TemporaryFile(dir=folder, prefix="hf_kvplus-")  # noqa: SIM115
        self._visiting: Future | None = None
        self._map(torch.empty(0, dtype=torch.uint8, device="cpu"))

    def _map(self, memory: torch.Tensor) -> None:
        """Find the parts of all pages in the bytes of the file."""
        spans, end = {}, 0
        for name, (shape, dtype) in self.layout.items():
            spans[name] = slice(end, end + torch.Size(shape).numel() * dtype.itemsize)
            end = -(-spans[name].stop // _ALIGNMENT) * _ALIGNMENT
        self._page_bytes, pages = end, memory.view(-1, end)
        self._parts = {
            name: pages[:, spans[name]].view(dtype).view(len(pages), *shape)
            for name, (shape, dtype) in self.layout.items()
        }

    def resize(self, capacity):
        if capacity <= self.capacity:
            return
        self._visiting = None
        size = capacity * self._page_bytes
        try:
            # This reserves the blocks: a full disk is an error here, not a crash at a later write.
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._file.fileno(), 0, size)
            else:
                self._file.truncate(size)
        except OSError as error:
            message = f"{error.strerror}: `offload_folder` cannot take {size:,} bytes of pages for a layer"
            raise OSError(error.errno, message, self._folder) from error
        self._map(torch.frombuffer(mmap.mmap(self._file.fileno(), size), dtype=torch.uint8))
        self.capacity = capacity

    def write(self, ids, parts):
        self._visiting = None
        for name, part in parts.items():
            self._parts[name][ids] = part.to("cpu")

    def prefetch(self):
        if self._visiting is None:
            self._visiting = _reader().submit(self._load, dict(self._parts))

    @staticmethod
    def _load(parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: part.clone(memory_format=torch.contiguous_format) for name, part in parts.items()}

    def view(self):
        self.prefetch()
        copies, self._visiting = self._visiting.result(), None
        return {name: copy.to(self.device) for name, copy in copies.items()}

    def bytes_by_tier(self):
        tiers = {"disk": os.fstat(self._file.fileno()).st_size}
        if self._visiting is not None:
            tiers["cpu"] = sum(part.nbytes for part in self._parts.values())
        return tiers


@cache
def _side_stream(device: torch.device, current: int) -> "torch.cuda.Stream":
    """The stream of the copies for what is computed on the stream `current`."""
    return torch.cuda.Stream(device)


@cache
def _reader() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="hf_kvplus-read")


@dataclass
class Offloaded(Placement):
    """Pages live away from the layer's device.

    Args:
        offload_to: `"cpu"` (CPU memory) or `"disk"` (files).
        offload_folder: an existing folder for the files of `"disk"`; by default the system's temporary folder.
    """

    offload_to: str = "cpu"
    offload_folder: str | None = None

    def __post_init__(self) -> None:
        if self.offload_to not in ("cpu", "disk"):
            raise invalid("offload_to", self.offload_to, ("cpu", "disk"))
        if self.offload_folder is None:
            return
        if self.offload_to != "disk":
            raise CacheConfigError(
                f"`offload_folder`: got {self.offload_folder!r} with `offload_to={self.offload_to!r}`, "
                "but only `offload_to='disk'` writes files. Set that, or leave the folder out."
            )
        self.offload_folder = os.fspath(self.offload_folder)
        try:
            tempfile.TemporaryFile(dir=self.offload_folder).close()
        except OSError as error:
            accepted = f"an existing folder that can be written to ({error.strerror})"
            raise invalid("offload_folder", self.offload_folder, accepted) from error

    def storage(self, layout: Layout, device: torch.device) -> Storage:
        if self.offload_to == "cpu":
            return HostStorage(layout, device)
        return DiskStorage(layout, device, self.offload_folder)


register_placement("offloaded", Offloaded)
