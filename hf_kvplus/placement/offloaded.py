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
        if self.device.type == "cpu" or self._visiting is not None:
            return
        stream = _side_stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            copies = {name: part.to(self.device, non_blocking=True) for name, part in self._parts.items()}
            arrived = torch.cuda.Event()
            arrived.record(stream)
        self._visiting = (copies, arrived)

    def view(self):
        if self.device.type == "cpu":
            return self._parts
        self.prefetch()
        copies, arrived = self._visiting
        self._visiting = None
        current = torch.cuda.current_stream(self.device)
        current.wait_event(arrived)
        for copy in copies.values():
            copy.record_stream(current)
        return copies

    def bytes_by_tier(self):
        tiers = super().bytes_by_tier()
        if self._visiting is not None:
            tiers[str(self.device)] = sum(copy.nbytes for copy in self._visiting[0].values())
        return tiers


class DiskStorage(Storage):
    """Pages in one unnamed file per part: the operating system removes them with the process, whatever ends it."""

    def __init__(self, layout: Layout, device: torch.device, folder: str | None) -> None:
        super().__init__(layout, device)
        self._files = {name: tempfile.TemporaryFile(dir=folder, prefix="hf_kvplus-") for name in layout}  # noqa: SIM115
        self._parts = {name: torch.empty((0, *s), dtype=d, device="cpu") for name, (s, d) in layout.items()}
        self._visiting: Future | None = None

    def resize(self, capacity):
        if capacity <= self.capacity:
            return
        self._visiting = None
        for name, (shape, dtype) in self.layout.items():
            file, size = self._files[name], capacity * torch.Size(shape).numel() * dtype.itemsize
            # `posix_fallocate` reserves the blocks: a full disk is an OSError here, not a crash at a later write.
            os.posix_fallocate(file.fileno(), 0, size) if hasattr(os, "posix_fallocate") else file.truncate(size)
            memory = mmap.mmap(file.fileno(), size)
            self._parts[name] = torch.frombuffer(memory, dtype=dtype).view(capacity, *shape)
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
        return {name: part.clone() for name, part in parts.items()}

    def view(self):
        self.prefetch()
        copies, self._visiting = self._visiting.result(), None
        return {name: copy.to(self.device) for name, copy in copies.items()}

    def read(self, ids):
        return {name: part[ids.to("cpu")].to(self.device) for name, part in self._parts.items()}

    def bytes_by_tier(self):
        on_disk = sum(os.fstat(file.fileno()).st_size for file in self._files.values())
        tiers = {"disk": on_disk}
        if self._visiting is not None:
            tiers["cpu"] = on_disk
        return tiers


@cache
def _side_stream(device: torch.device) -> "torch.cuda.Stream":
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
        if not os.path.isdir(self.offload_folder) or not os.access(self.offload_folder, os.W_OK):
            raise invalid("offload_folder", self.offload_folder, "an existing folder that can be written to")

    def storage(self, layout: Layout, device: torch.device) -> Storage:
        if self.offload_to == "cpu":
            return HostStorage(layout, device)
        return DiskStorage(layout, device, self.offload_folder)


register_placement("offloaded", Offloaded)
