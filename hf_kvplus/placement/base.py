"""The contract between a layer and the place where its pages live."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch

Layout = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


class Storage(ABC):
    """The encoded pages of one layer: for every part a tensor `[capacity, *shape]`, wherever it lives.

    Args:
        layout: shape (of one page) and dtype of every part.
        device: where the layer runs; `view` and `read` answer with tensors there.
    """

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.layout, self.device, self.capacity = layout, device, 0

    @abstractmethod
    def resize(self, capacity: int) -> None:
        """Make room for `capacity` pages (never fewer than now); what is stored stays."""

    @abstractmethod
    def write(self, ids: torch.Tensor, parts: Mapping[str, torch.Tensor]) -> None:
        """Store pages `ids` (int64, CPU), given as `[n, *shape]` per part on any device."""

    @abstractmethod
    def view(self) -> dict[str, torch.Tensor]:
        """All pages, on the layer's device, to be indexed by page number. Read-only.

        They may be copies: use them on the current stream and let go of them, since their memory serves the next layer.
        """

    @abstractmethod
    def bytes_by_tier(self) -> dict[str, int]:
        """Bytes that this storage occupies now, by tier: `"cuda:0"`, `"cpu"`, `"disk"`."""

    def prefetch(self) -> None:
        """Start bringing the pages to the layer's device; `view` will find them there."""


class Placement(ABC):
    """Chooses the storage of each layer. Subclasses are dataclasses: their fields are `cache_config` keys."""

    #: Whether `view` answers with the tensors that hold the pages, so that a step may read and write them in place.
    in_place: ClassVar[bool] = False

    @abstractmethod
    def storage(self, layout: Layout, device: torch.device) -> Storage:
        """An empty storage for a layer that runs on `device`."""


PLACEMENTS: dict[str, type[Placement]] = {}


def register_placement(name: str, placement: type[Placement]) -> None:
    """Make `name` a placement that cache strings (as a prefix) accept."""
    PLACEMENTS[name] = placement
