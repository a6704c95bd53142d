"""A window of recent tokens, and the first tokens as attention sinks.

Xiao et al. 2024, "Efficient Streaming Language Models with Attention Sinks", section 3.2. Keys keep the rotary position
at which they were computed.
"""

from dataclasses import dataclass

import torch

from ..errors import invalid
from .base import LayerState, Retention, register_retention


@dataclass
class Sliding(Retention):
    """Keep the first `sink_tokens` and the last `window` tokens of every sequence (padding never counts).

    Args:
        window: tokens that a query sees, itself included, beside the sinks.
        sink_tokens: first tokens that every query sees.
    """

    window: int = 1024
    sink_tokens: int = 4
    whole_pages = True
    fixed = True
    per_head = False

    def __post_init__(self) -> None:
        if isinstance(self.window, bool) or not isinstance(self.window, int) or self.window < 1:
            raise invalid("window", self.window, "a whole number of tokens from 1")
        if isinstance(self.sink_tokens, bool) or not isinstance(self.sink_tokens, int) or self.sink_tokens < 0:
            raise invalid("sink_tokens", self.sink_tokens, "a whole number of tokens from 0")

    def capacity(self, seen: int) -> int:
        return min(seen, self.window + self.sink_tokens)

    def select(self, state: LayerState) -> torch.Tensor:
        # The next query stands at `seen` and sees itself and the window - 1 tokens before it.
        return self._inside(state.positions, state.first, state.seen - self.window)

    def visible(self, queries, positions, first):
        return self._inside(positions[:, :, None], first[:, None], (queries - self.window)[..., None])

    def _inside(self, positions, first, window_start) -> torch.Tensor:
        sinks = positions < (first + self.sink_tokens)[:, None, None]
        return sinks | (positions > window_start)


register_retention("sliding", Sliding)
