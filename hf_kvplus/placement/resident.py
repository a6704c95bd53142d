"""Pages stay where their layer runs."""

from dataclasses import dataclass

import torch

from .base import Layout, Placement, Storage


class TensorStorage(Storage):
    """Pages in ordinary tensors on `home`, which growing reallocates one part at a time."""

    def __init__(self, layout: Layout, device: torch.device, home: torch.device | None = None) -> None:
        super().__init__(layout, device)
        self.home = home or device
        self._parts = {name: self._empty(0, *spec) for name, spec in layout.items()}

    def _empty(self, capacity: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty((capacity, *shape), dtype=dtype, device=self.home)

    def resize(self, capacity: int) -> None:
        if capacity <= self.capacity:
            return
        for name, spec in self.layout.items():
            grown = self._empty(capacity, *spec)
            grown[: self.capacity] = self._parts[name]
            self._parts[name] = grown
        self.capacity = capacity

    def write(self, ids, parts):
        first = int(ids[0]) if len(ids) else 0
        run = slice(first, first + len(ids))
        where = run if torch.equal(ids, torch.arange(first, run.stop, device=ids.device)) else ids.to(self.home)
        for name, part in parts.items():
            self._parts[name][where] = part.to(self.home)  # one copy where the pages lie together

    def view(self):
        return self._parts

    def bytes_by_tier(self):
        return {str(self.home): sum(part.nbytes for part in self._parts.values())}


@dataclass
class Resident(Placement):
    """Pages live on the device of their layer (the default)."""

    in_place = True

    def storage(self, layout: Layout, device: torch.device) -> Storage:
        return TensorStorage(layout, device)
