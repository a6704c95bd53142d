"""The contract of a retention policy, and the table of policies by name."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch


@dataclass
class LayerState:
    """What a policy may look at when it chooses. `n` counts stored slots; slots hold tokens in order.

    Attributes:
        positions: int `[rows, heads, n]`, each slot's position in its sequence (0 = first column of the batch, all
            padding of the row counted as if it stood before the first token); -1 marks a slot that holds no token.
        seen: tokens that the layer has been given, per row.
        first: int `[rows]`, the position of each row's first token that is not padding.
        recent: tokens newer than all slots, which stay in any case.
        read_keys: returns the keys, float `[rows, heads, n, dim]` (decoding them costs time: ask only if needed).
        rows: int `[rows]`, which sequences of the cache these are: those that exceed their budget.
    """

    positions: torch.Tensor
    seen: int
    first: torch.Tensor
    recent: int
    read_keys: Callable[[], torch.Tensor]
    rows: torch.Tensor


class Retention:
    """Chooses the tokens that a layer keeps. Subclasses are dataclasses: their fields are `cache_config` keys."""

    #: If true, pages are only dropped whole; if false, the survivors of several pages are sealed into new ones.
    whole_pages: ClassVar[bool] = False

    #: If true, `select` keeps what `visible` shows and nothing else decides, so steps may run without asking it.
    fixed: ClassVar[bool] = False

    #: Whether heads of one row may keep different tokens.
    per_head: ClassVar[bool] = True

    def capacity(self, seen: int) -> int:
        """The most tokens that a row should hold once it has seen `seen` of its own; never less for more."""
        raise NotImplementedError

    def select(self, state: LayerState) -> torch.Tensor:
        """Bool `[rows, heads, n]`: the slots to keep. Empty slots (`positions == -1`) are dropped whatever it says."""
        raise NotImplementedError

    def visible(self, queries: torch.Tensor, positions: torch.Tensor, first: torch.Tensor) -> torch.Tensor | None:
        """Which stored tokens a query may see, beyond causality.

        Args:
            queries: int `[q]` or `[rows, 1, q]`, positions of the query tokens.
            positions: int `[rows, heads, n]` of the stored tokens.
            first: int `[rows]`, as in `LayerState`.

        Returns:
            Bool `[rows, heads, q, n]`, or `None` if everything that is stored is visible.
        """
        return None


RETENTIONS: dict[str, type[Retention]] = {}


def register_retention(name: str, policy: type[Retention]) -> None:
    """Make `name` a policy that cache strings and `PagedCache(retention=...)` accept."""
    RETENTIONS[name] = policy
