"""Which of a layer's tokens are padding, row by row: a row's own tokens must fare as they would without it."""

import copy

import torch
from torch.nn.functional import pad

from .segment import NO_TOKEN


class Padding:
    """The padding of all rows, in positions.

    Attributes:
        first: int64 `[rows]`, the position of each row's first token that is not padding.
        gaps: bool `[rows, n]`, padding that came after that (between turns, say); `None` if there is none.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self.first = torch.zeros(rows, dtype=torch.int64, device=device)
        self.gaps: torch.Tensor | None = None

    def learn(self, padding: torch.Tensor, seen: int, with_gaps: bool) -> None:
        """Take in which of the newest tokens are padding.

        Args:
            padding: bool `[rows, new]`.
            seen: tokens seen, the new ones included.
            with_gaps: whether padding behind a row's first token matters.
        """
        start = seen - padding.shape[1]
        leading = padding.long().cumprod(dim=1).sum(dim=1)
        self.first = torch.where(self.first < start, self.first, start + leading)
        gaps = padding & (torch.arange(start, seen, device=padding.device) >= self.first[:, None])
        if with_gaps and bool(gaps.any()):
            known = gaps[:, :0] if self.gaps is None else self.gaps
            self.gaps = torch.cat([pad(known, (0, start - known.shape[1])), gaps], dim=1)

    def own_positions(self, positions: torch.Tensor, width: int, rows=slice(None)) -> torch.Tensor:
        """`positions [rows, heads, n]` (of `rows`, below `width`) as if a row had all its padding before its tokens.

        Distances between them count the row's own tokens only. The newest token stays where it is.
        """
        return shifted(positions, self.behind(width, rows))

    @property
    def own_first(self) -> torch.Tensor:
        """`first` among the `own_positions`: how much padding every row has."""
        return self.first if self.gaps is None else self.first + self.gaps.sum(1)

    def behind(self, width: int, rows=slice(None)) -> torch.Tensor | None:
        """Int32 `[rows, width]`: how much of the gaps comes after a position; `None` if there are none."""
        if self.gaps is None:
            return None
        gaps = self.gaps[rows].int()
        behind = gaps.sum(1, keepdim=True) - gaps.cumsum(1)
        return pad(behind, (0, width - behind.shape[1])).int()

    def most_gaps(self) -> int:
        """The most padding that any row has behind its first token."""
        return 0 if self.gaps is None else int(self.gaps.sum(1).max())

    def crop(self, length: int) -> None:
        """Forget all positions from `length` on."""
        self.first = self.first.clamp(max=length)
        self.gaps = None if self.gaps is None else self.gaps[:, :length].clone()

    def select_rows(self, index: torch.Tensor) -> None:
        """Row `i` becomes what row `index[i]` was."""
        index = index.to(self.first.device)
        self.first = self.first.index_select(0, index)
        self.gaps = None if self.gaps is None else self.gaps.index_select(0, index)

    def copy(self) -> "Padding":
        return copy.copy(self)  # its tensors are replaced, never written to


def shifted(positions: torch.Tensor, behind: torch.Tensor | None) -> torch.Tensor:
    """`positions [rows, heads, n]` plus what `behind [rows, width]` has at each; -1 stays -1."""
    if behind is None:
        return positions
    behind = behind[:, None].expand(-1, positions.shape[1], -1).gather(-1, positions.clamp(min=0).long())
    return torch.where(positions == NO_TOKEN, positions, positions + behind)
