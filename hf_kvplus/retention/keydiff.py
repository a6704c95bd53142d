"""KeyDiff: keep the keys that differ most from the others.

Park et al. 2025, "KeyDiff: Key Similarity-Based KV Cache Eviction for Long-Context LLM Inference in
Resource-Constrained Environments", section 3: a key's score is its negative cosine similarity to the mean of the
normalised keys.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import normalize

from ..errors import invalid
from .base import LayerState, Retention, register_retention


@dataclass
class KeyDiff(Retention):
    """Keep the `budget` most distinctive keys of every sequence and head. Needs keys alone, no queries.

    Args:
        budget: tokens kept per sequence and head (int), or the fraction of the tokens seen (float below 1).
    """

    budget: int | float = 1024

    def __post_init__(self) -> None:
        whole = isinstance(self.budget, int) and not isinstance(self.budget, bool) and self.budget >= 1
        fraction = isinstance(self.budget, float) and 0 < self.budget < 1
        if not (whole or fraction):
            raise invalid("budget", self.budget, "a whole number of tokens from 1, or a fraction between 0 and 1")

    def capacity(self, seen: int) -> int:
        return self.budget if isinstance(self.budget, int) else max(1, round(self.budget * seen))

    def select(self, state: LayerState) -> torch.Tensor:
        held = state.positions >= 0
        scores = self.score(state.read_keys().float(), held).masked_fill(~held, float("-inf"))
        # A row's own length counts, not that of the padded batch.
        wanted = [self.capacity(state.seen - int(first)) - state.recent for first in state.first]
        wanted = torch.tensor(wanted, device=scores.device)[:, None, None]
        rank = scores.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
        return held & (rank < wanted)

    def score(self, keys: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
        """Importance `[rows, heads, n]` of `keys [rows, heads, n, dim]`; slots that are not `held` do not count."""
        unit = normalize(keys, dim=-1)
        weight = held[..., None].to(unit.dtype)
        anchor = (unit * weight).sum(-2, keepdim=True) / weight.sum(-2, keepdim=True).clamp(min=1)
        return -(unit * normalize(anchor, dim=-1)).sum(-1)


register_retention("keydiff", KeyDiff)
